/* Norms, softmax and the logarithm of its sum, each row by itself: a row's result does not depend on how many there are. */

#include <math.h>

#include "rows.h"
#include "shared.h"

#if defined(LANES)

enum { ROWS_AT_ONCE = 16 };

struct row_function {
  const char *x;
  const float *scale, *bias;
  char *out;
  int rows, columns, bf16, centered, size;
  float epsilon, gain;
};

static float sum_of_row(const float *x, int size) {
  vec a = {0}, b = {0};
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) a += load(x + i), b += load(x + i + LANES);
  for (; i < size; i += LANES) a += size - i < LANES ? load_some(x + i, size - i, 0.0f) : load(x + i);
  return sum_of_lanes(a + b);
}

static float squares_of_row(const float *x, int size) {
  vec a = {0}, b = {0};
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    const vec p = load(x + i), q = load(x + i + LANES);
    a += p * p, b += q * q;
  }
  for (; i < size; i += LANES) {
    const vec p = size - i < LANES ? load_some(x + i, size - i, 0.0f) : load(x + i);
    a += p * p;
  }
  return sum_of_lanes(a + b);
}

static void normalize_rows(const void *work, int piece) {
  const struct row_function *t = work;
  const int n = t->columns;
  float *y = thread_memory(SCRATCH, sizeof(float) * n);
  for (int row = piece * ROWS_AT_ONCE; row < least((piece + 1) * ROWS_AT_ONCE, t->rows); row++) {
    const size_t place = (size_t)row * n;
    for (int i = 0; i < n; i++) {
      if (t->bf16) y[i] = number((uint32_t)((const uint16_t *)t->x)[place + i] << 16);
      else y[i] = ((const float *)t->x)[place + i];
    }
    if (t->centered) {
      const float mean = sum_of_row(y, n) / (float)n;
      for (int i = 0; i < n; i++) y[i] -= mean;
    }
    const float factor = 1.0f / sqrtf(squares_of_row(y, n) / (float)n + t->epsilon);
    for (int i = 0; i < n; i++) {
      float value = y[i] * factor;
      if (t->scale) value *= t->scale[i];
      if (t->bias) value += t->bias[i];
      y[i] = value * t->gain;
    }
    if (t->bf16) round_row(y, (uint16_t *)t->out + place, n);
    else memcpy(t->out + sizeof(float) * place, y, sizeof(float) * n);
  }
}

static void logsumexp_rows(const void *work, int piece) {
  const struct row_function *t = work;
  float *y = thread_memory(SCRATCH, sizeof(float) * t->size);
  for (int row = piece * ROWS_AT_ONCE; row < least((piece + 1) * ROWS_AT_ONCE, t->rows); row++) {
    const float *x = (const float *)t->x + (size_t)row * t->columns;
    const float top = largest(x, t->size, LOWEST_MAXIMUM);
    memcpy(y, x, sizeof(float) * t->size);
    ((float *)t->out)[row] = top + logf(exponentials(y, t->size, top));
  }
}

static void softmax_rows(const void *work, int piece) {
  const struct row_function *t = work;
  for (int row = piece * ROWS_AT_ONCE; row < least((piece + 1) * ROWS_AT_ONCE, t->rows); row++) {
    const size_t place = (size_t)row * t->columns;
    float *y = (float *)t->out + place;
    memcpy(y, (const float *)t->x + place, sizeof(float) * t->columns);
    const float sum = exponentials(y, t->columns, largest(y, t->columns, LOWEST_MAXIMUM));
    for (int i = 0; i < t->columns; i++) y[i] /= sum;
  }
}

static int rows_of(const XLA_FFI_Buffer *x) {
  int rows = 1;
  for (int64_t i = 0; i + 1 < x->rank; i++) rows *= (int)x->dims[i];
  return rows;
}

XLA_FFI_Error *panax_norm(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const int scaled = int_attribute(frame, "scaled"), biased = int_attribute(frame, "biased");
  const struct row_function work = {
      .x = x->data,
      .scale = scaled ? ((const XLA_FFI_Buffer *)frame->args.args[1])->data : NULL,
      .bias = biased ? ((const XLA_FFI_Buffer *)frame->args.args[1 + scaled])->data : NULL,
      .out = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data,
      .rows = rows_of(x),
      .columns = (int)x->dims[x->rank - 1],
      .bf16 = x->dtype == XLA_FFI_DataType_BF16,
      .centered = int_attribute(frame, "centered"),
      .epsilon = float_attribute(frame, "epsilon"),
      .gain = float_attribute(frame, "gain"),
  };
  if (!work.bf16 && x->dtype != XLA_FFI_DataType_F32) return refuse(frame, "panax: a norm of another type than float32 or bfloat16");
  share_out(frame, (work.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, normalize_rows, &work);
  return 0;
}

/* A function of the first `size` numbers of each row of float32. */
static XLA_FFI_Error *run_floats(XLA_FFI_CallFrame *frame, void (*run)(const void *work, int piece), int size) {
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const struct row_function work = {
      .x = x->data,
      .out = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data,
      .rows = rows_of(x),
      .columns = (int)x->dims[x->rank - 1],
      .size = size,
  };
  if (x->dtype != XLA_FFI_DataType_F32 || size > work.columns)
    return refuse(frame, "panax: a softmax of another type than float32, or past a row's end");
  share_out(frame, (work.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, run, &work);
  return 0;
}

XLA_FFI_Error *panax_softmax(XLA_FFI_CallFrame *frame) { return only_asked(frame) ? 0 : run_floats(frame, softmax_rows, 0); }

XLA_FFI_Error *panax_logsumexp(XLA_FFI_CallFrame *frame) {
  return only_asked(frame) ? 0 : run_floats(frame, logsumexp_rows, int_attribute(frame, "size"));
}

#else

XLA_FFI_Error *panax_norm(XLA_FFI_CallFrame *frame) {
  return only_asked(frame) ? 0 : refuse(frame, "panax: there are no functions of rows for this processor");
}

XLA_FFI_Error *panax_softmax(XLA_FFI_CallFrame *frame) { return panax_norm(frame); }

XLA_FFI_Error *panax_logsumexp(XLA_FFI_CallFrame *frame) { return panax_norm(frame); }

#endif
