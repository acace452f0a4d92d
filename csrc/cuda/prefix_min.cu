// Exclusive running minimum, one thread block a sequence, over the keys of segments.cuh.
#include <cub/block/block_scan.cuh>

#include "segments.cuh"

namespace megarl {
namespace {

__device__ float from_key_or_zero(int key) { return key == kNone ? 0.0f : from_key(key); }

__global__ void __launch_bounds__(kThreads)
    prefix_min(const float* __restrict__ log_ratio, const uint8_t* __restrict__ mask,
               const int32_t* __restrict__ cu_seqlens, float* __restrict__ out) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t start = cu_seqlens[blockIdx.x];
  const int64_t end = cu_seqlens[blockIdx.x + 1];
  int carry = kNone;  // minimum of the tiles before this one
  for (int64_t tile = start; tile < end; tile += kThreads * kItems) {
    const int64_t first = tile + threadIdx.x * kItems;
    int keys[kItems];
    int least[kItems];
    int tile_least;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t t = first + i;
      keys[i] = t < end && mask[t] ? to_key(log_ratio[t]) : kNone;
    }
    Scan(storage).ExclusiveScan(keys, least, kNone, Least(), tile_least);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t t = first + i;
      if (t < end) out[t] = from_key_or_zero(Least()(least[i], carry));
    }
    carry = Least()(carry, tile_least);
    __syncthreads();  // the next tile's scan writes to the same storage
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_prefix_min_cuda(const float* log_ratio, const uint8_t* mask, const int32_t* cu_seqlens,
                                      int64_t num_sequences, float* out, void* stream) {
  using namespace megarl;
  if (num_sequences == 0) return MEGARL_OK;
  prefix_min<<<static_cast<unsigned>(num_sequences), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      log_ratio, mask, cu_seqlens, out);
  return launch_status();
}
