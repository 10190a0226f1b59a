"""How fast a run is, against what its devices could do."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PEAK_FLOPS = {
    # Dense bfloat16 FLOP/s of one device, from the vendors' data sheets; the device kind as JAX names it, in lower case.
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


@dataclasses.dataclass(frozen=True)
class Peak:
    """What model FLOPs utilisation divides by.

    Attributes:
        flops_per_second: Of all devices together.
        source: In words, to be shown beside every figure that was divided by it.
    """

    flops_per_second: float
    source: str


def peak_of(devices: Sequence[Any], dtype: str) -> Peak:
    """The peak of these JAX devices: from the data sheet, else measured by a large product in `dtype`."""
    kind = devices[0].device_kind.lower()
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if name in kind:
            each = PEAK_FLOPS[name]
            return Peak(
                each * len(devices), f"{len(devices)} x {each / 1e12:.0f} TFLOP/s, bfloat16 data sheet of {name}"
            )
    measured = measure_product(dtype)
    # Simulated devices share the host's cores: their number adds nothing.
    return Peak(measured, f"{measured / 1e9:.0f} GFLOP/s, measured on this {devices[0].platform} by a {dtype} product")


def measure_product(dtype: str, size: int = 1536, rounds: int = 3) -> float:
    """FLOP/s of the fastest of a few square matrix products with random entries."""
    device = jax.local_devices()[0]
    a = jax.device_put(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32), device)
    a = a.astype(dtype)

    @jax.jit
    def product(a: jax.Array) -> jax.Array:
        return jnp.matmul(a, a, preferred_element_type=jnp.float32)

    product(a).block_until_ready()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def memory_in_use_bytes() -> int:
    """Bytes in use: the fullest device's, or the process's resident set where devices don't tell (CPU)."""
    in_use = [stats.get("bytes_in_use", 0) for device in jax.local_devices() if (stats := device.memory_stats())]
    if in_use:
        return max(in_use)
    import psutil

    return psutil.Process().memory_info().rss
