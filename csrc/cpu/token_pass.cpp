// The token pass on the CPU: threads take blocks of segments, a tile of tokens stays in the first-level cache, and every
// loop over a tile is vectorised except that of the running minimum.
#include <limits>
#include <vector>

#include "segments.h"
#include "token_rules.h"

namespace megarl {
namespace {

constexpr int kTile = 256;

struct alignas(64) Tile {
  float logprob[kTile], rollout_logprob[kTile], old_logprob[kTile], advantage[kTile];
  float log_ratio[kTile], ratio[kTile], prefix[kTile], prefix_ratio[kTile];
  float value[kTile], coefficient[kTile], sequence_value[kTile];
  int32_t mask[kTile], clamped[kTile], kept[kTile], first[kTile], second[kTile];
  int32_t index[kTile], sequence_index[kTile], bins[2][kTile];
};

struct Output {
  float* loss;
  float* coefficient;
  uint8_t* kept;
  double* segment_sums;
};

// Two tables, used in turn: successive tokens often share a bin, and an increment waits for the last one of that bin.
struct Histograms {
  int64_t counts[2][2][MEGARL_BINS + 1] = {};  // the last bin takes the untrained tokens
};

MEGARL_VARIANTS void load(const megarl_tokens& x, int64_t start, int n, Tile& tile) {
  const float* logprobs = x.logprobs + start;
  const float* rollout = x.rollout_logprobs + start;
  const float* advantages = x.advantages + start;
  const uint8_t* mask = x.mask + start;
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    const int on = mask[i] != 0;
    const float p = on ? logprobs[i] : 0.0f;
    const float q = on ? rollout[i] : 0.0f;
    const float l = p - q;
    tile.mask[i] = on;
    tile.logprob[i] = p;
    tile.rollout_logprob[i] = q;
    tile.advantage[i] = on ? advantages[i] : 0.0f;
    tile.clamped[i] = fabsf(l) > kLogRatioLimit;
    tile.log_ratio[i] = clamp(l, -kLogRatioLimit, kLogRatioLimit);
    tile.ratio[i] = exponential(tile.log_ratio[i]);
    tile.old_logprob[i] = 0.0f;
  }
  if (x.old_logprobs) {
    for (int i = 0; i < n; ++i) tile.old_logprob[i] = tile.mask[i] ? x.old_logprobs[start + i] : 0.0f;
  }
}

// Exclusive running minimum of the trained log-ratios, starting with `least`; returns the minimum after the last token.
// The second comparison takes a NaN, which then stays the minimum, since no value is less than NaN.
float running_min(Tile& tile, int begin, int end, float least) {
  for (int i = begin; i < end; ++i) {
    tile.prefix[i] = least;
    const float l = tile.log_ratio[i];
    least = tile.mask[i] & ((l < least) | (l != l)) ? l : least;
  }
  return least;
}

MEGARL_VARIANTS void weigh_prefix(Tile& tile, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    const float log_m = tile.prefix[i] == std::numeric_limits<float>::infinity() ? 0.0f : tile.prefix[i];
    tile.prefix[i] = log_m;
    tile.prefix_ratio[i] = exponential(log_m + tile.log_ratio[i]);
    tile.bins[0][i] = tile.mask[i] ? bin_of(tile.log_ratio[i]) : MEGARL_BINS;
    tile.bins[1][i] = tile.mask[i] ? bin_of(log_m) : MEGARL_BINS;
  }
}

template <class Rule>
MEGARL_INLINE void apply_rule(const Rule& rule, Tile& tile, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    const Token token{tile.logprob[i],   tile.rollout_logprob[i], tile.old_logprob[i],
                      tile.advantage[i], tile.log_ratio[i],       tile.ratio[i],
                      tile.prefix_ratio[i], tile.clamped[i],      tile.index[i]};
    const Outcome o = rule(token, Sequence{tile.sequence_value[i], tile.sequence_index[i]});
    const int on = tile.mask[i];
    tile.value[i] = on ? o.value : 0.0f;
    tile.coefficient[i] = on ? o.coefficient : 0.0f;
    tile.kept[i] = on & o.kept;
    tile.first[i] = on & o.first;
    tile.second[i] = on & o.second;
  }
}

MEGARL_VARIANTS void apply(int rule, const double* parameters, Tile& tile, int n) {
  with_rule(rule, [&](auto tag) __attribute__((always_inline)) {
    using Rule = typename decltype(tag)::Rule;
    apply_rule(Rule(parameters), tile, n);
  });
}

MEGARL_VARIANTS void count(const Tile& tile, int n, double* sums) {
  int32_t tokens = 0, positive = 0, negative = 0, clamped = 0, kept = 0, kept_positive = 0, kept_negative = 0;
#pragma omp simd reduction(+ : tokens, positive, negative, clamped, kept, kept_positive, kept_negative)
  for (int i = 0; i < n; ++i) {
    const int above = tile.advantage[i] > 0.0f, below = tile.advantage[i] < 0.0f;
    tokens += tile.mask[i];
    positive += above;
    negative += below;
    clamped += tile.clamped[i];
    kept += tile.kept[i];
    kept_positive += tile.kept[i] & above;
    kept_negative += tile.kept[i] & below;
  }
  sums[MEGARL_TOKENS] += tokens;
  sums[MEGARL_POSITIVE] += positive;
  sums[MEGARL_NEGATIVE] += negative;
  sums[MEGARL_CLAMPED] += clamped;
  sums[MEGARL_KEPT] += kept;
  sums[MEGARL_KEPT_POSITIVE] += kept_positive;
  sums[MEGARL_KEPT_NEGATIVE] += kept_negative;
}

MEGARL_VARIANTS void count_flags(const Tile& tile, int n, double* sums) {
  int32_t first = 0, first_positive = 0, first_negative = 0, second = 0, second_positive = 0, second_negative = 0;
#pragma omp simd reduction(+ : first, first_positive, first_negative, second, second_positive, second_negative)
  for (int i = 0; i < n; ++i) {
    const int above = tile.advantage[i] > 0.0f, below = tile.advantage[i] < 0.0f;
    first += tile.first[i];
    first_positive += tile.first[i] & above;
    first_negative += tile.first[i] & below;
    second += tile.second[i];
    second_positive += tile.second[i] & above;
    second_negative += tile.second[i] & below;
  }
  sums[MEGARL_FIRST] += first;
  sums[MEGARL_FIRST_POSITIVE] += first_positive;
  sums[MEGARL_FIRST_NEGATIVE] += first_negative;
  sums[MEGARL_SECOND] += second;
  sums[MEGARL_SECOND_POSITIVE] += second_positive;
  sums[MEGARL_SECOND_NEGATIVE] += second_negative;
}

MEGARL_VARIANTS void count_dampened(const Tile& tile, int n, float dampened, double* sums) {
  int32_t bad_prefix = 0, token = 0, token_bad = 0, prefix = 0, prefix_bad = 0;
#pragma omp simd reduction(+ : bad_prefix, token, token_bad, prefix, prefix_bad)
  for (int i = 0; i < n; ++i) {
    const int bad = tile.mask[i] & (tile.prefix[i] < kLogBadPrefix);
    const int by_token = tile.mask[i] & (tile.ratio[i] < dampened);
    const int by_prefix = tile.mask[i] & (tile.prefix_ratio[i] < dampened);
    bad_prefix += bad;
    token += by_token;
    token_bad += by_token & bad;
    prefix += by_prefix;
    prefix_bad += by_prefix & bad;
  }
  sums[MEGARL_BAD_PREFIX] += bad_prefix;
  sums[MEGARL_DAMPENED_TOKEN] += token;
  sums[MEGARL_DAMPENED_TOKEN_BAD] += token_bad;
  sums[MEGARL_DAMPENED_PREFIX] += prefix;
  sums[MEGARL_DAMPENED_PREFIX_BAD] += prefix_bad;
}

// Sums within a tile are float32, sums over tiles float64: 256 terms lose less precision than float32 log-probs have.
MEGARL_VARIANTS void measure(const Tile& tile, int n, double* sums) {
  float ratio = 0, ratio_square = 0, chi2 = 0, log_ratio = 0, k3 = 0, square = 0;
#pragma omp simd reduction(+ : ratio, ratio_square, chi2, log_ratio, k3, square)
  for (int i = 0; i < n; ++i) {
    const float r = tile.mask[i] ? tile.ratio[i] : 0.0f;
    const float l = tile.log_ratio[i];  // 0 where not trained
    const float e = excess(l, tile.ratio[i]);
    ratio += r;
    ratio_square += r * r;
    chi2 += (l + e) * (l + e);
    log_ratio += l;
    k3 += e;
    square += l * l;
  }
  float trust_square = 0, kept_square = 0;
  int32_t trust = 0, trust_kept = 0;
#pragma omp simd reduction(+ : trust_square, kept_square, trust, trust_kept)
  for (int i = 0; i < n; ++i) {
    const float a = tile.advantage[i], l = tile.log_ratio[i];
    const int inside = ((a > 0.0f) & (l > 0.0f)) | ((a < 0.0f) & (l < 0.0f));
    trust += inside;
    trust_kept += inside & tile.kept[i];
    trust_square += inside ? l * l : 0.0f;
    kept_square += inside & tile.kept[i] ? l * l : 0.0f;
  }
  sums[MEGARL_RATIO] += ratio;
  sums[MEGARL_RATIO_SQUARE] += ratio_square;
  sums[MEGARL_CHI2] += chi2;
  sums[MEGARL_LOG_RATIO] += log_ratio;
  sums[MEGARL_K3] += k3;
  sums[MEGARL_SQUARE] += square;
  sums[MEGARL_TRUST] += trust;
  sums[MEGARL_TRUST_KEPT] += trust_kept;
  sums[MEGARL_TRUST_SQUARE] += trust_square;
  sums[MEGARL_TRUST_KEPT_SQUARE] += kept_square;
}

MEGARL_VARIANTS void measure_by_sign(const Tile& tile, int n, double* sums) {
  float above = 0, below = 0, loss = 0;
#pragma omp simd reduction(+ : above, below, loss)
  for (int i = 0; i < n; ++i) {  // an untrained token has an advantage of 0
    const float a = tile.advantage[i];
    above += a > 0.0f ? tile.ratio[i] : 0.0f;
    below += a < 0.0f ? tile.ratio[i] : 0.0f;
    loss -= a > 0.0f ? tile.value[i] : 0.0f;
  }
  sums[MEGARL_RATIO_POSITIVE] += above;
  sums[MEGARL_RATIO_NEGATIVE] += below;
  sums[MEGARL_LOSS_POSITIVE] += loss;
}

MEGARL_VARIANTS void store(const Tile& tile, int64_t start, int n, const Output& out, Histograms& histograms) {
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    out.loss[start + i] = -tile.value[i];
    out.coefficient[start + i] = -tile.coefficient[i];
    out.kept[start + i] = static_cast<uint8_t>(tile.kept[i]);
  }
  for (int i = 0; i < n; ++i) {
    ++histograms.counts[i & 1][0][tile.bins[0][i]];
    ++histograms.counts[i & 1][1][tile.bins[1][i]];
  }
}

MEGARL_VARIANTS double sum_log_ratios(const megarl_tokens& x, int64_t start, int64_t end, bool mean) {
  double sum = 0;
  int64_t trained = 0;
#pragma omp simd reduction(+ : sum, trained)
  for (int64_t t = start; t < end; ++t) {
    const int on = x.mask[t] != 0;
    const float l = clamp(x.logprobs[t] - x.rollout_logprobs[t], -kLogRatioLimit, kLogRatioLimit);
    sum += on ? l : 0.0f;
    trained += on;
  }
  return mean && trained > 0 ? sum / static_cast<double>(trained) : sum;
}

MEGARL_VARIANTS int32_t find_trigger(const megarl_tokens& x, int64_t start, int64_t end, float threshold) {
  int32_t first = kNever;
#pragma omp simd reduction(min : first)
  for (int64_t t = start; t < end; ++t) {
    const float l = clamp(x.logprobs[t] - x.rollout_logprobs[t], -kLogRatioLimit, kLogRatioLimit);
    const int fires = (x.mask[t] != 0) & (x.advantages[t] < 0.0f) & (exponential(l) < threshold);
    const int32_t index = fires ? static_cast<int32_t>(t - start) : kNever;
    first = index < first ? index : first;
  }
  return first;
}

struct Pass {
  Quantity quantity;
  double argument;  // of the quantity: the rule's last parameter
  int rule;
  const double* parameters;
  float dampened;
  const megarl_tokens& tokens;
  const float* prefix_min;
  const float* value;  // given, as is the index; both null: computed
  const int32_t* index;
  Output out;
};

Sequence whole_sequence(const Pass& pass, int64_t s) {
  const megarl_tokens& x = pass.tokens;
  const int64_t start = x.cu_seqlens[s], end = x.cu_seqlens[s + 1];
  if (pass.value || pass.index) return {pass.value ? pass.value[s] : 0.0f, pass.index ? pass.index[s] : 0};
  switch (pass.quantity) {
    case Quantity::kMeanLogRatio:
    case Quantity::kSumLogRatio:
      return {static_cast<float>(sum_log_ratios(x, start, end, pass.quantity == Quantity::kMeanLogRatio)), 0};
    case Quantity::kFirstTrigger:
      return {0.0f, find_trigger(x, start, end, static_cast<float>(pass.argument))};
    case Quantity::kNone:
      break;
  }
  return {0.0f, 0};
}

// Position in a block: the segment of the next token, and the state carried from the segment's earlier tokens.
struct Cursor {
  int64_t segment;
  bool entering;  // the next token is the first of its segment
  float least;
  Sequence sequence;
};

// Goes through the segments of a tile and fills in the running minimum and what each token needs of its sequence.
void walk(const Pass& pass, int64_t start, int n, Tile& tile, Cursor& at) {
  const int32_t* cu_seqlens = pass.tokens.cu_seqlens;
  for (int begin = 0; begin < n;) {
    if (at.entering) {
      while (cu_seqlens[at.segment + 1] == cu_seqlens[at.segment]) ++at.segment;  // skip empty segments
      at.sequence = whole_sequence(pass, at.segment);
      at.least = pass.prefix_min ? pass.prefix_min[at.segment] : std::numeric_limits<float>::infinity();
    }
    const int64_t segment_end = cu_seqlens[at.segment + 1] - start;
    const int end = static_cast<int>(segment_end < n ? segment_end : n);
    at.least = running_min(tile, begin, end, at.least);
    const int32_t base = static_cast<int32_t>(start - cu_seqlens[at.segment]);
    for (int i = begin; i < end; ++i) {
      tile.index[i] = base + i;
      tile.sequence_value[i] = at.sequence.value;
      tile.sequence_index[i] = at.sequence.index;
    }
    at.entering = end == segment_end;
    at.segment += at.entering;
    begin = end;
  }
}

// Adds the tile's trained tokens and loss to the sums of their segments, of which `segment` is the first.
void sum_segments(const Tile& tile, const int32_t* cu_seqlens, int64_t segment, int64_t start, int n,
                  double* segment_sums) {
  for (int begin = 0; begin < n; ++segment) {
    const int64_t segment_end = cu_seqlens[segment + 1] - start;
    const int end = static_cast<int>(segment_end < n ? segment_end : n);
    double trained = 0, loss = 0;
    for (int i = begin; i < end; ++i) {
      trained += tile.mask[i];
      loss -= tile.value[i];
    }
    segment_sums[2 * segment] += trained;
    segment_sums[2 * segment + 1] += loss;
    begin = end;
  }
}

void run_block(const Pass& pass, int64_t first_segment, int64_t last_segment, double* sums, Histograms& histograms) {
  const int32_t* cu_seqlens = pass.tokens.cu_seqlens;
  Tile tile;
  Cursor at{first_segment, true, 0.0f, {}};
  const int64_t end = cu_seqlens[last_segment];
  for (int64_t start = cu_seqlens[first_segment]; start < end; start += kTile) {
    const int n = static_cast<int>(end - start < kTile ? end - start : kTile);
    const int64_t segment = at.segment;
    load(pass.tokens, start, n, tile);
    walk(pass, start, n, tile, at);
    weigh_prefix(tile, n);
    apply(pass.rule, pass.parameters, tile, n);
    count(tile, n, sums);
    count_flags(tile, n, sums);
    count_dampened(tile, n, pass.dampened, sums);
    measure(tile, n, sums);
    measure_by_sign(tile, n, sums);
    store(tile, start, n, pass.out, histograms);
    sum_segments(tile, cu_seqlens, segment, start, n, pass.out.segment_sums);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_token_pass_cpu(const char* name, const double* parameters, double dampened,
                                     const megarl_tokens* tokens, const float* prefix_min, const float* value,
                                     const int32_t* index, float* loss, float* coefficient, uint8_t* kept,
                                     double* segment_sums, double* sums, int64_t* histograms) {
  using namespace megarl;
  if (!boundaries_are_valid(tokens->cu_seqlens, tokens->num_segments)) return MEGARL_BAD_BOUNDARIES;
  const int rule = find_rule(name);
  if (rule < 0) return MEGARL_UNKNOWN_RULE;
  Quantity quantity = Quantity::kNone;
  int last = -1;
  with_rule(rule, [&](auto tag) {
    quantity = decltype(tag)::Rule::kQuantity;
    last = decltype(tag)::Rule::kLast;
  });
  const double argument = last < 0 ? 0.0 : parameters[last];
  const Output out{loss, coefficient, kept, segment_sums};
  const float threshold = static_cast<float>(dampened);
  const Pass pass{quantity, argument, rule, parameters, threshold, *tokens, prefix_min, value, index, out};
  const std::vector<int64_t> cuts = cut_into_blocks(tokens->cu_seqlens, tokens->num_segments);
  const int64_t num_blocks = static_cast<int64_t>(cuts.size()) - 1;
  std::vector<double> block_sums(num_blocks * MEGARL_NUM_SUMS, 0.0);
  for (int64_t i = 0; i < 2 * tokens->num_segments; ++i) segment_sums[i] = 0.0;
  for (int64_t i = 0; i < 2 * MEGARL_BINS; ++i) histograms[i] = 0;
#pragma omp parallel if (num_blocks > 1)
  {
    Histograms mine;
#pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < num_blocks; ++b) {
      run_block(pass, cuts[b], cuts[b + 1], &block_sums[b * MEGARL_NUM_SUMS], mine);
    }
#pragma omp critical  // integers: the order does not matter
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < MEGARL_BINS; ++i) {
        histograms[h * MEGARL_BINS + i] += mine.counts[0][h][i] + mine.counts[1][h][i];
      }
    }
  }
  for (int i = 0; i < MEGARL_NUM_SUMS; ++i) {
    sums[i] = 0.0;
    for (int64_t b = 0; b < num_blocks; ++b) sums[i] += block_sums[b * MEGARL_NUM_SUMS + i];
  }
  return MEGARL_OK;
}
