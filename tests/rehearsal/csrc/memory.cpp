// The device as torch sees it: number of devices, memory, streams that run immediately, random numbers, and counts.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "device.h"

namespace rehearsal {
namespace {

using namespace c10;

constexpr int kMostDevices = 8;
thread_local DeviceIndex current = 0;
thread_local int not_counted = 0;
std::atomic<Listener> listener{nullptr};
std::atomic<int> sync_debug_mode{0};
std::atomic<long> launched_total{0}, waited_total{0};
std::mutex mutex;  // of the two maps
std::map<std::string, long> launched_by_name;
std::map<const char*, size_t> pinned;  // beginning and size
std::mutex copies_mutex;
std::vector<std::function<void()>> copies;  // each finishes one
std::atomic<size_t> allocated[kMostDevices], peaks[kMostDevices];

struct Block {
  void* data;
  size_t size;
  DeviceIndex index;
};

void free_block(void* context) {
  const auto* block = static_cast<Block*>(context);
  allocated[block->index] -= block->size;
  std::free(block->data);
  delete block;
}

void* allocate_bytes(size_t n) {
  void* data = nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, 512, n) == 0, "CUDA out of memory: ", n, " bytes");
  return data;
}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t n) override {
    const Device device(kCUDA, current);
    if (n == 0) return {nullptr, nullptr, &free_block, device};
    void* data = allocate_bytes(n);
    std::memset(data, 0xFF, n);  // NaN: memory that was never written must not be read
    const size_t now = allocated[current] += n;
    for (size_t peak = peaks[current]; peak < now && !peaks[current].compare_exchange_weak(peak, now);) {
    }
    return {data, new Block{data, n, current}, &free_block, device};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};

void free_pinned(void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(static_cast<char*>(data));
  std::free(data);
}

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t n) override {
    void* data = allocate_bytes(n ? n : 1);
    const std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<char*>(data)] = n;
    return {data, data, &free_pinned, kCPU};
  }
  DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};

DeviceMemory device_allocator;
PinnedMemory pinned_allocator;

// Kernels are done when they are submitted; copies to the host once somebody waits, for whatever stream or event.
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before(kCUDA, current);
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(kCUDA, device.index() < 0 ? current : device.index()));
  }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = &current; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return finish_copies(), true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return finish_copies(), true; }
  void synchronizeStream(const Stream&) const override { waited("synchronize", false); }
  void synchronizeEvent(void*) const override { waited("synchronize", false); }
  void synchronizeDevice(const DeviceIndex) const override { waited("synchronize", false); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceGenerator final : GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index, at::Generator host)
      : GeneratorImpl(Device(kCUDA, index), DispatchKeySet(DispatchKey::CUDA)), host(std::move(host)) {}
  GeneratorImpl& inner() const { return *host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { inner().set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner().set_offset(offset); }
  uint64_t get_offset() const override { return inner().get_offset(); }
  uint64_t current_seed() const override { return inner().current_seed(); }
  uint64_t seed() override { return inner().seed(); }
  void set_state(const TensorImpl& state) override { inner().set_state(state); }
  intrusive_ptr<TensorImpl> get_state() const override { return inner().get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), host.clone()); }

  at::Generator host;
};

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current : index, at::detail::createCPUGenerator());
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, current); }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    auto next = pinned.upper_bound(static_cast<const char*>(data));
    return next != pinned.begin() && static_cast<const char*>(data) < std::prev(next)->first + std::prev(next)->second;
  }
  void deviceSynchronize(DeviceIndex) const override { waited("synchronize", false); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// preferred to those of a CUDA build
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)

const bool registered = (SetAllocator(kCUDA, &device_allocator, 100), true);

}  // namespace

DeviceIndex device_count() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return kMostDevices;
  if (*visible == '\0' || *visible == '-') return 0;
  int count = 1;
  for (; *visible; ++visible) count += *visible == ',';
  return static_cast<DeviceIndex>(count < kMostDevices ? count : kMostDevices);
}

DeviceIndex current_device() { return current; }
void set_current_device(DeviceIndex index) { current = index; }
Allocator* device_memory() { return &device_allocator; }
Allocator* pinned_memory() { return &pinned_allocator; }
Memory memory_of(DeviceIndex index) { return {allocated[index], peaks[index]}; }
void reset_peak(DeviceIndex index) { peaks[index] = allocated[index].load(); }

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; ++i) made.push_back(new_generator(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all[index < 0 ? current : index];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

void launched(const std::string& name) {
  if (not_counted) return;
  ++launched_total;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ++launched_by_name[name];
  }
  if (Listener tell = listener) tell("launch", name.c_str());
}

void submitted(std::function<void()> finish) {
  const std::lock_guard<std::mutex> lock(copies_mutex);
  copies.push_back(std::move(finish));
}

void finish_copies() {
  std::vector<std::function<void()>> ended;
  {
    const std::lock_guard<std::mutex> lock(copies_mutex);
    ended.swap(copies);
  }
  for (const auto& finish : ended) finish();
}

void waited(const char* why, bool checked) {
  finish_copies();
  if (not_counted) return;
  ++waited_total;
  if (Listener tell = listener) tell("wait", why);
  TORCH_CHECK(!checked || sync_debug_mode != 2, "called a synchronizing CUDA operation: ", why);
}

NotCounted::NotCounted() { ++not_counted; }
NotCounted::~NotCounted() { --not_counted; }
void set_listener(Listener tell) { listener = tell; }
void set_sync_mode(int mode) { sync_debug_mode = mode; }
int sync_mode() { return sync_debug_mode; }
long launch_count() { return launched_total; }
long wait_count() { return waited_total; }

std::map<std::string, long> launches() {
  const std::lock_guard<std::mutex> lock(mutex);
  return launched_by_name;
}

}  // namespace rehearsal
