"""Speed of a run relative to the peak of its devices."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.layout.target import device_target
from ..kernels import list_kernels, machine_key, use_kernels
from ..kernels.cache import kernels_folder
from ..kernels.cpu.native import peak_loop
from ..kernels.product import MatmulCase, product
from ..system import json_reader
from ..system.replacement import replace_file
from ..system.secure_dir import is_own_file

PEAK_FLOPS = {
    # Dense bfloat16 FLOP/s of one device, from the vendors' data sheets; the device kind is JAX's name in
    # lower case.
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "a100": 312e12,
    "l4": 121e12,
    "v100": 125e12,
    "tpu v4": 275e12,
    "tpu v5 lite": 197e12,
    "tpu v5e": 197e12,
    "tpu v5p": 459e12,
    "tpu v5": 459e12,
    "tpu v6 lite": 918e12,
    "tpu v6e": 918e12,
    "tpu7x": 2307e12,
}


LOOPS = 10


@dataclasses.dataclass(frozen=True)
class Peak:
    """Denominator of model FLOPs utilization.

    Attributes:
        flops_per_second: FLOP/s of all devices together.
        source: Description, shown with every figure that was divided by it.
    """

    flops_per_second: float
    source: str


def find_peak_flops(devices: Sequence[Any], dtype: str) -> Peak:
    """Return the peak of these JAX devices: by data sheet; for CPUs the measured rate on registers, for
    unlisted devices that of a large matmul."""
    kind = devices[0].device_kind.lower()
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if name in kind:
            each = PEAK_FLOPS[name]
            return Peak(
                each * len(devices), f"{len(devices)} x {each / 1e12:.0f} TFLOP/s, bfloat16 data sheet of {name}"
            )
    # Simulated devices share the host's cores: their number adds nothing.
    loop = measure_loop(dtype) if devices[0].platform == "cpu" else None
    measured = measure_matmul(dtype) if loop is None else loop
    cache_key = ("product" if loop is None else "loop", machine_key(), device_target(devices[0]).architecture, dtype)
    best = _record_best_rate("-".join(filter(None, cache_key)), measured)
    if loop is None:
        source = f"the fastest {dtype} product ever measured on this {devices[0].platform}"
        reason = "other programs use this machine"
    else:
        source = f"the most that this processor's threads multiply and add in {dtype}, on registers alone"
        # A thread measures its own time, so another program only affects the clock rate.
        reason = "its clock is slower"
    lower = "" if measured > 0.8 * best else f"; {measured / 1e9:.0f} now: {reason}"
    return Peak(best, f"{best / 1e9:.0f} GFLOP/s, {source}{lower}")


@functools.cache
def measure_loop(dtype: str) -> float | None:
    """Measure the FLOP/s of multiplications and additions on registers alone, which no program exceeds; None
    without C files."""
    program = peak_loop(dtype)
    return None if program is None else max(float(program()) for _ in range(LOOPS))


@functools.cache
def measure_matmul(dtype: str, size: int = 1536, rounds: int = 3) -> float:
    """Measure the FLOP/s of the fastest of a few square matmuls with random entries, with the fastest kernel
    of this machine.

    It takes most of a second, so a process measures once: the second run of a sweep or a notebook starts that
    much earlier.
    """
    device = jax.local_devices()[0]
    a = jax.device_put(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32), device)
    a = a.astype(dtype)
    target, case = device_target(device), MatmulCase(dtype=str(a.dtype), large=True, local=True)
    kernels = [k.name for k in list_kernels("matmul", target) if (k.limit(case, target) or k.missing()) is None]
    return max(_rate(name, a, rounds) for name in kernels)


def _rate(kernel: str, a: jax.Array, rounds: int) -> float:
    with use_kernels({"matmul": kernel}):
        multiply = jax.jit(lambda a: product("ab,bc->ac", a, a, jnp.float32)).lower(a).compile()
    multiply(a).block_until_ready()
    best, left = float("inf"), rounds
    while left > 0:
        start = time.perf_counter()
        multiply(a).block_until_ready()
        seconds = time.perf_counter() - start
        left = rounds if seconds < 0.98 * best else left - 1
        best = min(best, seconds)
    return 2 * a.shape[0] ** 3 / best


def _record_best_rate(name: str, measured: float) -> float:
    """Return the best rate ever measured for a machine and dtype, including this one; stored in the cache of
    kernels."""
    try:
        file = kernels_folder() / f"peak-{name}.json"
        previous = float(json_reader.read(file, constants=True)) if is_own_file(file) else 0.0
        if measured > previous:
            replace_file(file, json.dumps(measured), private=True)
        return max(previous, measured) if math.isfinite(previous) else measured
    except (OSError, ValueError, TypeError):
        return measured  # without a usable cache, the rate measured now


def memory_in_use_bytes() -> int:
    """Return the bytes in use: the fullest device's, or the process's resident set if devices don't report it
    (CPU)."""
    in_use = [stats.get("bytes_in_use", 0) for device in jax.local_devices() if (stats := device.memory_stats())]
    if in_use:
        return max(in_use)
    import psutil

    return psutil.Process().memory_info().rss
