// Radix selection over the squared log-ratios of the trust region: integer counts and sums, so that threads may add them
// in any order.
#include <math.h>

#include <vector>

#include "segments.h"
#include "token_rules.h"

namespace megarl {
namespace {

MEGARL_VARIANTS void make_keys(const megarl_tokens& x, int64_t begin, int64_t end, uint32_t* keys) {
#pragma omp simd
  for (int64_t t = begin; t < end; ++t) {
    const float l = clamp(x.logprobs[t] - x.rollout_logprobs[t], -kLogRatioLimit, kLogRatioLimit);
    const float a = x.advantages[t];
    const int trust = ((a > 0.0f) & (l > 0.0f)) | ((a < 0.0f) & (l < 0.0f));
    union {
      float value;
      uint32_t bits;
    } magnitude;
    magnitude.value = fabsf(l);
    keys[t] = trust & (x.mask[t] != 0) ? magnitude.bits : kOutside;
  }
}

// Adds the tokens [begin, end) to table [2][1 << bits].
void add(const uint32_t* keys, int64_t begin, int64_t end, uint32_t prefix, int shift, int bits, int64_t* table) {
  const uint32_t low = (1u << bits) - 1;
  int64_t* sums = table + (int64_t{1} << bits);
  // shifted by 31 or more, every key of the trust region agrees with the empty prefix
  const int above = shift + bits;
  const uint32_t wanted = above > 30 ? 0 : prefix >> above;
  for (int64_t t = begin; t < end; ++t) {
    const uint32_t key = keys[t];
    if (key == kOutside || (above > 30 ? 0 : key >> above) != wanted) continue;
    const uint32_t bin = (key >> shift) & low;
    ++table[bin];
    sums[bin] += fixed_point_square(key);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_moment_keys_cpu(const megarl_tokens* tokens, uint32_t* keys) {
  using namespace megarl;
  if (!boundaries_are_valid(tokens->cu_seqlens, tokens->num_segments)) return MEGARL_BAD_BOUNDARIES;
  const int64_t num_tokens = tokens->cu_seqlens[tokens->num_segments];
#pragma omp parallel for if (num_tokens > kBlockTokens)
  for (int64_t begin = 0; begin < num_tokens; begin += kBlockTokens) {
    make_keys(*tokens, begin, begin + kBlockTokens < num_tokens ? begin + kBlockTokens : num_tokens, keys);
  }
  return MEGARL_OK;
}

extern "C" int megarl_moment_histogram_cpu(const uint32_t* keys, int64_t num_tokens, const int64_t* prefix, int shift,
                                           int bits, int64_t* table) {
  using namespace megarl;
  const int64_t size = int64_t{2} << bits;
#pragma omp parallel if (num_tokens > kBlockTokens)
  {
    std::vector<int64_t> mine(size, 0);
#pragma omp for
    for (int64_t begin = 0; begin < num_tokens; begin += kBlockTokens) {
      const int64_t end = begin + kBlockTokens < num_tokens ? begin + kBlockTokens : num_tokens;
      add(keys, begin, end, static_cast<uint32_t>(*prefix), shift, bits, mine.data());
    }
#pragma omp critical
    for (int64_t i = 0; i < size; ++i) table[i] += mine[i];
  }
  return MEGARL_OK;
}

extern "C" int megarl_moment_ties_cpu(const uint32_t* keys, const int64_t* key, const int64_t* places,
                                      const int32_t* cu_seqlens, int64_t num_segments, const int64_t* prefix, int shift,
                                      int bits, int64_t* table) {
  using namespace megarl;
  const uint32_t tied = static_cast<uint32_t>(*key);
  const int64_t square = fixed_point_square(tied);
  const int64_t size = int64_t{2} << bits;
#pragma omp parallel if (cu_seqlens[num_segments] > kBlockTokens)
  {
    std::vector<int64_t> mine(size, 0);
#pragma omp for schedule(dynamic, 8)
    for (int64_t s = 0; s < num_segments; ++s) {
      for (int64_t t = cu_seqlens[s]; t < cu_seqlens[s + 1]; ++t) {
        if (keys[t] != tied) continue;
        const int64_t order = tie_order(places[s] + t - cu_seqlens[s]);
        if (order >> (shift + bits) != *prefix >> (shift + bits)) continue;
        const int64_t bin = (order >> shift) & ((int64_t{1} << bits) - 1);
        ++mine[bin];
        mine[(size >> 1) + bin] += square;
      }
    }
#pragma omp critical
    for (int64_t i = 0; i < size; ++i) table[i] += mine[i];
  }
  return MEGARL_OK;
}
