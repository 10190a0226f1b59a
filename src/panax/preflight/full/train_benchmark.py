"""A checkpoint from device memory, and a benchmark of as many layers as fit, with AdamW on the devices that
are here."""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...checkpoint import CheckpointConfig, Checkpointer, restore
from ...core import named_leaves
from ...data.text.token_source import TEXT_AXES, TEXT_LEAVES
from ...mesh import MeshShape, Placement
from ...metrics.throughput import find_peak_flops, measure_matmul
from ...models import DecoderConfig, DecoderTask
from ...optim import AdamW, Schedule
from ...plan.step import plan_step
from ...system.host_memory import free_bytes
from ...system.terminal_text import format_elapsed, format_flop_rate, format_rate
from ...train import CompiledStep, Program
from ..devices import select_devices
from .parts import Case, CaseSkipped, Figures, ResultMismatch
from .sizes import Sizes

DTYPE = "bfloat16"
"""Dtype of the benchmark's activations on accelerators; parameters and moments are float32."""

FEW_LAYERS = (1, 3)
"""Numbers of layers that are compiled to find the memory of a layer."""

MIN_LAYERS_KEPT = 0.85
"""If the planned layers do not fit, this share of them is tried next."""


def training_cases(sizes: Sizes, folder: Path) -> list[Case]:
    """Return two parts: the checkpoint, which writes to a temporary folder inside `folder`, and the benchmark."""
    return [
        Case("checkpoint", "save, train on, restore", lambda: check_checkpoint(sizes, folder)),
        Case("benchmark", sizes.trained_as, lambda: benchmark(sizes)),
    ]


def check_checkpoint(sizes: Sizes, folder: Path) -> Figures:
    """Save a state while it is on the devices, take a step, and restore it bitwise.

    Raises:
        ResultMismatch: A leaf differs from the one that was saved.
    """
    step, batch = _step(sizes.saved, "float32", 2, 64, steps=2)
    state, _ = step(step.init(0), step.put(batch))
    saved_leaves = _words(state)
    size = sum(leaf.nbytes for leaf in saved_leaves.values())
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise CaseSkipped(f"the state takes {size / 2**20:,.0f} MiB, and {folder} has {free / 2**20:,.0f} MiB free")
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    with tempfile.TemporaryDirectory(prefix="panax-check-", dir=folder) as place:
        checkpointer = Checkpointer(place, CheckpointConfig(retries=0), say=lambda line: None)
        checkpointer.prepare(state)
        start = time.perf_counter()
        checkpointer.save(state, 1, {})
        copied = time.perf_counter() - start
        # The arrays that were saved are donated: the written bytes must not depend on them.
        state, _ = step(state, step.put(batch))
        jax.block_until_ready(state)
        checkpointer.finish()
        written = time.perf_counter() - start
        start = time.perf_counter()
        again = jax.block_until_ready(restore(checkpointer.open(1), abstract, step.shardings))
        read = time.perf_counter() - start
    restored = _words(again)
    odd = [name for name, leaf in saved_leaves.items() if not np.array_equal(leaf, restored[name])]
    if odd:
        raise ResultMismatch(
            f"{len(odd)} of {len(saved_leaves)} arrays are not bitwise what was saved, such as {odd[0]}"
        )
    return {
        "size": f"{size / 2**20:,.0f} MiB",
        "copied to the host": f"{format_elapsed(copied)} ({format_rate(size / copied)})",
        "written": f"{format_elapsed(written)} ({format_rate(size / written)})",
        "restored": f"{format_elapsed(read)} ({format_rate(size / read)})",
    }


def benchmark(sizes: Sizes) -> Figures:
    """Train as many layers as fit, and time steps.

    Raises:
        CaseSkipped: Not one layer fits.
        ResultMismatch: The loss is not finite, or does not fall on one batch.
    """
    devices = select_devices()
    dtype = "float32" if devices[0].platform == "cpu" else DTYPE
    rows = sizes.rows_per_device * len(devices)
    free = _free_bytes(devices[0], sizes.memory_share)
    needed = MemoryModel.of(sizes, dtype, rows)
    layers = find_largest(sizes.trained.num_layers, lambda count: needed.bytes_of(count) <= free)
    if layers == 0:
        raise CaseSkipped(
            f"one layer of {sizes.trained_as} takes {needed.bytes_of(1) / 2**30:.1f} GiB, and there are {free / 2**30:.1f} GiB"
        )
    if sizes.seconds is not None:
        layers = min(layers, _in_time(sizes, dtype, rows))
    planned = layers
    while True:
        try:
            figures = _timed(_cut(sizes, layers), dtype, rows, sizes)
            memory = f"{needed.bytes_of(layers) / 2**30:.2f} of {free / 2**30:.2f} GiB on each device, by the compiler"
            note = {} if layers == planned else {"note": f"{planned} layers were planned, and did not fit"}
            return {**figures, "planned memory": memory, **note}
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or layers == 1:
                raise
            layers = max(1, min(layers - 1, int(MIN_LAYERS_KEPT * layers)))


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Memory of a step on each device, in bytes, extrapolated linearly from the compiler's plans for a few
    layers.

    Attributes:
        fixed: Memory without layers: embedding, head, and the temporary gradient of one layer.
        per_layer: Memory of a layer.
    """

    fixed: float
    per_layer: float

    @classmethod
    def of(cls, sizes: Sizes, dtype: str, rows: int) -> "MemoryModel":
        """Compile steps of few layers.

        Raises:
            ProgramTooLargeError: The compiler finds that even a few layers don't fit.
        """
        few, more = FEW_LAYERS
        bytes_of = {}
        for count in FEW_LAYERS:
            step, batch = _step(_cut(sizes, count), dtype, rows, sizes.tokens, steps=1)
            bytes_of[count] = plan_step(step, batch).memory.total
        each = (bytes_of[more] - bytes_of[few]) / (more - few)
        return cls(bytes_of[few] - few * each, each)

    def bytes_of(self, layers: int) -> float:
        return self.fixed + layers * self.per_layer


def find_largest(maximum: int, fits: Callable[[int], bool]) -> int:
    """Find the largest number up to `maximum` that fits, given that all smaller numbers fit too; 0 if none
    fits.

    >>> find_largest(32, lambda count: count <= 11), find_largest(4, lambda count: True), find_largest(4, lambda count: False)
    (11, 4, 0)
    """
    low, high = 0, maximum + 1
    if fits(maximum):
        return maximum
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _timed(model: DecoderConfig, dtype: str, rows: int, sizes: Sizes) -> Figures:
    devices = select_devices()
    step, batch = _step(model, dtype, rows, sizes.tokens, steps=sizes.steps + 2)
    sent = step.put(batch)
    state, losses, seconds = step.init(0), [], []
    for _ in range(sizes.steps + 2):
        start = time.perf_counter()
        state, scalars = step(state, sent)
        losses.append(float(scalars["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    if not all(np.isfinite(losses)) or not losses[-1] < losses[0]:
        raise ResultMismatch(f"the losses on one batch are {losses}; expected finite ones that fall")
    # The first one compiles, the second one warms up.
    median = float(np.median(seconds[2:]))
    tokens = rows * sizes.tokens
    flops = DecoderTask(model=model).flops_per_token(sizes.tokens) * tokens
    peak = find_peak_flops(devices, dtype)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(step.program.abstract.params))
    figures = {
        "layers": f"{model.num_layers} of {sizes.trained.num_layers}",
        "parameters": f"{parameters / 1e6:,.0f} million",
        "batch": f"{rows} rows of {sizes.tokens} tokens, {dtype}, remat full",
        "step": f"{format_elapsed(median)} (median of {sizes.steps}; "
        f"{format_elapsed(min(seconds[2:]))} to {format_elapsed(max(seconds[2:]))})",
        "tokens": f"{tokens / median:,.0f} a second",
        "rate": format_flop_rate(flops / median),
        "MFU": f"{flops / median / peak.flops_per_second:.1%} of {peak.source}",
        "loss": f"{losses[0]:.3f} -> {losses[-1]:.3f}",
        "compiled in": format_elapsed(step.compile_seconds),
    }
    used = [stats.get("peak_bytes_in_use", 0) for each in devices if (stats := each.memory_stats())]
    if any(used):
        figures["peak memory since the start"] = f"{max(used) / 2**30:.1f} GiB"
    return figures


def _cut(sizes: Sizes, layers: int) -> DecoderConfig:
    return dataclasses.replace(sizes.trained, num_layers=layers)


def _in_time(sizes: Sizes, dtype: str, rows: int) -> int:
    """Return the number of layers that train in the allowed seconds, at half the rate of matrix
    multiplications; at least 1."""
    assert sizes.seconds is not None
    affordable = sizes.seconds * measure_matmul(dtype) / 2
    tokens = rows * sizes.tokens * (sizes.steps + 2)

    def fits(count: int) -> bool:
        # A third more for recomputation.
        return 4 / 3 * tokens * DecoderTask(model=_cut(sizes, count)).flops_per_token(sizes.tokens) <= affordable

    return max(1, find_largest(sizes.trained.num_layers, fits))


def _free_bytes(device: Any, share: float) -> float:
    """Return a share of a device's free memory; of the host's, shared by all, if it reports none."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return share * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return share * free_bytes()


def _step(
    model: DecoderConfig, dtype: str, rows: int, tokens: int, *, steps: int
) -> tuple[CompiledStep, dict[str, np.ndarray]]:
    """Return a step of a decoder with its state sharded over the devices, and a batch of random tokens."""
    devices = select_devices()
    rows = -(-rows // len(devices)) * len(devices)
    task = DecoderTask(model=model, compute_dtype=dtype, remat="full")  # pyright: ignore[reportArgumentType]
    optimizer = AdamW(schedule=Schedule(peak=1e-3, decay="constant"))
    program = Program.create(task, optimizer, num_steps=steps)
    placement = Placement.create(MeshShape(fsdp=len(devices)), devices=devices)
    generator = np.random.default_rng(0)
    values = generator.integers(0, model.vocab_size, (rows, tokens + 1))
    positions = np.broadcast_to(np.arange(tokens), (rows, tokens))
    ones = np.ones((rows, tokens))
    leaves = (values[:, :-1], values[:, 1:], ones, ones, positions)
    batch = {name: leaf.astype(kind) for (name, kind), leaf in zip(TEXT_LEAVES.items(), leaves, strict=True)}
    return CompiledStep(program, placement, TEXT_AXES), batch


def _words(tree: Any) -> dict[str, np.ndarray]:
    """Return every leaf on the host; a random key as its words."""

    def host(leaf: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return {name: host(leaf) for name, leaf in named_leaves(tree).items()}
