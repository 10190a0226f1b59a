"""Custom calls on CPU, written in C (`csrc`): products and attention, by kernels of their own or by Intel's Math Kernel Library.

The machine's C compiler translates the files on first use; the result is kept in a folder of this user's own, with its checksum,
and made again where it is not what was written. Neither the files nor the library add threads: XLA's own share the work. What
runs where is chosen by timing (`timing.py`); what is missing is never chosen, and `missing` says why.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from panax.kernels.cache import is_whole, kernels_folder, put_whole
from panax.system import children
from panax.system.cpu_info import processor

SWITCH = "PANAX_MKL"
"""The environment variable that turns Intel's library off, by 0."""

OWN, INTEL = "c", "mkl"
KERNELS = (OWN, INTEL)
"""Whose products a call is made of: the C files' own, or those of Intel's library. A call's attribute is the place in here."""

_COMPILE_SECONDS = 300.0
_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-pthread", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_TARGETS = (
    *(f"panax_product_{each}" for each in ("nn", "nt", "tn", "tt")),
    "panax_wall",
    "panax_attention_forward",
    "panax_attention_backward",
)
_SEQUENTIAL, _LP64 = 1, 0


def native(target: str, results: Any, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """A call of one of the C functions, which runs on each device's own arrays. Its kernel must not be `missing`.

    Args:
        results: Their shapes and dtypes.
        aliases: Which operand's memory, by its number, becomes which result's.
    """
    return jax.ffi.ffi_call(
        target, results, has_side_effect=False, vmap_method="sequential", input_output_aliases=aliases
    )


@functools.cache
def missing(kernel: str, dtype: str) -> str | None:
    """Why products of a dtype ("float32" or "bfloat16") can't be made by a kernel here; None where they can."""
    try:
        compiled = _compiled()
        if kernel == INTEL:
            library = _library()
            pointers = (library.cblas_sgemm, library.cblas_gemm_bf16bf16f32)
            compiled.panax_use_library(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers))
    except _Absent as error:
        return str(error)
    if not compiled.panax_has(KERNELS.index(kernel), int(dtype == "bfloat16")):
        extension = "AVX-512 BF16" if dtype == "bfloat16" else "AVX-512"
        return f"this processor, or its compiler, lacks {extension}"
    return None


class _Absent(Exception):
    pass


def _library() -> ctypes.CDLL:
    """Intel's library, without threads of its own: XLA's share the work."""
    if os.environ.get(SWITCH, "1") == "0":
        raise _Absent(f"{SWITCH}=0")
    try:
        file = next(f for f in importlib.metadata.files("mkl") or () if f.name.startswith("libmkl_rt.so"))
        library = ctypes.CDLL(str(Path(str(file.locate())).resolve()), ctypes.RTLD_GLOBAL)
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError) as error:
        raise _Absent(f"Intel's MKL is not installed (the extra `mkl`): {error}") from error
    library.MKL_Set_Threading_Layer(_SEQUENTIAL)
    library.MKL_Set_Interface_Layer(_LP64)
    return library


@functools.cache
def _loaded() -> ctypes.CDLL | _Absent:
    """The C files, loaded, their functions known to XLA; or why they are not."""
    try:
        file = _made()
        try:
            compiled = ctypes.CDLL(str(file))
        except OSError:
            # Whole, and yet not to be loaded: as after a change of the system's libraries.
            file.unlink(missing_ok=True)
            compiled = ctypes.CDLL(str(_made()))
    except _Absent as error:
        return error
    except OSError as error:
        return _Absent(f"the compiled C files can't be loaded: {error}")
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(compiled, name)), platform="cpu")
    return compiled


def _compiled() -> ctypes.CDLL:
    found = _loaded()
    if isinstance(found, _Absent):
        raise found
    return found


@functools.cache
def sources_digest() -> str:
    """A hash of the C files, what they include, and the processor they are translated for."""
    folder = Path(__file__).parent / "csrc"
    read = (
        *sorted(folder.glob("*.c")),
        *sorted(folder.glob("*.h")),
        Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h",
    )
    data = b"".join(file.read_bytes() for file in read) + " ".join((*_FLAGS, processor())).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _made() -> Path:
    """The shared object of the C files, whole: the one in the cache, else one that is made now."""
    try:
        folder = kernels_folder()
        target = folder / f"kernels-{sources_digest()}.so"
        if not is_whole(target):
            _compile(folder, target)
    except OSError as error:
        raise _Absent(f"the cache of compiled C files can't be used: {error}") from error
    return target


def _compile(folder: Path, target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _Absent("there is no C compiler on this machine (cc, gcc or clang)")
    sources = sorted((Path(__file__).parent / "csrc").glob("*.c"))
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        made = Path(directory) / target.name
        command = [compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", *map(str, sources), "-o", str(made)]
        try:
            found = children.run(command, _COMPILE_SECONDS)
        except TimeoutError as error:
            raise _Absent(str(error)) from error
        if found.code:
            raise _Absent(f"{compiler} failed: {found.errors.strip() or f'exit code {found.code}'}")
        made.chmod(0o700)
        # The checksum first: a library without its own is made again.
        put_whole(target.with_suffix(".sha256"), hashlib.sha256(made.read_bytes()).hexdigest().encode())
        put_whole(target, made.read_bytes())
