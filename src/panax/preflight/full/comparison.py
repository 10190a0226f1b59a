"""Computation of a kernel's values on the device, and comparison with those of its definition."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.layout.target import Target, device_target
from ...kernels import Kernel, use_kernels
from ...kernels.registry import EXACT
from ...system.terminal_text import format_elapsed
from .parts import CaseSkipped, Figures, ResultMismatch

CUSTOM = frozenset({"cudnn", "pallas", "triton", "megablox", "c", "mkl", EXACT})
"""Panax's kernels that are custom calls in a compiled program: without one, something else would have run."""

PARTITIONING = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement")
"""Custom calls that are marks for XLA."""

REPEATS = 3


def local_target() -> Target:
    """Return the target of the device that the parts run on."""
    return device_target(jax.local_devices()[0])


@contextlib.contextmanager
def evaluate_definition() -> Iterator[None]:
    """Compute a definition inside the context: on the host's processor if JAX has it, with full-precision
    matmuls."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        # JAX_PLATFORMS names the accelerator alone.
        device = jax.local_devices()[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield


def full_precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Multiply float32 operands in full precision, also on devices that reduce it by default."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def run_kernel(
    kernel: Kernel,
    function: Callable[..., Any],
    arrays: Sequence[Any],
    dtype: str,
    *,
    named: Mapping[str, str] | None = None,
) -> tuple[tuple[np.ndarray, ...], Figures]:
    """Compile and run a function for the first device, and check that it ran the kernel there.

    Float32 operands are multiplied in full precision, so that only rounding can make a difference.

    Args:
        dtype: Dtype of the operands.
        named: Kinds of work for which the kernel is selected while the function is traced.

    Returns:
        The outputs in float32 or wider, and the time of a run.

    Raises:
        ResultMismatch: Another kernel ran, or another device.
    """
    device, names = jax.local_devices()[0], named or {}
    arrays = [jax.device_put(each, device) for each in arrays]
    with full_precision(dtype), use_kernels(names) as selections:
        compiled = jax.jit(function).lower(*arrays).compile()
    for work in names:
        noted = [line for line, of in selections.items() if of == work]
        if not any(f"runs {kernel.name!r}" in line for line in noted):
            raise ResultMismatch(
                f"{work} was to run {kernel.name!r}; what was traced ran {'; '.join(noted) or 'none of it'}"
            )
    calls = sorted({*re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or "")} - {*PARTITIONING})
    if kernel.name in CUSTOM and kernel.platforms and not calls:
        raise ResultMismatch(
            f"{kernel.name!r} was named, and the compiled program has no custom call: something else would run"
        )
    outputs = jax.block_until_ready(compiled(*arrays))
    for each in jax.tree.leaves(outputs):
        if {other.platform for other in each.devices()} != {device.platform}:
            raise ResultMismatch(f"the result is on {each.devices()}, expected {device}")
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    wide = tuple(np.asarray(each.astype(jnp.float32)) for each in jax.tree.leaves(outputs))
    figures = {"run": format_elapsed(min(times))}
    if kernel.platforms and calls:
        figures["calls"] = ", ".join(calls)
    return wide, figures


def worst_error_share(
    names: Sequence[str],
    results: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    allowed: Sequence[Any],
) -> float:
    """Return the largest distance from the definition as a share of the allowed error.

    Args:
        allowed: For each array, a number or an array of its shape.

    Raises:
        ResultMismatch: The share is above 1, or not finite; the message names the array.
    """
    worst = 0.0
    for name, left, right, limit in zip(names, results, expected, allowed, strict=True):
        if left.shape != right.shape:
            raise ResultMismatch(f"{name} has shape {left.shape}; its definition has {right.shape}")
        distance = np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))
        share = distance / np.maximum(np.asarray(limit, np.float64), np.finfo(np.float64).tiny)
        largest = float(share.max(initial=0.0))
        if not largest <= 1.0:
            bad = int((~(share <= 1.0)).sum())
            raise ResultMismatch(
                f"{name} is {float(distance.max()):.3g} from its definition, {largest:.3g} times what rounding may make, in "
                f"{bad:,} of {distance.size:,} entries"
            )
        worst = max(worst, largest)
    return worst


def select_supported(kernel: Kernel, cases: Sequence[Any], target: Target) -> list[int]:
    """Return the indices of the cases that a kernel supports.

    Raises:
        CaseSkipped: The kernel supports none of the cases, or a requirement is missing here; the message names
            it.
    """
    if missing := kernel.missing():
        raise CaseSkipped(missing)
    limits = [kernel.limit(case, target) for case in cases]
    if all(limits):
        raise CaseSkipped("; ".join(dict.fromkeys(str(limit) for limit in limits)))
    return [number for number, limit in enumerate(limits) if not limit]
