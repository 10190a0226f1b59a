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

static inline vec load_some_words(const char *x, int count) {
  uint32_t words[LANES] = {0};
  memcpy(words, x, sizeof(uint32_t) * count);
  return load(words);
}

/* Words `w` of `columns` columns of op(B), one row of a panel, from the matrix itself: its columns lie one after the other. */
static inline vec load_words(const struct operand *b, int p, int w, int deep, int column, int columns, const enum kind kind) {
  if (kind == FLOATS) {
    const char *x = b->x + 4 * ((size_t)(p + w) * b->p_step + column);
    return columns < LANES ? load_some_words(x, columns) : load(x);
  }
  uint32_t words[LANES] = {0};
  const int first = kind == PAIRS ? 2 * w : w;
  const uint16_t *x = (const uint16_t *)(b->x + 2 * ((size_t)(p + first) * b->p_step + column)), *y = x + b->p_step;
  const int has_partner = kind == PAIRS && first + 1 < deep;
  if (columns >= LANES) {
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint32_t wholes __attribute__((vector_size(4 * LANES)));
    const wholes low = __builtin_convertvector(*(const halves *)x, wholes);
    if (kind == WIDENED) return (vec)(low << 16);
    return has_partner ? (vec)(low | __builtin_convertvector(*(const halves *)y, wholes) << 16) : (vec)low;
  }
  for (int i = 0; i < columns; i++)
    words[i] = kind == WIDENED ? (uint32_t)x[i] << 16 : x[i] | (has_partner ? (uint32_t)y[i] << 16 : 0);
  return load(words);
}

enum { STEP = 8 }; /* Rows of B that are read side by side. */

/* The sums of a tile over STEP words or fewer: the same additions as those of a product of panels. */
static inline void add_words(vec *sums, const uint32_t *panel_a, const struct operand *b, int p, int w, int count, int deep, int column,
                             int columns, const enum kind kind, const int rows) {
  vec s[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) s[i][j] = sums[i * VECTORS + j];
  for (int step = 0; step < count; step++) {
    const uint32_t *a = panel_a + (size_t)(w + step) * ROWS;
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) {
      const int left = columns - j * LANES;
      const vec right = left > 0 ? load_words(b, p, w + step, deep, column + j * LANES, left, kind) : (vec){0};
#pragma GCC unroll 12
      for (int i = 0; i < rows; i++) s[i][j] = kind == PAIRS ? add_pairs(s[i][j], a[i], right) : s[i][j] + number(a[i]) * right;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) sums[i * VECTORS + j] = s[i][j];
}

/* A product of few rows reads B once, in the order in which it lies, and copies none of it: that takes longer than the product. */
static inline void few_rows(const struct operand *a, const struct operand *b, int m, int n, int k, float alpha, float beta, float *c,
                            int ldc, const enum kind kind, const int rows) {
  const int block_k = kind == PAIRS ? 2 * BLOCK_WORDS : BLOCK_WORDS;
  uint32_t *panel_a = thread_memory(PANELS, sizeof(uint32_t) * (WORDS_A + WORDS_B));
  vec *sums = (vec *)(panel_a + WORDS_A);
  for (int p = 0; !p || p < k; p += block_k) {
    const int deep = least(block_k, k - p), words = kind == PAIRS ? (deep + 1) / 2 : deep;
    pack(panel_a, a, 0, p, m, ROWS, deep, kind);
    for (int column = 0; column < n; column += BLOCK_N) {
      const int wide = least(BLOCK_N, n - column), tiles = (wide + COLUMNS - 1) / COLUMNS;
      memset(sums, 0, sizeof(vec) * tiles * ROWS * VECTORS);
      for (int w = 0; w < words; w += STEP)
        for (int tile = 0; tile < tiles; tile++)
          add_words(sums + tile * ROWS * VECTORS, panel_a, b, p, w, least(STEP, words - w), deep, column + tile * COLUMNS,
                    least(COLUMNS, wide - tile * COLUMNS), kind, rows);
      for (int tile = 0; tile < tiles; tile++)
        store((vec(*)[VECTORS])(sums + tile * ROWS * VECTORS), c + column + tile * COLUMNS, ldc, m,
              least(COLUMNS, wide - tile * COLUMNS), alpha, p ? 1.0f : beta);
    }
  }
}

static inline void gemm(const struct operand *a, const struct operand *b, int m, int n, int k, float alpha, float beta, float *c,
                        int ldc, const enum kind kind) {
  const int block_k = kind == PAIRS ? 2 * BLOCK_WORDS : BLOCK_WORDS;
  if (b->row_step == 1 && m <= ROWS) {
    if (m == 1) few_rows(a, b, m, n, k, alpha, beta, c, ldc, kind, 1);
    else if (m <= 3) few_rows(a, b, m, n, k, alpha, beta, c, ldc, kind, 3);
    else if (m <= 4) few_rows(a, b, m, n, k, alpha, beta, c, ldc, kind, 4);
    else if (m <= 8 && ROWS >= 8) few_rows(a, b, m, n, k, alpha, beta, c, ldc, kind, 8);
    else few_rows(a, b, m, n, k, alpha, beta, c, ldc, kind, ROWS);
    return;
  }
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
