// The part of CUDA that megarl's kernels use, for a host compiler: a block's threads are fibres of one thread, which run
// one after another from barrier to barrier; blocks run one after another. Deterministic; a block whose threads do not
// all reach a barrier aborts with a message. `rehearsal_reverse_threads` reverses the order: a result that changes with
// it depends on a race.
#ifndef MEGARL_REHEARSAL_CUDA_RUNTIME_H
#define MEGARL_REHEARSAL_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>

#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::isnan;
using std::max;
using std::min;

namespace rehearsal {

constexpr int kWarpSize = 32;
using Slot = uint64_t;

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);
void* dynamic_shared();
void wait_for_block();
void wait_for_warp();
// What the lanes of this thread's warp put into their slots; each call waits for the whole warp.
const Slot* exchange(Slot mine);

template <class T>
T as(Slot slot) {
  T value;
  memcpy(&value, &slot, sizeof value);
  return value;
}

template <class T>
const Slot* exchange_value(T value) {
  Slot slot = 0;
  static_assert(sizeof value <= sizeof slot, "a shuffle moves at most 64 bits");
  memcpy(&slot, &value, sizeof value);
  return exchange(slot);
}

template <class... P>
auto launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  return [=](P... arguments) { run_grid(grid, block, shared_bytes, [&] { kernel(arguments...); }); };
}

}  // namespace rehearsal

inline void __syncthreads() { rehearsal::wait_for_block(); }
inline void __syncwarp(unsigned = ~0u) { rehearsal::wait_for_warp(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return rehearsal::as<T>(rehearsal::exchange_value(value)[(threadIdx.x % rehearsal::kWarpSize) ^ step]);
}

template <class T, class F>
T reduce_warp(T value, F&& combine) {
  const rehearsal::Slot* slots = rehearsal::exchange_value(value);
  T total = rehearsal::as<T>(slots[0]);
  for (int lane = 1; lane < rehearsal::kWarpSize; ++lane) total = combine(total, rehearsal::as<T>(slots[lane]));
  return total;
}

inline int __reduce_add_sync(unsigned, int value) {
  return reduce_warp(value, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int value) {
  return reduce_warp(value, [](int a, int b) { return a < b ? a : b; });
}

template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}

template <class To, class From>
To rehearsal_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline int __float_as_int(float x) { return rehearsal_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return rehearsal_bits<unsigned>(x); }
inline float __int_as_float(int x) { return rehearsal_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return rehearsal_bits<float>(x); }

#endif
