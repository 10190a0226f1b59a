/* Compares products and rows of scores with double precision, in a program of its own: for processors that only an emulator has. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "rows.h"
#include "shared.h"

void panax_gemm_f32(int, int, int, int, int, int, float, const void *, int, const void *, int, float, float *, int);
void panax_gemm_bf16(int, int, int, int, int, int, float, const void *, int, const void *, int, float, float *, int);

static const int SIZES[][3] = {{1, 1, 1}, {1, 70, 33}, {5, 1, 801}, {13, 17, 7}, {37, 41, 384}, {150, 33, 385}, {3, 5, 0}};

/* Numbers that bfloat16 holds, as both types. */
static void draw(float *wide, uint16_t *narrow, int count) {
  for (int i = 0; i < count; i++) {
    union { float value; uint32_t bits; } u = {.value = (float)rand() / (float)RAND_MAX * 2 - 1};
    u.bits &= 0xffff0000u;
    wide[i] = u.value, narrow[i] = (uint16_t)(u.bits >> 16);
  }
}

static int wrong_products(int m, int n, int k, int trans_a, int trans_b, int bf16) {
  float *a = calloc((size_t)m * k + 1, 4), *b = calloc((size_t)k * n + 1, 4), *c = malloc((size_t)m * n * 4);
  uint16_t *narrow_a = calloc((size_t)m * k + 1, 2), *narrow_b = calloc((size_t)k * n + 1, 2);
  int wrong = 0;
  draw(a, narrow_a, m * k), draw(b, narrow_b, k * n);
  (bf16 ? panax_gemm_bf16 : panax_gemm_f32)(ROW_MAJOR, trans_a ? TRANS : NO_TRANS, trans_b ? TRANS : NO_TRANS, m, n, k, 1.0f,
                                            bf16 ? (void *)narrow_a : a, trans_a ? m : k, bf16 ? (void *)narrow_b : b,
                                            trans_b ? k : n, 0.0f, c, n);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = 0, terms = 0;
      for (int p = 0; p < k; p++) {
        const double term = (double)a[trans_a ? p * m + i : i * k + p] * b[trans_b ? j * k + p : p * n + j];
        sum += term, terms += fabs(term);
      }
      wrong += !(fabs(c[i * n + j] - sum) <= terms * 0x1p-23 * (k + 2));
    }
  free(a), free(b), free(c), free(narrow_a), free(narrow_b);
  return wrong;
}

static int wrong_rows(int size) {
  const float cut = 0x1p-126f;
  float x[80], y[80], dx[80], dy[80];
  double sum = 0;
  int wrong = 0;
  for (int i = 0; i < size; i++) y[i] = x[i] = -0.7f * i + 3 * sinf(i) - (i % 7 == 3 ? 1e30f : 0), dy[i] = dx[i] = cosf(i);
  const float top = largest(x, size, -1e20f), found = exponentials(x, size, top);
  for (int i = 0; i < size; i++) {
    const double e = exp((double)(y[i] - top));
    wrong += !(y[i] <= top) + !(fabs(x[i] - e) <= 0x1p-22 * e + cut);
    sum += e;
  }
  wrong += !(fabs(found - sum) <= 1e-5 * sum);
  for (int i = 0; i < size; i++) x[i] = y[i];
  weights_and_derivatives(x, dx, size, top + 1, 0.25f, 0.5f);
  for (int i = 0; i < size; i++) {
    const double e = exp((double)(y[i] - (top + 1))), d = (dy[i] - 0.25) * 0.5 * e;
    wrong += !(fabs(x[i] - e) <= 0x1p-22 * e + cut) + !(fabs(dx[i] - d) <= 0x1p-20 * fabs(d) + 2 * cut);
  }
  x[0] = NAN;
  exponentials(x, 1, 0.0f);
  return wrong + (x[0] == x[0]);
}

int main(void) {
  int wrong = 0;
  for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
    for (int kind = 0; kind < 8; kind++)
      wrong += wrong_products(SIZES[i][0], SIZES[i][1], SIZES[i][2], kind & 1, kind >> 1 & 1, kind >> 2);
  for (int size = 1; size < 80; size++) wrong += wrong_rows(size);
  printf("%d values are wrong\n", wrong);
  return wrong > 0;
}
