"""The C files' products for each instruction set of this processor: against float64, on sizes and numbers that break kernels."""

import concurrent.futures
import ctypes
import platform
import subprocess
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import psutil
import pytest

from panax.core.errors import RecipeError
from panax.kernels.cpu import instruction_sets
from panax.kernels.cpu.instruction_sets import INSTRUCTION_SETS, ISA_VARIABLE, detect, read_limit
from panax.kernels.cpu.library import OPTIONS, SOURCES

HERE = [each.name for each in detect()]
ROW_MAJOR, TRANSPOSED = 101, {False: 111, True: 112}
BFLOAT16 = ml_dtypes.bfloat16
SIZES = [(1, 1, 1), (1, 70, 33), (5, 1, 801), (13, 17, 7), (37, 41, 384), (150, 33, 385), (12, 1540, 3), (3, 5, 0)]


class Library:
    """The products of one instruction set, called without XLA."""

    def __init__(self, file: Path):
        loaded = ctypes.CDLL(str(file))
        self.functions = {np.float32: loaded.panax_gemm_f32, BFLOAT16: loaded.panax_gemm_bf16}
        number, pointer = ctypes.c_int, ctypes.c_void_p
        for function in self.functions.values():
            function.restype = None
            scales = ctypes.c_float
            function.argtypes = [*[number] * 6, scales, pointer, number, pointer, number, scales, pointer, number]

    def product(self, a, b, transposed=(False, False), alpha=1.0, beta=0.0, c=None):
        """alpha * op(a) @ op(b) + beta * c."""
        m, k = a.shape[::-1] if transposed[0] else a.shape
        n = b.shape[0] if transposed[1] else b.shape[1]
        out = np.full((m, n), np.nan, np.float32) if c is None else c.copy()
        words = (TRANSPOSED[transposed[0]], TRANSPOSED[transposed[1]])
        function = self.functions[a.dtype.type]
        places = (a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1])
        function(ROW_MAJOR, *words, m, n, k, alpha, *places, beta, out.ctypes.data, n)
        return out


@pytest.fixture(scope="module", params=HERE)
def library(request, tmp_path_factory) -> Library:
    file = tmp_path_factory.mktemp("csrc") / f"{request.param}.so"
    # The files of products alone, which take less than half of the compiler's time for all.
    sources = [str(SOURCES / name) for name in ("gemm.c", "shared.c")]
    options = (*OPTIONS, *INSTRUCTION_SETS[request.param].options, f"-I{jax.ffi.include_dir()}")
    subprocess.run(["cc", *options, *sources, "-o", str(file)], check=True, timeout=300)
    return Library(file)


def drawn(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def unaligned(x):
    """The same numbers at an address that no vector likes."""
    room = np.empty(x.nbytes + 128, np.uint8)
    start = 64 - room.ctypes.data % 64 + x.itemsize
    moved = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def test_there_is_one_for_this_processor():
    assert HERE, f"no kernel for {platform.machine()}"


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [(a, b) for a in (False, True) for b in (False, True)])
def test_products_of_odd_sizes(library, transposed, dtype):
    for m, n, k in SIZES:
        a, b = drawn((m, k), dtype), drawn((k, n), dtype, 1)
        wide = a.astype(np.float64) @ b.astype(np.float64)
        terms = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        stored = [unaligned(np.ascontiguousarray(x.T if t else x)) for x, t in zip((a, b), transposed)]
        result = library.product(*stored, transposed)
        # Each of k terms is rounded once in its product and once in its sum.
        assert (np.abs(result - wide) <= terms * 2.0**-23 * (k + 2)).all(), (m, n, k)
        before = drawn((m, n), np.float32, 2)
        result = library.product(*stored, transposed, alpha=0.5, beta=2.0, c=before)
        tolerance = (terms + 2 * np.abs(before)) * 2.0**-23 * (k + 4)
        assert (np.abs(result - (0.5 * wide + 2.0 * before)) <= tolerance).all(), (m, n, k)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_a_row_has_the_same_bits_beside_any_others(library, dtype):
    a, b = drawn((257, 400), dtype), drawn((400, 70), dtype, 1)
    whole = library.product(a, b)
    for rows in range(1, 257):
        np.testing.assert_array_equal(library.product(a[:rows], b), whole[:rows])
    for row in (0, 5, 11, 100, 256):
        np.testing.assert_array_equal(library.product(a[row : row + 1], b), whole[row : row + 1])
    np.testing.assert_array_equal(library.product(np.ascontiguousarray(a.T), b, (True, False)), whole)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_what_is_not_finite_stays_in_its_row_and_column(library, dtype):
    a, b = drawn((30, 50), dtype), drawn((50, 40), dtype, 1)
    clean = library.product(a, b)
    a[7, 49], b[0, 39] = np.nan, np.inf
    found = library.product(a, b)
    assert np.isnan(found[7]).all() and not np.isfinite(found[:, 39]).any()
    rest = np.delete(np.delete(found, 7, 0), 39, 1)
    np.testing.assert_array_equal(rest, np.delete(np.delete(clean, 7, 0), 39, 1))


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_threads_do_not_disturb_each_other(library, threads):
    a, b = drawn((90, 400), np.float32), drawn((400, 70), np.float32, 1)
    alone = library.product(a, b)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for found in pool.map(lambda _: library.product(a, b), range(4 * threads)):
            np.testing.assert_array_equal(found, alone)


@pytest.mark.skipif(platform.system() != "Linux", reason="/proc")
def test_a_thread_that_ends_leaves_no_memory(library):
    def resident() -> int:
        return psutil.Process().memory_info().rss

    a, b = drawn((90, 400), np.float32), drawn((400, 1536), np.float32, 1)

    def run(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=library.product, args=(a, b))
            thread.start()
            thread.join()

    run(40)  # So many that the allocator has an arena for each, which it keeps.
    before = resident()
    run(150)
    # They would leave panels of two megabytes each.
    assert resident() - before < 100 << 20


def test_denormal_float32(library):
    a, b = np.full((5, 3), 1e-40, np.float32), np.ones((3, 9), np.float32)
    np.testing.assert_allclose(library.product(a, b), 3e-40, rtol=1e-4)


@pytest.mark.parametrize(
    "machine, flags, names",
    [
        ("x86_64", "avx avx2 fma bmi2 f16c", ["avx2"]),
        ("x86_64", "avx avx2", []),
        ("x86_64", "avx2 fma bmi2 f16c avx512f avx512bw avx512dq avx512vl avx512cd", ["avx2", "avx512"]),
        ("AMD64", "avx2 fma bmi2 f16c", []),
        ("aarch64", "fp asimd bf16", ["neon", "neon_bf16"]),
        ("arm64", "asimd", ["neon"]),
        ("riscv64", "", []),
    ],
)
def test_what_a_processor_has(machine, flags, names):
    assert [each.name for each in detect(flags.split(), machine)] == names


def test_the_environment_names_one(monkeypatch):
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert read_limit() is None
    monkeypatch.setenv(ISA_VARIABLE, HERE[0])
    assert read_limit() == INSTRUCTION_SETS[HERE[0]]
    monkeypatch.setenv(ISA_VARIABLE, "avx3")
    with pytest.raises(RecipeError, match="PANAX_CPU_ISA='avx3': did you mean"):
        read_limit()
    monkeypatch.setattr(instruction_sets, "cpu_flags", frozenset)
    monkeypatch.setenv(ISA_VARIABLE, HERE[0])
    with pytest.raises(RecipeError, match="this processor lacks it; it has none of them"):
        read_limit()
