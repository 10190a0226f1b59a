/* Products of matrices of float32, or of bfloat16 into float32, by the vectors of whatever processor this is compiled for, with the
   arguments of cblas_sgemm and cblas_gemm_bf16bf16f32. Where the processor has an instruction for pairs of bfloat16 it is used; else
   bfloat16 becomes float32 on the way into the panels, and costs what float32 costs.

   As BLIS does it (van Zee and van de Geijn, ACM TOMS 41:3): op(A) and op(B) are copied into panels that are read in order, in
   blocks that stay in the caches, and a tile of ROWS x COLUMNS sums is kept in registers. Each sum runs over k in the same order
   whatever the number of rows or columns, so a row's result does not depend on its neighbors. */

#include "shared.h"
#include "tile.h"

#if defined(LANES)

#include <string.h>

/* A matrix: element (row, p) of op(X) is x[row * row_step + p * p_step]; one of the steps is 1. */
struct operand {
  const char *x;
  size_t row_step, p_step;
};

/* `rows` rows from `row` on, of `k` elements from `p` on, as one panel of `width` rows; what is missing is zero. */
static inline void pack(uint32_t *restrict panel, const struct operand *o, int row, int p, int rows, const int width, int k,
                        const enum kind kind) {
  const int bytes = kind == FLOATS ? 4 : 2, halves = kind != FLOATS, odd = halves ? k % 2 : 0, pairs = kind == PAIRS;
  const char *x = o->x + bytes * (row * o->row_step + p * o->p_step);
  const size_t step = bytes * o->p_step;
  if (rows < width) memset(panel, 0, sizeof(uint32_t) * (size_t)(pairs ? (k + 1) / 2 : k) * width);
  if (o->row_step != 1) {
    pack_rows(panel, x, bytes * o->row_step, rows, width, halves ? k / 2 : k, kind == WIDENED);
  } else if (pairs) {
    for (int w = 0; w < k / 2; w++) {
      const uint16_t *even = (const uint16_t *)(x + 2 * w * step), *uneven = (const uint16_t *)(x + (2 * w + 1) * step);
      for (int i = 0; i < rows; i++) panel[(size_t)w * width + i] = even[i] | (uint32_t)uneven[i] << 16;
    }
  } else if (halves) {
    for (int w = 0; w < k - odd; w++)
      for (int i = 0; i < rows; i++) panel[(size_t)w * width + i] = widened(x + w * step + 2 * i);
  } else if (rows == width) {
    for (int w = 0; w < k; w++) memcpy(panel + (size_t)w * width, x + w * step, sizeof(uint32_t) * width);
  } else {
    for (int w = 0; w < k; w++) memcpy(panel + (size_t)w * width, x + w * step, sizeof(uint32_t) * rows);
  }
  /* The last of an odd number of bfloat16 has no partner: zero is its partner. */
  for (int i = 0; odd && i < rows; i++) {
    const char *last = x + 2 * (i * o->row_step + (size_t)(k - 1) * o->p_step);
    panel[(size_t)(pairs ? k / 2 : k - 1) * width + i] = pairs ? widened(last) >> 16 : widened(last);
  }
}

static inline void gemm(const struct operand *a, const struct operand *b, int m, int n, int k, float alpha, float beta, float *c,
                        int ldc, const enum kind kind) {
  const int block_k = kind == PAIRS ? 2 * BLOCK_WORDS : BLOCK_WORDS;
  vec sum[ROWS][VECTORS];
  uint32_t *panels_a = thread_memory(PANELS, sizeof(uint32_t) * (WORDS_A + WORDS_B)), *panels_b = panels_a + WORDS_A;
  for (int p = 0; !p || p < k; p += block_k) { /* Once at least: a sum of nothing is zero. */
    const int deep = least(block_k, k - p), words = kind == PAIRS ? (deep + 1) / 2 : deep;
    const float kept = p ? 1.0f : beta;
    for (int column = 0; column < n; column += BLOCK_N) {
      const int wide = least(BLOCK_N, n - column);
      for (int j = 0; j < wide; j += COLUMNS)
        pack(panels_b + (size_t)j * words, b, column + j, p, least(COLUMNS, wide - j), COLUMNS, deep, kind);
      for (int row = 0; row < m; row += BLOCK_M) {
        const int high = least(BLOCK_M, m - row);
        for (int i = 0; i < high; i += ROWS)
          pack(panels_a + (size_t)i * words, a, row + i, p, least(ROWS, high - i), ROWS, deep, kind);
        for (int j = 0; j < wide; j += COLUMNS)
          for (int i = 0; i < high; i += ROWS) {
            const int rows = least(ROWS, high - i);
            multiply(panels_a + (size_t)i * words, panels_b + (size_t)j * words, words, sum, rows, kind);
            store(sum, c + (size_t)(row + i) * ldc + column + j, ldc, rows, least(COLUMNS, wide - j), alpha, kept);
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

#define GEMM(name, kind)                                                                                                     \
  void name(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda, const void *b,   \
            int ldb, float beta, float *c, int ldc) {                                                                        \
    const struct operand left = left_of(a, trans_a, lda), right = right_of(b, trans_b, ldb);                                 \
    (void)layout;                                                                                                            \
    gemm(&left, &right, m, n, k, alpha, beta, c, ldc, kind);                                                                 \
  }

GEMM(panax_gemm_f32, FLOATS)
GEMM(panax_gemm_bf16, HAS_PAIRS ? PAIRS : WIDENED)

#endif
