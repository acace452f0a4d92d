// Radix selection over the squared log-ratios of the trust region. Counts and sums are integers, so that threads may
// add them in any order.
#include <math.h>

#include <algorithm>
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

constexpr int kChunk = 256;

// Bins and squares of a chunk of keys; keys that do not agree with the prefix get bin 1 << bits. False if none agrees.
MEGARL_VARIANTS bool bin_chunk(const uint32_t* keys, int n, uint32_t prefix, int shift, int bits, int32_t* bins,
                               int64_t* squares) {
  // shifted by 31, every key of the trust region is 0, and agrees with the empty prefix
  const int above = shift + bits > 30 ? 31 : shift + bits;
  const uint32_t wanted = above > 30 ? 0 : prefix >> above;
  const uint32_t low = (1u << bits) - 1;
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int i = 0; i < n; ++i) {
    const int agrees = (keys[i] >> above) == wanted;  // kOutside has the top bit, which no key has
    bins[i] = agrees ? static_cast<int32_t>((keys[i] >> shift) & low) : static_cast<int32_t>(low + 1);
    any |= agrees;
  }
  if (!any) return false;
  for (int i = 0; i < n; ++i) squares[i] = bins[i] > static_cast<int32_t>(low) ? 0 : fixed_point_square(keys[i]);
  return true;
}

// Adds the tokens [begin, end) to counts and sums [(1 << bits) + 1]. There is no branch per token, since about half of
// them agree with the prefix, which a processor cannot predict.
void add(const uint32_t* keys, int64_t begin, int64_t end, uint32_t prefix, int shift, int bits, int64_t* counts,
         int64_t* sums) {
  int32_t bins[kChunk];
  int64_t squares[kChunk];
  for (int64_t t = begin; t < end; t += kChunk) {
    const int n = static_cast<int>(end - t < kChunk ? end - t : kChunk);
    if (!bin_chunk(keys + t, n, prefix, shift, bits, bins, squares)) continue;
    for (int i = 0; i < n; ++i) {
      ++counts[bins[i]];
      sums[bins[i]] += squares[i];
    }
  }
}

MEGARL_VARIANTS bool any_equal(const uint32_t* keys, int n, uint32_t key) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int i = 0; i < n; ++i) any |= keys[i] == key;
  return any != 0;
}

// Adds the tokens of [begin, end) whose key is `tied` to the table, binned by their tie order.
void add_ties(const uint32_t* keys, int64_t begin, int64_t end, uint32_t tied, const int64_t* places,
              const int32_t* cu_seqlens, int64_t num_segments, int64_t prefix, int shift, int bits, int64_t* table) {
  const int64_t square = fixed_point_square(tied);
  for (int64_t start = begin; start < end; start += kChunk) {
    const int n = static_cast<int>(end - start < kChunk ? end - start : kChunk);
    if (!any_equal(keys + start, n, tied)) continue;
    for (int64_t t = start; t < start + n; ++t) {
      if (keys[t] != tied) continue;
      const int64_t s = std::upper_bound(cu_seqlens, cu_seqlens + num_segments + 1, t) - cu_seqlens - 1;
      const int64_t order = tie_order(places[s] + t - cu_seqlens[s]);
      if (order >> (shift + bits) != prefix >> (shift + bits)) continue;
      const int64_t bin = (order >> shift) & ((int64_t{1} << bits) - 1);
      ++table[bin];
      table[(int64_t{1} << bits) + bin] += square;
    }
  }
}

int64_t block_end(int64_t begin, int64_t num_tokens) {
  return begin + kBlockTokens < num_tokens ? begin + kBlockTokens : num_tokens;
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_moment_keys_cpu(const megarl_tokens* tokens, uint32_t* keys) {
  using namespace megarl;
  if (!boundaries_are_valid(tokens->cu_seqlens, tokens->num_segments)) return MEGARL_BAD_BOUNDARIES;
  const int64_t num_tokens = tokens->cu_seqlens[tokens->num_segments];
#pragma omp parallel for if (num_tokens > kBlockTokens)
  for (int64_t begin = 0; begin < num_tokens; begin += kBlockTokens) {
    make_keys(*tokens, begin, block_end(begin, num_tokens), keys);
  }
  return MEGARL_OK;
}

extern "C" int megarl_moment_histogram_cpu(const uint32_t* keys, int64_t num_tokens, const int64_t* prefix, int shift,
                                           int bits, int64_t* table) {
  using namespace megarl;
  const int64_t bins = int64_t{1} << bits;
#pragma omp parallel if (num_tokens > kBlockTokens)
  {
    std::vector<int64_t> counts(bins + 1, 0), sums(bins + 1, 0);
#pragma omp for
    for (int64_t begin = 0; begin < num_tokens; begin += kBlockTokens) {
      add(keys, begin, block_end(begin, num_tokens), static_cast<uint32_t>(*prefix), shift, bits, counts.data(),
          sums.data());
    }
#pragma omp critical
    for (int64_t i = 0; i < bins; ++i) {
      table[i] += counts[i];
      table[bins + i] += sums[i];
    }
  }
  return MEGARL_OK;
}

extern "C" int megarl_moment_ties_cpu(const uint32_t* keys, const int64_t* key, const int64_t* places,
                                      const int32_t* cu_seqlens, int64_t num_segments, const int64_t* prefix, int shift,
                                      int bits, int64_t* table) {
  using namespace megarl;
  const int64_t num_tokens = cu_seqlens[num_segments];
  const int64_t size = int64_t{2} << bits;
#pragma omp parallel if (num_tokens > kBlockTokens)
  {
    std::vector<int64_t> mine(size, 0);
#pragma omp for
    for (int64_t begin = 0; begin < num_tokens; begin += kBlockTokens) {
      add_ties(keys, begin, block_end(begin, num_tokens), static_cast<uint32_t>(*key), places, cu_seqlens, num_segments,
               *prefix, shift, bits, mine.data());
    }
#pragma omp critical
    for (int64_t i = 0; i < size; ++i) table[i] += mine[i];
  }
  return MEGARL_OK;
}
