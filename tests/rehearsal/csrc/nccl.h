// The backend "nccl" of a process group: gloo's collectives on the bytes of CUDA tensors.
#ifndef MEGARL_REHEARSAL_NCCL_H
#define MEGARL_REHEARSAL_NCCL_H

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace rehearsal {

using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Sizes = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto x = host(tensors);
    return gloo_->broadcast(x, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto x = host(tensors);
    return gloo_->allreduce(x, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto x = host(tensors);
    return gloo_->allreduce_coalesced(x, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto x = host(tensors);
    return gloo_->reduce(x, options);
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return gloo_->allgather(to, from, options);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->_allgather_base(to, from, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  WorkPtr gather(Lists& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return gloo_->gather(to, from, options);
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return gloo_->scatter(to, from, options);
  }
  WorkPtr reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host(out);
    auto from = host(in);
    return gloo_->reduce_scatter(to, from, options);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, Sizes& out_sizes, Sizes& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->alltoall_base(to, from, out_sizes, in_sizes, options);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    auto to = host(out), from = host(in);
    return gloo_->alltoall(to, from, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto x = host(tensors);
    return gloo_->send(x, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto x = host(tensors);
    return gloo_->recv(x, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    waited("barrier", false);
    return gloo_->barrier(options);
  }

 private:
  static Tensor host(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense");
    return host_view(tensor);
  }
  template <class T>
  static std::vector<T> host(const std::vector<T>& all) {
    std::vector<T> out;
    for (const T& each : all) out.push_back(host(each));
    return out;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace rehearsal

#endif
