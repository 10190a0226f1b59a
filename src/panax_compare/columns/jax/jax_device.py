"""Measurements and settings of JAX for a comparison: waiting, memory, precision, the speed of a matmul. Not
code that a user would write."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from panax.metrics.throughput import measure_loop

from ...workload.compared_work import Batch, ComparedWork
from ...workload.precision import Precision
from .. import RunningColumn

PRODUCT = 2048
"""Number of rows and columns of the matmul that is timed."""

PRODUCTS = {Precision.F32: "highest", Precision.TF32: "tensorfloat32"}
"""Value of `jax_default_matmul_precision`; bfloat16 needs none."""


def set_precision(precision: Precision) -> None:
    """Set the work's precision of float32 matmuls; must be called before tracing."""
    if precision in PRODUCTS and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", PRODUCTS[precision])


def make_running_column(
    work: ComparedWork,
    step: Callable[[Any], Any],
    evaluate: Callable[[Any], Any],
    put: Callable[[Batch], Any] | None = None,
    tracing_seconds: float = 0.0,
    notes: tuple[str, ...] = (),
) -> RunningColumn:
    """Build a JAX column; its memory is that of this process's first device."""
    device = jax.local_devices()[0]

    def peak() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    return RunningColumn(
        put=put or jax.device_put,
        step=step,
        evaluate=evaluate,
        wait=jax.block_until_ready,
        device=device.device_kind,
        peak_bytes=peak,
        product=lambda: measure_matmul_rate(work.precision),
        registers=lambda: measure_loop(work.precision.computed) if device.platform == "cpu" else None,
        tracing_seconds=tracing_seconds,
        notes=notes,
    )


def measure_matmul_rate(precision: Precision) -> float:
    """Measure the FLOP/s of the fastest of a few square matmuls."""
    a = jax.device_put(np.random.default_rng(0).standard_normal((PRODUCT, PRODUCT), np.float32))
    a = a.astype(precision.computed)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(a))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        seconds.append(time.perf_counter() - start)
    return 2 * PRODUCT**3 / min(seconds)
