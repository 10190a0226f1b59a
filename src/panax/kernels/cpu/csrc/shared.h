/* What the custom calls on CPU have in common: whose products they are made of, attributes, errors, and sharing work out. */

#ifndef PANAX_SHARED_H
#define PANAX_SHARED_H

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

/* cblas_sgemm and cblas_gemm_bf16bf16f32: 16-bit numbers are opaque here. */
typedef void (*gemm_fn)(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda,
                        const void *b, int ldb, float beta, float *c, int ldc);

static inline int least(int a, int b) { return a < b ? a : b; }

/* Whose products: the places of `KERNELS` in core/native.py. */
enum { OWN, INTEL, NUM_KERNELS };

/* The function of a kernel for products of float32, or of bfloat16 into float32; NULL where there is none. */
gemm_fn gemm_of(int kernel, int bf16);

XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message);

/* Whether this call only asks what the handler is, and its answer; nothing is done before a program runs, either. */
int only_asked(XLA_FFI_CallFrame *frame);

/* The attribute of that name: an int32 or a float32. It must be there. */
int int_attribute(const XLA_FFI_CallFrame *frame, const char *name);
float float_attribute(const XLA_FFI_CallFrame *frame, const char *name);

/* The attribute of that name: an array of int32, whose length both sides know. */
const int32_t *ints_attribute(const XLA_FFI_CallFrame *frame, const char *name);

/* This thread's own memory of a kind, at least so large, aligned to 64 bytes; it is kept for the next call and freed with the thread. */
enum { PANELS, SCRATCH, NUM_MEMORIES };
void *thread_memory(int kind, size_t size);

/* How many threads XLA's pool has. */
int threads_of(const XLA_FFI_CallFrame *frame);

/* Run `run(work, piece)` for each piece, on this thread and on those of XLA's pool that are free; returns when all are done. */
void share_out(const XLA_FFI_CallFrame *frame, int pieces, void (*run)(const void *work, int piece), const void *work);

#endif
