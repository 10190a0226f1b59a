/* Convolutions of float32 in up to three dimensions, and their gradients by the weights, as products of matrices of which one is
   never written down: its panels are filled from the image (im2col; Chellapilla et al., 2006, inside of BLIS's packing).

   Forward, and by the input:   out[o][position] = sum over (tap, c) of w[o][(tap, c)] * x[c][position * stride - pad + tap * dilation]
   By the weights:              d_w[o][(tap, c)] = sum over positions of d_out[o][position] * x[c][the same place]

       x, d_out: (images, groups * channels, planes, rows, columns)      w: (groups * outputs, inputs, taps...)

   `exchanged` weights are those of the convolution that this one goes back through: their first axis is summed over, their second
   one is the outputs, and forward their taps are read from the last to the first.

   `spread`, the dilation of x, puts zeros between its places, as a transposed convolution has them. They are not multiplied: the positions that
   are alike modulo the spread (a phase) meet the same taps, and each phase is a product of its own. Each sum has one order, by
   blocks of BLOCK_WORDS, whatever the number of threads, images or outputs. */

#include "shared.h"
#include "tile.h"

#if defined(LANES)

#include <string.h>

enum { AXES = 3, SPAN = BLOCK_WORDS };

struct convolution {
  const uint32_t *x, *x_end;
  const float *other; /* w, or d_out. */
  float *out;
  int images, groups, inputs, outputs; /* Channels of one group. */
  int in[AXES], positions[AXES], taps[AXES];
  const int32_t *stride, *pad, *dilation, *spread;
  int in_size, out_size, all_taps; /* Products of the above. */
  int exchanged;
  size_t row_step, channel_step, group_step; /* In the weights, between outputs, inputs and groups. */
  int columns, rows, across, down; /* Of a piece, and the number of pieces in each direction. */
};

/* The positions that are alike modulo the spread, and the taps that they meet. */
struct phase {
  int first[AXES], count[AXES], first_tap[AXES], tap_step[AXES], taps[AXES];
  int all, size, all_taps; /* Positions of all images, of one image; taps. */
};

/* Consecutive positions: where tap zero would read without padding, and how far that is along each axis. */
struct window {
  int count, base[SPAN], at[AXES][SPAN];
};

/* What one tap reads for a window: runs of places at the distance `step`, of which the first one is `from`; below zero it is
   padding. Or place by place. */
struct source {
  int runs, step, scattered, offset[SPAN];
  struct {
    int start, length, from;
  } run[SPAN];
};

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* Quotient and whether it is one, of numbers that may be negative. */
static int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

static struct phase phase_of(const struct convolution *t, int number) {
  struct phase phase = {.size = 1, .all_taps = 1};
  for (int d = AXES - 1; d >= 0; d--) {
    const int spread = t->spread[d], first = number % spread;
    number /= spread;
    int tap = 0, step = 1;
    while (step < spread && step * t->dilation[d] % spread) step++;
    while (tap < step && (first - t->pad[d] + tap * t->dilation[d]) % spread) tap++;
    phase.first[d] = first;
    phase.count[d] = first < t->positions[d] ? ceil_div(t->positions[d] - first, spread) : 0;
    phase.first_tap[d] = tap;
    phase.tap_step[d] = step;
    phase.taps[d] = tap < step && tap < t->taps[d] ? ceil_div(t->taps[d] - tap, step) : 0;
    phase.size *= phase.count[d];
    phase.all_taps *= phase.taps[d];
  }
  phase.all = phase.size * t->images;
  return phase;
}

/* The phase's positions from `first` on; `target` gets where their results lie in the first output of the first group. What is
   beyond the last position reads padding. */
static void look(struct window *window, int *target, const struct convolution *t, const struct phase *phase, int first, int count,
                 int width) {
  int rest = first % phase->size, image = first / phase->size, q[AXES];
  for (int d = AXES - 1; d >= 0; d--) q[d] = rest % phase->count[d], rest /= phase->count[d];
  window->count = width;
  for (int j = count; j < width; j++) window->base[j] = 0, window->at[0][j] = window->at[1][j] = window->at[2][j] = -(1 << 30);
  for (int j = 0; j < count; j++) {
    int base = image * t->groups * t->inputs, out = image * t->groups * t->outputs;
    for (int d = 0; d < AXES; d++) {
      window->at[d][j] = q[d] * t->stride[d];
      base = base * t->in[d] + q[d] * t->stride[d];
      out = out * t->positions[d] + phase->first[d] + q[d] * t->spread[d];
    }
    window->base[j] = base;
    if (target) target[j] = out;
    if (++q[2] == phase->count[2] && (q[2] = 0, ++q[1] == phase->count[1]) && (q[1] = 0, ++q[0] == phase->count[0]))
      q[0] = 0, image++;
  }
}

/* A tap: its place among all, and how far from its position it reads, along each axis and in memory. */
struct tap {
  int index, shift[AXES], offset;
};

/* The phase's tap of that number. */
static struct tap tap_of(const struct convolution *t, const struct phase *phase, int number) {
  struct tap tap = {0};
  int place[AXES];
  for (int d = AXES - 1; d >= 0; d--) place[d] = number % phase->taps[d], number /= phase->taps[d];
  for (int d = 0; d < AXES; d++) {
    const int index = phase->first_tap[d] + place[d] * phase->tap_step[d];
    tap.shift[d] = floor_div(phase->first[d] - t->pad[d] + index * t->dilation[d], t->spread[d]);
    tap.offset = tap.offset * t->in[d] + tap.shift[d];
    tap.index = tap.index * t->taps[d] + index;
  }
  return tap;
}

/* What a tap reads for a window, relative to the first channel. */
static void read_tap(struct source *source, const struct convolution *t, const struct window *window, struct tap tap) {
  for (int j = 0; j < window->count; j++) {
    int inside = 1; /* Without branches, so that it is done by vectors; as unsigned, a place before the first is a large one. */
    for (int d = 0; d < AXES; d++) inside &= (unsigned)(window->at[d][j] + tap.shift[d]) < (unsigned)t->in[d];
    source->offset[j] = inside ? window->base[j] + tap.offset : -1;
  }
  int runs = 0;
  source->step = t->stride[AXES - 1];
  for (int j = 0, start = 0; j < window->count; j = start) {
    const int from = source->offset[j], step = from >= 0 ? source->step : 0;
    for (start = j + 1; start < window->count && source->offset[start] == from + step * (start - j);) start++;
    source->run[runs].start = j, source->run[runs].length = start - j, source->run[runs++].from = from;
  }
  source->runs = runs;
  source->scattered = source->step > 2 || runs > window->count / 4;
}

/* Every second number of two vectors. */
static inline vec even(vec a, vec b) {
#if LANES == 16
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif LANES == 8
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}

/* One channel of a window. May write up to a vector more than the window has, which the caller has room for or overwrites. */
static inline void fetch(uint32_t *restrict to, const uint32_t *x, const uint32_t *end, const struct source *source, int count) {
  if (source->scattered) {
    for (int j = 0; j < count; j++) to[j] = source->offset[j] < 0 ? 0 : x[source->offset[j]];
    return;
  }
  for (int r = 0; r < source->runs; r++) {
    const int length = source->run[r].length, from = source->run[r].from;
    uint32_t *out = to + source->run[r].start;
    const uint32_t *in = x + from;
    if (from < 0)
      for (int i = 0; i < length; i += LANES) *(loose *)(out + i) = (vec){0};
    else if (end - in < source->step * (length + LANES))
      for (int i = 0; i < length; i++) out[i] = in[i * source->step];
    else if (source->step == 1)
      for (int i = 0; i < length; i += LANES) *(loose *)(out + i) = load(in + i);
    else
      for (int i = 0; i < length; i += LANES) *(loose *)(out + i) = even(load(in + 2 * i), load(in + 2 * i + LANES));
  }
}

static void scatter(vec sum[ROWS][VECTORS], float *out, size_t row_step, const int *target, int rows, int columns, int add) {
  for (int i = 0; i < rows; i++, out += row_step) {
    const float *row = (const float *)sum[i];
    for (int j = 0; j < columns; j++) out[target[j]] = add ? out[target[j]] + row[j] : row[j];
  }
}

/* Words of a thread's panels, all of A and one of B, with room for what is fetched ahead or beyond the last word. */
enum { ROOM_A = BLOCK_N * (BLOCK_WORDS + 16), ROOM_B = COLUMNS * (BLOCK_WORDS + 16) };

/* A part of the outputs of one group at a part of the positions of one phase. */
static void forward_piece(const void *work, int piece) {
  const struct convolution *t = work;
  const int row_first = piece % t->down * t->rows, column_first = piece / t->down % t->across * t->columns;
  const int group = piece / t->down / t->across % t->groups;
  const struct phase phase = phase_of(t, piece / t->down / t->across / t->groups);
  const int depth = phase.all_taps * t->inputs, wide = least(t->columns, phase.all - column_first);
  const int high = least(t->rows, t->outputs - row_first);
  const uint32_t *x = t->x + (size_t)group * t->inputs * t->in_size;
  float *out = t->out + (size_t)(group * t->outputs + row_first) * t->out_size;
  const float *w = t->other + group * t->group_step + row_first * t->row_step;
  uint32_t *panels_a = thread_memory(PANELS, sizeof(uint32_t) * (ROOM_A + ROOM_B)), *panel_b = panels_a + ROOM_A;
  int target[COLUMNS];
  struct window window;
  struct source source;
  vec sum[ROWS][VECTORS];
  for (int p = 0; wide > 0 && (!p || p < depth); p += BLOCK_WORDS) { /* Once at least: a sum of nothing is zero. */
    const int words = least(BLOCK_WORDS, depth - p);
    for (int i = 0; i < high; i += ROWS) {
      uint32_t *panel = panels_a + (size_t)i * words;
      const int rows = least(ROWS, high - i);
      if (rows < ROWS) memset(panel, 0, sizeof(uint32_t) * (size_t)words * ROWS);
      for (int word = 0, n; word < words; word += n) {
        const int channel = (p + word) % t->inputs, tap = tap_of(t, &phase, (p + word) / t->inputs).index;
        const float *from = w + i * t->row_step + channel * t->channel_step + (t->exchanged ? t->all_taps - 1 - tap : tap);
        n = least(t->inputs - channel, words - word);
        for (int k = 0; k < n; k++, from += t->channel_step)
          for (int row = 0; row < rows; row++) panel[(word + k) * ROWS + row] = word32(from + row * t->row_step);
      }
    }
    for (int j = 0; j < wide; j += COLUMNS) {
      const int columns = least(COLUMNS, wide - j);
      look(&window, target, t, &phase, column_first + j, columns, COLUMNS);
      for (int word = 0, n; word < words; word += n) {
        const int channel = (p + word) % t->inputs;
        n = least(t->inputs - channel, words - word);
        read_tap(&source, t, &window, tap_of(t, &phase, (p + word) / t->inputs));
        for (int i = 0; i < n; i++)
          fetch(panel_b + (word + i) * COLUMNS, x + (size_t)(channel + i) * t->in_size, t->x_end, &source, COLUMNS);
      }
      const int neighbors = target[columns - 1] - target[0] == columns - 1;
      for (int i = 0; i < high; i += ROWS) {
        const int rows = least(ROWS, high - i);
        float *c = out + (size_t)i * t->out_size;
        multiply(panels_a + (size_t)i * words, panel_b, words, sum, rows, FLOATS);
        if (neighbors) store(sum, c + target[0], t->out_size, rows, columns, 1.0f, p ? 1.0f : 0.0f);
        else scatter(sum, c, t->out_size, target, rows, columns, p);
      }
    }
  }
}

/* A part of the weights of one group: its sums over all positions. */
static void by_weights_piece(const void *work, int piece) {
  enum { STEP = SPAN + 2 * LANES };
  const struct convolution *t = work;
  const int row_first = piece % t->down * t->rows, column_first = piece / t->down % t->across * t->columns;
  const int group = piece / t->down / t->across;
  const struct phase phase = phase_of(t, 0);
  const int wide = least(t->columns, t->all_taps * t->inputs - column_first), high = least(t->rows, t->outputs - row_first);
  const uint32_t *x = t->x + (size_t)group * t->inputs * t->in_size;
  const size_t step = sizeof(float) * (size_t)t->out_size;
  uint32_t *panels_a = thread_memory(PANELS, sizeof(uint32_t) * (ROOM_A + ROOM_B)), *panel_b = panels_a + ROOM_A;
  uint32_t *rows_of_b = thread_memory(SCRATCH, sizeof(uint32_t) * ((size_t)COLUMNS * STEP + (size_t)high * wide));
  float *sums = (float *)(rows_of_b + COLUMNS * STEP);
  struct window window;
  struct source source;
  vec sum[ROWS][VECTORS];
  for (int p = 0; !p || p < phase.all; p += BLOCK_WORDS) {
    const int words = least(BLOCK_WORDS, phase.all - p);
    for (int i = 0; i < high; i += ROWS) {
      uint32_t *panel = panels_a + (size_t)i * words;
      const int rows = least(ROWS, high - i);
      if (rows < ROWS) memset(panel, 0, sizeof(uint32_t) * (size_t)words * ROWS);
      for (int word = 0, n; word < words; word += n) {
        const int image = (p + word) / t->out_size, place = (p + word) % t->out_size;
        n = least(t->out_size - place, words - word);
        const size_t channel = (size_t)(image * t->groups + group) * t->outputs + row_first + i;
        const float *from = t->other + channel * t->out_size + place;
        pack_rows(panel + word * ROWS, (const char *)from, step, rows, ROWS, n, 0);
      }
    }
    if (words) look(&window, NULL, t, &phase, p, words, words);
    for (int j = 0, tap = -1; j < wide; j += COLUMNS) {
      const int columns = least(COLUMNS, wide - j);
      for (int i = 0; words && i < columns; i++) {
        const int column = column_first + j + i;
        if (tap != column / t->inputs) read_tap(&source, t, &window, tap_of(t, &phase, tap = column / t->inputs));
        fetch(rows_of_b + i * STEP, x + (size_t)(column % t->inputs) * t->in_size, t->x_end, &source, words);
      }
      if (columns < COLUMNS) memset(panel_b, 0, sizeof(uint32_t) * (size_t)words * COLUMNS);
      pack_rows(panel_b, (const char *)rows_of_b, sizeof(uint32_t) * STEP, columns, COLUMNS, words, 0);
      for (int i = 0; i < high; i += ROWS) {
        const int rows = least(ROWS, high - i);
        multiply(panels_a + (size_t)i * words, panel_b, words, sum, rows, FLOATS);
        store(sum, sums + (size_t)i * wide + j, wide, rows, columns, 1.0f, p ? 1.0f : 0.0f);
      }
    }
  }
  for (int i = 0; i < high; i++) {
    float *out = t->out + group * t->group_step + (row_first + i) * t->row_step;
    for (int j = 0; j < wide; j++, sums++)
      out[(column_first + j) % t->inputs * t->channel_step + (column_first + j) / t->inputs] = *sums;
  }
}

/* Pieces for each thread: parts of whichever side is longer, so that the shorter one is packed again and again. No more rows than
   the panels of A hold. */
static int cut(struct convolution *t, int columns, int rows, int independent, int threads) {
  const int share = ceil_div(threads, independent), by_rows = rows > columns && rows >= share * ROWS;
  t->columns = ceil_div(ceil_div(columns, by_rows ? 1 : share), COLUMNS) * COLUMNS;
  t->across = ceil_div(columns, t->columns);
  t->rows = least(BLOCK_N / ROWS, ceil_div(ceil_div(rows, ceil_div(share, t->across)), ROWS)) * ROWS;
  t->down = ceil_div(rows, t->rows);
  return independent * t->across * t->down;
}

static int size_of(const int *axes) { return axes[0] * axes[1] * axes[2]; }

/* What both functions take. `w` has the shape of the weights; `d_out`, that of the outputs. */
static int read(struct convolution *t, const XLA_FFI_CallFrame *frame, const XLA_FFI_Buffer *w, const XLA_FFI_Buffer *d_out) {
  const XLA_FFI_Buffer *x = frame->args.args[0], *other = frame->args.args[1], *result = frame->rets.rets[0];
  if (x->rank != AXES + 2 || w->rank != AXES + 2 || d_out->rank != AXES + 2) return 0;
  if (x->dtype != XLA_FFI_DataType_F32 || other->dtype != XLA_FFI_DataType_F32 || result->dtype != XLA_FFI_DataType_F32) return 0;
  const int groups = int_attribute(frame, "groups"), exchanged = int_attribute(frame, "exchanged");
  const int first = (int)w->dims[0] / groups, second = (int)w->dims[1];
  *t = (struct convolution){
      .x = x->data,
      .other = other->data,
      .out = result->data,
      .images = (int)x->dims[0],
      .groups = groups,
      .inputs = exchanged ? first : second,
      .outputs = exchanged ? second : first,
      .exchanged = exchanged,
      .stride = ints_attribute(frame, "stride"),
      .pad = ints_attribute(frame, "padding"),
      .dilation = ints_attribute(frame, "dilation"),
      .spread = ints_attribute(frame, "input_dilation"),
  };
  for (int d = 0; d < AXES; d++) {
    t->in[d] = (int)x->dims[2 + d], t->positions[d] = (int)d_out->dims[2 + d], t->taps[d] = (int)w->dims[2 + d];
    if (t->spread[d] > 1 && t->stride[d] > 1) return 0;
  }
  t->in_size = size_of(t->in), t->out_size = size_of(t->positions), t->all_taps = size_of(t->taps);
  t->row_step = (size_t)t->all_taps * (exchanged ? 1 : second), t->channel_step = (size_t)t->all_taps * (exchanged ? second : 1);
  t->group_step = (size_t)first * second * t->all_taps;
  t->x_end = t->x + (size_t)t->images * groups * t->inputs * t->in_size;
  return x->dims[1] == groups * t->inputs && d_out->dims[1] == groups * t->outputs && d_out->dims[0] == t->images;
}

XLA_FFI_Error *panax_convolution(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  struct convolution work;
  if (!read(&work, frame, frame->args.args[1], frame->rets.rets[0]))
    return refuse(frame, "panax: the arguments of a convolution disagree");
  const struct phase first = phase_of(&work, 0); /* No phase has more positions. */
  const int phases = work.spread[0] * work.spread[1] * work.spread[2];
  if (!first.all || !work.outputs) return 0;
  share_out(frame, cut(&work, first.all, work.outputs, phases * work.groups, threads_of(frame)), forward_piece, &work);
  return 0;
}

XLA_FFI_Error *panax_convolution_by_weights(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  struct convolution work;
  if (!read(&work, frame, frame->rets.rets[0], frame->args.args[1]) || work.spread[0] * work.spread[1] * work.spread[2] != 1)
    return refuse(frame, "panax: the arguments of a convolution's gradient disagree");
  const int columns = work.all_taps * work.inputs;
  if (!columns || !work.outputs) return 0;
  share_out(frame, cut(&work, columns, work.outputs, work.groups, threads_of(frame)), by_weights_piece, &work);
  return 0;
}

#else

XLA_FFI_Error *panax_convolution(XLA_FFI_CallFrame *frame) {
  return only_asked(frame) ? 0 : refuse(frame, "panax: there is no convolution for this processor");
}

XLA_FFI_Error *panax_convolution_by_weights(XLA_FFI_CallFrame *frame) { return panax_convolution(frame); }

#endif
