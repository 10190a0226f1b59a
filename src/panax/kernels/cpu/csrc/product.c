/* Products of two matrices of float32 or bfloat16 into float32, and what keeps XLA from fusing across them. */

#include <string.h>

#include "shared.h"

struct product {
  gemm_fn gemm;
  const char *a, *b;
  float *c;
  int bytes, trans_a, trans_b, m, n, k, lda, ldb;
  int rows, columns, across; /* Of one piece of the result, and how many pieces lie side by side. */
};

static void one_piece(const void *work, int piece) {
  const struct product *p = work;
  const size_t row = (size_t)(piece / p->across) * p->rows, column = (size_t)(piece % p->across) * p->columns;
  const char *a = p->a + p->bytes * row * (p->trans_a ? 1 : p->lda);
  const char *b = p->b + p->bytes * column * (p->trans_b ? p->ldb : 1);
  p->gemm(ROW_MAJOR, p->trans_a ? TRANS : NO_TRANS, p->trans_b ? TRANS : NO_TRANS, least(p->rows, p->m - (int)row),
          least(p->columns, p->n - (int)column), p->k, 1.0f, a, p->lda, b, p->ldb, 0.0f, p->c + row * p->n + column, p->n);
}

static int half(int size) { return (size / 2 + 15) / 16 * 16; }

/* Into a piece for each thread or a few more, as square as they get: each reads as little as can be. */
static int cut(struct product *p, int threads) {
  p->rows = p->m;
  p->columns = p->n;
  for (int pieces = 1; pieces < threads && (p->rows > 16 || p->columns > 16); pieces *= 2)
    *(p->rows >= p->columns ? &p->rows : &p->columns) = half(p->rows >= p->columns ? p->rows : p->columns);
  p->across = (p->n + p->columns - 1) / p->columns;
  return (p->m + p->rows - 1) / p->rows * p->across;
}

static XLA_FFI_Error *product(XLA_FFI_CallFrame *frame, int trans_a, int trans_b) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *a = frame->args.args[0], *b = frame->args.args[1], *out = frame->rets.rets[0];
  const int bf16 = a->dtype == XLA_FFI_DataType_BF16, k = (int)a->dims[trans_a ? 0 : 1];
  if (a->dtype != b->dtype || out->dtype != XLA_FFI_DataType_F32 || (!bf16 && a->dtype != XLA_FFI_DataType_F32))
    return refuse(frame, "panax: a product of other types than two of float32 or bfloat16 into float32");
  if (b->dims[trans_b ? 1 : 0] != k) return refuse(frame, "panax: the operands of a product disagree on the summed axis");
  const gemm_fn gemm = gemm_of(int_attribute(frame, "kernel"), bf16);
  if (!gemm) return refuse(frame, "panax: this machine lacks the kernel that a product was compiled for");
  struct product work = {
      .gemm = gemm,
      .a = a->data,
      .b = b->data,
      .c = out->data,
      .bytes = bf16 ? 2 : 4,
      .trans_a = trans_a,
      .trans_b = trans_b,
      .m = (int)out->dims[0],
      .n = (int)out->dims[1],
      .k = k,
      .lda = (int)a->dims[1],
      .ldb = (int)b->dims[1],
  };
  const int pieces = cut(&work, threads_of(frame));
  share_out(frame, pieces, one_piece, &work);
  return 0;
}

XLA_FFI_Error *panax_product_nn(XLA_FFI_CallFrame *frame) { return product(frame, 0, 0); }
XLA_FFI_Error *panax_product_nt(XLA_FFI_CallFrame *frame) { return product(frame, 0, 1); }
XLA_FFI_Error *panax_product_tn(XLA_FFI_CallFrame *frame) { return product(frame, 1, 0); }
XLA_FFI_Error *panax_product_tt(XLA_FFI_CallFrame *frame) { return product(frame, 1, 1); }

/* Sums over the rows of a matrix, in blocks of rows: each thread a band of columns, whose order of summing is always the same. */
enum { BAND = 256, SUMMED_ROWS = 256 };

struct row_sums {
  const char *x;
  float *out;
  int bf16, rows, columns;
};

static void one_band(const void *work, int piece) {
  const struct row_sums *t = work;
  const int first = piece * BAND, width = least(BAND, t->columns - first);
  float *out = t->out + first, sums[BAND];
  memset(out, 0, sizeof(float) * width);
  for (int block = 0; block < t->rows; block += SUMMED_ROWS) {
    memset(sums, 0, sizeof sums);
    for (int row = block; row < least(block + SUMMED_ROWS, t->rows); row++) {
      const size_t place = (size_t)row * t->columns + first;
      if (t->bf16) {
        const uint16_t *x = (const uint16_t *)t->x + place;
        for (int i = 0; i < width; i++) {
          const union { uint32_t bits; float value; } wide = {.bits = (uint32_t)x[i] << 16};
          sums[i] += wide.value;
        }
      } else {
        const float *x = (const float *)t->x + place;
        for (int i = 0; i < width; i++) sums[i] += x[i];
      }
    }
    for (int i = 0; i < width; i++) out[i] += sums[i];
  }
}

XLA_FFI_Error *panax_row_sums(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *x = frame->args.args[0];
  const int bf16 = x->dtype == XLA_FFI_DataType_BF16;
  if (!bf16 && x->dtype != XLA_FFI_DataType_F32)
    return refuse(frame, "panax: sums of rows of another type than float32 or bfloat16");
  const struct row_sums work = {x->data, ((XLA_FFI_Buffer *)frame->rets.rets[0])->data, bf16, (int)x->dims[0], (int)x->dims[1]};
  share_out(frame, (work.columns + BAND - 1) / BAND, one_band, &work);
  return 0;
}

/* What it is given, in the same place where XLA could arrange that: a wall that nothing is fused across. */
XLA_FFI_Error *panax_wall(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *x = frame->args.args[0];
  XLA_FFI_Buffer *out = frame->rets.rets[0];
  size_t size = x->dtype == XLA_FFI_DataType_BF16 ? 2 : 4;
  if (x->dtype != XLA_FFI_DataType_BF16 && x->dtype != XLA_FFI_DataType_F32)
    return refuse(frame, "panax: a wall for another type than float32 or bfloat16");
  for (int64_t i = 0; i < x->rank; i++) size *= (size_t)x->dims[i];
  if (out->data != x->data) memcpy(out->data, x->data, size);
  return 0;
}
