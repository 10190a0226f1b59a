"""Products and attention on CPU around Intel's Math Kernel Library, where it is installed: XLA's own products reach 0.85 of its
rate, in places half of it.

The library comes from `pip install 'panax[mkl]'`. The C files of `csrc` stand between it and XLA; the C compiler of the machine
translates them on first use, and the result is kept in the user's cache. The library adds no threads: XLA's own share the work.
Without the library or a compiler nothing changes, and `absent()` says why.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

logger = logging.getLogger("panax.core")

LEAST_PRODUCTS = 2**22
"""Multiplications from which a product is worth a call."""

SWITCH = "PANAX_MKL"
"""The environment variable that turns the library off, by 0."""

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-pthread", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_TARGETS = (
    *(f"panax_product_{each}" for each in ("nn", "nt", "tn", "tt")),
    "panax_wall",
    "panax_attention_forward",
    "panax_attention_backward",
)
_SEQUENTIAL, _LP64 = 1, 0


def blas_product(a: jax.Array, b: jax.Array, transposed: tuple[bool, bool]) -> jax.Array:
    """The float32 product of two float32 or two bfloat16 matrices, either taken transposed. `absent()` must be None.

    Args:
        a: (rows, summed), or (summed, rows) where transposed.
        b: (summed, columns), or (columns, summed) where transposed.
    """
    shape = (a.shape[1 if transposed[0] else 0], b.shape[0 if transposed[1] else 1])
    target = "panax_product_" + "".join("t" if each else "n" for each in transposed)
    return native(target, jax.ShapeDtypeStruct(shape, jnp.float32))(a, b)


def native(target: str, results: Any, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """A call of one of the C functions, which runs on each device's own arrays. `absent()` must be None.

    Args:
        results: Their shapes and dtypes.
        aliases: Which operand's memory, by its number, becomes which result's.
    """
    return jax.ffi.ffi_call(
        target, results, has_side_effect=False, vmap_method="sequential", input_output_aliases=aliases
    )


@functools.cache
def absent() -> str | None:
    """Why the library is not used, or None where it is."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    try:
        compiled = ctypes.CDLL(str(_compiled()))
        library = _library()
    except _Absent as error:
        logger.info("products on CPU are XLA's own: %s", error)
        return str(error)
    pointers = (library.cblas_sgemm, library.cblas_gemm_bf16bf16f32)
    compiled.panax_use_library(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers))
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(compiled, name)), platform="cpu")
    return None


class _Absent(Exception):
    pass


def _processor() -> bytes:
    """What the machine's processors can do: a cache may be shared by unlike machines."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return next((line for line in lines if line.startswith(b"flags")), b"")


def _library() -> ctypes.CDLL:
    """The library, without threads of its own: XLA's share the work."""
    try:
        library = _loaded("mkl", "libmkl_rt.so")
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError) as error:
        raise _Absent(f"Intel's MKL is not installed (pip install 'panax[mkl]'): {error}") from error
    library.MKL_Set_Threading_Layer(_SEQUENTIAL)
    library.MKL_Set_Interface_Layer(_LP64)
    return library


def _loaded(package: str, name: str) -> ctypes.CDLL:
    file = next(file for file in importlib.metadata.files(package) or () if file.name.startswith(name))
    return ctypes.CDLL(str(Path(str(file.locate())).resolve()), ctypes.RTLD_GLOBAL)


def _compiled() -> Path:
    """The shared object of the C files, made by this machine's compiler where the cache has none."""
    folder, headers = Path(__file__).parent / "csrc", Path(jax.ffi.include_dir())
    sources = sorted(folder.glob("*.c"))
    read = (*sources, *sorted(folder.glob("*.h")), headers / "xla/ffi/api/c_api.h")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in read) + _processor()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "panax"
    target = cache / f"blas-{digest}.so"
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _Absent("there is no C compiler on this machine (cc, gcc or clang)")
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / target.name
            command = [compiler, *_FLAGS, f"-I{headers}", *map(str, sources), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            made.replace(target)
    except subprocess.CalledProcessError as error:
        raise _Absent(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()}") from error
    except OSError as error:
        raise _Absent(f"the cache {cache} can't be written: {error}") from error
    return target
