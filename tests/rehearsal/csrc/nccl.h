// The backend "nccl" of a process group: gloo's collectives on the bytes of CUDA tensors. Results arrive when their work
// is waited for, and are NaN until then; inputs must not change until then either. An error is written to the store
// below all prefixes, as torch's ProcessGroupNCCL does: every other group that polls it ends its process.
#ifndef MEGARL_REHEARSAL_NCCL_H
#define MEGARL_REHEARSAL_NCCL_H

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "deferred.h"

namespace rehearsal {

using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Sizes = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr const char* kErrorKey = "exception_dump";  // kStoreDumpKey of torch's ProcessGroupNCCL.hpp

// ``work()``; an error of it is written to ``store``.
template <class F>
auto reported(const StorePtr& store, const F& work) {
  try {
    return work();
  } catch (...) {
    store->set(kErrorKey, std::vector<uint8_t>{1});
    throw;
  }
}

class Submitted final : public c10d::Work {
 public:
  Submitted(Pending pending, c10d::OpType type, StorePtr store)
      : Work(-1, type), pending_(std::move(pending)), store_(std::move(store)) {}

  void begin(bool keeps_inputs, WorkPtr gloo) {
    gloo_ = std::move(gloo);
    pending_.hide(keeps_inputs);
  }
  Pending& tensors() { return pending_; }

  bool isCompleted() override { return gloo_->isCompleted() && wait(kNoTimeout); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override {
    reported(store_, [&] { return gloo_->wait(timeout); });
    pending_.finish();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { gloo_->abort(); }

 private:
  Pending pending_;
  StorePtr store_;
  WorkPtr gloo_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, const StorePtr& store, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(store) {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    if (prefixed) store_ = prefixed->getUnderlyingNonPrefixStore();
  }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place("broadcast", tensors, [&](Tensors& x) { return gloo_->broadcast(x, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place("all_reduce", tensors, [&](Tensors& x) { return gloo_->allreduce(x, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return in_place("all_reduce", tensors, [&](Tensors& x) { return gloo_->allreduce_coalesced(x, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place("reduce", tensors, [&](Tensors& x) { return gloo_->reduce(x, options); });
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return submit("all_gather", true, out, in, [&](auto& to, auto& from) { return gloo_->allgather(to, from, options); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return submit("all_gather", true, out, in,
                  [&](auto& to, auto& from) { return gloo_->_allgather_base(to, from, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return submit("all_gather", true, out, in,
                  [&](auto& to, auto& from) { return gloo_->allgather_into_tensor_coalesced(to, from, options); });
  }
  WorkPtr gather(Lists& out, Tensors& in, const c10d::GatherOptions& options) override {
    return submit("gather", true, out, in, [&](auto& to, auto& from) { return gloo_->gather(to, from, options); });
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    return submit("scatter", false, out, in, [&](auto& to, auto& from) { return gloo_->scatter(to, from, options); });
  }
  WorkPtr reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& options) override {
    return submit("reduce_scatter", false, out, in,
                  [&](auto& to, auto& from) { return gloo_->reduce_scatter(to, from, options); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return submit("reduce_scatter", false, out, in,
                  [&](auto& to, auto& from) { return gloo_->_reduce_scatter_base(to, from, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override {
    return submit("reduce_scatter", false, out, in,
                  [&](auto& to, auto& from) { return gloo_->reduce_scatter_tensor_coalesced(to, from, options); });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, Sizes& out_sizes, Sizes& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    return submit("all_to_all", false, out, in, [&](auto& to, auto& from) {
      return gloo_->alltoall_base(to, from, out_sizes, in_sizes, options);
    });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return submit("all_to_all", false, out, in, [&](auto& to, auto& from) { return gloo_->alltoall(to, from, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors none;
    return submit("send", false, none, tensors, [&](auto&, auto& from) { return gloo_->send(from, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return in_place("recv", tensors, [&](Tensors& x) { return gloo_->recv(x, from, tag); });
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
  template <class F>
  static Tensor map(const Tensor& tensor, const F& f) {
    return f(host(tensor));
  }
  template <class T, class F>
  static std::vector<T> map(const std::vector<T>& all, const F& f) {
    std::vector<T> out;
    for (const T& each : all) out.push_back(map(each, f));
    return out;
  }

  // ``run(out, in)`` on copies; ``keeps_inputs``: as `Pending::hide`.
  template <class Out, class In, class Run>
  WorkPtr submit(const char* name, bool keeps_inputs, const Out& out, const In& in, const Run& run) const {
    auto work = c10::make_intrusive<Submitted>(Pending(name), c10d::OpType::UNKNOWN, store_);
    auto from = map(in, [&](const Tensor& x) { return work->tensors().reads(x); });
    auto to = map(out, [&](const Tensor& x) { return work->tensors().writes(x); });
    work->begin(keeps_inputs, reported(store_, [&] { return run(to, from); }));
    return work;
  }
  template <class Run>
  WorkPtr in_place(const char* name, const Tensors& tensors, const Run& run) const {
    return submit(name, false, tensors, Tensors{}, [&](Tensors& to, Tensors&) { return run(to); });
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StorePtr store_;
};

}  // namespace rehearsal

#endif
