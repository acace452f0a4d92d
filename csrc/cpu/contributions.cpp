#include <math.h>

#include <vector>

#include "segments.h"
#include "token_rules.h"

namespace megarl {
namespace {

void add(const megarl_tokens& x, int64_t t, int weighted, const double* low, int num_low, const double* high,
         int num_high, int64_t* table) {
  const float a = x.advantages[t];
  if (!x.mask[t] || !(a > 0.0f || a < 0.0f)) return;
  const float l = clamp(x.logprobs[t] - x.rollout_logprobs[t], -kLogRatioLimit, kLogRatioLimit);
  const double ratio = static_cast<double>(expf(l));
  const double weight = weighted ? exp(static_cast<double>(x.rollout_logprobs[t])) : 1.0;
  const double mass = weight * fabs(static_cast<double>(a));
  const int bin = a > 0.0f ? bin_below(ratio, high, num_high) : num_high + 2 + bin_below(ratio, low, num_low);
  const int64_t bins = num_low + num_high + 4;
  int64_t limbs[6];
  limbs_of(mass, limbs);
  limbs_of(mass * ratio, limbs + 3);
  for (int i = 0; i < 6; ++i) table[i * bins + bin] += limbs[i];
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_contributions_cpu(const megarl_tokens* tokens, int weighted, const double* low, int num_low,
                                        const double* high, int num_high, int64_t* table) {
  using namespace megarl;
  if (!boundaries_are_valid(tokens->cu_seqlens, tokens->num_segments)) return MEGARL_BAD_BOUNDARIES;
  const int64_t num_tokens = tokens->cu_seqlens[tokens->num_segments];
  const int64_t size = 6 * (num_low + num_high + 4);
#pragma omp parallel if (num_tokens > kBlockTokens)
  {
    std::vector<int64_t> mine(size, 0);
#pragma omp for
    for (int64_t t = 0; t < num_tokens; ++t) add(*tokens, t, weighted, low, num_low, high, num_high, mine.data());
#pragma omp critical  // integers: the order does not matter
    for (int64_t i = 0; i < size; ++i) table[i] += mine[i];
  }
  return MEGARL_OK;
}
