// Causal attention of packed pieces so short that a call of a library for each would take longer than the work.
#include <math.h>
#include <string.h>

#include <vector>

#include "segments.h"

namespace megarl {
namespace {

#define MEGARL_INLINE inline __attribute__((always_inline))  // so that it is compiled for the level of its caller

// exp(x) for -87 <= x <= 0, within 2 units in the last place, in one straight line of which compilers make vectors;
// below, exp(-87). NaN for NaN.
MEGARL_INLINE float exp_of_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int32_t n = static_cast<int32_t>((x >= -87.0f ? x : 0.0f) * 1.44269504f - 0.5f);
  const float r = (x - static_cast<float>(n) * 0.693359375f) + static_cast<float>(n) * 2.12194440e-4f;
  float p = 1.9875691500e-4f;  // Cephes, expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = (n + 127) * (1 << 23);
  float power;
  memcpy(&power, &bits, sizeof(power));
  return (p * r * r + r + 1.0f) * power;
}

struct Piece {
  int64_t first_query, queries, first_key, keys;
  int64_t probs;  // offset of its first head's probabilities
};

std::vector<Piece> pieces_of(const megarl_pieces& x) {
  std::vector<Piece> pieces;
  int64_t probs = 0;
  for (int64_t i = 0; i < x.num_pieces; ++i) {
    const int64_t q = x.cu_seqlens_q[i], k = x.cu_seqlens_k[i];
    pieces.push_back({q, x.cu_seqlens_q[i + 1] - q, k, x.cu_seqlens_k[i + 1] - k, probs});
    probs += x.heads * pieces.back().queries * pieces.back().keys;
  }
  return pieces;
}

// The row of a query on the packed axis; -1 if the row takes its output from another query, so that this one need not
// be computed.
MEGARL_INLINE int64_t row_of(const megarl_pieces& x, int64_t query) {
  const int64_t row = x.queries ? x.queries[query] : query;
  return x.outputs && x.outputs[row] != query ? -1 : row;
}

// WIDTH: of a head, known when this is compiled so that a row stays in registers; 0: any width.
template <int WIDTH>
struct Row {
  static MEGARL_INLINE float dot(const float* a, const float* b, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < (WIDTH ? WIDTH : width); ++i) sum += a[i] * b[i];
    return sum;
  }
  static MEGARL_INLINE void add(float* to, float factor, const float* x, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < (WIDTH ? WIDTH : width); ++i) to[i] += factor * x[i];
  }
};

struct Arrays {
  const float *q, *k, *v;
  float *out, *probs;
  const float* gradient;
  float *dq, *dk, *dv;
};

template <int WIDTH>
MEGARL_INLINE void attend_as(const megarl_pieces& x, const Piece& piece, int64_t group, const int64_t* rows,
                             const Arrays& a) {
  const int64_t width = WIDTH ? WIDTH : x.width, shared = x.heads / x.kv_heads;
  for (int64_t i = 0; i < piece.queries; ++i) {
    const int64_t row = row_of(x, piece.first_query + i), visible = piece.keys - piece.queries + i + 1;
    if (row < 0) continue;
    for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
      const int64_t at = (row * x.heads + head) * width;
      float* p = a.probs + piece.probs + (head * piece.queries + i) * piece.keys;
      float highest = -INFINITY, total = 0.0f;
      for (int64_t j = 0; j < visible; ++j) {
        p[j] = x.scale * Row<WIDTH>::dot(a.q + at, a.k + rows[j], width);
        highest = p[j] > highest ? p[j] : highest;
      }
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < visible; ++j) {
        p[j] = exp_of_negative(p[j] - highest);
        total += p[j];
      }
      float sums[WIDTH ? WIDTH : 1] = {};  // in registers
      float* sum = WIDTH ? sums : a.out + at;
      if (!WIDTH) memset(sum, 0, width * sizeof(float));
      for (int64_t j = 0; j < visible; ++j) {
        p[j] /= total;
        Row<WIDTH>::add(sum, p[j], a.v + rows[j], width);
      }
      if (WIDTH) memcpy(a.out + at, sums, WIDTH * sizeof(float));
    }
  }
}

template <int WIDTH>
MEGARL_INLINE void differentiate_as(const megarl_pieces& x, const Piece& piece, int64_t group, const int64_t* rows,
                                    const Arrays& a, float* scores) {
  const int64_t width = WIDTH ? WIDTH : x.width, shared = x.heads / x.kv_heads;
  for (int64_t i = 0; i < piece.queries; ++i) {
    const int64_t row = row_of(x, piece.first_query + i), visible = piece.keys - piece.queries + i + 1;
    if (row < 0) continue;
    for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
      const int64_t at = (row * x.heads + head) * width;
      const float* p = a.probs + piece.probs + (head * piece.queries + i) * piece.keys;
      float mean = 0.0f;
      for (int64_t j = 0; j < visible; ++j) {
        scores[j] = Row<WIDTH>::dot(a.gradient + at, a.v + rows[j], width);
        mean += p[j] * scores[j];
        Row<WIDTH>::add(a.dv + rows[j], p[j], a.gradient + at, width);
      }
      float sums[WIDTH ? WIDTH : 1] = {};
      float* sum = WIDTH ? sums : a.dq + at;
      if (!WIDTH) memset(sum, 0, width * sizeof(float));
      for (int64_t j = 0; j < visible; ++j) {
        const float score = x.scale * p[j] * (scores[j] - mean);
        Row<WIDTH>::add(sum, score, a.k + rows[j], width);
        Row<WIDTH>::add(a.dk + rows[j], score, a.q + at, width);
      }
      if (WIDTH) memcpy(a.dq + at, sums, WIDTH * sizeof(float));
    }
  }
}

MEGARL_VARIANTS void attend(const megarl_pieces& x, const Piece& piece, int64_t group, const int64_t* rows,
                            const Arrays& a) {
  switch (x.width) {
    case 32: return attend_as<32>(x, piece, group, rows, a);
    case 64: return attend_as<64>(x, piece, group, rows, a);
    case 128: return attend_as<128>(x, piece, group, rows, a);
    default: return attend_as<0>(x, piece, group, rows, a);
  }
}

MEGARL_VARIANTS void differentiate(const megarl_pieces& x, const Piece& piece, int64_t group, const int64_t* rows,
                                   const Arrays& a, float* scores) {
  switch (x.width) {
    case 32: return differentiate_as<32>(x, piece, group, rows, a, scores);
    case 64: return differentiate_as<64>(x, piece, group, rows, a, scores);
    case 128: return differentiate_as<128>(x, piece, group, rows, a, scores);
    default: return differentiate_as<0>(x, piece, group, rows, a, scores);
  }
}

// Calls of_piece(piece, group, rows) for each piece and each head of its keys, which begin at `rows` in k and v.
template <typename F>
void for_each_piece(const megarl_pieces& x, const F& of_piece) {
  const std::vector<Piece> pieces = pieces_of(x);
  const int64_t numbers = x.cu_seqlens_q[x.num_pieces] * x.heads * x.width;
#pragma omp parallel for if (numbers > 16 * kBlockTokens)  // heads: pieces may share keys
  for (int64_t group = 0; group < x.kv_heads; ++group) {
    std::vector<int64_t> rows;
    for (const Piece& piece : pieces) {
      rows.resize(piece.keys);
      for (int64_t j = 0; j < piece.keys; ++j) {
        const int64_t key = x.keys ? x.keys[piece.first_key + j] : piece.first_key + j;
        rows[j] = (key * x.kv_heads + group) * x.width;
      }
      of_piece(piece, group, rows);
    }
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_short_attention_cpu(const megarl_pieces* x, const float* q, const float* k, const float* v,
                                          float* out, float* probs) {
  using namespace megarl;
  const Arrays arrays{q, k, v, out, probs, nullptr, nullptr, nullptr, nullptr};
  for_each_piece(*x, [&](const Piece& piece, int64_t group, const std::vector<int64_t>& rows) {
    attend(*x, piece, group, rows.data(), arrays);
  });
  return MEGARL_OK;
}

extern "C" int megarl_short_attention_backward_cpu(const megarl_pieces* x, const float* q, const float* k,
                                                   const float* v, const float* probs, const float* gradient,
                                                   float* dq, float* dk, float* dv) {
  using namespace megarl;
  const Arrays arrays{q, k, v, nullptr, const_cast<float*>(probs), gradient, dq, dk, dv};
  for_each_piece(*x, [&](const Piece& piece, int64_t group, const std::vector<int64_t>& rows) {
    std::vector<float> scores(rows.size());
    differentiate(*x, piece, group, rows.data(), arrays, scores.data());
  });
  return MEGARL_OK;
}
