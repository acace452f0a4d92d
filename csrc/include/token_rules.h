// What the token passes on the CPU and in CUDA share. The rules themselves, what a trained token contributes under an
// objective and with which gradient, stand in megarl/objectives; translate_rules.py writes them into megarl_rules.h.
// tests/kernels/test_constants.py compares the constants with megarl/kernels/constants.py.
#ifndef MEGARL_TOKEN_RULES_H
#define MEGARL_TOKEN_RULES_H

#include <math.h>
#include <string.h>

#include "megarl_kernels.h"

#ifdef __CUDACC__
#define MEGARL_INLINE __host__ __device__ __forceinline__
#else
#define MEGARL_INLINE inline __attribute__((always_inline))
#endif

namespace megarl {

constexpr float kLogRatioLimit = 20.0f;
constexpr float kSequenceLogRatioLimit = 80.0f;  // e^80 exceeds any bound, and is still a finite float32
constexpr float kBadPrefix = 0.8f;
constexpr float kLogBadPrefix = -0.22314355131420976f;  // log .8
constexpr float kSmallestRest = 1e-8f;                 // added to the probability of all tokens but the sampled one
constexpr int32_t kNever = 0x7FFFFFFF;                 // index of the first trigger where there is none
constexpr int kPositionBits = 22;                      // of a token's position in its sequence, and of its sequence's
constexpr uint32_t kOutside = 0xFFFFFFFFu;             // key of a token outside the trust region
constexpr double kSquareScale = 1073741824.0;          // 2^30: fixed-point l^2
constexpr double kLargestSquare = 1024.0;
constexpr double kLimbScale = 16777216.0;  // 2^24: limbs of a contribution
constexpr double kLargestContribution = 274877906944.0;  // 2^38
constexpr int kHistogramShift = 19;   // leaves sign, exponent and 4 bits of the mantissa of a float32
constexpr int kHistogramBase = 1807;  // one less than the shifted bits of 2^-14

// (e^x - 1 - x) / x^2 for |x| <= .35, in plain arithmetic.
MEGARL_INLINE float exponential_remainder(float x) {
  float p = 1.9875691500e-4f;
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  return p * x + 5.0000001201e-1f;
}

// exp(x) for |x| <= 88 in plain arithmetic, so that loops over it vectorise; 1 ulp. NaN stays NaN.
MEGARL_INLINE float exponential(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  const float scaled = x * 1.44269504f;
  const float n = (scaled + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p = (exponential_remainder(r) * r) * r + r + 1.0f;
  union {
    int32_t bits;
    float value;
  } power;
  power.bits = (static_cast<int32_t>(n) + 127) << 23;
  return p * power.value;
#endif
}

MEGARL_INLINE float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

struct Token {
  float logprob, rollout_logprob, old_logprob;
  float advantage;
  float log_ratio;     // l = logprob - rollout_logprob, clamped to +-kLogRatioLimit
  float ratio;         // exp(l)
  float prefix_ratio;  // exp(log m + l)
  int clamped;         // whether the clamp changed the log-ratio
  int index;           // position, counted from the start of the segment
  int never = 0;
};

struct Sequence {  // what a rule needs of the whole sequence
  float value;
  int index;  // a position, counted from the start of the segment
};

struct Outcome {
  float value;        // objective_t: the loss is its negative
  float coefficient;  // its derivative with respect to the log-prob
  int kept;           // whether the gradient survives
  int first, second;  // flags that the rule counts in metrics: clipped, vetoed or masked tokens
};

// What the passes compute of a whole sequence, by the names in megarl/objectives/parts/quantities.py.
enum class Quantity { kNone, kMeanLogRatio, kSumLogRatio, kFirstTrigger };

// 1 - e^x for x <= 0 without cancellation, in plain arithmetic.
MEGARL_INLINE float one_minus_exp(float x) {
  return x > -0.34f ? -(exponential_remainder(x) * x * x + x) : 1.0f - exponential(x);
}

#include "megarl_rules.h"  // MEGARL_RULES(rule): every rule, its name and its type

// ratio - 1 - l without cancellation, for ratio = exp(l); 2 ulp.
MEGARL_INLINE float excess(float l, float ratio) {
  return fabsf(l) < 0.34f ? exponential_remainder(l) * l * l : ratio - 1.0f - l;
}

// Algorithm 1 of M2PO removes the first among equals in (sequence, position) order: later ones have lower tie orders.
MEGARL_INLINE int64_t tie_order(int64_t place) { return (int64_t{1} << 2 * kPositionBits) - 1 - place; }

// l^2 in units of 2^-30 from the bit pattern of |l|, as an integer, whose sums are exact in every order.
MEGARL_INLINE int64_t fixed_point_square(uint32_t key) {
  union {
    uint32_t bits;
    float value;
  } magnitude;
  magnitude.bits = key;
  const double l = magnitude.value;
  const double square = l * l;
  return static_cast<int64_t>(rint((square > kLargestSquare ? kLargestSquare : square) * kSquareScale));
}

// Number of edges below x: bin i holds edges[i-1] < x <= edges[i].
MEGARL_INLINE int bin_below(double x, const double* edges, int num_edges) {
  int begin = 0, end = num_edges;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (edges[middle] < x) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The three limbs of a contribution, integer multiples of 1, 2^-24 and 2^-48, which add exactly in any order.
MEGARL_INLINE void limbs_of(double x, int64_t out[3]) {
  double rest = x > kLargestContribution ? kLargestContribution : (x >= 0.0 ? x : 0.0);  // NaN counts as 0
  for (int i = 0; i < 2; ++i) {
    const double whole = floor(rest);
    out[i] = static_cast<int64_t>(whole);
    rest = (rest - whole) * kLimbScale;
  }
  out[2] = static_cast<int64_t>(rint(rest));
}

// Bin of a log-ratio: 0 to MEGARL_BINS - 1, MEGARL_BINS_PER_SIGN around zero. NaN counts as a large value.
MEGARL_INLINE int bin_of(float l) {
  union {
    float value;
    int32_t bits;
  } x;
  x.value = l;
  const int step = ((x.bits & 0x7FFFFFFF) >> kHistogramShift) - kHistogramBase;
  const int magnitude = step < 0 ? 0 : (step > MEGARL_BINS_PER_SIGN ? MEGARL_BINS_PER_SIGN : step);
  return x.bits < 0 ? MEGARL_BINS_PER_SIGN - magnitude : MEGARL_BINS_PER_SIGN + magnitude;
}

template <class R>
struct Tag {
  using Rule = R;
};

// The number in MEGARL_RULES of the rule with this name, -1 if there is none.
inline int find_rule(const char* name) {
  int number = 0;
#define MEGARL_COMPARE(rule, Type)           \
  if (strcmp(name, rule) == 0) return number; \
  ++number;
  MEGARL_RULES(MEGARL_COMPARE)
#undef MEGARL_COMPARE
  return -1;
}

// Calls visit with the tag of rule number `wanted`; runs on the host, to choose the kernel.
template <class Visit>
inline __attribute__((always_inline)) void with_rule(int wanted, Visit&& visit) {
  int number = 0;
#define MEGARL_VISIT(rule, Type) \
  if (wanted == number++) return visit(Tag<Type>());
  MEGARL_RULES(MEGARL_VISIT)
#undef MEGARL_VISIT
}

}  // namespace megarl

#endif
