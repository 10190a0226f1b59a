/* Grouped products: the rows of each group times the group's own matrix, and the sums over the rows of each group.

       x: (row, k)     w: (group, k, n), or transposed (group, n, k)     out: (row, n)
       x: (row, k)     y: (row, n)                                       out: (group, k, n)

   The rows of a group lie together; those between two groups, and those after the last one, become zero. A large group is cut by columns, so that threads share it; a row's result depends
   on no other row and on no number of threads. */

#include <string.h>

#include "shared.h"

enum { LEAST_COLUMNS = 128 };

struct grouped {
  gemm_fn gemm;
  const char *x, *other;
  float *out;
  const int32_t *sizes, *starts;
  int bytes, groups, rows, k, n, transposed;
  int columns, across; /* Of a piece, and pieces of a group. */
};

static void product_piece(const void *work, int piece) {
  const struct grouped *t = work;
  const int group = piece / t->across, column = piece % t->across * t->columns, wide = least(t->columns, t->n - column);
  const int start = t->starts[group], size = t->sizes[group], next = group + 1 < t->groups ? t->starts[group + 1] : t->rows;
  const char *w = t->other + t->bytes * ((size_t)group * t->k * t->n + (size_t)column * (t->transposed ? t->k : 1));
  float *out = t->out + (size_t)start * t->n + column;
  if (size)
    t->gemm(ROW_MAJOR, NO_TRANS, t->transposed ? TRANS : NO_TRANS, size, wide, t->k, 1.0f, t->x + t->bytes * (size_t)start * t->k,
            t->k, w, t->transposed ? t->k : t->n, 0.0f, out, t->n);
  for (int row = size; row < next - start; row++) memset(out + (size_t)row * t->n, 0, sizeof(float) * wide);
}

static void outer_piece(const void *work, int piece) {
  const struct grouped *t = work;
  const int group = piece / t->across, column = piece % t->across * t->columns, wide = least(t->columns, t->n - column);
  const size_t start = t->starts[group];
  t->gemm(ROW_MAJOR, TRANS, NO_TRANS, t->k, wide, t->sizes[group], 1.0f, t->x + t->bytes * start * t->k, t->k,
          t->other + t->bytes * (start * t->n + column), t->n, 0.0f, t->out + (size_t)group * t->k * t->n + column, t->n);
}

/* Whether the groups lie one after the other inside of the rows; counts the rows of all and of the largest one. */
static int fits(const struct grouped *t, int *all, int *largest) {
  *all = *largest = 0;
  for (int i = 0, end = 0; i < t->groups; i++) {
    if (t->sizes[i] < 0 || t->starts[i] < end || t->sizes[i] > t->rows - t->starts[i]) return 0;
    end = t->starts[i] + t->sizes[i];
    *all += t->sizes[i];
    if (t->sizes[i] > *largest) *largest = t->sizes[i];
  }
  return 1;
}

static XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, int outer) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *x = frame->args.args[0], *other = frame->args.args[1], *sizes = frame->args.args[2];
  const XLA_FFI_Buffer *starts = frame->args.args[3], *out = frame->rets.rets[0];
  const int bf16 = x->dtype == XLA_FFI_DataType_BF16;
  if (x->dtype != other->dtype || out->dtype != XLA_FFI_DataType_F32 || (!bf16 && x->dtype != XLA_FFI_DataType_F32))
    return refuse(frame, "panax: a grouped product of other types than two of float32 or bfloat16 into float32");
  if (sizes->dtype != XLA_FFI_DataType_S32 || starts->dtype != XLA_FFI_DataType_S32)
    return refuse(frame, "panax: the sizes and starts of groups are not int32");
  struct grouped work = {
      .gemm = gemm_of(int_attribute(frame, "kernel"), bf16),
      .x = x->data,
      .other = other->data,
      .out = out->data,
      .sizes = sizes->data,
      .starts = starts->data,
      .bytes = bf16 ? 2 : 4,
      .groups = (int)sizes->dims[0],
      .rows = (int)x->dims[0],
      .k = (int)x->dims[1],
      .n = (int)out->dims[outer ? 2 : 1],
      .transposed = outer ? 0 : int_attribute(frame, "transposed"),
  };
  if (!work.gemm) return refuse(frame, "panax: this machine lacks the kernel that a grouped product was compiled for");
  int all, largest;
  if (!fits(&work, &all, &largest)) return refuse(frame, "panax: the groups of a grouped product are not inside of its rows");
  if (!work.n) return 0;
  /* Each part packs the group's rows again: whole groups, unless one would keep a thread busy when the others are done. */
  const int threads = threads_of(frame), whole = (int64_t)largest * 2 * threads <= all;
  const int parts = whole ? 1 : least(threads, (work.n + LEAST_COLUMNS - 1) / LEAST_COLUMNS);
  work.columns = ((work.n + parts - 1) / parts + 31) / 32 * 32;
  work.across = (work.n + work.columns - 1) / work.columns;
  share_out(frame, work.groups * work.across, outer ? outer_piece : product_piece, &work);
  return 0;
}

XLA_FFI_Error *panax_grouped_product(XLA_FFI_CallFrame *frame) { return run(frame, 0); }
XLA_FFI_Error *panax_grouped_outer(XLA_FFI_CallFrame *frame) { return run(frame, 1); }
