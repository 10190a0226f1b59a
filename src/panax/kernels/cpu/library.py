"""The C files (`csrc`) as a shared library: compiled by this machine's compiler on first use, or from a
wheel.

The compiled library is cached in a folder that only this user can write to, with a checksum, and rebuilt if
the checksum differs. The wheel `panax-jax-kernels` is for machines without a compiler: it contains one
library for each instruction set.
"""

import ctypes
import functools
import hashlib
import importlib.util
import json
import platform
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax

from panax.kernels.cache import is_intact, kernels_folder, write_intact
from panax.kernels.cpu.instruction_sets import InstructionSet, detect, read_limit
from panax.system import children, json_reader
from panax.system.cpu_info import describe_processor

SOURCES = Path(__file__).parent / "csrc"

PACKAGE = "panax_jax_kernels"
"""The wheel's module."""
MANIFEST = "manifest.json"
"""File in the wheel with `sources`, the digest of the C files that it was built from, and the sha256 of each
library by name."""

OPTIONS = ("-O3", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")

_COMPILE_SECONDS = 300.0


class UnavailableError(Exception):
    """There is no library of the C files; the message gives the reason."""


def load() -> ctypes.CDLL:
    """Return the library.

    Raises:
        UnavailableError: The library can't be built or loaded; the message gives the reason.
    """
    loaded = _loaded()
    if isinstance(loaded, UnavailableError):
        raise loaded
    return loaded


@functools.cache
def _loaded() -> ctypes.CDLL | UnavailableError:
    """Return the library, or the error: a compiler that failed is not called again."""
    try:
        file = _built_here() if _compiler() else _packaged()
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            if file.parent.name == PACKAGE:
                raise
            # Complete, but not loadable: for example after a change of the system's libraries.
            file.unlink(missing_ok=True)
            return ctypes.CDLL(str(_built_here()))
    except UnavailableError as error:
        return error
    except OSError as error:
        return UnavailableError(f"the compiled C files can't be loaded: {error}")


@functools.cache
def sources_digest() -> str:
    """Compute a hash of the C files."""
    return _digest(SOURCES.glob("*.[ch]"))


@functools.cache
def build_digest() -> str:
    """Compute a hash of everything that determines the results of a library on this machine."""
    header = hashlib.sha256((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_bytes()).hexdigest()
    parts = (sources_digest(), header, *_options(), describe_processor(), "" if _compiler() else PACKAGE)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def instruction_set() -> str:
    """Return the name of the instruction set that the library is compiled for."""
    best = _target_set()
    return "this compiler's best" if best is None else best.name


def _target_set() -> InstructionSet | None:
    """Return the set selected by the environment, else the processor's best; None if the system lists no
    flags."""
    return read_limit() or next(reversed(detect()), None)


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _options() -> tuple[str, ...]:
    best = _target_set()
    # If the system lists no flags, the compiler detects the processor.
    here = ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native", "-mtune=generic")
    # Apple's linker needs no such option: its libraries resolve their own functions first.
    linker = () if platform.system() == "Darwin" else ("-Wl,-Bsymbolic",)
    return (*OPTIONS, *linker, *(here if best is None else best.options))


def _built_here() -> Path:
    """Return the library in the cache, verified; compiled now if it does not exist."""
    try:
        folder = kernels_folder()
        target = folder / f"kernels-{build_digest()}.so"
        if not is_intact(target):
            _compile_into(folder, target)
    except OSError as error:
        raise UnavailableError(f"the cache of compiled C files can't be used: {error}") from error
    return target


def compile_library(file: Path, options: Iterable[str]) -> None:
    """Compile the C files with this machine's compiler.

    Raises:
        UnavailableError: The compiler is missing or fails.
    """
    compiler = _compiler()
    if compiler is None:
        raise UnavailableError("there is no C compiler on this machine (cc, gcc or clang)")
    sources = map(str, sorted(SOURCES.glob("*.c")))
    command = [compiler, *options, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(file)]
    try:
        ended = children.run_command(command, _COMPILE_SECONDS)
    except TimeoutError as error:
        raise UnavailableError(str(error)) from error
    if ended.code:
        raise UnavailableError(f"{compiler} failed: {ended.errors.strip() or f'exit code {ended.code}'}")


def _compile_into(folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        made = Path(directory) / target.name
        compile_library(made, _options())
        write_intact(target, made.read_bytes())


def _packaged() -> Path:
    """Return the wheel's library for this processor."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UnavailableError("there is no C compiler on this machine (cc, gcc or clang)")
    folder = Path(spec.origin).parent
    manifest = _read_manifest(folder / MANIFEST)
    if manifest.get("sources") != sources_digest():
        raise UnavailableError(
            "there is no C compiler, and the installed panax-jax-kernels is of another version of Panax"
        )
    limit = read_limit()
    sets = detect() if limit is None else (limit,)
    names = [name for each in reversed(sets) if (name := f"kernels-{each.name}.so") in manifest]
    if not names:
        raise UnavailableError("there is no C compiler, and panax-jax-kernels has nothing for this processor")
    # Mapping a truncated library would kill the process.
    if hashlib.sha256((folder / names[0]).read_bytes()).hexdigest() != manifest[names[0]]:
        raise UnavailableError(f"{folder / names[0]} is damaged; install panax-jax-kernels again")
    return folder / names[0]


def _read_manifest(file: Path) -> dict[str, str]:
    try:
        return dict(json_reader.read(file))
    except (ValueError, TypeError) as error:
        raise UnavailableError(f"{file} is damaged; install panax-jax-kernels again") from error


def build_manifest(libraries: Iterable[Path]) -> str:
    """Return the manifest of a wheel with these libraries."""
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in libraries}
    return json.dumps({"sources": sources_digest(), **sums})
