// Work that is not done when it is submitted: what it writes holds NaN until somebody has waited for it.
#ifndef MEGARL_REHEARSAL_DEFERRED_H
#define MEGARL_REHEARSAL_DEFERRED_H

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <utility>
#include <vector>

#include "device.h"

namespace rehearsal {

inline Tensor copy_of(const Tensor& tensor) {
  Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  if (tensor.numel()) std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return copy;
}

// What one submission reads and writes: contiguous tensors of the host.
class Pending {
 public:
  explicit Pending(std::string name) : name_(std::move(name)) {}

  // What to read instead of ``tensor``: its bytes of now.
  Tensor reads(const Tensor& tensor) { return add(inputs_, tensor); }

  // Where to write instead of ``tensor``, until `finish`; it begins with the bytes of now.
  Tensor writes(const Tensor& tensor) { return add(outputs_, tensor); }

  // After all of the above: what will be written is NaN. An input that is part of an output, as a rank's own share of
  // gathered parameters, keeps its bytes if ``keeps_inputs``.
  void hide(bool keeps_inputs) {
    for (auto& [place, value] : outputs_) {
      if (place.numel()) std::memset(place.mutable_data_ptr(), 0xFF, place.nbytes());
    }
    for (auto& [place, value] : inputs_) {
      if (keeps_inputs && is_written(place)) write(place, value);
    }
  }

  void finish() {
    if (std::exchange(finished_, true)) return;
    for (auto& [place, value] : inputs_) {
      const bool same = !place.numel() || !std::memcmp(place.const_data_ptr(), value.const_data_ptr(), place.nbytes());
      TORCH_CHECK(same || is_written(place), "what ", name_, " reads was changed before anybody waited for it");
    }
    for (auto& [place, value] : outputs_) write(place, value);
  }

 private:
  using Pairs = std::vector<std::pair<Tensor, Tensor>>;

  Tensor add(Pairs& pairs, const Tensor& tensor) {
    TORCH_CHECK(tensor.is_contiguous(), name_, " needs contiguous tensors");
    pairs.emplace_back(tensor, copy_of(tensor));
    return pairs.back().second;
  }

  static void write(const Tensor& place, const Tensor& value) {
    if (place.numel()) std::memcpy(place.mutable_data_ptr(), value.const_data_ptr(), place.nbytes());
  }

  bool is_written(const Tensor& input) const {
    const auto* begin = static_cast<const char*>(input.const_data_ptr());
    for (const auto& [place, value] : outputs_) {
      const auto* other = static_cast<const char*>(place.const_data_ptr());
      if (begin < other + place.nbytes() && other < begin + input.nbytes()) return true;
    }
    return false;
  }

  const std::string name_;
  Pairs inputs_, outputs_;
  bool finished_ = false;
};

}  // namespace rehearsal

#endif
