// cub::BlockScan as far as megarl uses it. As in CUB, its storage may be used again only after another barrier.
#ifndef MEGARL_REHEARSAL_BLOCK_SCAN_CUH
#define MEGARL_REHEARSAL_BLOCK_SCAN_CUH

#include <cuda_runtime.h>

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

template <class T, int threads, BlockScanAlgorithm = BLOCK_SCAN_RAKING>
struct BlockScan {
  struct TempStorage {
    T values[threads];
  };
  explicit BlockScan(TempStorage& storage) : values(storage.values) {}

  template <class Op>
  void ExclusiveScan(T input, T& output, T initial, Op op, T& total) {
    const int mine = static_cast<int>(threadIdx.x);
    values[mine] = input;
    __syncthreads();
    output = initial;
    total = values[0];
    for (int i = 0; i < mine; ++i) output = op(output, values[i]);
    for (int i = 1; i < threads; ++i) total = op(total, values[i]);
  }

  T* values;
};

}  // namespace cub

#endif
