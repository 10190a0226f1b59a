"""`find_batch`: search for the largest micro-batch that fits each device's memory, by compiling steps without
running any."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ...core.errors import LayoutError, RecipeError
from ...core.layout.target import device_target
from ...job.join import check_single_process
from ...mesh import Placement
from ...mesh.topology import data_parallel_size
from ...plan.step import ProgramMemory, ProgramTooLargeError, plan_step
from ...system.host_memory import host_bytes
from ...system.terminal_text import format_bytes
from ...train.compilation.mesh_requirements import mesh_requirements
from ...train.compiled_step import CompiledStep
from ..entry import check_experiment
from ..experiment import Experiment
from ..opened_data import LogFn
from ..preparation import make_program, refuse_rollouts
from ..sketch import Sketch, sketch_step

MAX_MEMORY_SHARE = 0.9
"""Share of a device's memory that a step may use: the rest is for fragmentation, libraries and further
batches."""

SIZES_PER_OCTAVE = 8
"""Number of candidate sizes between one power of 2 and the next, above 16 rows."""

MAX_ROWS = 2**16
"""Largest number of rows per device that is tried."""


@dataclasses.dataclass(frozen=True)
class BatchTrial:
    """A micro-batch size for which the step was compiled.

    Attributes:
        rows: Rows per device, at one time.
        total_bytes: Memory on each device; None if the compiler refused the program because it is too large.
    """

    rows: int
    total_bytes: int | None


@dataclasses.dataclass(frozen=True)
class BatchSearch:
    """Result of `find_batch`.

    Attributes:
        rows: Maximum number of rows per device that fit at one time.
        total_bytes: Memory that this step takes on each device.
        memory_bytes: Memory that a step may take on each device: `MAX_MEMORY_SHARE` of its memory.
        ways: Number of devices over which the rows of a batch are split.
        batch_size: The experiment's global batch.
        micro_batches: The fewest micro-batches that keep the global batch.
        even: True if its rows divide by these; otherwise `step.pad_rows` has to pad them.
        at_most: True if more than `MAX_ROWS` rows might fit.
        trials: All steps that were compiled, by their rows.
    """

    rows: int
    total_bytes: int
    memory_bytes: int
    ways: int
    batch_size: int
    micro_batches: int
    even: bool
    at_most: bool
    trials: tuple[BatchTrial, ...]

    @property
    def largest_batch(self) -> int:
        """Return the largest global batch without gradient accumulation."""
        return self.rows * self.ways


def find_batch(
    experiment: Experiment,
    *,
    memory_gib: float | None = None,
    devices: Any = None,
    say: LogFn = lambda line: None,
) -> BatchSearch:
    """Find the maximum number of rows that each device can train on at one time. Steps are compiled, and their
    memory is read; none is run.

    Above 16 rows the answer is a multiple of an eighth of a power of 2.

    Args:
        memory_gib: Memory of each device; by default as the device reports. Devices on a CPU share what the
            process may use.
        devices: JAX devices, also of a target that is not attached; None for all attached ones.
        say: Called with a line for each step that is compiled.

    Raises:
        LayoutError: Not even one row fits.
        RecipeError: The memory is not a number above 0, or the experiment has `debug` set.
    """
    check_experiment(experiment, "find_batch")
    refuse_rollouts(experiment, "find_batch")
    if memory_gib is not None and not (math.isfinite(memory_gib) and memory_gib > 0):
        raise RecipeError(
            f"memory_gib={memory_gib}; expected the memory of a device in GiB, above 0, as in --memory-gib 80"
        )
    if experiment.debug:
        raise RecipeError("debug runs without a compiled step, so its memory is unknown; remove debug")
    check_single_process("find_batch")
    devices = jax.devices() if devices is None else list(devices)
    memory = usable_bytes(devices) if memory_gib is None else round(memory_gib * 2**30)
    sketch = sketch_step(experiment, devices, say, memory)
    assert isinstance(sketch.step, CompiledStep)
    batch, limit = sketch.batch(), int(MAX_MEMORY_SHARE * memory)
    batch_size, ways = next(iter(batch.values())).shape[0], data_parallel_size(sketch.step.placement.sizes)
    tried: dict[int, BatchTrial] = {}

    def fits(rows: int) -> bool:
        tried[rows] = BatchTrial(rows, step_memory_bytes(sketch, batch, rows, ways, batch_size))
        total = tried[rows].total_bytes
        size_text = "more than the compiler allows" if total is None else format_bytes(total)
        verdict = "fits" if total is not None and total <= limit else "does not fit"
        say(f"{rows:,} row{'s' if rows > 1 else ''} on each device: {size_text} of {format_bytes(limit)}: {verdict}")
        return verdict == "fits"

    config = sketch.experiment.step
    rows = find_largest(fits, max(1, batch_size // (ways * config.micro_batches)))
    total = tried[rows].total_bytes if rows else None
    if total is None:
        one_row_bytes = tried[1].total_bytes
        takes = "more than the compiler accepts" if one_row_bytes is None else format_bytes(one_row_bytes)
        raise LayoutError(
            f"one row on each device takes {takes}, where {format_bytes(limit)} may be used: shard over more devices "
            f"(--mesh.fsdp, --mesh.tensor), use --task.remat full, or shorter rows"
        )
    parts = math.ceil(batch_size / (ways * rows))
    even = next((n for n in range(parts, batch_size + 1) if batch_size % (ways * n) == 0), None)
    return BatchSearch(
        rows, total, limit, ways, batch_size, parts if even is None else even, even is not None, rows >= MAX_ROWS,
        tuple(tried[n] for n in sorted(tried)),
    )  # fmt: skip


def find_largest(fits: Callable[[int], bool], first: int) -> int:
    """Find the largest size that fits, of all up to 16 and of eight between a power of 2 and the next; 0 if
    none does.

    Args:
        fits: Returns True if a size fits; if one does not, larger ones are assumed not to fit either.
        first: The size to begin with.

    >>> find_largest(lambda rows: rows <= 13, 1), find_largest(lambda rows: rows <= 101, 4), find_largest(lambda rows: False, 4)
    (13, 96, 0)
    """
    cached_fits = functools.cache(fits)
    low = 1 << (min(first, MAX_ROWS).bit_length() - 1)
    while low and not cached_fits(low):
        low //= 2
    while 0 < low < MAX_ROWS and cached_fits(2 * low):
        low *= 2
    if not low or low == MAX_ROWS:
        return low
    unit = max(1, low // SIZES_PER_OCTAVE)
    good, bad = low // unit, 2 * low // unit
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if cached_fits(middle * unit) else (good, middle)
    return good * unit


def step_memory_bytes(sketch: Sketch, batch: Mapping[str, Any], rows: int, ways: int, batch_size: int) -> int | None:
    """Return the memory of a step on each device, in bytes, with `rows` at one time and at least the global
    batch; None if the compiler refused it."""
    parts = math.ceil(batch_size / (ways * rows))
    step = dataclasses.replace(sketch.experiment.step, micro_batches=parts)
    program = make_program(dataclasses.replace(sketch.experiment, step=step), sketch.task)
    old: Placement = sketch.step.placement
    placement = Placement.create(
        sketch.experiment.mesh, sketch.experiment.rules, list(old.devices.devices.flat), mesh_requirements(program)
    )
    shapes = {
        name: jax.ShapeDtypeStruct((parts * ways * rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()
    }
    with warnings.catch_warnings():
        # Warnings about a pipeline with few micro-batches, for example: the step is compiled, not run.
        warnings.simplefilter("ignore")
        try:
            compiled = CompiledStep(program, placement, sketch.step.batch_axes)
            memory = plan_step(compiled, shapes).memory
            if program.transformation.renewal is None:
                return memory.total
            renewal = ProgramMemory.of(compiled.trace_renewal().lower().compile())
            return max(memory.total, memory.arguments + renewal.temporaries + renewal.outputs - renewal.reused)
        except ProgramTooLargeError:
            return None


def usable_bytes(devices: list[Any]) -> int:
    """Return the memory of each device, in bytes: its own, or its share of the host memory that this process
    may use.

    Raises:
        RecipeError: The device does not report it.
    """
    if not device_target(devices[0]).traits.own_memory:
        return host_bytes() // len(devices)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise RecipeError(f"{devices[0].device_kind} does not report its memory; pass it: --memory-gib 80")
    return limit


def format_batch_result(search: BatchSearch) -> list[str]:
    """Format the result for a terminal."""
    each = f"{search.rows:,} rows on each device" + (", or more" if search.at_most else "")
    lines = [
        f"micro-batch    {each}: {format_bytes(search.total_bytes)} of {format_bytes(search.memory_bytes)}",
        f"global batch   up to {search.largest_batch:,} rows without accumulation, over {search.ways} "
        f"{'devices' if search.ways > 1 else 'device'}",
    ]
    flags = f"--step.micro-batches {search.micro_batches}" + ("" if search.even else " --step.pad-rows")
    return [*lines, f"set            {flags}, for the recipe's {search.batch_size:,} rows"]
