// GELU and its derivative in one pass over memory, as a function that XLA calls.

#include <cmath>
#include <cstddef>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error FusedGelu(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> slope) {
  if (y->element_count() != x.element_count() || slope->element_count() != x.element_count()) {
    return ffi::Error::InvalidArgument("fused_gelu: both results have the size of the input");
  }
  const float* in = x.typed_data();
  float* value = y->typed_data();
  float* derivative = slope->typed_data();
  for (std::size_t i = 0; i < x.element_count(); ++i) {
    const float share = 0.5f * (1.0f + std::erf(in[i] * 0.70710678f));
    const float density = 0.39894228f * std::exp(-0.5f * in[i] * in[i]);
    value[i] = in[i] * share;
    derivative[i] = share + in[i] * density;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedGeluHandler, FusedGelu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
