/* C ABI of megarl's kernels: raw pointers, sizes, and on CUDA a stream. Nothing here knows torch.
 *
 * Every function returns MEGARL_OK or an error; on an error the output is unspecified. Arrays are contiguous. The
 * caller allocates, and keeps pointers on the device of the function's suffix. Results depend neither on the number of
 * threads nor on scheduling. The CUDA functions do not check cu_seqlens: that would wait for the device.
 */
#ifndef MEGARL_KERNELS_H
#define MEGARL_KERNELS_H

#include <stdint.h>

#define MEGARL_ABI_VERSION 7 /* raise it when a signature or its meaning changes; Python refuses other versions */

#define MEGARL_OK 0
#define MEGARL_BAD_BOUNDARIES 1 /* cu_seqlens does not start at 0, or decreases */
#define MEGARL_UNKNOWN_RULE 2
#define MEGARL_CUDA_ERROR 100 /* MEGARL_CUDA_ERROR + e: cudaError_t e */

#ifdef __cplusplus
extern "C" {
#endif

int megarl_abi_version(void);

/* The digest of the source of the token pass's rule of that name (csrc/translate_rules.py); NULL if there is none. */
const char* megarl_rule_digest(const char* rule);

/* Packed tokens. A segment is a sequence, or one of the two chunks of it that a context-parallel rank holds. Where the
 * mask is 0, the other values are ignored, NaN included. */
typedef struct {
  const float* logprobs;         /* [T] current policy */
  const float* rollout_logprobs; /* [T] behaviour policy */
  const float* old_logprobs;     /* [T] proximal policy; may be NULL where the rule does not need it */
  const float* advantages;       /* [T] */
  const uint8_t* mask;           /* [T] non-zero: the token is trained on */
  const int32_t* cu_seqlens;     /* [num_segments + 1] */
  int64_t num_segments;
} megarl_tokens;

/* Sums over trained tokens; l is the clamped log-ratio, m the prefix minimum of the ratios, T the trust region
 * (A > 0, l > 0 or A < 0, l < 0). "first" and "second" are the rule's own two flags. */
enum megarl_sum {
  MEGARL_TOKENS,
  MEGARL_POSITIVE, /* A > 0 */
  MEGARL_NEGATIVE, /* A < 0 */
  MEGARL_RATIO,
  MEGARL_RATIO_SQUARE,
  MEGARL_CHI2, /* (ratio - 1)^2 */
  MEGARL_LOG_RATIO,
  MEGARL_K3, /* ratio - 1 - l */
  MEGARL_SQUARE,
  MEGARL_TRUST,
  MEGARL_TRUST_SQUARE,
  MEGARL_TRUST_KEPT,
  MEGARL_TRUST_KEPT_SQUARE,
  MEGARL_CLAMPED,
  MEGARL_KEPT,
  MEGARL_KEPT_POSITIVE,
  MEGARL_KEPT_NEGATIVE,
  MEGARL_FIRST,
  MEGARL_FIRST_POSITIVE,
  MEGARL_FIRST_NEGATIVE,
  MEGARL_SECOND,
  MEGARL_SECOND_POSITIVE,
  MEGARL_SECOND_NEGATIVE,
  MEGARL_BAD_PREFIX, /* m < .8 */
  MEGARL_DAMPENED_TOKEN, /* ratio < dampened */
  MEGARL_DAMPENED_TOKEN_BAD, /* ... after a bad prefix */
  MEGARL_DAMPENED_PREFIX, /* m ratio < dampened */
  MEGARL_DAMPENED_PREFIX_BAD,
  MEGARL_RATIO_POSITIVE, /* ratio of the tokens with A > 0 */
  MEGARL_RATIO_NEGATIVE,
  MEGARL_LOSS_POSITIVE, /* loss of the tokens with A > 0 */
  MEGARL_NUM_SUMS
};

/* Bins of the log-ratio histograms: 16 per octave of |l| from 2^-14 to 20 (the upper bits of its float32 pattern), on
 * both sides of one bin around 0. */
#define MEGARL_BINS_PER_SIGN 293
#define MEGARL_BINS (2 * MEGARL_BINS_PER_SIGN + 1)

/* Log-ratio, prefix minimum, weight and mask, loss, its gradient and every sum of the metrics, in one pass.
 *
 * rule: the name of a rule in megarl/objectives. parameters: the rule's, float64, on the device.
 * dampened: effective ratio below which a token counts as dampened.
 * prefix_min [num_segments]: least log-ratio of the earlier segments of a sequence, inf for none; NULL: segments are
 * whole sequences.
 * value, index [num_segments]: what the rule needs of the whole sequence, index counted from the segment's start; both
 * NULL: the pass computes it (Quantity in token_rules.h).
 * loss, coefficient [T]: loss of a token and its derivative with respect to the log-prob, 0 where the mask is 0.
 * kept [T] uint8: 1 for trained tokens whose gradient survives.
 * segment_sums [num_segments, 2] float64: number of trained tokens, and sum of their loss.
 * sums [MEGARL_NUM_SUMS] float64. histograms [2, MEGARL_BINS] int64, of l and of log m; the CUDA function adds to them.
 * scratch (CUDA): float64 [num_segments, MEGARL_NUM_SUMS].
 */
int megarl_token_pass_cpu(const char* rule, const double* parameters, double dampened,
                          const megarl_tokens* tokens, const float* prefix_min, const float* value,
                          const int32_t* index, float* loss, float* coefficient, uint8_t* kept, double* segment_sums,
                          double* sums, int64_t* histograms);
int megarl_token_pass_cuda(const char* rule, const double* parameters, double dampened,
                           const megarl_tokens* tokens, const float* prefix_min, const float* value,
                           const int32_t* index, float* loss, float* coefficient, uint8_t* kept, double* segment_sums,
                           double* sums, int64_t* histograms, double* scratch, void* stream);

/* M2PO's radix selection.
 *
 * keys [T] uint32: bit pattern of |l| for tokens of the trust region, 0xFFFFFFFF elsewhere.
 * histogram: of the keys that equal *prefix (on the device) in the bits from shift + bits on, adds to table
 * [2, 1 << bits] int64 the count and the sum of l^2 in units of 2^-30, binned by the next lower `bits` bits.
 * ties: the same for the tokens whose key is exactly *key, with their tie orders (token_rules.h) in place of keys;
 * places [num_segments]: place of a segment's first token in the order that breaks ties.
 */
int megarl_moment_keys_cpu(const megarl_tokens* tokens, uint32_t* keys);
int megarl_moment_keys_cuda(const megarl_tokens* tokens, int64_t num_tokens, uint32_t* keys, void* stream);
int megarl_moment_histogram_cpu(const uint32_t* keys, int64_t num_tokens, const int64_t* prefix, int shift, int bits,
                                int64_t* table);
int megarl_moment_histogram_cuda(const uint32_t* keys, int64_t num_tokens, const int64_t* prefix, int shift, int bits,
                                 int64_t* table, void* stream);
int megarl_moment_ties_cpu(const uint32_t* keys, const int64_t* key, const int64_t* places, const int32_t* cu_seqlens,
                           int64_t num_segments, const int64_t* prefix, int shift, int bits, int64_t* table);
int megarl_moment_ties_cuda(const uint32_t* keys, const int64_t* key, const int64_t* places,
                            const int32_t* cu_seqlens, int64_t num_segments, const int64_t* prefix, int shift,
                            int bits, int64_t* table, void* stream);

/* BAPO's binned contributions: adds to table [6, num_low + num_high + 4] int64 the three limbs (`limbs_of` in
 * token_rules.h) of w |A| and of w |A| ratio, w = exp(rollout log-prob) if weighted, else 1, binned by the ratio:
 * num_high + 1 bins of A > 0 (high[i-1] < ratio <= high[i]), one unused, num_low + 1 bins of A < 0, one unused. */
int megarl_contributions_cpu(const megarl_tokens* tokens, int weighted, const double* low, int num_low,
                             const double* high, int num_high, int64_t* table);
int megarl_contributions_cuda(const megarl_tokens* tokens, int64_t num_tokens, int weighted, const double* low,
                              int num_low, const double* high, int num_high, int64_t* table, void* stream);

/* Causal attention of packed pieces, on CPUs, for pieces of a few tokens: piece i has the queries cu_seqlens_q[i] to
 * cu_seqlens_q[i + 1] and the keys cu_seqlens_k[i] to cu_seqlens_k[i + 1]; its last query attends to all of these, each
 * query before that to one key less. No index is checked; no piece may have more queries than keys, and every row must
 * be a query. */
typedef struct {
  const int64_t* queries;      /* [Q] row of each query on the packed axis; NULL: in order */
  const int64_t* outputs;      /* [T] the query whose output each row takes; NULL: in order */
  const int64_t* keys;         /* [K] row of each key; NULL: in order */
  const int32_t* cu_seqlens_q; /* [num_pieces + 1] */
  const int32_t* cu_seqlens_k; /* [num_pieces + 1] */
  int64_t num_pieces, heads, kv_heads, width;
  float scale;
} megarl_pieces;

/* q, out, gradient, dq [T, heads, width]; k, v, dk, dv [N, kv_heads, width]; probs: heads times the sum over pieces of
 * queries times keys. The backward function adds to dk and dv. */
int megarl_short_attention_cpu(const megarl_pieces* pieces, const float* q, const float* k, const float* v, float* out,
                               float* probs);
int megarl_short_attention_backward_cpu(const megarl_pieces* pieces, const float* q, const float* k, const float* v,
                                        const float* probs, const float* gradient, float* dq, float* dk, float* dv);

/* RMSNorm on CPUs. x, out, gradient, dx [rows, width]; weight, dw [width]; scales [rows]: 1 / sqrt(mean(x^2) + eps).
 * The backward function adds to dw. */
int megarl_rms_norm_cpu(const float* x, const float* weight, int64_t rows, int64_t width, double eps, float* out,
                        float* scales);
int megarl_rms_norm_backward_cpu(const float* x, const float* weight, const float* scales, const float* gradient,
                                 int64_t rows, int64_t width, float* dx, float* dw);

#ifdef __cplusplus
}
#endif

#endif
