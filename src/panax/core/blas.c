/* Products of matrices for XLA on CPU, handed to a BLAS that was loaded by `blas.py`: compiled there, on first use. */

#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* cblas_sgemm, cblas_gemm_bf16bf16f32 and their strided batches; the 16-bit type is opaque here. */
typedef void (*gemm_fn)(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void *a, int lda,
                        const void *b, int ldb, float beta, float *c, int ldc);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static gemm_fn gemm_f32, gemm_bf16;

void panax_use_blas(void *f32, void *bf16) {
  gemm_f32 = (gemm_fn)f32;
  gemm_bf16 = (gemm_fn)bf16;
}

static XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {0};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error *product(XLA_FFI_CallFrame *frame, int trans_a, int trans_b) {
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 0;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return 0;
  const XLA_FFI_Buffer *a = frame->args.args[0], *b = frame->args.args[1], *out = frame->rets.rets[0];
  const int m = (int)out->dims[0], n = (int)out->dims[1], k = (int)a->dims[trans_a ? 0 : 1];
  gemm_fn gemm = a->dtype == XLA_FFI_DataType_BF16 ? gemm_bf16 : gemm_f32;
  if (!gemm || a->dtype != b->dtype || out->dtype != XLA_FFI_DataType_F32)
    return refuse(frame, "panax: a product of other types than two of float32 or bfloat16 into float32");
  if (b->dims[trans_b ? 1 : 0] != k) return refuse(frame, "panax: the operands of a product disagree on the summed axis");
  gemm(ROW_MAJOR, trans_a ? TRANS : NO_TRANS, trans_b ? TRANS : NO_TRANS, m, n, k, 1.0f, a->data, (int)a->dims[1], b->data,
       (int)b->dims[1], 0.0f, out->data, n);
  return 0;
}

XLA_FFI_Error *panax_product_nn(XLA_FFI_CallFrame *frame) { return product(frame, 0, 0); }
XLA_FFI_Error *panax_product_nt(XLA_FFI_CallFrame *frame) { return product(frame, 0, 1); }
XLA_FFI_Error *panax_product_tn(XLA_FFI_CallFrame *frame) { return product(frame, 1, 0); }
XLA_FFI_Error *panax_product_tt(XLA_FFI_CallFrame *frame) { return product(frame, 1, 1); }
