/* What attention does to rows of scores, by vectors: the largest value, exponentials, and their derivatives. */

#ifndef PANAX_ROWS_H
#define PANAX_ROWS_H

#include <math.h>

#include "vectors.h"

#if defined(LANES)

/* As in kernels/attention/mask.py: their differences are finite, so no row can turn into a NaN. */
static const float MASKED = -1e30f, LOWEST_MAXIMUM = -1e20f;

static inline uint16_t to_bf16(float x) {
  union { float value; uint32_t bits; } u = {.value = x};
  if (x != x) return 0x7fc0;
  return (uint16_t)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16); /* To the nearest, ties to even. */
}

static inline void round_row(const float *x, uint16_t *y, int size) {
  for (int c = 0; c < size; c++) y[c] = to_bf16(x[c]);
}

static inline float capped(float x, float soft_cap) {
  const float small = expf(-2.0f * fabsf(x) / soft_cap);
  return copysignf(soft_cap * (1.0f - small) / (1.0f + small), x);
}

/* The row before `start` and from `stop` on is zero. */
static inline void clear_outside(float *row, int start, int stop, int size) {
  memset(row, 0, sizeof(float) * start);
  memset(row + stop, 0, sizeof(float) * (size - stop));
}

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

/* Where one is not a number it is b. */
static inline vec larger(vec a, vec b) {
#if LANES == 16
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#endif
}

static inline vec all(float x) { return (vec){0} + x; }

/* e^x within two units in the last place, 0 where that is below the normal numbers; for x up to 88. Reduced to |r| <= ln(2) / 2,
   then the polynomial of Cephes' expf (www.netlib.org/cephes). */
static inline vec exponential(vec x) {
  const float magic = 12582912.0f; /* Adding it rounds to whole numbers, which then are the lowest bits. */
  x = larger(all(-88.02969f), x); /* -127 ln(2), whose power of two is made of the bits of zero. */
  const vec rounded = x * 1.44269504f + magic, n = rounded - magic;
  const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const ivec power = ((ivec)rounded << 23) + (127 << 23);
  return (p * (r * r) + r + 1.0f) * (vec)power;
}

static inline void put(float *to, vec x) { *(loose *)to = x; }

/* The last numbers of a row as a vector, with others in the place of what is missing. */
static inline vec load_some(const float *x, int count, float other) {
  float room[LANES];
  for (int i = 0; i < LANES; i++) room[i] = i < count ? x[i] : other;
  return load(room);
}

static inline void put_some(float *to, vec x, int count) {
  float room[LANES];
  put(room, x);
  for (int i = 0; i < count; i++) to[i] = room[i];
}

static inline float largest_lane(vec x) {
  float room[LANES], found;
  put(room, x);
  found = room[0];
  for (int i = 1; i < LANES; i++) found = room[i] > found ? room[i] : found;
  return found;
}

static inline float sum_of_lanes(vec x) {
  float room[LANES], sum = 0;
  put(room, x);
  for (int i = 0; i < LANES; i++) sum += room[i];
  return sum;
}

/* The largest of `size` numbers, or `least`. */
static inline float largest(const float *x, int size, float least) {
  vec a = all(least), b = a;
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) a = larger(a, load(x + i)), b = larger(b, load(x + i + LANES));
  for (; i + LANES <= size; i += LANES) a = larger(a, load(x + i));
  if (i < size) b = larger(b, load_some(x + i, size - i, least));
  return largest_lane(larger(a, b));
}

/* x = e^(x - top), and the sum of that. */
static inline float exponentials(float *x, int size, float top) {
  vec a = {0}, b = {0};
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    const vec p = exponential(load(x + i) - top), q = exponential(load(x + i + LANES) - top);
    put(x + i, p), put(x + i + LANES, q);
    a += p, b += q;
  }
  for (; i < size; i += LANES) {
    const int count = size - i;
    const vec p = exponential((count < LANES ? load_some(x + i, count, -1e30f) : load(x + i)) - top);
    if (count < LANES) put_some(x + i, p, count);
    else put(x + i, p);
    a += p;
  }
  return sum_of_lanes(a + b);
}

/* x = e^(x - logsumexp), dx = (dx - delta) * scale * x. */
static inline void weights_and_derivatives(float *x, float *dx, int size, float logsumexp, float delta, float scale) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec p = exponential(load(x + i) - logsumexp);
    put(x + i, p), put(dx + i, (load(dx + i) - delta) * scale * p);
  }
  if (i < size) {
    const int count = size - i;
    const vec p = exponential(load_some(x + i, count, -1e30f) - logsumexp);
    const vec d = (load_some(dx + i, count, 0.0f) - delta) * scale * p;
    put_some(x + i, p, count), put_some(dx + i, d, count);
  }
}

#endif
#endif
