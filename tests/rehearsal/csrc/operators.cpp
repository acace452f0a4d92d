// Every operator of the dispatch key CUDA runs its CPU kernel on the same bytes, except for a few with their own code.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "deferred.h"

namespace rehearsal {
namespace {

using namespace at;

// The host waits for these, because the size of their result depends on values on the device.
const std::unordered_set<std::string> kWaiting = {
    "aten::nonzero",  "aten::nonzero.out",  "aten::masked_select", "aten::masked_select.out", "aten::bincount",
    "aten::_unique2", "aten::unique_dim",   "aten::_unique",       "aten::equal",             "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
};

// These also take indices on the host, which are then copied to the device.
const std::unordered_set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

Storage shared_storage(const Tensor& tensor, Device device, Allocator* allocator) {
  const Storage& storage = tensor.storage();
  auto free = [](void* context) { delete static_cast<Storage*>(context); };
  DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), new Storage(storage), free, device);
  return Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, /*resizable=*/true));
}

Tensor with_storage(const Tensor& like, Storage storage, DispatchKey key) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}

// As torch makes views: also in inference mode, a view of a parameter is no inference tensor.
Tensor view_of(const Tensor& base, const Tensor& like) {
  auto out = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(base.storage()), base.key_set(),
                                                 like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

void take_over(const Tensor& from, const Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from.storage());
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

// One call of an operator: its arguments on the host, its results back on the device.
class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack), name_(op.schema().name()) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      writes_ = alias && alias->isWrite();
      IValue& value = (*stack_)[begin + i];
      value = to_host(value, arguments[i]);
    }
    check_devices();
    const OnDevice guard(index_);
    count();
    if (waits()) waited(name_.c_str());
    {
      const NotCounted inner;
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    }
    for (auto& [host, device] : pairs_) {  // an out= argument may have been resized
      if (host.sizes() != device.sizes() || host.storage().data() != device.storage().data()) {
        take_over(device_view(host, index_), device);
      }
    }
    const size_t results = op_.schema().returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) {
      (*stack_)[i] = map((*stack_)[i], [this](const Tensor& t) { return to_device(t); });
    }
  }

 private:
  template <class F>
  static IValue map(const IValue& value, const F& f) {
    if (value.isTensor()) return f(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : value.toTensorVector()) out.push_back(f(t));
      return out;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const auto& t : value.toOptionalTensorVector()) out.push_back(t ? std::optional(f(*t)) : std::nullopt);
      return out;
    }
    return value;
  }

  IValue to_host(const IValue& value, const c10::Argument& argument) {
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(kCPU);
    if (value.isGenerator()) return host_generator(value.toGenerator());
    if (value.isNone() && argument.type()->str() == "Generator?") return host_generator(default_generator(-1));
    return map(value, [this](const Tensor& t) { return host_argument(t); });
  }

  Tensor host_argument(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      uploads_ |= tensor.dim() > 0;
      wrong_ |= tensor.dim() > 0 || writes_;
      return tensor;
    }
    if (index_ < 0) index_ = tensor.device().index();
    several_ |= index_ != tensor.device().index();
    masks_ |= tensor.scalar_type() == kBool && !pairs_.empty();
    pairs_.emplace_back(host_view(tensor), tensor);
    return pairs_.back().first;
  }

  void check_devices() const {
    const bool indexing = kIndexing.count(name_) > 0;
    TORCH_CHECK(!several_, "Expected all tensors to be on the same device, but found two CUDA devices in ", name_);
    TORCH_CHECK(!wrong_ || (indexing && index_ >= 0),
                "Expected all tensors to be on the same device, but found cuda and cpu in ", name_);
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasKernelForDispatchKey(DispatchKey::CPU), "the rehearsal device has no ", full_name(),
        ", which has no CPU kernel that it could run: define it in tests/rehearsal/cuda_only.py");
  }

  bool waits() const {
    const std::string name = full_name();
    if (kIndexing.count(name_)) return uploads_ || (masks_ && name_ != "aten::index");  // its masks came by nonzero()
    if (name == "aten::repeat_interleave.Tensor") {
      return (*stack_)[stack_->size() - 1].isNone();  // output_size
    }
    return kWaiting.count(name) > 0;
  }

  void count() const {
    for (const auto& result : op_.schema().returns()) {
      if (result.alias_info() && !result.alias_info()->isWrite()) return;  // a view
    }
    launched(full_name());
  }

  std::string full_name() const {
    const std::string& overload = op_.schema().overload_name();
    return overload.empty() ? name_ : name_ + "." + overload;
  }

  Tensor to_device(const Tensor& tensor) const {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (const auto& [host, device] : pairs_) {
      if (tensor.is_same(host)) return device;
    }
    for (const auto& [host, device] : pairs_) {  // a view
      if (tensor.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) {
        return view_of(device, tensor);
      }
    }
    return device_view(tensor, index_ < 0 ? current_device() : index_);
  }

  const OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::string name_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  c10::DeviceIndex index_ = -1;
  bool writes_ = false, wrong_ = false, uploads_ = false, several_ = false, masks_ = false;
};

void run_on_host(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

Tensor empty(c10::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_memory(), DispatchKeySet(DispatchKey::CUDA),
                                   dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_memory(), DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  launched("aten::copy_");
  const bool crosses = self.is_cuda() != source.is_cuda();
  if (crosses && !non_blocking) waited(self.is_cuda() ? "copy to the device" : "copy to the host");
  const AutoDispatchBelowADInplaceOrView guard;
  const Tensor to = host_view(self), from = host_view(source);
  const Tensor& on_host = self.is_cuda() ? source : self;
  if (!crosses || !non_blocking || !on_host.is_contiguous() || !on_host.is_pinned()) {  // others wait on a GPU, too
    to.copy_(from);
    return self;
  }
  auto copy = std::make_shared<Pending>("a copy");
  if (self.is_cuda()) {
    to.copy_(copy->reads(from));
  } else {
    copy->writes(to).copy_(from);
    copy->hide(false);
  }
  submitted([copy] { copy->finish(); });
  return self;
}

Scalar local_scalar(const Tensor& self) {
  waited("item");
  return at::_local_scalar_dense(host_view(self));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= bytes) return self;
  const OnDevice guard(self.device().index());
  auto grown = device_memory()->allocate(bytes);
  if (storage->nbytes()) std::memcpy(grown.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
  return self;
}

Tensor& set_storage(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const int64_t size[] = {static_cast<int64_t>(source.nbytes() / self.itemsize())}, stride[] = {1};
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, 0);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  take_over(source, self);
  return self;
}

void record_stream(Tensor&, Stream) {}

// Values of at::SDPBackend; FlashAttention's operators are in cuda_only.py.
int64_t choose_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask,
                         double dropout, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == kBFloat16 || query.scalar_type() == kHalf;
  const bool flash = half && query.dim() == 4 && query.size(-1) <= 256 && !mask && dropout == 0.0;
  return flash ? 1 : 0;
}
const bool chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention), true);

// On a backend that registers no kernels, as CUDA is in a CPU build, an operator is a composite of others, or missing.
constexpr auto kUnregistered = DispatchKey::VE;

void run_composite(const OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  op.getComputedKernelForDispatchKey(kUnregistered).callBoxed(op, keys, stack);
}

struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// A CUDA build of torch has kernels of its own, which hide the fallback; replacing one warns.
std::vector<c10::RegistrationHandleRAII> replace_kernels_of_torch() {
  NoWarnings none;
  const c10::WarningUtils::WarningHandlerGuard guard(&none);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::RegistrationHandleRAII> replaced;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    // c10d's are the same in both builds: they call the process group
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) || name.getNamespace() == "c10d") continue;
    const auto kernel = op->hasComputedKernelForDispatchKey(kUnregistered)
                            ? KernelFunction::makeFromBoxedFunction<&run_composite>()
                            : KernelFunction::makeFromBoxedFunction<&run_on_host>();
    replaced.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, kernel, std::nullopt, nullptr, "rehearsal"));
  }
  return replaced;
}
const auto replaced = replace_kernels_of_torch();

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", choose_attention);
  // one kernel on a GPU; without this, a composite of seven
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return with_storage(tensor, shared_storage(tensor, kCPU, c10::GetAllocator(kCPU)), DispatchKey::CPU);
}

Tensor device_view(const Tensor& tensor, c10::DeviceIndex index) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  return with_storage(tensor, shared_storage(tensor, Device(kCUDA, index), device_memory()), DispatchKey::CUDA);
}

}  // namespace rehearsal
