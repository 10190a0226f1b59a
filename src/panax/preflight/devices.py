"""Speed of each device: the rate of its matrix multiplications and the bandwidth of its memory."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 7
"""Number of executions of each measurement; the fastest counts. On two busy cores the fastest of 7 came
within 10 % of the fastest of 50."""


@dataclasses.dataclass(frozen=True)
class BenchmarkSize:
    """Size of the work that is timed.

    Attributes:
        rows: Rows of the square matrices.
        dtype: Dtype of their elements.
        chain: Multiplications in one program, so that starting it does not count.
        memory_bytes: Size of the array that is copied, far above any cache.
    """

    rows: int
    dtype: str
    chain: int
    memory_bytes: int


SIZES = {"cpu": BenchmarkSize(1024, "float32", 1, 128 * 2**20)}

ACCELERATOR = BenchmarkSize(8192, "bfloat16", 8, 2**30)


@dataclasses.dataclass(frozen=True)
class DeviceFigures:
    """Figures of one device.

    Attributes:
        index: JAX's id of the device.
        matrix_flops: The highest rate, in FLOP/s.
        memory_bandwidth: The highest bandwidth, read and written, in bytes per second.
        slowest_ratio: Time of the slowest multiplication relative to the fastest.
    """

    index: int
    matrix_flops: float
    memory_bandwidth: float
    slowest_ratio: float


def size_for(platform: str) -> BenchmarkSize:
    return SIZES.get(platform, ACCELERATOR)


def select_devices() -> list[Any]:
    """Return this process's devices to measure: all of them, but only one if they are simulated and share the
    host's cores."""
    local = jax.local_devices()
    return local[:1] if local[0].platform == "cpu" else local


def measure_device(device: Any) -> DeviceFigures:
    """Time matrix multiplications, then copies of a large array, on one device."""
    size = size_for(device.platform)
    with jax.default_device(device):
        a = jnp.full((size.rows, size.rows), 1 / size.rows, size.dtype)

        def multiplied(x: jax.Array) -> jax.Array:
            for _ in range(size.chain):
                x = jnp.matmul(x, a, preferred_element_type=jnp.float32).astype(a.dtype)
            return x

        times = time_executions(jax.jit(multiplied), a)
        flops = 2 * size.rows**3 * size.chain / min(times)
        ratio = max(times) / min(times)
        # In place: the system would allocate new memory page by page, which costs more than the copy.
        x = jnp.zeros((size.memory_bytes // 4,), jnp.float32)
        copies = time_in_place(jax.jit(lambda x: x + 1, donate_argnums=0), x)
    return DeviceFigures(device.id, flops, 2 * size.memory_bytes / min(copies), ratio)


def time_executions(program: Callable[..., Any], *arguments: Any, repeats: int = REPEATS) -> list[float]:
    """Time several executions, after one that compiles and one that warms up."""
    for _ in range(2):
        jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
    return seconds


def time_in_place(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> list[float]:
    """Time several executions like `time_executions`, each with the result of the previous one."""
    seconds = []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        x = jax.block_until_ready(program(x))
        seconds.append(time.perf_counter() - start)
    return seconds[2:]
