/* Products of matrices for XLA on CPU, handed to a BLAS that was loaded by `blas.py`: compiled there, on first use. */

#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* cblas_sgemm and cblas_gemm_bf16bf16f32, and the former's batches of equal matrices; 16-bit numbers are opaque here. */
typedef void (*gemm_fn)(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda,
                        const void *b, int ldb, float beta, float *c, int ldc);

typedef void (*batch_fn)(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda,
                         int stride_a, const void *b, int ldb, int stride_b, float beta, float *c, int ldc, int stride_c,
                         int count);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static gemm_fn gemm_f32, gemm_bf16;
static batch_fn batch_f32;

void panax_use_blas(void *f32, void *bf16, void *f32_batch) {
  gemm_f32 = (gemm_fn)f32;
  gemm_bf16 = (gemm_fn)bf16;
  batch_f32 = (batch_fn)f32_batch;
}

static XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {0};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Whether this call only asks what the handler is, and its answer; nothing is done before a program runs, either. */
static int only_asked(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

static XLA_FFI_Error *product(XLA_FFI_CallFrame *frame, int trans_a, int trans_b) {
  if (only_asked(frame)) return 0;
  const XLA_FFI_Buffer *a = frame->args.args[0], *b = frame->args.args[1], *out = frame->rets.rets[0];
  const int first = (int)out->rank - 2;
  const int m = (int)out->dims[first], n = (int)out->dims[first + 1];
  const int lda = (int)a->dims[first + 1], ldb = (int)b->dims[first + 1], k = (int)a->dims[first + (trans_a ? 0 : 1)];
  const int op_a = trans_a ? TRANS : NO_TRANS, op_b = trans_b ? TRANS : NO_TRANS, bf16 = a->dtype == XLA_FFI_DataType_BF16;
  if (a->dtype != b->dtype || out->dtype != XLA_FFI_DataType_F32 || (!bf16 && a->dtype != XLA_FFI_DataType_F32))
    return refuse(frame, "panax: a product of other types than two of float32 or bfloat16 into float32");
  if (b->dims[first + (trans_b ? 1 : 0)] != k)
    return refuse(frame, "panax: the operands of a product disagree on the summed axis");
  const int size_a = first ? (int)(a->dims[1] * a->dims[2]) : 0, size_b = first ? (int)(b->dims[1] * b->dims[2]) : 0;
  const int count = first ? (int)out->dims[0] : 1;
  if (first && !bf16) {
    batch_f32(ROW_MAJOR, op_a, op_b, m, n, k, 1.0f, a->data, lda, size_a, b->data, ldb, size_b, 0.0f, out->data, n, m * n, count);
    return 0;
  }
  /* The library has no strided batches of bfloat16. */
  const size_t bytes = bf16 ? 2 : 4;
  for (int i = 0; i < count; i++)
    (bf16 ? gemm_bf16 : gemm_f32)(ROW_MAJOR, op_a, op_b, m, n, k, 1.0f, (const char *)a->data + bytes * i * size_a, lda,
                                  (const char *)b->data + bytes * i * size_b, ldb, 0.0f,
                                  (float *)out->data + (size_t)i * m * n, n);
  return 0;
}

XLA_FFI_Error *panax_product_nn(XLA_FFI_CallFrame *frame) { return product(frame, 0, 0); }
XLA_FFI_Error *panax_product_nt(XLA_FFI_CallFrame *frame) { return product(frame, 0, 1); }
XLA_FFI_Error *panax_product_tn(XLA_FFI_CallFrame *frame) { return product(frame, 1, 0); }
XLA_FFI_Error *panax_product_tt(XLA_FFI_CallFrame *frame) { return product(frame, 1, 1); }
