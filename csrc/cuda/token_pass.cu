// The token pass on a GPU: a thread block goes through a segment, tile by tile; eight neighbouring segments that are all
// short share one block, a warp each. Sums are added in an order that depends only on the lengths.
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

#include "segments.cuh"

namespace megarl {
namespace {

constexpr int kShort = 512;  // tokens of the longest segment in a group that shares a block
constexpr int kLoss = MEGARL_NUM_SUMS, kRow = kLoss + 1;  // a row has all sums, and last that of the loss
static_assert(kRow <= kWarp, "one lane writes one sum");

struct Pass {
  const double* parameters;
  float dampened;
  megarl_tokens tokens;
  const float* prefix_min;
  const float* value;  // given, as is the index; both null: computed
  const int32_t* index;
  float* loss;
  float* coefficient;
  uint8_t* kept;
  double* segment_sums;
  int64_t* histograms;
  double* scratch;
  bool wide;
};

using BlockScan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
using WarpScan = cub::WarpScan<int>;

struct Shared {
  // Two, used in turn: the barrier in the scan of one separates two uses of the other.
  typename BlockScan::TempStorage block_scan[2];
  typename WarpScan::TempStorage warp_scan[kWarps];
  double partial[kWarps];
  double rows[kWarps][kRow];
  unsigned histograms[2][MEGARL_BINS];
};

// The threads that work on one segment: a warp, or all warps of a block.
template <int warps>
struct Team {
  static constexpr int kWarps = warps;
  static constexpr int kTile = warps * kWarp * kItems;

  static __device__ int rank() { return threadIdx.x % (warps * kWarp); }
  static __device__ int first_warp() { return threadIdx.x / (warps * kWarp) * warps; }

  static __device__ void sync() {
    if constexpr (warps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  static __device__ void exclusive_min(Shared& shared, int turn, int key, int& before, int& total) {
    if constexpr (warps == 1) {
      WarpScan(shared.warp_scan[threadIdx.x / kWarp]).ExclusiveScan(key, before, kNone, Least(), total);
      __syncwarp();
    } else {
      BlockScan(shared.block_scan[turn]).ExclusiveScan(key, before, kNone, Least(), total);
    }
  }

  // Combines one value per warp, the same on all of its lanes, over the team.
  template <class Combine>
  static __device__ double combine(Shared& shared, double of_warp, Combine&& combine) {
    if constexpr (warps == 1) return of_warp;
    shared.partial[threadIdx.x / kWarp] = of_warp;  // every lane writes the same value
    sync();
    double total = shared.partial[0];
    for (int w = 1; w < warps; ++w) total = combine(total, shared.partial[w]);
    sync();
    return total;
  }
};

__device__ float mean_or_sum(double sum, double trained, bool mean) {
  return static_cast<float>(mean && trained > 0 ? sum / trained : sum);
}

// What the rule needs of the whole sequence.
template <class Rule, class Team>
__device__ Sequence whole_sequence(const Pass& pass, Shared& shared, int64_t s, uint32_t start, uint32_t end) {
  constexpr Quantity quantity = Rule::kQuantity;
  if (pass.value || pass.index) return {pass.value ? pass.value[s] : 0.0f, pass.index ? pass.index[s] : 0};
  if constexpr (quantity == Quantity::kMeanLogRatio || quantity == Quantity::kSumLogRatio) {
    double sum = 0.0;
    int trained = 0;
    for (uint32_t tile = start & ~3u; tile < end; tile += Team::kTile) {
      const Quad q = load(pass.tokens, pass.wide, tile + Team::rank() * kItems, start, end);
      for (int i = 0; i < kItems; ++i) {
        sum += clamped_log_ratio(q, i);
        trained += q.on[i];
      }
    }
    const auto add = [](double a, double b) { return a + b; };
    sum = Team::combine(shared, warp_sum(sum), add);
    const double count = Team::combine(shared, warp_sum(trained), add);
    return {mean_or_sum(sum, count, quantity == Quantity::kMeanLogRatio), 0};
  } else if constexpr (quantity == Quantity::kFirstTrigger) {
    const float threshold = static_cast<float>(pass.parameters[Rule::kLast]);
    int first = kNever;
    for (uint32_t tile = start & ~3u; tile < end; tile += Team::kTile) {
      const uint32_t t = tile + Team::rank() * kItems;
      const Quad q = load(pass.tokens, pass.wide, t, start, end);
      for (int i = kItems - 1; i >= 0; --i) {
        const bool fires = q.advantage[i] < 0.0f && exponential(clamped_log_ratio(q, i)) < threshold;
        if (fires) first = min(first, static_cast<int>(t + i - start));
      }
    }
    const auto earlier = [](double a, double b) { return min(a, b); };
    return {0.0f, static_cast<int>(Team::combine(shared, warp_min(first), earlier))};
  }
  return {0.0f, 0};
}

__host__ __device__ constexpr bool is_count(int sum) {
  return !(sum == MEGARL_RATIO || sum == MEGARL_RATIO_SQUARE || sum == MEGARL_CHI2 || sum == MEGARL_LOG_RATIO ||
           sum == MEGARL_K3 || sum == MEGARL_SQUARE || sum == MEGARL_TRUST_SQUARE || sum == MEGARL_TRUST_KEPT_SQUARE ||
           sum == MEGARL_RATIO_POSITIVE || sum == MEGARL_RATIO_NEGATIVE || sum == MEGARL_LOSS_POSITIVE || sum == kLoss);
}

__host__ __device__ constexpr int counts_below(int sum) {
  return sum == 0 ? 0 : counts_below(sum - 1) + is_count(sum - 1);
}

// A thread's sums over a stretch of tiles, with four counts packed into a register.
struct Totals {
  float reals[kRow] = {};  // sums that are no counts; the compiler removes unused entries
  uint32_t counts[(counts_below(kRow) + 3) / 4] = {};

  template <int sum>
  __device__ void count(int flag) {
    constexpr int place = counts_below(sum);
    counts[place / 4] += static_cast<uint32_t>(flag) << place % 4 * 8;
  }

  // Adds the warp's totals over the stretch to its row, in float64.
  template <int sum = 0>
  __device__ void flush(double (&row)[kRow]) const {
    if constexpr (sum < kRow) {
      constexpr int place = counts_below(sum);
      double total;
      if constexpr (is_count(sum)) {
        total = warp_sum(static_cast<int>(counts[place / 4] >> place % 4 * 8 & 255));
      } else {
        total = warp_sum(static_cast<double>(reals[sum]));
      }
      if (threadIdx.x % kWarp == sum) row[sum] += total;
      flush<sum + 1>(row);
    }
  }
};
constexpr int kStretch = 32;  // tiles: a thread's 128 tokens fit into its counts, and lose little in float32 sums
static_assert(kStretch * kItems < 256, "a count has 8 bits");

__device__ void count(const Token& t, float log_m, float dampened, int on, const Outcome& o, Totals& totals) {
  const int above = t.advantage > 0.0f, below = t.advantage < 0.0f;
  const int kept = on & o.kept, first = on & o.first, second = on & o.second;
  const int bad = on & (log_m < kLogBadPrefix);
  const int by_token = on & (t.ratio < dampened), by_prefix = on & (t.prefix_ratio < dampened);
  totals.count<MEGARL_TOKENS>(on);
  totals.count<MEGARL_POSITIVE>(above);
  totals.count<MEGARL_NEGATIVE>(below);
  totals.count<MEGARL_CLAMPED>(t.clamped);
  totals.count<MEGARL_KEPT>(kept);
  totals.count<MEGARL_KEPT_POSITIVE>(kept & above);
  totals.count<MEGARL_KEPT_NEGATIVE>(kept & below);
  totals.count<MEGARL_FIRST>(first);
  totals.count<MEGARL_FIRST_POSITIVE>(first & above);
  totals.count<MEGARL_FIRST_NEGATIVE>(first & below);
  totals.count<MEGARL_SECOND>(second);
  totals.count<MEGARL_SECOND_POSITIVE>(second & above);
  totals.count<MEGARL_SECOND_NEGATIVE>(second & below);
  totals.count<MEGARL_BAD_PREFIX>(bad);
  totals.count<MEGARL_DAMPENED_TOKEN>(by_token);
  totals.count<MEGARL_DAMPENED_TOKEN_BAD>(by_token & bad);
  totals.count<MEGARL_DAMPENED_PREFIX>(by_prefix);
  totals.count<MEGARL_DAMPENED_PREFIX_BAD>(by_prefix & bad);
  const int trust = in_trust_region(t.advantage, t.log_ratio);
  totals.count<MEGARL_TRUST>(trust);
  totals.count<MEGARL_TRUST_KEPT>(trust & kept);
}

__device__ void measure(const Token& t, int on, const Outcome& o, Totals& totals) {
  float* x = totals.reals;
  const float l = t.log_ratio;  // 0 where not trained
  const float e = excess(l, t.ratio);
  const int trust = in_trust_region(t.advantage, l);
  x[MEGARL_RATIO] += on ? t.ratio : 0.0f;
  x[MEGARL_RATIO_SQUARE] += on ? t.ratio * t.ratio : 0.0f;
  x[MEGARL_CHI2] += (l + e) * (l + e);
  x[MEGARL_LOG_RATIO] += l;
  x[MEGARL_K3] += e;
  x[MEGARL_SQUARE] += l * l;
  x[MEGARL_TRUST_SQUARE] += trust ? l * l : 0.0f;
  x[MEGARL_TRUST_KEPT_SQUARE] += trust & on & o.kept ? l * l : 0.0f;
  x[MEGARL_RATIO_POSITIVE] += t.advantage > 0.0f ? t.ratio : 0.0f;  // 0 where not trained
  x[MEGARL_RATIO_NEGATIVE] += t.advantage < 0.0f ? t.ratio : 0.0f;
  x[MEGARL_LOSS_POSITIVE] -= t.advantage > 0.0f ? o.value : 0.0f;
  x[kLoss] -= on ? o.value : 0.0f;
}

// Counts tokens of one bin and adds them to the histogram when the bin changes: a running minimum rarely does.
struct Run {
  int bin = 0;
  unsigned length = 0;

  __device__ void extend(int next, unsigned* histogram) {
    if (next != bin) {
      flush(histogram);
      bin = next;
    }
    ++length;
  }

  __device__ void flush(unsigned* histogram) {
    if (length) atomicAdd(&histogram[bin], length);
    length = 0;
  }
};

struct Results {
  float loss[kItems], coefficient[kItems];
  uint8_t kept[kItems];
};

__device__ void store(const Pass& pass, const Results& r, uint32_t first, uint32_t start, uint32_t end) {
  if (pass.wide && first >= start && first + kItems <= end) {
    *reinterpret_cast<float4*>(pass.loss + first) = make_float4(r.loss[0], r.loss[1], r.loss[2], r.loss[3]);
    *reinterpret_cast<float4*>(pass.coefficient + first) =
        make_float4(r.coefficient[0], r.coefficient[1], r.coefficient[2], r.coefficient[3]);
    *reinterpret_cast<uchar4*>(pass.kept + first) = make_uchar4(r.kept[0], r.kept[1], r.kept[2], r.kept[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i < start || first + i >= end) continue;
    pass.loss[first + i] = r.loss[i];
    pass.coefficient[first + i] = r.coefficient[i];
    pass.kept[first + i] = r.kept[i];
  }
}

// Applies the rule to a thread's four tokens of a tile. least: key of the minimum over all earlier tokens.
template <class Rule>
__device__ Results weigh(const Rule& rule, const Sequence& sequence, const Quad& q, int index, int least,
                         const Pass& pass, Shared& shared, Run& minima, Totals& totals) {
  Results results;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const float difference = q.logprob[i] - q.rollout_logprob[i];
    const float l = clamped_log_ratio(q, i);
    const float log_m = least >= kInfinity ? 0.0f : from_key(least);
    const Token token{q.logprob[i],   q.rollout_logprob[i],   q.old_logprob[i], q.advantage[i], l,
                      exponential(l), exponential(log_m + l), fabsf(difference) > kLogRatioLimit, index + i};
    const Outcome o = rule(token, sequence);
    results.loss[i] = q.on[i] ? -o.value : 0.0f;
    results.coefficient[i] = q.on[i] ? -o.coefficient : 0.0f;
    results.kept[i] = static_cast<uint8_t>(q.on[i] & o.kept);
    count(token, log_m, pass.dampened, q.on[i], o, totals);
    measure(token, q.on[i], o, totals);
    if (q.on[i]) {
      atomicAdd(&shared.histograms[0][bin_of(l)], 1u);
      minima.extend(bin_of(log_m), shared.histograms[1]);
      least = Least()(least, to_key(l));
    }
  }
  return results;
}

template <class Team>
__device__ void write_row(const Pass& pass, const Shared& shared, int64_t s) {
  Team::sync();
  const int i = Team::rank();
  if (i >= kRow) return;
  double total = 0.0;
  for (int w = 0; w < Team::kWarps; ++w) total += shared.rows[Team::first_warp() + w][i];
  if (i < MEGARL_NUM_SUMS) pass.scratch[s * MEGARL_NUM_SUMS + i] = total;
  if (i == MEGARL_TOKENS) pass.segment_sums[2 * s] = total;
  if (i == kLoss) pass.segment_sums[2 * s + 1] = total;
}

template <class Rule, class Team>
__device__ void run_segment(const Pass& pass, Shared& shared, int64_t s) {
  const uint32_t start = pass.tokens.cu_seqlens[s], end = pass.tokens.cu_seqlens[s + 1];
  const Rule rule(pass.parameters);
  const Sequence sequence = whole_sequence<Rule, Team>(pass, shared, s, start, end);
  int carry = pass.prefix_min ? to_key(pass.prefix_min[s]) : kNone;  // key of the earlier tiles' minimum
  int turn = 0;
  Run minima;
  double(&row)[kRow] = shared.rows[threadIdx.x / kWarp];
  if (threadIdx.x % kWarp < kRow) row[threadIdx.x % kWarp] = 0.0;
  for (uint32_t tile = start & ~3u; tile < end;) {
    Totals totals;
    const uint32_t stretch_end = min(end, tile + kStretch * Team::kTile);
    for (; tile < stretch_end; tile += Team::kTile, turn ^= 1) {
      const uint32_t first = tile + Team::rank() * kItems;
      const Quad q = load(pass.tokens, pass.wide, first, start, end);
      int key = kNone, before, tile_least;
#pragma unroll
      for (int i = 0; i < kItems; ++i) key = q.on[i] ? Least()(key, to_key(clamped_log_ratio(q, i))) : key;
      Team::exclusive_min(shared, turn, key, before, tile_least);
      const int index = static_cast<int>(first - start);
      const int least = Least()(carry, before);
      store(pass, weigh(rule, sequence, q, index, least, pass, shared, minima, totals), first, start, end);
      carry = Least()(carry, tile_least);
    }
    totals.flush(row);
  }
  minima.flush(shared.histograms[1]);
  write_row<Team>(pass, shared, s);
}

// Whether segments [first, last) share one block: there are several, and all are short.
__device__ bool is_short(const megarl_tokens& tokens, int64_t first, int64_t last) {
  bool all = last - first > 1;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int64_t s = first + i < last ? first + i : first;
    all &= tokens.cu_seqlens[s + 1] - tokens.cu_seqlens[s] <= kShort;
  }
  return all;
}

template <class Rule>
__global__ void __launch_bounds__(kThreads, 2) token_pass(const Pass pass) {
  __shared__ Shared shared;
  const int64_t first = blockIdx.x / kWarps * kWarps;
  const int64_t last = first + kWarps < pass.tokens.num_segments ? first + kWarps : pass.tokens.num_segments;
  const bool grouped = is_short(pass.tokens, first, last);
  if (grouped && blockIdx.x != first) return;
  for (int i = threadIdx.x; i < 2 * MEGARL_BINS; i += kThreads) (&shared.histograms[0][0])[i] = 0;
  __syncthreads();
  if (!grouped) {
    run_segment<Rule, Team<kWarps>>(pass, shared, blockIdx.x);
  } else if (first + threadIdx.x / kWarp < last) {
    run_segment<Rule, Team<1>>(pass, shared, first + threadIdx.x / kWarp);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * MEGARL_BINS; i += kThreads) {
    const unsigned n = (&shared.histograms[0][0])[i];
    if (n) add(pass.histograms + i, n);
  }
}

// Block b adds up column b of the rows.
__global__ void __launch_bounds__(kThreads) add_rows(const double* rows, int64_t num_rows, double* sums) {
  __shared__ double partial[kWarps];
  double total = 0.0;
  for (int64_t s = threadIdx.x; s < num_rows; s += kThreads) total += rows[s * MEGARL_NUM_SUMS + blockIdx.x];
  partial[threadIdx.x / kWarp] = warp_sum(total);
  __syncthreads();
  if (threadIdx.x > 0) return;
  total = 0.0;
  for (int w = 0; w < kWarps; ++w) total += partial[w];
  sums[blockIdx.x] = total;
}

template <class Rule>
void launch(const Pass& pass, cudaStream_t stream) {
  token_pass<Rule><<<static_cast<unsigned>(pass.tokens.num_segments), kThreads, 0, stream>>>(pass);
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_token_pass_cuda(const char* name, const double* parameters, double dampened,
                                      const megarl_tokens* tokens, const float* prefix_min, const float* value,
                                      const int32_t* index, float* loss, float* coefficient, uint8_t* kept,
                                      double* segment_sums, double* sums, int64_t* histograms, double* scratch,
                                      void* stream) {
  using namespace megarl;
  const int rule = find_rule(name);
  if (rule < 0) return MEGARL_UNKNOWN_RULE;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  const bool wide = can_load_wide(*tokens) && are_aligned({loss, coefficient}, 16) && are_aligned({kept}, 4);
  const float threshold = static_cast<float>(dampened);
  const Pass pass{parameters,  threshold, *tokens,      prefix_min, value,   index, loss,
                  coefficient, kept,      segment_sums, histograms, scratch, wide};
  with_rule(rule, [&](auto tag) {
    if (tokens->num_segments > 0) launch<typename decltype(tag)::Rule>(pass, on);
  });
  add_rows<<<MEGARL_NUM_SUMS, kThreads, 0, on>>>(scratch, tokens->num_segments, sums);
  return launch_status();
}
