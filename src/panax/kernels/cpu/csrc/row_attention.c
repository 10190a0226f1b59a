/* Causal attention whose result for a query depends on the query and on the keys that it sees alone: not on the rows beside it, on
   the length of the row, on what is packed before it, or on where the keys lie. Keys are visited in blocks that begin at the first
   key of the query's document. Training runs it on packed rows, generation on caches. */

#include <stdlib.h>

#include "rows.h"
#include "shared.h"

#if defined(LANES)

enum { QUERY_BLOCK = 64 };

struct row_attention {
  gemm_fn gemm;
  int batch, seq, length, heads, kv_heads, dim, key_block, window, bf16, result_bf16;
  float scale, soft_cap;
  const char *q, *k, *v;
  const int32_t *segments, *start;
  char *out;
  float *logsumexp;
};

/* Queries of one document, or the heads of one query that share keys: row r is at the position first + r * step. */
struct run {
  const char *q, *k, *v;
  size_t q_stride, key_stride; /* In numbers, from a row to the next. */
  int rows, first, step;
  char *out;
  float *logsumexp;
  size_t logsumexp_stride;
};

static size_t width(const struct row_attention *t) { return t->bf16 ? 2 : 4; }

/* One row's exponentials, in place, below its running maximum; the running sum and what was summed before shrink with it. */
static void soften_row(const struct row_attention *t, float *x, int start, int stop, int columns, float *total, float *highest,
                       float *summed) {
  clear_outside(x, start, stop, columns);
  if (start == stop) return;
  if (t->soft_cap > 0)
    for (int c = start; c < stop; c++) x[c] = capped(x[c], t->soft_cap);
  const float top = largest(x + start, stop - start, *highest);
  const float sum = exponentials(x + start, stop - start, top);
  const float shrink = expf(*highest - top);
  *total = *total * shrink + sum;
  *highest = top;
  for (int d = 0; d < t->dim; d++) summed[d] *= shrink;
}

static void store_rows(const struct row_attention *t, const struct run *run, const float *sums, const float *total,
                       const float *highest) {
  for (int row = 0; row < run->rows; row++) {
    const float *x = sums + (size_t)row * t->dim, factor = total[row] > 0 ? 1.0f / total[row] : 1.0f;
    const size_t place = (size_t)row * run->q_stride;
    for (int d = 0; d < t->dim; d++) {
      if (t->result_bf16) ((uint16_t *)run->out)[place + d] = to_bf16(x[d] * factor);
      else ((float *)run->out)[place + d] = x[d] * factor;
    }
    run->logsumexp[row * run->logsumexp_stride] = total[row] > 0 ? highest[row] + logf(total[row]) : MASKED;
  }
}

/* At most QUERY_BLOCK rows. */
static void attend(const struct row_attention *t, const struct run *run) {
  const int rows = run->rows, keys = run->first + (rows - 1) * run->step + 1, block = t->key_block;
  const size_t size = (size_t)rows * block, summed = (size_t)rows * t->dim;
  float *scores = thread_memory(SCRATCH, (size + summed + 2 * rows + (t->bf16 ? size / 2 + 1 : 0)) * sizeof(float));
  float *sums = scores + size, *total = sums + summed, *highest = total + rows;
  /* What is multiplied: the weights rounded, or themselves. */
  void *weights = t->bf16 ? (void *)(highest + rows) : (void *)scores;
  memset(sums, 0, (summed + rows) * sizeof(float));
  for (int row = 0; row < rows; row++) highest[row] = LOWEST_MAXIMUM;
  for (int key = 0; key < keys; key += block) {
    const int columns = least(block, keys - key);
    if (t->window && key + columns <= run->first - t->window + 1) continue;
    const char *k = run->k + width(t) * key * run->key_stride, *v = run->v + width(t) * key * run->key_stride;
    t->gemm(ROW_MAJOR, NO_TRANS, TRANS, rows, columns, t->dim, t->scale, run->q, (int)run->q_stride, k, (int)run->key_stride, 0.0f,
            scores, columns);
    for (int row = 0; row < rows; row++) {
      const int query = run->first + row * run->step, before = t->window ? query - t->window + 1 - key : 0;
      const int stop = least(query + 1 - key, columns), start = before < 0 ? 0 : before;
      float *x = scores + (size_t)row * columns;
      soften_row(t, x, least(start, stop < 0 ? 0 : stop), stop < 0 ? 0 : stop, columns, total + row, highest + row,
                 sums + (size_t)row * t->dim);
      if (t->bf16) round_row(x, (uint16_t *)weights + (size_t)row * columns, columns);
    }
    t->gemm(ROW_MAJOR, NO_TRANS, NO_TRANS, rows, t->dim, columns, 1.0f, weights, columns, v, (int)run->key_stride, 1.0f, sums, t->dim);
  }
  store_rows(t, run, sums, total, highest);
}

/* A block of a row's queries of one head, document by document. */
static void packed_piece(const void *work, int piece) {
  const struct row_attention *t = work;
  const int blocks = (t->seq + QUERY_BLOCK - 1) / QUERY_BLOCK, i = piece % blocks, h = piece / blocks % t->heads, b = piece / blocks / t->heads;
  const int stop = least((i + 1) * QUERY_BLOCK, t->seq), g = h / (t->heads / t->kv_heads);
  const int32_t *segments = t->segments ? t->segments + (size_t)b * t->seq : NULL;
  for (int query = i * QUERY_BLOCK, end; query < stop; query = end) {
    int begin = segments ? query : 0;
    for (end = segments ? query + 1 : stop; segments && end < stop && segments[end] == segments[query]; end++) {}
    while (segments && begin && segments[begin - 1] == segments[query]) begin--;
    const size_t place = ((size_t)b * t->seq + query) * t->heads + h, key = ((size_t)b * t->seq + begin) * t->kv_heads + g;
    struct run run = {
        .q = t->q + width(t) * place * t->dim,
        .k = t->k + width(t) * key * t->dim,
        .v = t->v + width(t) * key * t->dim,
        .q_stride = (size_t)t->heads * t->dim,
        .key_stride = (size_t)t->kv_heads * t->dim,
        .rows = end - query,
        .first = query - begin,
        .step = 1,
        .out = t->out + (size_t)(t->result_bf16 ? 2 : 4) * place * t->dim,
        .logsumexp = t->logsumexp + place,
        .logsumexp_stride = (size_t)t->heads,
    };
    if (!segments || segments[query]) attend(t, &run);
    for (int row = 0; segments && !segments[query] && row < run.rows; row++) { /* Padding sees nothing. */
      memset(run.out + (t->result_bf16 ? 2 : 4) * row * run.q_stride, 0, (size_t)(t->result_bf16 ? 2 : 4) * t->dim);
      run.logsumexp[row * run.logsumexp_stride] = MASKED;
    }
  }
}

/* The queries of one head of a row, or one query of all heads that share keys. */
static void cached_piece(const void *work, int piece) {
  const struct row_attention *t = work;
  const int group = t->heads / t->kv_heads, together = t->seq == 1, heads = together ? t->kv_heads : t->heads;
  const int b = piece / heads, h = piece % heads * (together ? group : 1), g = h / group;
  const size_t place = (size_t)b * t->seq * t->heads + h, key = ((size_t)b * t->kv_heads + g) * t->length * t->dim;
  for (int query = 0; query < t->seq; query += QUERY_BLOCK) {
    const size_t here = place + (size_t)query * t->heads;
    const struct run run = {
        .q = t->q + width(t) * here * t->dim,
        .k = t->k + width(t) * key,
        .v = t->v + width(t) * key,
        .q_stride = (size_t)(together ? 1 : t->heads) * t->dim,
        .key_stride = (size_t)t->dim,
        .rows = together ? group : least(QUERY_BLOCK, t->seq - query),
        .first = least(t->start[b] < 0 ? 0 : t->start[b], t->length - t->seq) + query,
        .step = !together,
        .out = t->out + (size_t)(t->result_bf16 ? 2 : 4) * here * t->dim,
        .logsumexp = t->logsumexp + here,
        .logsumexp_stride = (size_t)(together ? 1 : t->heads),
    };
    attend(t, &run);
  }
}

static XLA_FFI_Error *run_attention(XLA_FFI_CallFrame *frame, int cached) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *q = frame->args.args[0], *k = frame->args.args[1], *v = frame->args.args[2];
  const XLA_FFI_Buffer *last = frame->args.size > 3 ? frame->args.args[3] : NULL, *out = frame->rets.rets[0];
  const int bf16 = q->dtype == XLA_FFI_DataType_BF16;
  const struct row_attention work = {
      .gemm = gemm_of(OWN, bf16),
      .batch = (int)q->dims[0],
      .seq = (int)q->dims[1],
      .length = (int)k->dims[cached ? 2 : 1],
      .heads = (int)q->dims[2],
      .kv_heads = (int)k->dims[cached ? 1 : 2],
      .dim = (int)q->dims[3],
      .key_block = int_attribute(frame, "key_block"),
      .window = int_attribute(frame, "window"),
      .bf16 = bf16,
      .result_bf16 = out->dtype == XLA_FFI_DataType_BF16,
      .scale = float_attribute(frame, "scale"),
      .soft_cap = float_attribute(frame, "soft_cap"),
      .q = q->data,
      .k = k->data,
      .v = v->data,
      .segments = cached || !last ? NULL : last->data,
      .start = cached && last ? last->data : NULL,
      .out = out->data,
      .logsumexp = ((XLA_FFI_Buffer *)frame->rets.rets[1])->data,
  };
  if (!work.gemm) return refuse(frame, "panax: this machine lacks the kernel that attention was compiled for");
  if (k->dtype != q->dtype || v->dtype != q->dtype) return refuse(frame, "panax: queries, keys and values of different types");
  const int blocks = cached ? 1 : (work.seq + QUERY_BLOCK - 1) / QUERY_BLOCK;
  const int heads = cached && work.seq == 1 ? work.kv_heads : work.heads;
  share_out(frame, work.batch * heads * blocks, cached ? cached_piece : packed_piece, &work);
  return 0;
}

#else

static XLA_FFI_Error *run_attention(XLA_FFI_CallFrame *frame, int cached) {
  (void)cached;
  return only_asked(frame) ? 0 : refuse(frame, "panax: there is no attention for this processor");
}

#endif

XLA_FFI_Error *panax_row_attention(XLA_FFI_CallFrame *frame) { return run_attention(frame, 0); }
XLA_FFI_Error *panax_cached_attention(XLA_FFI_CallFrame *frame) { return run_attention(frame, 1); }
