// Shared by the CUDA kernels: four tokens per thread, order-preserving keys, and sums in a fixed order.
#ifndef MEGARL_CUDA_SEGMENTS_CUH
#define MEGARL_CUDA_SEGMENTS_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include <initializer_list>

#include "token_rules.h"

namespace megarl {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kItems = 4;  // tokens per thread: 128 bits of float32
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Integer keys that sort like the floats, because fminf fails in two cases: NaN has the lowest key, so that it stays
// the minimum, and "no trained token" has the highest, above +infinity.
constexpr int kNone = 0x7FFFFFFF;
constexpr int kInfinity = 0x7F800000;

struct Least {
  __device__ int operator()(int a, int b) const { return a < b ? a : b; }
};

__device__ inline int to_key(float value) {
  if (isnan(value)) return static_cast<int>(0x80000000);
  const int bits = __float_as_int(value);
  return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ inline float from_key(int key) { return __int_as_float(key < 0 ? key ^ 0x7FFFFFFF : key); }

// Every lane gets bitwise the same sum, since in a butterfly both partners add the same pair.
__device__ inline double warp_sum(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ inline int warp_sum(int value) { return __reduce_add_sync(kAllLanes, value); }
__device__ inline int warp_min(int value) { return __reduce_min_sync(kAllLanes, value); }

// Four successive tokens; all fields of an untrained one are zero.
struct Quad {
  float logprob[kItems], rollout_logprob[kItems], old_logprob[kItems], advantage[kItems];
  int on[kItems];
};

__device__ inline void unpack(const float* from, float (&to)[kItems]) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// Tokens first to first + 3; those outside [start, end) count as untrained. first is a multiple of 4. wide: the arrays
// are aligned for 128-bit loads.
__device__ inline Quad load(const megarl_tokens& x, bool wide, uint32_t first, uint32_t start, uint32_t end) {
  Quad q = {};
  if (wide && first >= start && first + kItems <= end) {
    const uchar4 mask = *reinterpret_cast<const uchar4*>(x.mask + first);
    q.on[0] = mask.x != 0, q.on[1] = mask.y != 0, q.on[2] = mask.z != 0, q.on[3] = mask.w != 0;
    unpack(x.logprobs + first, q.logprob);
    unpack(x.rollout_logprobs + first, q.rollout_logprob);
    unpack(x.advantages + first, q.advantage);
    if (x.old_logprobs) unpack(x.old_logprobs + first, q.old_logprob);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t t = first + i;
      if (t < start || t >= end) continue;
      q.on[i] = x.mask[t] != 0;
      q.logprob[i] = x.logprobs[t];
      q.rollout_logprob[i] = x.rollout_logprobs[t];
      q.advantage[i] = x.advantages[t];
      if (x.old_logprobs) q.old_logprob[i] = x.old_logprobs[t];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (q.on[i]) continue;
    q.logprob[i] = q.rollout_logprob[i] = q.old_logprob[i] = q.advantage[i] = 0.0f;
  }
  return q;
}

__device__ inline float clamped_log_ratio(const Quad& q, int i) {
  return clamp(q.logprob[i] - q.rollout_logprob[i], -kLogRatioLimit, kLogRatioLimit);
}

__device__ inline int in_trust_region(float advantage, float log_ratio) {
  return ((advantage > 0.0f) & (log_ratio > 0.0f)) | ((advantage < 0.0f) & (log_ratio < 0.0f));
}

__device__ inline void add(int64_t* to, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

// A 64-bit sum in shared memory by two 32-bit atomics with a carry, since 64-bit atomics there would compile to loops.
struct WideSum {
  uint32_t low, high;

  __device__ void add(int64_t value) {
    const uint32_t lower = static_cast<uint32_t>(value);
    uint32_t upper = static_cast<uint32_t>(value >> 32);
    upper += atomicAdd(&low, lower) + lower < lower;
    if (upper) atomicAdd(&high, upper);
  }

  __device__ int64_t value() const { return static_cast<int64_t>(high) << 32 | low; }
};

inline bool are_aligned(std::initializer_list<const void*> pointers, uintptr_t bytes) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes) return false;
  }
  return true;
}

inline bool can_load_wide(const megarl_tokens& x) {
  return are_aligned({x.logprobs, x.rollout_logprobs, x.old_logprobs, x.advantages}, 16) && are_aligned({x.mask}, 4);
}

inline int launch_status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? MEGARL_OK : MEGARL_CUDA_ERROR + static_cast<int>(error);
}

// Number of blocks for a grid-stride loop over `num_tokens`: only as many as keep every multiprocessor busy, since each
// block adds to the one table at its end.
inline unsigned strided_blocks(int64_t num_tokens) {
  constexpr int64_t kTokensOfBlock = 8 * kThreads * kItems, kMost = 1024;
  const int64_t blocks = (num_tokens + kTokensOfBlock - 1) / kTokensOfBlock;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

}  // namespace megarl

#endif
