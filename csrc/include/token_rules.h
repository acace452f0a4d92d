// One small function per objective, its rule: what a trained token contributes, and with which gradient. The token
// passes on the CPU and in CUDA share the rules. The definitions are those of megarl/objectives. The comment above a
// rule names its parameters in order. tests/kernels/test_constants.py compares the constants with
// megarl/kernels/constants.py.
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
};

struct Sequence {
  float log_ratio;  // mean or sum over the whole sequence, see Rule::kQuantity
  int index;        // first trigger, or the last token that is muted among those at M2PO's threshold
};

struct Outcome {
  float value;        // objective_t: the loss is its negative
  float coefficient;  // its derivative with respect to the log-prob
  int kept;           // whether the gradient survives
  int first, second;  // flags that the rule counts in metrics: clipped, vetoed or masked tokens
};

enum class Quantity { kNone, kMean, kSum, kFirstTrigger, kTies };

MEGARL_INLINE Outcome hard_clip(float ratio, float advantage, float low, float high, int clamped) {
  const int clipped = ((advantage > 0.0f) & (ratio > high)) | ((advantage < 0.0f) & (ratio < low));
  const float value = (clipped ? clamp(ratio, low, high) : ratio) * advantage;
  const int kept = !clipped & !clamped;
  return {value, kept ? value : 0.0f, kept, clipped, 0};
}

MEGARL_INLINE Outcome dual_clip(Outcome o, float advantage, float bound) {
  const int capped = (advantage < 0.0f) & (o.value < bound * advantage);
  o.value = capped ? bound * advantage : o.value;
  o.coefficient = capped ? 0.0f : o.coefficient;
  o.kept &= !capped;
  o.first |= capped;
  return o;
}

MEGARL_INLINE Outcome soft_clip(float ratio, const Token& t, float low, float high) {
  const float weight = clamp(ratio, low, high) * t.advantage;
  return {weight * t.logprob, weight, 1, (ratio < low) | (ratio > high), 0};
}

struct Reinforce {
  static constexpr Quantity kQuantity = Quantity::kNone;
  MEGARL_INLINE explicit Reinforce(const double*) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float value = t.ratio * t.advantage;
    return {value, t.clamped ? 0.0f : value, !t.clamped, 0, 0};
  }
};

// ratio_min, ratio_max
struct Bounded {
  float low, high;
  MEGARL_INLINE explicit Bounded(const double* p) : low(static_cast<float>(p[0])), high(static_cast<float>(p[1])) {}
};

struct ClipToken : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    return hard_clip(t.ratio, t.advantage, low, high, t.clamped);
  }
};

// ratio_min, ratio_max: the value of ClipToken, but with a gradient also where it is bounded
struct ClipPreserving : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const Outcome o = hard_clip(t.ratio, t.advantage, low, high, 0);
    return {o.value, t.clamped ? 0.0f : o.value, !t.clamped, o.first, 0};
  }
};

// eps_low, eps_high, ratio_max: the bounds widen as the token's probability under the behaviour policy falls
struct ClipPrior {
  static constexpr Quantity kQuantity = Quantity::kNone;
  float low, high, most;
  MEGARL_INLINE explicit ClipPrior(const double* p)
      : low(static_cast<float>(p[0])), high(static_cast<float>(p[1])), most(static_cast<float>(p[2])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float inverse = exponential(clamp(-t.rollout_logprob, 0.0f, kSequenceLogRatioLimit));
    const float below = 0.5f + 0.5f * sqrtf(clamp(1.0f - 4.0f * low * inverse, 0.0f, 1.0f));
    const float above = clamp(0.5f + 0.5f * sqrtf(1.0f + 4.0f * high * inverse), 1.0f, most);
    return dual_clip(hard_clip(t.ratio, t.advantage, below, above, t.clamped), t.advantage, most);
  }
};

// largest |l|: the comparison is exact where the bound is the log-ratio of a token
struct ClipLogRatio {
  static constexpr Quantity kQuantity = Quantity::kNone;
  float level;
  MEGARL_INLINE explicit ClipLogRatio(const double* p) : level(static_cast<float>(p[0])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float l = t.log_ratio;
    const int clipped = ((t.advantage > 0.0f) & (l > level)) | ((t.advantage < 0.0f) & (l < -level));
    const float value = (clipped ? exponential(clamp(l, -level, level)) : t.ratio) * t.advantage;
    const int kept = !clipped & !t.clamped;
    return {value, kept ? value : 0.0f, kept, clipped, 0};
  }
};

struct ClipPrefix : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    return hard_clip(t.prefix_ratio, t.advantage, low, high, t.clamped);
  }
};

struct ClipSequenceMean : Bounded {
  static constexpr Quantity kQuantity = Quantity::kMean;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence& s) const {
    return hard_clip(exponential(s.log_ratio), t.advantage, low, high, t.clamped);
  }
};

// ratio_min, ratio_max, clip_ratio_c
struct ClipDual : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  float bound;
  MEGARL_INLINE explicit ClipDual(const double* p) : Bounded(p), bound(static_cast<float>(p[2])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    return dual_clip(hard_clip(t.ratio, t.advantage, low, high, t.clamped), t.advantage, bound);
  }
};

struct SoftClipToken : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const { return soft_clip(t.ratio, t, low, high); }
};

struct SoftClipPrefix : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    return soft_clip(t.prefix_ratio, t, low, high);
  }
};

struct TaperedSequence : Bounded {
  static constexpr Quantity kQuantity = Quantity::kSum;
  using Bounded::Bounded;
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence& s) const {
    const float ratio = exponential(clamp(s.log_ratio, -kSequenceLogRatioLimit, kSequenceLogRatioLimit));
    const int negative = t.advantage < 0.0f;
    const float weight = (t.advantage > 0.0f ? 1.0f : clamp(ratio, low, high)) * t.advantage;
    return {weight * t.logprob, weight, 1, negative & ((ratio < low) | (ratio > high)), 0};
  }
};

// tau_positive, tau_negative
struct Gated {
  static constexpr Quantity kQuantity = Quantity::kNone;
  float positive, negative;
  MEGARL_INLINE explicit Gated(const double* p) : positive(static_cast<float>(p[0])), negative(static_cast<float>(p[1])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float tau = t.advantage > 0.0f ? positive : negative;
    const float e = exponential(clamp(-tau * (t.ratio - 1.0f), -kSequenceLogRatioLimit, kSequenceLogRatioLimit));
    const float p = 1.0f / (1.0f + e);
    const int kept = !t.clamped;
    return {4.0f / tau * p * t.advantage, kept ? 4.0f * p * p * e * t.ratio * t.advantage : 0.0f, kept, 0, 0};
  }
};

// k and lambda of positive, then of negative advantages
struct GammaSequence {
  static constexpr Quantity kQuantity = Quantity::kSum;
  float k[2], lambda[2];
  MEGARL_INLINE explicit GammaSequence(const double* p)
      : k{static_cast<float>(p[0]), static_cast<float>(p[2])},
        lambda{static_cast<float>(p[1]), static_cast<float>(p[3])} {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence& s) const {
    const int negative = t.advantage < 0.0f;
    const float w = clamp(s.log_ratio, -kLogRatioLimit, kLogRatioLimit);
    const float log_weight =
        (negative ? k[1] : k[0]) * w - (negative ? lambda[1] : lambda[0]) * (exponential(w) - 1.0f);
    const float bounded = clamp(log_weight, -kSequenceLogRatioLimit, kSequenceLogRatioLimit);
    const float weight = exponential(bounded) * t.advantage;
    return {weight * t.logprob, weight, 1, 0, 0};
  }
};

// 1 - e^x for x <= 0 without cancellation, in plain arithmetic.
MEGARL_INLINE float rest_of(float x) {
  return x > -0.34f ? -(exponential_remainder(x) * x * x + x) : 1.0f - exponential(x);
}

// threshold, ratio_max
template <bool kl>
struct Divergence : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  using Bounded::Bounded;  // low is the threshold
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float l = t.log_ratio;
    const float log_q = clamp(t.rollout_logprob, -kSequenceLogRatioLimit, 0.0f), q = exponential(log_q);
    float distance = q * fabsf(t.ratio - 1.0f);
    if (kl) {
      const float rest_q = rest_of(log_q) + kSmallestRest;
      const float rest_p = rest_of(clamp(log_q + l, -kSequenceLogRatioLimit, 0.0f)) + kSmallestRest;
      distance = rest_q * logf(rest_q / rest_p) - q * l;
    }
    const int along = ((t.advantage > 0.0f) & (l > 0.0f)) | ((t.advantage < 0.0f) & (l < 0.0f));
    const int masked = along & (distance > low);
    const float weight = masked ? 0.0f : clamp(t.ratio, 0.0f, high) * t.advantage;
    return {weight * t.logprob, weight, !masked, masked, 0};
  }
};

enum class Scope { kSequence, kSuffix, kNonTriggerSuffix, kTrigger };

// ratio_min, ratio_max, veto_threshold
template <Scope scope>
struct Veto : Bounded {
  static constexpr Quantity kQuantity = scope == Scope::kTrigger ? Quantity::kNone : Quantity::kFirstTrigger;
  float threshold;
  MEGARL_INLINE explicit Veto(const double* p) : Bounded(p), threshold(static_cast<float>(p[2])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence& s) const {
    const int negative = t.advantage < 0.0f;
    const int trigger = negative & (t.ratio < threshold);
    int vetoed = trigger;
    if (scope == Scope::kSequence) vetoed = negative & (s.index < kNever);
    if (scope == Scope::kSuffix) vetoed = negative & (t.index > s.index);
    if (scope == Scope::kNonTriggerSuffix) vetoed = negative & (t.index > s.index) & !trigger;
    Outcome o = hard_clip(t.ratio, t.advantage, low, high, t.clamped);
    o.value = vetoed ? 0.0f : o.value;
    o.coefficient = vetoed ? 0.0f : o.coefficient;
    o.kept &= !vetoed;
    o.first &= !vetoed;
    o.second = vetoed;
    return o;
  }
};

// threshold of |l|, tie order from which on tokens at the threshold are muted
struct SecondMoment {
  static constexpr Quantity kQuantity = Quantity::kTies;
  float threshold;
  MEGARL_INLINE explicit SecondMoment(const double* p) : threshold(static_cast<float>(p[0])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence& s) const {
    const int trust = ((t.advantage > 0.0f) & (t.log_ratio > 0.0f)) | ((t.advantage < 0.0f) & (t.log_ratio < 0.0f));
    const float magnitude = fabsf(t.log_ratio);
    const int muted = trust & ((magnitude > threshold) | ((magnitude == threshold) & (t.index <= s.index)));
    const float value = muted ? 0.0f : t.ratio * t.advantage;
    const int kept = !muted & !t.clamped;
    return {value, kept ? value : 0.0f, kept, muted, 0};
  }
};

// ratio_min, ratio_max, behaviour_weight_max
struct Decoupled : Bounded {
  static constexpr Quantity kQuantity = Quantity::kNone;
  float weight_max;
  MEGARL_INLINE explicit Decoupled(const double* p) : Bounded(p), weight_max(static_cast<float>(p[2])) {}
  MEGARL_INLINE Outcome operator()(const Token& t, const Sequence&) const {
    const float proximal = t.logprob - t.old_logprob;
    const int far = fabsf(proximal) > kLogRatioLimit;
    const float behaviour = clamp(t.old_logprob - t.rollout_logprob, -kLogRatioLimit, kLogRatioLimit);
    const float ratio = exponential(clamp(proximal, -kLogRatioLimit, kLogRatioLimit));
    const float full = exponential(behaviour);
    const float weight = full > weight_max ? weight_max : full;
    Outcome o = hard_clip(ratio, t.advantage, low, high, far);
    o.value *= weight;
    o.coefficient *= weight;
    return o;
  }
};

// ratio - 1 - l without cancellation, for ratio = exp(l); 2 ulp.
MEGARL_INLINE float excess(float l, float ratio) {
  return fabsf(l) < 0.34f ? exponential_remainder(l) * l * l : ratio - 1.0f - l;
}

// Algorithm 1 of M2PO removes the first among equals in (sequence, position) order: later ones have lower tie orders.
MEGARL_INLINE int64_t tie_order(int64_t place) { return (int64_t{1} << 2 * kPositionBits) - 1 - place; }

// The last index in a segment at which a token at the threshold is muted; -1 for none.
MEGARL_INLINE int last_refused_tie(double order, int64_t place) {
  const int64_t last = tie_order(static_cast<int64_t>(order)) - place;
  return last < -1 ? -1 : (last > INT32_MAX ? INT32_MAX : static_cast<int>(last));
}

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

// Every rule: the name that an objective gives in `Objective.rule` (Python), and its type.
#define MEGARL_RULES(rule)                                            \
  rule("reinforce", Reinforce)                                        \
  rule("clip_token", ClipToken)                                       \
  rule("clip_preserving", ClipPreserving)                             \
  rule("clip_prior", ClipPrior)                                       \
  rule("clip_log_ratio", ClipLogRatio)                                \
  rule("clip_prefix", ClipPrefix)                                     \
  rule("clip_sequence_mean", ClipSequenceMean)                        \
  rule("clip_dual", ClipDual)                                         \
  rule("soft_clip_token", SoftClipToken)                              \
  rule("soft_clip_prefix", SoftClipPrefix)                            \
  rule("tapered_sequence", TaperedSequence)                           \
  rule("gated", Gated)                                                \
  rule("gamma_sequence", GammaSequence)                               \
  rule("divergence_tv", Divergence<false>)                            \
  rule("divergence_kl", Divergence<true>)                             \
  rule("veto_sequence", Veto<Scope::kSequence>)                       \
  rule("veto_suffix", Veto<Scope::kSuffix>)                           \
  rule("veto_non_trigger_suffix", Veto<Scope::kNonTriggerSuffix>)     \
  rule("veto_trigger", Veto<Scope::kTrigger>)                         \
  rule("second_moment", SecondMoment)                                 \
  rule("decoupled", Decoupled)

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
