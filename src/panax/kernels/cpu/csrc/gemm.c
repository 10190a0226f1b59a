/* Products of matrices of float32, or of bfloat16 into float32, by the processor's vectors of 512 bits (AVX-512; for bfloat16 its
   instruction for pairs), with the arguments of cblas_sgemm and cblas_gemm_bf16bf16f32: a candidate beside Intel's library, which
   does not use them on every processor that has them.

   As BLIS does it (van Zee and van de Geijn, ACM TOMS 41:3): op(A) and op(B) are copied into panels that are read in order, in
   blocks that stay in the caches, and a tile of 12 x 32 sums is kept in registers. Panels are of 32-bit words: a float32, or two
   bfloat16 that are neighbours in the summed dimension.

       panel of A: [words][12 rows]      panel of B: [words][32 columns]                                                          */

#include "shared.h"

#if defined(__AVX512F__)

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 12, COLUMNS = 32, BLOCK_M = 12 * ROWS, BLOCK_WORDS = 384, BLOCK_N = 48 * COLUMNS };

/* A matrix of either type: element (row, p) of op(X) is x[row * row_step + p * p_step]; one of the steps is 1. */
struct operand {
  const char *x;
  size_t row_step, p_step;
};

static inline const void *element(const struct operand *o, size_t row, size_t p, int bytes) {
  return o->x + bytes * (row * o->row_step + p * o->p_step);
}

/* `rows` rows from `row` on, of `k` elements from `p` on, as one panel of `width` rows; what is missing is zero. */
static inline void pack(uint32_t *restrict panel, const struct operand *o, int row, int p, int rows, int width, int k, const int bf16) {
  const int words = bf16 ? (k + 1) / 2 : k, whole = bf16 ? k / 2 : k, bytes = bf16 ? 2 : 4, per_word = bf16 ? 2 : 1;
  if (rows < width) memset(panel, 0, sizeof(uint32_t) * (size_t)words * width);
  if (o->row_step == 1) {
    for (int w = 0; w < whole; w++) {
      uint32_t *to = panel + (size_t)w * width;
      if (bf16) {
        const uint16_t *even = element(o, row, p + 2 * w, 2), *odd = even + o->p_step;
        for (int i = 0; i < rows; i++) to[i] = even[i] | (uint32_t)odd[i] << 16;
      } else {
        memcpy(to, element(o, row, p + w, 4), sizeof(uint32_t) * rows);
      }
    }
  } else {
    /* Eight rows at a time, so that what is written stays in few lines of the cache. */
    for (int first = 0; first < rows; first += 8) {
      const int last = least(first + 8, rows);
      for (int w = 0; w < whole; w++)
        for (int i = first; i < last; i++)
          memcpy(panel + (size_t)w * width + i, element(o, row + i, p + per_word * w, bytes), 4);
    }
  }
  if (whole < words)
    for (int i = 0; i < rows; i++) panel[(size_t)whole * width + i] = *(const uint16_t *)element(o, row + i, p + 2 * whole, 2);
}

static inline __m512 added(__m512 sum, uint32_t a, __m512i b, const int bf16) {
#if defined(__AVX512BF16__)
  if (bf16) return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#endif
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32((int)a)), _mm512_castsi512_ps(b), sum);
}

/* sum[12][32] = the product of two panels. */
static inline void multiply(const uint32_t *restrict a, const uint32_t *restrict b, int words, __m512 sum[ROWS][2], const int bf16) {
  __m512 s[ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++) s[i][0] = s[i][1] = _mm512_setzero_ps();
  for (int w = 0; w < words; w++, a += ROWS, b += COLUMNS) {
    const __m512i left = _mm512_loadu_si512(b), right = _mm512_loadu_si512(b + 16);
    _mm_prefetch((const char *)(b + 8 * COLUMNS), _MM_HINT_T0);
    _mm_prefetch((const char *)(b + 8 * COLUMNS + 16), _MM_HINT_T0);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
      s[i][0] = added(s[i][0], a[i], left, bf16);
      s[i][1] = added(s[i][1], a[i], right, bf16);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++) sum[i][0] = s[i][0], sum[i][1] = s[i][1];
}

static inline __mmask16 within(int columns) { return columns >= 16 ? 0xffff : columns > 0 ? (1u << columns) - 1 : 0; }

/* c = alpha * sum + beta * c, in the rows and columns that are there. */
static void store(__m512 sum[ROWS][2], float *c, size_t ldc, int rows, int columns, float alpha, float beta) {
  const __m512 times = _mm512_set1_ps(alpha), keep = _mm512_set1_ps(beta);
  const __mmask16 mask[2] = {within(columns), within(columns - 16)};
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < 2; j++) {
      float *to = c + i * ldc + 16 * j;
      __m512 value = _mm512_mul_ps(sum[i][j], times);
      if (beta != 0.0f) value = _mm512_fmadd_ps(keep, _mm512_maskz_loadu_ps(mask[j], to), value);
      _mm512_mask_storeu_ps(to, mask[j], value);
    }
}

/* Each thread's panels, with room for what is fetched ahead; they live as long as the thread. */
static _Thread_local uint32_t *panels_a, *panels_b;

static int panels_made(void) {
  if (!panels_a && posix_memalign((void **)&panels_a, 64, sizeof(uint32_t) * BLOCK_M * (BLOCK_WORDS + 16))) panels_a = NULL;
  if (!panels_b && posix_memalign((void **)&panels_b, 64, sizeof(uint32_t) * BLOCK_N * (BLOCK_WORDS + 16))) panels_b = NULL;
  return panels_a && panels_b;
}

static inline void gemm(const struct operand *a, const struct operand *b, int m, int n, int k, float alpha, float beta, float *c,
                        int ldc, const int bf16) {
  const int block_k = bf16 ? 2 * BLOCK_WORDS : BLOCK_WORDS;
  __m512 sum[ROWS][2];
  if (!panels_made()) abort(); /* The library would end the process there, too: there is no error to return. */
  for (int p = 0; p < k; p += block_k) {
    const int deep = least(block_k, k - p), words = bf16 ? (deep + 1) / 2 : deep;
    const float kept = p ? 1.0f : beta;
    for (int column = 0; column < n; column += BLOCK_N) {
      const int wide = least(BLOCK_N, n - column);
      for (int j = 0; j < wide; j += COLUMNS)
        pack(panels_b + (size_t)j * words, b, column + j, p, least(COLUMNS, wide - j), COLUMNS, deep, bf16);
      for (int row = 0; row < m; row += BLOCK_M) {
        const int high = least(BLOCK_M, m - row);
        for (int i = 0; i < high; i += ROWS)
          pack(panels_a + (size_t)i * words, a, row + i, p, least(ROWS, high - i), ROWS, deep, bf16);
        for (int j = 0; j < wide; j += COLUMNS)
          for (int i = 0; i < high; i += ROWS) {
            multiply(panels_a + (size_t)i * words, panels_b + (size_t)j * words, words, sum, bf16);
            store(sum, c + (size_t)(row + i) * ldc + column + j, ldc, least(ROWS, high - i), least(COLUMNS, wide - j), alpha,
                  kept);
          }
      }
    }
  }
}

static struct operand left_of(const void *a, int trans, int lda) {
  return (struct operand){a, trans == TRANS ? 1 : (size_t)lda, trans == TRANS ? (size_t)lda : 1};
}

static struct operand right_of(const void *b, int trans, int ldb) {
  return (struct operand){b, trans == TRANS ? (size_t)ldb : 1, trans == TRANS ? 1 : (size_t)ldb};
}

#define GEMM(name, bf16)                                                                                                     \
  void name(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda, const void *b,   \
            int ldb, float beta, float *c, int ldc) {                                                                        \
    const struct operand left = left_of(a, trans_a, lda), right = right_of(b, trans_b, ldb);                                 \
    (void)layout;                                                                                                            \
    gemm(&left, &right, m, n, k, alpha, beta, c, ldc, bf16);                                                                 \
  }

GEMM(panax_gemm_f32, 0)
#if defined(__AVX512BF16__)
GEMM(panax_gemm_bf16, 1)
#endif

#endif
