"""Custom calls on CPU, written in C (`csrc`): matmuls and attention, by the C files' kernels or by Intel's
Math Kernel Library.

Neither the C files nor the library start threads: XLA's threads share the work. An unavailable kernel is never
chosen; `unavailable_reason` returns the reason.
"""

import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from panax.kernels.cpu import library

MKL_VARIABLE = "PANAX_MKL"
"""Environment variable that disables Intel's library, by the value 0."""

OWN, INTEL = "c", "mkl"
KERNELS = (OWN, INTEL)
"""Implementations of the matmuls in a call: the C files', or Intel's library. A call's attribute is the index
in this tuple."""

TARGETS = (
    *(f"panax_product_{each}" for each in ("nn", "nt", "tn", "tt")),
    "panax_row_sums",
    "panax_wall",
    "panax_peak",
    "panax_attention_forward",
    "panax_attention_backward",
    "panax_row_attention",
    "panax_cached_attention",
    "panax_norm",
    "panax_logsumexp",
    "panax_softmax",
    "panax_convolution",
    "panax_convolution_by_weights",
    "panax_grouped_product",
    "panax_grouped_outer",
)
_SEQUENTIAL, _LP64 = 1, 0


def call_native(target: str, results: Any, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """Return a call of one of the C functions, on local arrays. Its kernel must be available.

    Args:
        results: Shapes and dtypes of the results.
        aliases: Map from the index of an operand to that of the result that reuses its memory.
    """
    return jax.ffi.ffi_call(
        target, results, has_side_effect=False, vmap_method="sequential", input_output_aliases=aliases
    )


@functools.cache
def unavailable_reason(kernel: str, dtype: str) -> str | None:
    """Return why a kernel does not support matmuls of a dtype ("float32" or "bfloat16") here; None if it
    does."""
    try:
        compiled = _registered()
        if kernel == INTEL:
            intel = _intel_library()
            pointers = (intel.cblas_sgemm, intel.cblas_gemm_bf16bf16f32)
            compiled.panax_use_library(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers))
    except library.UnavailableError as error:
        return str(error)
    if not compiled.panax_has(KERNELS.index(kernel), int(dtype == "bfloat16")):
        return "this processor, or its compiler, has none of AVX2, AVX-512 and NEON"
    return None


def multiplies_bfloat16() -> bool:
    """Return True if the C files' matmuls of bfloat16 use dedicated instructions, which take half of
    float32's time."""
    return unavailable_reason(OWN, "bfloat16") is None and bool(_registered().panax_multiplies_bf16())


def peak_loop(dtype: str) -> Callable[[], jax.Array] | None:
    """Return a program that multiplies and adds on registers alone, on all of XLA's threads, and returns their
    FLOP/s; None without the C files.

    Each thread measures its own CPU time, so other programs do not affect the result.
    """
    if unavailable_reason(OWN, dtype) is not None:
        return None
    call = call_native("panax_peak", jax.ShapeDtypeStruct((), np.float32))
    bf16 = np.int32(dtype == "bfloat16")
    return jax.jit(lambda: call(bf16=bf16)).lower().compile()


def _intel_library() -> ctypes.CDLL:
    """Load Intel's library, without its threads: XLA's threads share the work."""
    if os.environ.get(MKL_VARIABLE, "1") == "0":
        raise library.UnavailableError(f"{MKL_VARIABLE}=0")
    try:
        file = next(f for f in importlib.metadata.files("mkl") or () if f.name.startswith("libmkl_rt.so"))
        intel = ctypes.CDLL(str(Path(str(file.locate())).resolve()), ctypes.RTLD_GLOBAL)
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError) as error:
        raise library.UnavailableError(f"Intel's MKL is not installed (the extra `mkl`): {error}") from error
    intel.MKL_Set_Threading_Layer(_SEQUENTIAL)
    intel.MKL_Set_Interface_Layer(_LP64)
    return intel


@functools.cache
def _registered() -> ctypes.CDLL:
    """Return the library of the C files, with its functions registered with XLA."""
    compiled = library.load()
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(compiled, name)), platform="cpu")
    return compiled
