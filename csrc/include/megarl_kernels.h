/* C ABI of megarl's kernels: raw pointers, sizes, and on CUDA a stream. Nothing here knows torch.
 *
 * Every function returns MEGARL_OK or an error; on an error the output is unspecified. Arrays are contiguous. The
 * caller allocates, and keeps pointers on the device of the function's suffix.
 */
#ifndef MEGARL_KERNELS_H
#define MEGARL_KERNELS_H

#include <stdint.h>

#define MEGARL_ABI_VERSION 1 /* rises when a signature or its meaning changes; Python refuses another one */

#define MEGARL_OK 0
#define MEGARL_BAD_BOUNDARIES 1  /* cu_seqlens does not start at 0, or decreases */
#define MEGARL_CUDA_ERROR 100    /* MEGARL_CUDA_ERROR + e: cudaError_t e */

#ifdef __cplusplus
extern "C" {
#endif

int megarl_abi_version(void);

/* out[t] = minimum of log_ratio over the earlier tokens of t's sequence whose mask is not 0; 0 where there is none.
 *
 * log_ratio, mask, out [T] with T = cu_seqlens[num_sequences]; cu_seqlens [num_sequences + 1] starts at 0 and never
 * decreases. A masked token influences nothing, whatever its value. A trained NaN makes all later tokens of its
 * sequence NaN. The CUDA function does not check cu_seqlens: that would wait for the device.
 */
int megarl_prefix_min_cpu(const float* log_ratio, const uint8_t* mask, const int32_t* cu_seqlens,
                          int64_t num_sequences, float* out);
int megarl_prefix_min_cuda(const float* log_ratio, const uint8_t* mask, const int32_t* cu_seqlens,
                           int64_t num_sequences, float* out, void* stream);

#ifdef __cplusplus
}
#endif

#endif
