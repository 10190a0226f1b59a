/* Flash attention (arXiv:2205.14135) on CPU: products by a kernel, straight from and into [batch, seq, heads, dim]. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rows.h"
#include "shared.h"

#if defined(LANES)

struct attention {
  gemm_fn gemm;
  int batch, query_seq, key_seq, heads, kv_heads, dim, query_block, key_block, causal, window, offset, bf16, result_bf16;
  float scale, soft_cap;
  const char *q, *k, *v, *d_out;
  const float *logsumexp, *delta;
  const int32_t *query_segments, *key_segments;
  char *out, *d_q, *d_k, *d_v;
  float *logsumexp_out;
};

struct block {
  int query, key, rows, columns;
};

static int most(int a, int b) { return a > b ? a : b; }

/* Where a head of a [batch, seq, heads, dim] array of the operands' type starts, at a position. */
static const void *at(const struct attention *t, const char *x, int b, int seq, int position, int heads, int head) {
  return x + (size_t)(t->bf16 ? 2 : 4) * (((size_t)b * seq + position) * heads + head) * t->dim;
}

static void gemm(const struct attention *t, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda,
                 const void *b, int ldb, float beta, float *c, int ldc) {
  t->gemm(ROW_MAJOR, trans_a ? TRANS : NO_TRANS, trans_b ? TRANS : NO_TRANS, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* The columns of a block that a query may see, as a range. */
static void range_seen(const struct attention *t, const struct block *block, int row, int *start, int *stop) {
  const int query = block->query + row + t->offset;
  const int before = t->window ? query - t->window + (t->causal ? 1 : 0) : block->key;
  const int after = t->causal ? query + 1 : t->window ? query + t->window + 1 : block->key + block->columns;
  *start = least(most(before - block->key, 0), block->columns);
  *stop = most(least(after - block->key, block->columns), *start);
}

static int sees_any(const struct attention *t, const struct block *block) {
  int start, stop, seen = 0;
  /* Ranges move with the query: where first and last see nothing, one between them still may. */
  for (int row = 0; row < block->rows && !seen; row++) {
    range_seen(t, block, row, &start, &stop);
    seen = start < stop;
  }
  return seen;
}

/* Keys of other segments than the query's are masked; segment 0 is padding. */
static void mask_segments(const struct attention *t, const struct block *block, int b, int row, float *x, int start, int stop) {
  const int32_t *keys = t->key_segments + (size_t)b * t->key_seq + block->key;
  const int32_t segment = t->query_segments[(size_t)b * t->query_seq + block->query + row];
  for (int c = start; c < stop; c++) x[c] = segment != 0 && keys[c] == segment ? x[c] : MASKED;
}

/* Scaled products of a block's queries and keys. */
static void products(const struct attention *t, const struct block *block, int b, int h, float *scores) {
  const int group = t->heads / t->kv_heads;
  gemm(t, 0, 1, block->rows, block->columns, t->dim, t->scale,
       at(t, t->q, b, t->query_seq, block->query, t->heads, h), t->heads * t->dim,
       at(t, t->k, b, t->key_seq, block->key, t->kv_heads, h / group), t->kv_heads * t->dim, 0.0f, scores, block->columns);
}

/* Rows of float32 into one head of a [batch, seq, heads, dim] result, each divided where divisors are given. */
static void store(const struct attention *t, char *result, const float *rows, const float *divisors, int b, int seq, int position,
                  int count, int heads, int head) {
  for (int row = 0; row < count; row++) {
    const size_t place = (((size_t)b * seq + position + row) * heads + head) * t->dim;
    const float *x = rows + (size_t)row * t->dim, factor = divisors ? 1.0f / divisors[row] : 1.0f;
    if (t->result_bf16) {
      uint16_t *y = (uint16_t *)result + place;
      for (int c = 0; c < t->dim; c++) y[c] = to_bf16(x[c] * factor);
    } else {
      float *y = (float *)result + place;
      for (int c = 0; c < t->dim; c++) y[c] = x[c] * factor;
    }
  }
}

/* One row's exponentials, in place, below its running maximum; the running sum and what was summed before shrink with it. */
static void soften(const struct attention *t, const struct block *block, int b, int row, float *x, float *total, float *highest,
                   float *summed) {
  int start, stop;
  range_seen(t, block, row, &start, &stop);
  clear_outside(x, start, stop, block->columns);
  if (start == stop) return;
  if (t->soft_cap > 0)
    for (int c = start; c < stop; c++) x[c] = capped(x[c], t->soft_cap);
  if (t->query_segments) mask_segments(t, block, b, row, x, start, stop);
  const float top = largest(x + start, stop - start, *highest);
  const float sum = exponentials(x + start, stop - start, top);
  const float shrink = expf(*highest - top);
  *total = *total * shrink + sum;
  *highest = top;
  for (int d = 0; d < t->dim; d++) summed[d] *= shrink;
}

/* One block of queries of one head. */
static void forward_piece(const void *work, int piece) {
  const struct attention *t = work;
  const int blocks = (t->query_seq + t->query_block - 1) / t->query_block, group = t->heads / t->kv_heads;
  const int i = piece % blocks, h = piece / blocks % t->heads, b = piece / blocks / t->heads;
  struct block block = {.query = i * t->query_block};
  block.rows = least(t->query_block, t->query_seq - block.query);
  const size_t size = (size_t)block.rows * t->key_block, summed = (size_t)block.rows * t->dim;
  float *scores = thread_memory(SCRATCH, (size + summed + 2 * block.rows + (t->bf16 ? size / 2 + 1 : 0)) * sizeof(float));
  float *sums = scores + size, *total = sums + summed, *highest = total + block.rows;
  /* What is multiplied: the weights rounded, or themselves. */
  void *weights = t->bf16 ? highest + block.rows : scores;
  memset(sums, 0, (summed + block.rows) * sizeof(float));
  for (int row = 0; row < block.rows; row++) highest[row] = LOWEST_MAXIMUM;
  for (block.key = 0; block.key < t->key_seq; block.key += t->key_block) {
    block.columns = least(t->key_block, t->key_seq - block.key);
    if (!sees_any(t, &block)) continue;
    products(t, &block, b, h, scores);
    for (int row = 0; row < block.rows; row++) {
      float *x = scores + (size_t)row * block.columns;
      soften(t, &block, b, row, x, total + row, highest + row, sums + (size_t)row * t->dim);
      if (t->bf16) round_row(x, (uint16_t *)weights + (size_t)row * block.columns, block.columns);
    }
    gemm(t, 0, 0, block.rows, t->dim, block.columns, 1.0f, weights, block.columns,
         at(t, t->v, b, t->key_seq, block.key, t->kv_heads, h / group), t->kv_heads * t->dim, 1.0f, sums, t->dim);
  }
  for (int row = 0; row < block.rows; row++) {
    const int seen = total[row] > 0;
    t->logsumexp_out[((size_t)b * t->query_seq + block.query + row) * t->heads + h] =
        seen ? highest[row] + logf(total[row]) : MASKED;
    if (!seen) total[row] = 1.0f;
  }
  store(t, t->out, sums, total, b, t->query_seq, block.query, block.rows, t->heads, h);
}

/* One row of weights from scores, and of the scores' cotangents from the weights'. */
static void differentiate(const struct attention *t, const struct block *block, int b, int h, int row, float *x, float *dx) {
  int start, stop;
  range_seen(t, block, row, &start, &stop);
  const size_t place = ((size_t)b * t->query_seq + block->query + row) * t->heads + h;
  /* A query that sees nothing has a logarithm as low as what is masked: e to their difference would be 1. */
  const float logsumexp = fmaxf(t->logsumexp[place], LOWEST_MAXIMUM);
  if (t->soft_cap > 0)
    for (int c = start; c < stop; c++) {
      x[c] = capped(x[c], t->soft_cap);
      const float bounded = x[c] / t->soft_cap;
      dx[c] = (dx[c] - t->delta[place]) * (1.0f - bounded * bounded);
    }
  if (t->query_segments) mask_segments(t, block, b, row, x, start, stop);
  weights_and_derivatives(x + start, dx + start, stop - start, logsumexp, t->soft_cap > 0 ? 0.0f : t->delta[place], t->scale);
  clear_outside(x, start, stop, block->columns);
  clear_outside(dx, start, stop, block->columns);
}

/* One key-value head, with all the heads that share it. */
static void backward_piece(const void *work, int piece) {
  const struct attention *t = work;
  const int group = t->heads / t->kv_heads, g = piece % t->kv_heads, b = piece / t->kv_heads;
  const size_t size = (size_t)t->query_block * t->key_block, summed = (size_t)t->key_seq * t->dim;
  float *scores = thread_memory(SCRATCH, (2 * size + 2 * summed + (size_t)t->query_block * t->dim + (t->bf16 ? size + 1 : 0)) * sizeof(float));
  float *d_scores = scores + size, *d_k = d_scores + size, *d_v = d_k + summed, *d_q = d_v + summed;
  /* What is multiplied: both rounded, or themselves. */
  uint16_t *rounded = (uint16_t *)(d_q + (size_t)t->query_block * t->dim);
  void *weights = t->bf16 ? rounded : (void *)scores, *d_raw = t->bf16 ? rounded + size : (void *)d_scores;
  memset(d_k, 0, 2 * summed * sizeof(float));
  const int q_stride = t->heads * t->dim, k_stride = t->kv_heads * t->dim;
  for (int h = g * group; h < (g + 1) * group; h++) {
    struct block block;
    for (block.query = 0; block.query < t->query_seq; block.query += t->query_block) {
      block.rows = least(t->query_block, t->query_seq - block.query);
      const void *q = at(t, t->q, b, t->query_seq, block.query, t->heads, h);
      const void *d_out = at(t, t->d_out, b, t->query_seq, block.query, t->heads, h);
      memset(d_q, 0, (size_t)block.rows * t->dim * 4);
      for (block.key = 0; block.key < t->key_seq; block.key += t->key_block) {
        block.columns = least(t->key_block, t->key_seq - block.key);
        if (!sees_any(t, &block)) continue;
        const int rows = block.rows, columns = block.columns;
        products(t, &block, b, h, scores);
        gemm(t, 0, 1, rows, columns, t->dim, 1.0f, d_out, q_stride, at(t, t->v, b, t->key_seq, block.key, t->kv_heads, g),
             k_stride, 0.0f, d_scores, block.columns);
        for (int row = 0; row < rows; row++) {
          const size_t place = (size_t)row * block.columns;
          differentiate(t, &block, b, h, row, scores + place, d_scores + place);
          if (!t->bf16) continue;
          round_row(scores + place, (uint16_t *)weights + place, columns);
          round_row(d_scores + place, (uint16_t *)d_raw + place, columns);
        }
        const size_t here = (size_t)block.key * t->dim;
        gemm(t, 0, 0, rows, t->dim, columns, 1.0f, d_raw, block.columns, at(t, t->k, b, t->key_seq, block.key, t->kv_heads, g),
             k_stride, 1.0f, d_q, t->dim);
        gemm(t, 1, 0, columns, t->dim, rows, 1.0f, d_raw, block.columns, q, q_stride, 1.0f, d_k + here, t->dim);
        gemm(t, 1, 0, columns, t->dim, rows, 1.0f, weights, block.columns, d_out, q_stride, 1.0f, d_v + here, t->dim);
      }
      store(t, t->d_q, d_q, NULL, b, t->query_seq, block.query, block.rows, t->heads, h);
    }
  }
  store(t, t->d_k, d_k, NULL, b, t->key_seq, 0, t->key_seq, t->kv_heads, g);
  store(t, t->d_v, d_v, NULL, b, t->key_seq, 0, t->key_seq, t->kv_heads, g);
}

/* What both passes are given. */
static struct attention read(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *q = frame->args.args[0], *k = frame->args.args[1], *v = frame->args.args[2];
  const XLA_FFI_Buffer *result = frame->rets.rets[0];
  const int bf16 = q->dtype == XLA_FFI_DataType_BF16;
  return (struct attention){
      .gemm = gemm_of(int_attribute(frame, "kernel"), bf16),
      .batch = (int)q->dims[0],
      .query_seq = (int)q->dims[1],
      .key_seq = (int)k->dims[1],
      .heads = (int)q->dims[2],
      .kv_heads = (int)k->dims[2],
      .dim = (int)q->dims[3],
      .query_block = int_attribute(frame, "query_block"),
      .key_block = int_attribute(frame, "key_block"),
      .causal = int_attribute(frame, "causal"),
      .window = int_attribute(frame, "window"),
      .offset = int_attribute(frame, "offset"),
      .bf16 = bf16,
      .result_bf16 = result->dtype == XLA_FFI_DataType_BF16,
      .scale = float_attribute(frame, "scale"),
      .soft_cap = float_attribute(frame, "soft_cap"),
      .q = q->data,
      .k = k->data,
      .v = v->data,
  };
}

static void read_segments(struct attention *t, const XLA_FFI_CallFrame *frame, int first) {
  if (frame->args.size <= first) return;
  t->query_segments = ((const XLA_FFI_Buffer *)frame->args.args[first])->data;
  t->key_segments = ((const XLA_FFI_Buffer *)frame->args.args[first + 1])->data;
}

XLA_FFI_Error *panax_attention_forward(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  struct attention work = read(frame);
  if (!work.gemm) return refuse(frame, "panax: this machine lacks the kernel that attention was compiled for");
  read_segments(&work, frame, 3);
  work.out = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data;
  work.logsumexp_out = ((XLA_FFI_Buffer *)frame->rets.rets[1])->data;
  const int blocks = (work.query_seq + work.query_block - 1) / work.query_block;
  share_out(frame, work.batch * work.heads * blocks, forward_piece, &work);
  return 0;
}

XLA_FFI_Error *panax_attention_backward(XLA_FFI_CallFrame *frame) {
  if (only_asked(frame)) return 0;
  struct attention work = read(frame);
  if (!work.gemm) return refuse(frame, "panax: this machine lacks the kernel that attention was compiled for");
  read_segments(&work, frame, 6);
  work.d_out = ((const XLA_FFI_Buffer *)frame->args.args[3])->data;
  work.logsumexp = ((const XLA_FFI_Buffer *)frame->args.args[4])->data;
  work.delta = ((const XLA_FFI_Buffer *)frame->args.args[5])->data;
  work.d_q = ((XLA_FFI_Buffer *)frame->rets.rets[0])->data;
  work.d_k = ((XLA_FFI_Buffer *)frame->rets.rets[1])->data;
  work.d_v = ((XLA_FFI_Buffer *)frame->rets.rets[2])->data;
  share_out(frame, work.batch * work.kv_heads, backward_piece, &work);
  return 0;
}

#else

XLA_FFI_Error *panax_attention_forward(XLA_FFI_CallFrame *frame) {
  return only_asked(frame) ? 0 : refuse(frame, "panax: there is no attention for this processor");
}

XLA_FFI_Error *panax_attention_backward(XLA_FFI_CallFrame *frame) { return panax_attention_forward(frame); }

#endif
