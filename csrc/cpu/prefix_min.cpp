#include "segments.h"

namespace {

void sequence_prefix_min(const float* log_ratio, const uint8_t* mask, int64_t start, int64_t end, float* out) {
  int64_t t = start;
  while (t < end && !mask[t]) out[t++] = 0.0f;
  if (t == end) return;
  float least = log_ratio[t];
  out[t++] = 0.0f;
  for (; t < end; ++t) {
    out[t] = least;
    const float value = log_ratio[t];
    // A NaN value enters through the second test; a NaN minimum stays, since nothing is less than it.
    if (mask[t] && (value < least || value != value)) least = value;
  }
}

}  // namespace

extern "C" int megarl_prefix_min_cpu(const float* log_ratio, const uint8_t* mask, const int32_t* cu_seqlens,
                                     int64_t num_sequences, float* out) {
  if (!megarl::boundaries_are_valid(cu_seqlens, num_sequences)) return MEGARL_BAD_BOUNDARIES;
#pragma omp parallel for schedule(dynamic) if (cu_seqlens[num_sequences] >= megarl::kBlockTokens)
  for (int64_t s = 0; s < num_sequences; ++s) {
    sequence_prefix_min(log_ratio, mask, cu_seqlens[s], cu_seqlens[s + 1], out);
  }
  return MEGARL_OK;
}
