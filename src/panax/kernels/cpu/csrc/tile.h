/* The panels of a product and the tile of sums in registers, which products (gemm.c) and convolutions (convolution.c) are made of.

       panel of A: [words][ROWS]      panel of B: [words][COLUMNS]      a word: a float32, or a pair along k of bfloat16               */

#ifndef PANAX_TILE_H
#define PANAX_TILE_H

#include "shared.h"
#include "vectors.h"

#if defined(LANES)

enum { COLUMNS = VECTORS * LANES, BLOCK_M = (144 / ROWS) * ROWS, BLOCK_WORDS = 384, BLOCK_N = (1536 / COLUMNS) * COLUMNS };

/* What a panel is made of: float32, bfloat16 widened to float32, or pairs of bfloat16. */
enum kind { FLOATS, WIDENED, PAIRS };

static inline uint32_t word32(const void *x) {
  uint32_t word;
  memcpy(&word, x, 4);
  return word;
}

static inline uint32_t widened(const void *x) {
  uint16_t half;
  memcpy(&half, x, 2);
  return (uint32_t)half << 16;
}

/* Word `w` of a row: one element, or two of bfloat16 that become two. */
static inline void pack_word(uint32_t *to, const char *x, int w, size_t width, const int widen) {
  if (widen) to[2 * w * width] = widened(x + 4 * w), to[(2 * w + 1) * width] = widened(x + 4 * w + 2);
  else to[w * width] = word32(x + 4 * w);
}

/* Four rows of four words each, as four columns. */
static inline void transpose(quad out[4], const char *from, size_t step) {
  const quad a = load_quad(from), b = load_quad(from + step), c = load_quad(from + 2 * step), d = load_quad(from + 3 * step);
  const quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5), out[1] = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), out[3] = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/* Rows whose elements lie one after the other: four at a time, by words of 32 bits. */
static inline void pack_rows(uint32_t *restrict panel, const char *x, size_t step, int rows, const int width, int words, const int widen) {
  int row = 0;
  for (; row + 4 <= rows; row += 4, x += 4 * step) {
    int w = 0;
    for (; w + 4 <= words; w += 4) {
      uint32_t *to = panel + (size_t)w * (widen ? 2 : 1) * width + row;
      quad columns[4];
      transpose(columns, x + 4 * w, step);
      for (int i = 0; i < 4; i++)
        if (widen) {
          store_quad(to + 2 * i * width, columns[i] << 16);
          store_quad(to + (2 * i + 1) * width, columns[i] & 0xffff0000u);
        } else {
          store_quad(to + i * width, columns[i]);
        }
    }
    for (; w < words; w++)
      for (int i = 0; i < 4; i++) pack_word(panel + row + i, x + i * step, w, width, widen);
  }
  for (; row < rows; row++, x += step)
    for (int w = 0; w < words; w++) pack_word(panel + row, x, w, width, widen);
}

/* The first `rows` rows of the product of two panels. */
static inline void multiply_rows(const uint32_t *restrict a, const uint32_t *restrict b, int words, vec sum[ROWS][VECTORS],
                                 const enum kind kind, const int rows) {
  vec s[ROWS][VECTORS] = {0};
  for (int w = 0; w < words; w++, a += ROWS, b += COLUMNS) {
    vec right[VECTORS];
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) {
      right[j] = load(b + j * LANES);
      __builtin_prefetch(b + 8 * COLUMNS + j * LANES);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
      for (int j = 0; j < VECTORS; j++) s[i][j] = kind == PAIRS ? add_pairs(s[i][j], a[i], right[j]) : s[i][j] + number(a[i]) * right[j];
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) sum[i][j] = s[i][j];
}

/* sum[ROWS][VECTORS] = the product of two panels; of the last rows of a matrix, no more than a third of a tile in vain. */
static inline void multiply(const uint32_t *restrict a, const uint32_t *restrict b, int words, vec sum[ROWS][VECTORS], int rows,
                            const enum kind kind) {
  enum { THIRD = ROWS / 3, MOST = ROWS - THIRD };
  if (rows > MOST) multiply_rows(a, b, words, sum, kind, ROWS);
  else if (rows > THIRD) multiply_rows(a, b, words, sum, kind, MOST);
  else multiply_rows(a, b, words, sum, kind, THIRD);
}

/* c = alpha * sum + beta * c, in the rows and columns that are there. */
static inline void store(vec sum[ROWS][VECTORS], float *c, size_t ldc, int rows, int columns, float alpha, float beta) {
  if (columns == COLUMNS) {
    for (int i = 0; i < rows; i++, c += ldc)
#pragma GCC unroll 3
      for (int j = 0; j < VECTORS; j++) {
        vec value = sum[i][j] * alpha;
        if (beta != 0.0f) value += beta * load(c + j * LANES);
        *(loose *)(c + j * LANES) = value;
      }
    return;
  }
  for (int i = 0; i < rows; i++, c += ldc) {
    const float *row = (const float *)sum[i];
    for (int j = 0; j < columns; j++) c[j] = beta != 0.0f ? alpha * row[j] + beta * c[j] : alpha * row[j];
  }
}

/* Words of a thread's panels, with room for what is fetched ahead. */
enum { WORDS_A = BLOCK_M * (BLOCK_WORDS + 16), WORDS_B = BLOCK_N * (BLOCK_WORDS + 16) };

#endif
#endif
