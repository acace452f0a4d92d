// Exclusive running minimum, one thread block a sequence, over int32 keys that sort like the floats.
//
// Keys make the minimum exact in the two cases that fminf gets wrong: NaN has the lowest key, so that it stays the
// minimum, and a masked token has the highest, above +infinity, so that it is told from every trained value.
#include <cub/block/block_scan.cuh>

#include "megarl_kernels.h"

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;
constexpr int kNone = 0x7FFFFFFF;

struct Least {
  __device__ int operator()(int a, int b) const { return a < b ? a : b; }
};

__device__ int to_key(float value) {
  if (isnan(value)) return static_cast<int>(0x80000000);
  const int bits = __float_as_int(value);
  return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ float from_key(int key) {
  if (key == kNone) return 0.0f;
  return __int_as_float(key < 0 ? key ^ 0x7FFFFFFF : key);
}

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
      if (t < end) out[t] = from_key(Least()(least[i], carry));
    }
    carry = Least()(carry, tile_least);
    __syncthreads();  // the next tile's scan writes to the same storage
  }
}

}  // namespace

extern "C" int megarl_prefix_min_cuda(const float* log_ratio, const uint8_t* mask, const int32_t* cu_seqlens,
                                      int64_t num_sequences, float* out, void* stream) {
  if (num_sequences == 0) return MEGARL_OK;
  prefix_min<<<static_cast<unsigned>(num_sequences), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      log_ratio, mask, cu_seqlens, out);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? MEGARL_OK : MEGARL_CUDA_ERROR + static_cast<int>(error);
}
