// Shared by the CPU kernels: work per thread, vector variants, checks of the boundaries, and blocks of segments.
#ifndef MEGARL_CPU_SEGMENTS_H
#define MEGARL_CPU_SEGMENTS_H

#include <vector>

#include "megarl_kernels.h"

// Compiles a function once per x86-64 level; the variant is chosen when the library is loaded. Functions that it calls
// are compiled for the same level only if they are inlined into it.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define MEGARL_VARIANTS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGARL_VARIANTS
#endif

namespace megarl {

constexpr int64_t kBlockTokens = 16384;  // a thread's unit of work; for less it does not pay to wake another thread

inline bool boundaries_are_valid(const int32_t* cu_seqlens, int64_t num_segments) {
  if (cu_seqlens[0] != 0) return false;
  for (int64_t s = 0; s < num_segments; ++s) {
    if (cu_seqlens[s + 1] < cu_seqlens[s]) return false;
  }
  return true;
}

// Block b is segments [cuts[b], cuts[b + 1]), at least kBlockTokens tokens except in the last. The blocks depend only
// on the lengths, so sums taken block by block do not depend on the number of threads.
inline std::vector<int64_t> cut_into_blocks(const int32_t* cu_seqlens, int64_t num_segments) {
  std::vector<int64_t> cuts{0};
  for (int64_t s = 0; s < num_segments; ++s) {
    if (cu_seqlens[s + 1] - cu_seqlens[cuts.back()] >= kBlockTokens || s + 1 == num_segments) cuts.push_back(s + 1);
  }
  return cuts;
}

}  // namespace megarl

#endif
