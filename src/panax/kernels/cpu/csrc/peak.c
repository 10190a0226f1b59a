/* What the processor could do at most: multiplications and additions on registers alone, which no product can exceed. */

#include <time.h>

#include "shared.h"
#include "vectors.h"

enum { MOST_THREADS = 1024 };

#if defined(LANES)

enum { LOOPS = 1 << 16, CHAINS = ROWS * VECTORS };

/* As many sums as a product keeps in registers, each waiting for itself alone. */
static inline void loop(const int pairs) {
  vec sums[CHAINS] = {0}, x = (vec){0} + 1.0f, y = (vec){0} + 1e-9f;
  const uint32_t pair = 0x3f803f80;
  OPAQUE(x);
  OPAQUE(y);
  for (int i = 0; i < LOOPS; i++)
#pragma GCC unroll 24
    for (int j = 0; j < CHAINS; j++) {
      sums[j] = pairs ? add_pairs(sums[j], pair, y) : sums[j] + x * y;
      OPAQUE(sums[j]);
    }
}

static void float_piece(const void *work, int piece) { (void)work, (void)piece, loop(0); }
static void pair_piece(const void *work, int piece) { (void)work, (void)piece, loop(1); }

static double loop_flops(int pairs) { return 2.0 * LANES * CHAINS * LOOPS * (pairs ? 2 : 1); }

#else

enum { HAS_PAIRS = 0 };

static void float_piece(const void *work, int piece) { (void)work, (void)piece; }
static void pair_piece(const void *work, int piece) { (void)work, (void)piece; }

static double loop_flops(int pairs) { return (void)pairs, 0.0; }

#endif

/* Intel's matrix units: tiles of 16 x 16 sums, each of 16 pairs. The system grants them to a process that asks. */
#if defined(__AMX_BF16__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

enum { GRANT = 0x1023, TILE_DATA = 18, TILE_LOOPS = 1 << 14, TILE_CHAINS = 4 };

struct tiles {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

static int has_tiles(void) { return !syscall(SYS_arch_prctl, GRANT, TILE_DATA); }

static double tile_flops(void) { return 2.0 * 16 * 16 * 32 * TILE_CHAINS * TILE_LOOPS; }

static void tile_piece(const void *work, int piece) {
  struct tiles tiles = {.palette = 1};
  (void)work, (void)piece;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  _tile_loadconfig(&tiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int i = 0; i < TILE_LOOPS; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

#else

static int has_tiles(void) { return 0; }
static double tile_flops(void) { return 0.0; }
static void tile_piece(const void *work, int piece) { (void)work, (void)piece; }

#endif

/* Whether bfloat16 is multiplied by instructions of its own. */
int panax_multiplies_bf16(void) { return HAS_PAIRS; }

/* FLOPs of one piece; 0 where there is no loop for this processor. */
static double piece_flops(int bf16) { return bf16 && has_tiles() ? tile_flops() : loop_flops(bf16 && HAS_PAIRS); }

struct peak {
  int bf16;
  double rates[MOST_THREADS]; /* FLOP/s of each piece, in time of its own thread: other programs take none of it. */
};

static void timed_piece(const void *work, int piece) {
  struct peak *peak = (struct peak *)work;
  struct timespec start, end;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
  if (!peak->bf16) float_piece(work, piece);
  else if (has_tiles()) tile_piece(work, piece);
  else if (HAS_PAIRS) pair_piece(work, piece);
  else float_piece(work, piece);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  peak->rates[piece] = piece_flops(peak->bf16) / ((end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec));
}

/* A piece for each thread of XLA's pool, all at once; the result is the FLOP/s of all. */
XLA_FFI_Error *panax_peak(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  struct peak peak = {.bf16 = int_attribute(frame, "bf16")};
  const int threads = least(threads_of(frame), MOST_THREADS);
  share_out(frame, threads, timed_piece, &peak);
  double sum = 0;
  for (int i = 0; i < threads; i++) sum += peak.rates[i];
  *(float *)((XLA_FFI_Buffer *)frame->rets.rets[0])->data = (float)sum;
  return 0;
}
