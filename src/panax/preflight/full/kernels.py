"""Checks of every registered kernel of every kind of work, on the attached device and in each dtype."""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.layout.target import Target
from ...kernels import Kernel, list_kernels
from ...kernels.grouped.grouped_matmul import GroupedCase, Groups, aligned_row_count, choose_tile
from ...kernels.product import MatmulCase, product, sum_rows
from ...kernels.quantized import INT8
from ...kernels.quantized.residual import WORK, ResidualCase
from ...kernels.registry import list_works
from .attention import check_adapted_attention, check_attention, check_context_attention, check_partial_attention
from .comparison import local_target, run_kernel, select_supported, worst_error_share
from .convolution import check_convolution
from .parts import Case, CaseSkipped, Figures
from .rows import check_cached_attention, check_logsumexp, check_materialize, check_norm, check_softmax
from .scans import scan_cases
from .sizes import Sizes

DTYPES = ("float32", "bfloat16")

Check = Callable[[Kernel, str, Sizes], Figures]

_ROUNDING = 2.0**-23


def kernel_cases(sizes: Sizes, target: Target | None = None) -> list[Case]:
    """Return one part for each kernel of each kind of work for a platform, and each dtype.

    Args:
        target: The target with the kernels; by default this process's device, on which alone the parts can
            run.
    """
    cases = []
    with_torch = _load_adapted()
    for work in list_works():
        check = CHECKS.get(work, _undefined)
        for kernel in list_kernels(work, target or local_target()):
            for dtype in DTYPES:
                run = functools.partial(check, kernel, dtype, sizes)
                cases.append(Case("kernel", f"{work}, {kernel.name}, {dtype}", run))
    if not with_torch:
        cases.append(Case("kernel", "adapted attention", _without_torch))
    return [*cases, *scan_cases(sizes)]


def _load_adapted() -> bool:
    """Register the kernels of traced PyTorch models, if PyTorch is installed."""
    if importlib.util.find_spec("torch") is None:
        return False
    importlib.import_module("panax.adapters.torch.lowering.attention")
    return True


def _without_torch() -> Figures:
    raise CaseSkipped("PyTorch is not installed (the extra `torch`), and its kernels are for traced PyTorch models")


def _undefined(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    raise CaseSkipped(f"there is no definition of {kernel.work!r} here to compare it with")


def check_grouped(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "grouped matmul": rows times their groups' matrices, rows times the transposed
    matrices, and the sums over rows."""
    target, count, width = local_target(), 8, sizes.width
    # A group without rows, one with a single row, one with most of them.
    shares = [0, 1, sizes.rows // 2, sizes.rows // 16, 3, sizes.rows // 8]
    counts = [*shares, sizes.rows // 16, sizes.rows - sum(shares) - sizes.rows // 16]
    tile = choose_tile(target, rows=sizes.rows, groups=count)
    select_supported(kernel, [GroupedCase(tile=tile, dtype=dtype)], target)
    total = aligned_row_count(sizes.rows, count, tile)
    numbers = np.asarray(counts, np.int32)
    starts = np.concatenate([[0], np.cumsum(-(-numbers // tile) * tile)])[:-1]
    generator = np.random.default_rng(0)
    x, y = (_zeroed(generator, total, width, starts, numbers) for _ in range(2))
    x, y, w = (_rounded(each, dtype) for each in (x, y, generator.normal(size=(count, width, width))))

    def run(x: Any, y: Any, w: Any, numbers: Any) -> tuple[Any, ...]:
        groups = Groups(sizes=numbers, rows=total, tile=tile)
        forward = kernel.run.product(x, w, groups, transposed=False, out_dtype=jnp.float32)
        back = kernel.run.product(y, w, groups, transposed=True, out_dtype=jnp.float32)
        # The rows of unused tiles are undefined.
        used = (jnp.arange(total) < groups.used_tiles * tile)[:, None]
        outer = kernel.run.outer(x, y, groups, out_dtype=jnp.float32)
        return jnp.where(used, forward, 0.0), jnp.where(used, back, 0.0), outer

    results, figures = run_kernel(kernel, run, (x, y, w, numbers), dtype)
    wide = [np.zeros((total, width)), np.zeros((total, width)), np.zeros((count, width, width))]
    sums = [np.zeros_like(each) for each in wide]
    x, y, w = (np.asarray(each, np.float64) for each in (x, y, w))
    for group, (start, size) in enumerate(zip(starts, numbers)):
        rows = slice(start, start + size)
        for into, left, right, matrix in ((wide, x, y, w), (sums, np.abs(x), np.abs(y), np.abs(w))):
            into[0][rows] = left[rows] @ matrix[group]
            into[1][rows] = right[rows] @ matrix[group].T
            into[2][group] = left[rows].T @ right[rows]
    terms = (width, width, sizes.rows)
    allowed = [_allowed(each, number) for each, number in zip(sums, terms)]
    share = worst_error_share(("product", "transposed product", "sum over rows"), results, wide, allowed)
    return {"of the allowed error": f"{share:.0%}", "rows": f"{sizes.rows} in tiles of {tile}", **figures}


def check_matmul(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "matmul": two matrices, each as it is and transposed."""
    select_supported(kernel, [MatmulCase(dtype=dtype, large=True, local=True)], local_target())
    generator = np.random.default_rng(0)
    a = _rounded(generator.normal(size=(sizes.rows, sizes.width)), dtype)
    b = _rounded(generator.normal(size=(sizes.width, sizes.rows // 2)), dtype)

    def run(a: Any, b: Any) -> tuple[Any, ...]:
        products = []
        for turned in ((False, False), (False, True), (True, False), (True, True)):
            left, right = a.T if turned[0] else a, b.T if turned[1] else b
            if kernel.run is None:  # XLA's own
                letters = f"{'ba' if turned[0] else 'ab'},{'cb' if turned[1] else 'bc'}->ac"
                products.append(product(letters, left, right, jnp.float32))
            else:
                products.append(kernel.run(left, right, turned))
        return tuple(products)

    results, figures = run_kernel(kernel, run, (a, b), dtype, named=_named(kernel))
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    allowed = _allowed(np.abs(a) @ np.abs(b), sizes.width)
    names = ("product", "of b transposed", "of a transposed", "of both transposed")
    share = worst_error_share(names, results, [a @ b] * 4, [allowed] * 4)
    return {"of the allowed error": f"{share:.0%}", **figures}


def check_row_sums(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "row sums"."""
    select_supported(kernel, [MatmulCase(dtype=dtype, large=True, local=True)], local_target())
    x = _rounded(np.random.default_rng(0).normal(size=(sizes.rows, sizes.width)), dtype)
    results, figures = run_kernel(kernel, kernel.run or sum_rows, (x,), dtype, named=_named(kernel))
    wide = np.asarray(x, np.float64)
    share = worst_error_share(("sum",), results, [wide.sum(0)], [_allowed(np.abs(wide).sum(0), sizes.rows)])
    return {"of the allowed error": f"{share:.0%}", **figures}


def check_wall(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "wall": its output equals its input, bit by bit."""
    if kernel.run is None:
        raise CaseSkipped("XLA has no wall, so that there is nothing to run")
    select_supported(kernel, [MatmulCase(dtype=dtype, large=True, local=True)], local_target())
    x = _rounded(np.random.default_rng(0).normal(size=(sizes.rows, sizes.width)), dtype)
    results, figures = run_kernel(kernel, kernel.run, (x,), dtype)
    worst_error_share(("value",), results, [np.asarray(x, np.float32)], [0.0])
    return {"of the allowed error": "bitwise", **figures}


def check_codes(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "codes and rest": each value is at most half a step from its decoded code, and decoded
    value and residual add up to it."""
    if dtype != "float32":
        raise CaseSkipped("gradients are added up in float32")
    select_supported(kernel, [ResidualCase(INT8, 256)], local_target())
    x, residual = np.random.default_rng(0).normal(size=(2, sizes.rows, 256)).astype(np.float32)

    def run(x: Any, residual: Any) -> tuple[Any, ...]:
        codes, rest = kernel.run(x, residual, INT8)
        return codes.dequantize(jnp.float32) + rest, rest

    results, figures = run_kernel(kernel, run, (x, residual), dtype)
    total = x.astype(np.float64) + residual
    steps = np.abs(total).max(1, keepdims=True) / 127
    allowed = [np.abs(total).max() * 4 * _ROUNDING, 0.5001 * steps]
    share = worst_error_share(("codes and rest", "rest"), results, [total, np.zeros_like(total)], allowed)
    return {"of the allowed error": f"{share:.0%}", **figures}


CHECKS: dict[str, Check] = {
    "attention": check_attention,
    "partial attention": check_partial_attention,
    "context attention": check_context_attention,
    "adapted attention": check_adapted_attention,
    "grouped matmul": check_grouped,
    "matmul": check_matmul,
    "convolution": check_convolution,
    "row sums": check_row_sums,
    "wall": check_wall,
    "norm": check_norm,
    "softmax": check_softmax,
    "logsumexp": check_logsumexp,
    "materialize": check_materialize,
    "cached attention": check_cached_attention,
    WORK: check_codes,
}
"""Kind of work to the check that compares one of its kernels with its definition."""


def _named(kernel: Kernel) -> dict[str, str]:
    """Select a kernel without a function, which is XLA's own: otherwise timing might choose another."""
    return {kernel.work: kernel.name} if kernel.run is None else {}


def _allowed(magnitudes: np.ndarray, terms: int) -> np.ndarray:
    """Return the allowed float32 rounding error of sums of `terms` terms, from the sums of the terms'
    magnitudes.

    Products of 8-bit mantissas are exact in float32, so that it is the same for operands in bfloat16.
    """
    return magnitudes * _ROUNDING * (2 + math.sqrt(terms))


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.float32).astype(jnp.dtype(dtype))


def _zeroed(generator: Any, total: int, width: int, starts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return random rows for each group, with zeros in the gaps after them."""
    rows = np.zeros((total, width), np.float32)
    for start, size in zip(starts, numbers):
        rows[start : start + size] = generator.normal(size=(size, width))
    return rows
