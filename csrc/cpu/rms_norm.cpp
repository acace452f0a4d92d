// RMSNorm of rows and its gradients, in one pass over memory forward and one backward.
#include <math.h>

#include <vector>

#include "segments.h"

namespace megarl {
namespace {

constexpr int64_t kRows = 256;  // of a block; each block sums its part of the weight's gradient for itself

MEGARL_VARIANTS void normalise(const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* out,
                               float* scales) {
  for (int64_t r = 0; r < rows; ++r, x += width, out += width) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
    scales[r] = scale;
  }
}

MEGARL_VARIANTS void differentiate(const float* x, const float* weight, const float* scales, const float* gradient,
                                   int64_t rows, int64_t width, float* dx, float* dw) {
  for (int64_t r = 0; r < rows; ++r, x += width, gradient += width, dx += width) {
    const float scale = scales[r];
    float along = 0.0f;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < width; ++i) along += gradient[i] * weight[i] * x[i];
    along *= scale * scale / static_cast<float>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      dx[i] = scale * (gradient[i] * weight[i] - along * x[i]);
      dw[i] += gradient[i] * x[i] * scale;
    }
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_rms_norm_cpu(const float* x, const float* weight, int64_t rows, int64_t width, double eps,
                                   float* out, float* scales) {
  using namespace megarl;
#pragma omp parallel for if (rows * width > 16 * kBlockTokens)
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t n = rows - r < kRows ? rows - r : kRows;
    normalise(x + r * width, weight, n, width, static_cast<float>(eps), out + r * width, scales + r);
  }
  return MEGARL_OK;
}

extern "C" int megarl_rms_norm_backward_cpu(const float* x, const float* weight, const float* scales,
                                            const float* gradient, int64_t rows, int64_t width, float* dx, float* dw) {
  using namespace megarl;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  std::vector<float> sums(blocks * width, 0.0f);
#pragma omp parallel for if (rows * width > 16 * kBlockTokens)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t r = b * kRows, n = rows - r < kRows ? rows - r : kRows;
    differentiate(x + r * width, weight, scales + r, gradient + r * width, n, width, dx + r * width,
                  sums.data() + b * width);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < width; ++i) dw[i] += sums[b * width + i];
  }
  return MEGARL_OK;
}
