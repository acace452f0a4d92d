#include <limits>

#include "segments.h"
#include "token_rules.h"

namespace megarl {
namespace {

MEGARL_VARIANTS void summarise(const megarl_tokens& x, int64_t s, float threshold, float* least, double* sum,
                               int64_t* count, int32_t* first_trigger) {
  float minimum = std::numeric_limits<float>::infinity();
  double total = 0.0;
  int64_t trained = 0;
  int32_t trigger = kNever;
  for (int64_t t = x.cu_seqlens[s]; t < x.cu_seqlens[s + 1]; ++t) {
    if (!x.mask[t]) continue;
    const float l = clamp(x.logprobs[t] - x.rollout_logprobs[t], -kLogRatioLimit, kLogRatioLimit);
    if (l < minimum || l != l) minimum = l;  // once NaN it stays NaN, since no value is less than NaN
    total += l;
    ++trained;
    if (trigger == kNever && x.advantages[t] < 0.0f && exponential(l) < threshold) {
      trigger = static_cast<int32_t>(t - x.cu_seqlens[s]);
    }
  }
  least[s] = minimum;
  sum[s] = total;
  count[s] = trained;
  first_trigger[s] = trigger;
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_segment_summary_cpu(const megarl_tokens* tokens, const float* veto_threshold, float* least, double* sum,
                                          int64_t* count, int32_t* first_trigger) {
  using namespace megarl;
  const int64_t segments = tokens->num_segments;
  if (!boundaries_are_valid(tokens->cu_seqlens, segments)) return MEGARL_BAD_BOUNDARIES;
#pragma omp parallel for schedule(dynamic, 8) if (tokens->cu_seqlens[segments] >= kBlockTokens)
  for (int64_t s = 0; s < segments; ++s) summarise(*tokens, s, *veto_threshold, least, sum, count, first_trigger);
  return MEGARL_OK;
}
