// A CUDA device made of host memory, for torch's CPU build: what its parts share.
#ifndef MEGARL_REHEARSAL_DEVICE_H
#define MEGARL_REHEARSAL_DEVICE_H

#include <ATen/core/Tensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include <functional>
#include <map>
#include <string>

namespace rehearsal {

using at::Tensor;

// As many as CUDA_VISIBLE_DEVICES names, or 8 without it. Does not initialise the device.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

struct OnDevice {  // in its scope, this is the current device
  explicit OnDevice(c10::DeviceIndex index) : before(current_device()) {
    if (index >= 0) set_current_device(index);
  }
  ~OnDevice() { set_current_device(before); }
  c10::DeviceIndex before;
};

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();

struct Memory {
  size_t allocated, peak;
};
Memory memory_of(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);

const at::Generator& default_generator(c10::DeviceIndex index);
// The host generator that a CUDA generator draws from.
at::Generator host_generator(const at::Generator& generator);

// The same bytes as a tensor of the host or of a device. The result keeps the bytes alive.
Tensor host_view(const Tensor& tensor);
Tensor device_view(const Tensor& tensor, c10::DeviceIndex index);

// Counts an operation that would be a launch on a GPU.
void launched(const std::string& name);
// Copies between the host and the device that nobody has waited for yet; `waited` finishes them.
void submitted(std::function<void()> finish);
void finish_copies();
// Counts a wait of the host for the device; raises where torch.cuda.set_sync_debug_mode("error") asks for it.
void waited(const char* why, bool checked = true);
struct NotCounted {  // in its scope, calls of this thread are not counted
  NotCounted();
  ~NotCounted();
};
using Listener = void (*)(const char* kind, const char* name);
void set_listener(Listener listener);  // nullptr: none
void set_sync_mode(int mode);          // 0: default, 1: warn, 2: error
int sync_mode();
std::map<std::string, long> launches();
long launch_count();
long wait_count();

}  // namespace rehearsal

#endif
