/* The vectors of the instruction set that this is compiled for: how many float32 they hold, and the tile of sums that fits into
   the registers. Nothing is defined where a product by them would be no faster than XLA's. */

#ifndef PANAX_VECTORS_H
#define PANAX_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { ROWS = 12, VECTORS = 2 };
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { ROWS = 6, VECTORS = 2 };
#define LANES 8
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { ROWS = 8, VECTORS = 3 };
#define LANES 4
#endif

#if defined(LANES)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t quad __attribute__((vector_size(16)));
/* The same where they lie at any address, among numbers of any type. */
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t loose_quad __attribute__((vector_size(16), aligned(2), may_alias));

static inline vec load(const void *x) { return *(const loose *)x; }
static inline void store_quad(uint32_t *to, quad x) { *(loose_quad *)to = x; }
static inline quad load_quad(const void *x) { return *(const loose_quad *)x; }

/* What the compiler must not look through. */
#if defined(__aarch64__)
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#endif

static inline float number(uint32_t word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}

/* sum + the products of a pair of bfloat16 with each lane's pair. */
#if defined(__AVX512BF16__)
enum { HAS_PAIRS = 1 };
static inline vec add_pairs(vec sum, uint32_t pair, vec pairs) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)pairs);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
enum { HAS_PAIRS = 1 };
static inline vec add_pairs(vec sum, uint32_t pair, vec pairs) {
  return (vec)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32(vdupq_n_u32(pair)), (bfloat16x8_t)pairs);
}
#else
enum { HAS_PAIRS = 0 };
static inline vec add_pairs(vec sum, uint32_t pair, vec pairs) { return (void)pair, (void)pairs, sum; }
#endif

#endif
#endif
