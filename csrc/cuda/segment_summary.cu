// One thread block per segment; the order of additions is fixed.
#include "segments.cuh"

namespace megarl {
namespace {

struct Summary {
  int key;  // `to_key` of the least log-ratio
  double sum;
  int count;
  int trigger;

  __device__ void add(const Summary& other) {
    key = min(key, other.key);
    sum += other.sum;
    count += other.count;
    trigger = min(trigger, other.trigger);
  }
};

__global__ void __launch_bounds__(kThreads)
    summarise(const megarl_tokens tokens, const float* threshold, bool wide, float* least, double* sum, int64_t* count,
              int32_t* first_trigger) {
  __shared__ Summary of_warp[kWarps];
  const int64_t s = blockIdx.x;
  const uint32_t start = tokens.cu_seqlens[s], end = tokens.cu_seqlens[s + 1];
  Summary mine{kNone, 0.0, 0, kNever};
  for (uint32_t tile = start & ~3u; tile < end; tile += kThreads * kItems) {
    const uint32_t first = tile + threadIdx.x * kItems;
    const Quad q = load(tokens, wide, first, start, end);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!q.on[i]) continue;
      const float l = clamped_log_ratio(q, i);
      const bool fires = q.advantage[i] < 0.0f && exponential(l) < *threshold;
      mine.add({to_key(l), l, 1, fires ? static_cast<int>(first + i - start) : kNever});
    }
  }
  mine = {warp_min(mine.key), warp_sum(mine.sum), warp_sum(mine.count), warp_min(mine.trigger)};
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) mine.add(of_warp[w]);
  least[s] = mine.key == kNone ? __int_as_float(kInfinity) : from_key(mine.key);
  sum[s] = mine.sum;
  count[s] = mine.count;
  first_trigger[s] = mine.trigger;
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_segment_summary_cuda(const megarl_tokens* tokens, const float* veto_threshold, float* least,
                                           double* sum, int64_t* count, int32_t* first_trigger, void* stream) {
  using namespace megarl;
  if (tokens->num_segments == 0) return MEGARL_OK;
  summarise<<<static_cast<unsigned>(tokens->num_segments), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *tokens, veto_threshold, can_load_wide(*tokens), least, sum, count, first_trigger);
  return launch_status();
}
