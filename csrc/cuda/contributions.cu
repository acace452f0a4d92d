// BAPO's binned contributions, as integers, so that thread blocks may add them in any order.
#include "segments.cuh"

namespace megarl {
namespace {

constexpr int kLimbs = 6;
constexpr int kSharedBins = 1000;  // 48 KB of shared memory; with more bins the table is in device memory

struct Grid {
  const double* low;
  int num_low;
  const double* high;
  int num_high;

  __host__ __device__ int bins() const { return num_low + num_high + 4; }
};

// A thread's sum for its current bin, added to the table when the bin changes. Successive tokens mostly share a bin.
struct Contribution {
  int bin = 0;
  int64_t limbs[kLimbs] = {};

  __device__ void flush(WideSum* shared, int64_t* table, int bins) {
#pragma unroll
    for (int i = 0; i < kLimbs; ++i) {
      if (limbs[i] == 0) continue;
      if (shared) {
        shared[i * bins + bin].add(limbs[i]);
      } else {
        add(table + i * bins + bin, limbs[i]);
      }
      limbs[i] = 0;
    }
  }
};

// The bin of a token and its limbs; false if it has none.
__device__ bool contribution(const Quad& q, int i, bool weighted, const Grid& grid, int& bin,
                             int64_t (&limbs)[kLimbs]) {
  const float a = q.advantage[i];
  if (!(a > 0.0f || a < 0.0f)) return false;
  const double ratio = static_cast<double>(expf(clamped_log_ratio(q, i)));
  const double weight = weighted ? exp(static_cast<double>(q.rollout_logprob[i])) : 1.0;
  const double mass = weight * fabs(static_cast<double>(a));
  bin = a > 0.0f ? bin_below(ratio, grid.high, grid.num_high)
                 : grid.num_high + 2 + bin_below(ratio, grid.low, grid.num_low);
  limbs_of(mass, limbs);
  limbs_of(mass * ratio, limbs + 3);
  return true;
}

__global__ void __launch_bounds__(kThreads)
    contributions(const megarl_tokens tokens, bool wide, int64_t num_tokens, bool weighted, const Grid grid,
                  bool in_shared, int64_t* table) {
  extern __shared__ WideSum sums[];
  const int bins = grid.bins();
  WideSum* shared = in_shared ? sums : nullptr;
  if (in_shared) {
    for (int i = threadIdx.x; i < kLimbs * bins; i += kThreads) sums[i] = {};
    __syncthreads();
  }
  Contribution mine;
  const int64_t stride = int64_t{gridDim.x} * kThreads * kItems;
  for (int64_t t = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kItems; t < num_tokens; t += stride) {
    const Quad q = load(tokens, wide, t, 0, num_tokens);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int bin;
      int64_t limbs[kLimbs];
      if (!contribution(q, i, weighted, grid, bin, limbs)) continue;
      if (bin != mine.bin) {
        mine.flush(shared, table, bins);
        mine.bin = bin;
      }
#pragma unroll
      for (int j = 0; j < kLimbs; ++j) mine.limbs[j] += limbs[j];
    }
  }
  mine.flush(shared, table, bins);
  if (!in_shared) return;
  __syncthreads();
  for (int i = threadIdx.x; i < kLimbs * bins; i += kThreads) {
    const int64_t sum = sums[i].value();
    if (sum) add(table + i, sum);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_contributions_cuda(const megarl_tokens* tokens, int64_t num_tokens, int weighted,
                                         const double* low, int num_low, const double* high, int num_high,
                                         int64_t* table, void* stream) {
  using namespace megarl;
  if (num_tokens == 0) return MEGARL_OK;
  const Grid grid{low, num_low, high, num_high};
  const bool in_shared = grid.bins() <= kSharedBins;
  const size_t bytes = in_shared ? kLimbs * grid.bins() * sizeof(WideSum) : 0;
  contributions<<<strided_blocks(num_tokens), kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(
      *tokens, can_load_wide(*tokens), num_tokens, weighted != 0, grid, in_shared, table);
  return launch_status();
}
