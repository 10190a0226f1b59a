"""Pipeline schedules as tables: each stage's work in each tick, and the slots of the values it stores. Plain
Python.

A pipeline of `stages` devices holds `stages * chunks` virtual stages; chunk c of stage s is virtual stage `c
* stages + s`. All stages tick together. In one tick, a stage runs one virtual stage forward for one
micro-batch, or backward for another, or both. Ticks without any forward or without any backward work are run
by programs without that half, so an idle half costs no time: warm-up is forward only, cool-down is backward
only, and the bubble is that of the published schedules.

Sources: GPipe (arXiv:1811.06965); 1F1B (PipeDream-Flush, arXiv:2006.09503); interleaved (Megatron-LM,
arXiv:2104.04473).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

from ..core.errors import RecipeError
from ..core.validation import Validated

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(Validated):
    """Settings of a `stage` axis.

    Attributes:
        schedule: 1f1b stores the inputs of at most 2·stages - 1 micro-batches. interleaved gives each stage
            several chunks of layers: a bubble `chunks` times smaller, at the cost of more transfers and more
            stored inputs. gpipe runs all forwards, then all backwards, and stores the inputs of every
            micro-batch.
        chunks: Number of groups of layers on each stage, for interleaved.
    """

    schedule: ScheduleName = "1f1b"
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise RecipeError(f"pipeline.chunks={self.chunks}; expected 1 or more")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise RecipeError(
                f"pipeline.schedule={self.schedule!r} with chunks={self.chunks}; interleaved takes 2 or more chunks, the others 1"
            )


@dataclasses.dataclass(frozen=True)
class StageTask:
    """A unit: one virtual stage's work on one micro-batch."""

    micro_batch: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Tick:
    """The forward unit and the backward unit of each stage; None if idle."""

    forward: tuple[StageTask | None, ...]
    backward: tuple[StageTask | None, ...]


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """A valid order of all work.

    Attributes:
        slots: Maximum number of virtual-stage inputs that a stage stores at a time, which determines the
            memory.
        gradient_slots: Maximum number of gradients that wait at a time.
        rows: For each tick and stage, the indices that the executor reads.
    """

    stages: int
    chunks: int
    micro_batches: int
    ticks: tuple[Tick, ...]
    slots: int
    gradient_slots: int
    rows: tuple[tuple[Mapping[str, int], ...], ...]

    @property
    def phases(self) -> list[tuple[bool, bool, int]]:
        """(any stage runs forward, any stage runs backward, number of ticks) for each run of equal ticks."""
        kinds = [(any(tick.forward), any(tick.backward)) for tick in self.ticks]
        return [(*kind, len(list(group))) for kind, group in itertools.groupby(kinds)]

    def time(self, forward: float = 1.0, backward: float = 3.0) -> float:
        """Return the total time, in units of a whole stage's forward time; a backward unit reruns the forward
        from the stored input, hence 3."""
        return sum(ticks * (f * forward + b * backward) for f, b, ticks in self.phases) / self.chunks

    def bubble(self, forward: float = 1.0, backward: float = 3.0) -> float:
        """Return the fraction of the time in which a stage is idle.

        >>> round(build_schedule(Pipeline(), stages=4, micro_batches=12).bubble(), 6) == round(3 / 15, 6)
        True
        """
        each = forward + (backward if any(b for _, b, _ in self.phases) else 0.0)
        return 1.0 - self.micro_batches * each / self.time(forward, backward)


def build_schedule(
    pipeline: Pipeline, *, stages: int, micro_batches: int, forward_only: bool = False
) -> PipelineSchedule:
    """Build the schedule's table.

    Args:
        forward_only: True for evaluation.
    """
    units = list(_units(stages, pipeline.chunks, micro_batches))
    forward = {(unit, stage): i + stage for i, unit in units for stage in range(stages)}
    backward: dict[tuple[StageTask, int], int] = {}
    if not forward_only:
        last = pipeline.chunks - 1
        # The first gradient exists once the first micro-batch leaves the last stage; GPipe waits for all micro-batches.
        first = forward[StageTask(0, last), stages - 1]
        if pipeline.schedule == "gpipe":
            first = max(forward.values()) + 1
        # The backward order mirrors the forward one, with stages and chunks reversed.
        mirrored = {unit: i for i, unit in units}
        backward = {
            (unit, stage): first + mirrored[StageTask(unit.micro_batch, last - unit.chunk)] + stages - 1 - stage
            for _, unit in units
            for stage in range(stages)
        }
    return _tabulated(stages, pipeline.chunks, micro_batches, forward, backward)


def _units(stages: int, chunks: int, micro_batches: int) -> Iterator[tuple[int, StageTask]]:
    """Yield (turn, unit) in the order of stage 0: a group of `stages` micro-batches passes through one chunk
    after another."""
    for group in range(-(-micro_batches // stages)):
        for chunk in range(chunks):
            for within in range(stages):
                micro_batch = group * stages + within
                if micro_batch < micro_batches:
                    # With a single chunk, groups follow each other without gaps.
                    yield (group * chunks + chunk) * stages + within, StageTask(micro_batch, chunk)


Times = Mapping[tuple[StageTask, int], int]


def _tabulated(stages: int, chunks: int, micro_batches: int, forward: Times, backward: Times) -> PipelineSchedule:
    count = max([*forward.values(), *backward.values()]) + 1
    who: dict[str, dict[tuple[int, int], StageTask]] = {"forward": {}, "backward": {}}
    for kind, times in (("forward", forward), ("backward", backward)):
        for (unit, stage), tick in times.items():
            assert (tick, stage) not in who[kind], "two units in one tick of one stage"
            who[kind][tick, stage] = unit
    last = (chunks - 1, stages - 1)

    def before(unit: StageTask, stage: int) -> tuple[StageTask, int]:
        return (unit, stage - 1) if stage else (StageTask(unit.micro_batch, unit.chunk - 1), stages - 1)

    def after(unit: StageTask, stage: int) -> tuple[StageTask, int]:
        return (unit, stage + 1) if stage < stages - 1 else (StageTask(unit.micro_batch, unit.chunk + 1), 0)

    # A tick has four moments, at 4 * tick + 0..3: forward, loss, backward, arrival of values from the neighbors.
    # Each value occupies its slot from the moment it arrives or is made to its last use.
    inputs: dict[int, list[tuple[int, int, StageTask]]] = {stage: [] for stage in range(stages)}
    gradients: dict[int, list[tuple[int, int, StageTask]]] = {stage: [] for stage in range(stages)}
    for (unit, stage), tick in forward.items():
        start = 4 * tick if (unit.chunk, stage) == (0, 0) else 4 * forward[before(unit, stage)] + 3
        end = 4 * backward[unit, stage] + 2 if backward else 4 * tick
        assert start <= 4 * tick, "a unit runs before its input is there"
        inputs[stage].append((start, end, unit))
        if backward:
            start = 4 * tick + 1 if (unit.chunk, stage) == last else 4 * backward[after(unit, stage)] + 3
            assert start <= end, "a backward unit runs before its gradient is there"
            gradients[stage].append((start, end, unit))
    input_slots, slots = _allocated(inputs)
    gradient_slots, gradient_count = _allocated(gradients)

    # Unused indices are 0, or the dump slot (`slots`, `gradient_count`), so that every tick runs the same program.
    def row(tick: int, stage: int) -> dict[str, int]:
        f, b = who["forward"].get((tick, stage)), who["backward"].get((tick, stage))
        # Arrivals of this tick come from the ring's neighbors; at its end, a micro-batch moves to the next chunk.
        sent = who["forward"].get((tick, (stage - 1) % stages))
        returned = who["backward"].get((tick, (stage + 1) % stages))
        done = who["forward"].get((tick, stages - 1))
        arrives = _next_or_none(sent, (stage - 1) % stages, stages, chunks)
        comes_back = _previous_or_none(returned, (stage + 1) % stages, stages)
        lost = done is not None and done.chunk == chunks - 1
        return {
            "forward": int(f is not None),
            "forward_micro_batch": f.micro_batch if f else 0,
            "forward_chunk": f.chunk if f else 0,
            "forward_slot": input_slots[stage, f] if f else slots,
            "forward_first": int(f is not None and stage == 0 and f.chunk == 0),
            "loss": int(lost),
            "loss_micro_batch": done.micro_batch if done and lost else 0,
            "loss_slot": gradient_slots[stage, done]
            if done and lost and stage == stages - 1 and backward
            else gradient_count,
            "backward": int(b is not None),
            "backward_micro_batch": b.micro_batch if b else 0,
            "backward_chunk": b.chunk if b else 0,
            "backward_slot": input_slots[stage, b] if b else slots,
            "backward_gradient_slot": gradient_slots[stage, b] if b else gradient_count,
            "backward_first": int(b is not None and stage == 0 and b.chunk == 0),
            "arrival_slot": input_slots[stage, arrives] if arrives else slots,
            "gradient_arrival_slot": gradient_slots[stage, comes_back] if comes_back else gradient_count,
        }

    ticks = tuple(
        Tick(
            tuple(who["forward"].get((tick, stage)) for stage in range(stages)),
            tuple(who["backward"].get((tick, stage)) for stage in range(stages)),
        )
        for tick in range(count)
    )
    rows = tuple(tuple(row(tick, stage) for stage in range(stages)) for tick in range(count))
    return PipelineSchedule(stages, chunks, micro_batches, ticks, slots, gradient_count, rows)


def _next_or_none(unit: StageTask | None, stage: int, stages: int, chunks: int) -> StageTask | None:
    """Return the unit that consumes the output of `unit` on `stage`; None after the last one."""
    if unit is None or (stage == stages - 1 and unit.chunk == chunks - 1):
        return None
    return unit if stage < stages - 1 else StageTask(unit.micro_batch, unit.chunk + 1)


def _previous_or_none(unit: StageTask | None, stage: int, stages: int) -> StageTask | None:
    """Return the unit with the output that `unit` on `stage` computes the gradient of; None before the first
    one."""
    if unit is None or (stage == 0 and unit.chunk == 0):
        return None
    return unit if stage else StageTask(unit.micro_batch, unit.chunk - 1)


def _allocated(
    intervals: Mapping[int, list[tuple[int, int, StageTask]]],
) -> tuple[dict[tuple[int, StageTask], int], int]:
    """Assign each (stage, unit) a slot that no other live unit uses; return the slots and their number."""
    slots: dict[tuple[int, StageTask], int] = {}
    num_slots = 0
    for stage, lives in intervals.items():
        free_at: list[int] = []
        for start, end, unit in sorted(lives, key=lambda life: life[:2]):
            slot = next((i for i, busy_until in enumerate(free_at) if busy_until < start), len(free_at))
            if slot == len(free_at):
                free_at.append(end)
            free_at[slot] = end
            slots[stage, unit] = slot
        num_slots = max(num_slots, len(free_at))
    return slots, num_slots


def layers_by_stage(layers: int, *, stages: int, chunks: int) -> list[list[list[int]]]:
    """Distribute layers over stages as evenly as possible: [stage][chunk] to its layers, in order.

    Raises:
        RecipeError: There are fewer layers than virtual stages.

    >>> layers_by_stage(7, stages=2, chunks=2)
    [[[0, 1], [4, 5]], [[2, 3], [6]]]
    """
    count = stages * chunks
    if layers < count:
        fits = [str(n) for n in range(1, layers // chunks + 1)]
        raise RecipeError(
            f"{layers} layers are fewer than stage={stages} x chunks={chunks} = {count} parts of a pipeline; use mesh.stage in "
            f"{{{', '.join(fits[-8:])}}}" + (f" with {chunks} chunks, or fewer chunks" if chunks > 1 else "")
        )
    base, extra = divmod(layers, count)
    starts = [0, *itertools.accumulate(base + (k < extra) for k in range(count))]
    return [
        [list(range(starts[c * stages + s], starts[c * stages + s + 1])) for c in range(chunks)] for s in range(stages)
    ]


def schedule_table(stages: int, micro_batches: int, chunks: int) -> str:
    """Format each schedule's ticks, bubble and peak of stored inputs as a Markdown table, computed from the
    executor's tables."""
    lines = [
        "| schedule | ticks (forward, both, backward) | bubble | inputs kept | for layers |",
        "|---|---|---|---|---|",
    ]
    named: list[tuple[str, Pipeline]] = [
        ("gpipe", Pipeline(schedule="gpipe")),
        ("1f1b", Pipeline()),
        (f"interleaved, {chunks} chunks", Pipeline(schedule="interleaved", chunks=chunks)),
    ]
    for name, pipeline in named:
        schedule = build_schedule(pipeline, stages=stages, micro_batches=micro_batches)
        counts = {(True, False): 0, (True, True): 0, (False, True): 0}
        for forward, backward, count in schedule.phases:
            counts[forward, backward] += count
        ticks = f"{len(schedule.ticks)} ({', '.join(map(str, counts.values()))})"
        part = stages * pipeline.chunks
        lines.append(f"| {name} | {ticks} | {schedule.bubble():.1%} | {schedule.slots} | 1/{part} |")
    return "\n".join(lines)
