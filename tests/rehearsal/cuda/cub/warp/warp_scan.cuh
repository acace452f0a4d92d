// cub::WarpScan as far as megarl uses it.
#ifndef MEGARL_REHEARSAL_WARP_SCAN_CUH
#define MEGARL_REHEARSAL_WARP_SCAN_CUH

#include <cuda_runtime.h>

namespace cub {

template <class T>
struct WarpScan {
  struct TempStorage {};
  explicit WarpScan(TempStorage&) {}

  template <class Op>
  void ExclusiveScan(T input, T& output, T initial, Op op, T& total) {
    const rehearsal::Slot* slots = rehearsal::exchange_value(input);
    const int lane = static_cast<int>(threadIdx.x) % rehearsal::kWarpSize;
    output = initial;
    total = rehearsal::as<T>(slots[0]);
    for (int i = 0; i < lane; ++i) output = op(output, rehearsal::as<T>(slots[i]));
    for (int i = 1; i < rehearsal::kWarpSize; ++i) total = op(total, rehearsal::as<T>(slots[i]));
  }
};

}  // namespace cub

#endif
