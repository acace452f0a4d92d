// Radix selection over the squared log-ratios of the trust region. Counts and sums are integers, so that thread blocks
// may add them in any order.
#include "segments.cuh"

namespace megarl {
namespace {

constexpr int kMaxBits = 11;  // most bits of a digit; a table of 2^11 bins fits into shared memory

__global__ void __launch_bounds__(kThreads)
    make_keys(const megarl_tokens tokens, bool wide, int64_t num_tokens, uint32_t* keys) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kItems;
  if (first >= num_tokens) return;
  const Quad q = load(tokens, wide, first, 0, num_tokens);
  uint32_t out[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const float l = clamped_log_ratio(q, i);
    out[i] = in_trust_region(q.advantage[i], l) ? __float_as_uint(fabsf(l)) : kOutside;
  }
  if (wide && first + kItems <= num_tokens) {
    *reinterpret_cast<uint4*>(keys + first) = make_uint4(out[0], out[1], out[2], out[3]);
    return;
  }
  for (int i = 0; i < kItems && first + i < num_tokens; ++i) keys[first + i] = out[i];
}

struct Bin {
  uint32_t count;
  WideSum sum;
};

__device__ void count_key(uint32_t key, uint32_t wanted, int shift, int bits, Bin* bins) {
  const int above = shift + bits;
  // shifted by 31, every key of the trust region is 0, and agrees with the empty prefix
  if (key == kOutside || (above > 30 ? 0 : key >> above) != wanted) return;
  Bin& bin = bins[key >> shift & ((1u << bits) - 1)];
  atomicAdd(&bin.count, 1u);
  bin.sum.add(fixed_point_square(key));
}

__global__ void __launch_bounds__(kThreads)
    add_keys(const uint32_t* keys, bool wide, int64_t num_tokens, const int64_t* prefix, int shift, int bits,
             int64_t* table) {
  __shared__ Bin bins[1 << kMaxBits];
  const int size = 1 << bits;
  for (int b = threadIdx.x; b < size; b += kThreads) bins[b] = {};
  __syncthreads();
  const uint32_t wanted = shift + bits > 30 ? 0 : static_cast<uint32_t>(*prefix) >> (shift + bits);
  const int64_t stride = int64_t{gridDim.x} * kThreads * kItems;
  for (int64_t t = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kItems; t < num_tokens; t += stride) {
    if (wide && t + kItems <= num_tokens) {
      const uint4 k = *reinterpret_cast<const uint4*>(keys + t);
      count_key(k.x, wanted, shift, bits, bins);
      count_key(k.y, wanted, shift, bits, bins);
      count_key(k.z, wanted, shift, bits, bins);
      count_key(k.w, wanted, shift, bits, bins);
    } else {
      for (int i = 0; i < kItems && t + i < num_tokens; ++i) count_key(keys[t + i], wanted, shift, bits, bins);
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < size; b += kThreads) {
    if (bins[b].count == 0) continue;
    add(table + b, bins[b].count);
    add(table + size + b, bins[b].sum.value());
  }
}

// Tied tokens all have the same square, so it is enough to count them and multiply at the end.
__global__ void __launch_bounds__(kThreads)
    add_ties(const uint32_t* keys, const int64_t* key, const int64_t* places, const int32_t* cu_seqlens,
             int64_t num_segments, const int64_t* prefix, int shift, int bits, int64_t* table) {
  __shared__ uint32_t counts[1 << kMaxBits];
  const int size = 1 << bits;
  for (int b = threadIdx.x; b < size; b += kThreads) counts[b] = 0;
  __syncthreads();
  const uint32_t tied = static_cast<uint32_t>(*key);
  const int64_t wanted = *prefix >> (shift + bits);
  for (int64_t s = blockIdx.x; s < num_segments; s += gridDim.x) {
    const int64_t start = cu_seqlens[s], end = cu_seqlens[s + 1];
    for (int64_t t = start + threadIdx.x; t < end; t += kThreads) {
      if (keys[t] != tied) continue;
      const int64_t order = tie_order(places[s] + t - start);
      if (order >> (shift + bits) == wanted) atomicAdd(&counts[order >> shift & (size - 1)], 1u);
    }
  }
  __syncthreads();
  const int64_t square = fixed_point_square(tied);
  for (int b = threadIdx.x; b < size; b += kThreads) {
    if (counts[b] == 0) continue;
    add(table + b, counts[b]);
    add(table + size + b, counts[b] * square);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_moment_keys_cuda(const megarl_tokens* tokens, int64_t num_tokens, uint32_t* keys, void* stream) {
  using namespace megarl;
  if (num_tokens == 0) return MEGARL_OK;
  const int64_t of_block = kThreads * kItems;
  const bool wide = can_load_wide(*tokens) && are_aligned({keys}, 16);
  make_keys<<<static_cast<unsigned>((num_tokens + of_block - 1) / of_block), kThreads, 0,
              static_cast<cudaStream_t>(stream)>>>(*tokens, wide, num_tokens, keys);
  return launch_status();
}

extern "C" int megarl_moment_histogram_cuda(const uint32_t* keys, int64_t num_tokens, const int64_t* prefix, int shift,
                                            int bits, int64_t* table, void* stream) {
  using namespace megarl;
  if (bits > kMaxBits) return MEGARL_CUDA_ERROR + static_cast<int>(cudaErrorInvalidValue);
  if (num_tokens == 0) return MEGARL_OK;
  add_keys<<<strided_blocks(num_tokens), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      keys, are_aligned({keys}, 16), num_tokens, prefix, shift, bits, table);
  return launch_status();
}

extern "C" int megarl_moment_ties_cuda(const uint32_t* keys, const int64_t* key, const int64_t* places,
                                       const int32_t* cu_seqlens, int64_t num_segments, const int64_t* prefix,
                                       int shift, int bits, int64_t* table, void* stream) {
  using namespace megarl;
  if (bits > kMaxBits) return MEGARL_CUDA_ERROR + static_cast<int>(cudaErrorInvalidValue);
  if (num_segments == 0) return MEGARL_OK;
  constexpr int64_t kMost = 1024;  // most blocks, since each adds to the one table at its end
  add_ties<<<static_cast<unsigned>(num_segments < kMost ? num_segments : kMost), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(keys, key, places, cu_seqlens, num_segments, prefix, shift, bits,
                                                  table);
  return launch_status();
}
