"""Cost of one training step: compiled for attached devices, or for others, and never run."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..data import TextData
from ..train import CompiledStep
from .collectives import Collective, count_collectives
from .overlap import OverlapReport, has_async_schedule, overlapped_flops


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes on each device while a program runs, as its compiler arranged them.

    Attributes:
        arguments: The state and the batch.
        outputs: The next state and the scalars.
        temporaries: Activations, gradients, gathered weights.
        reused: Outputs that reuse an argument's memory.
    """

    arguments: int
    outputs: int
    temporaries: int
    reused: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.reused

    @classmethod
    def of(cls, compiled: Any) -> "ProgramMemory":
        """Read the memory of a compiled program. Host memory is not counted."""
        read = compiled.memory_analysis()
        return cls(
            arguments=read.argument_size_in_bytes,
            outputs=read.output_size_in_bytes,
            temporaries=read.temp_size_in_bytes,
            reused=read.alias_size_in_bytes,
        )


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One training step, before it runs.

    Attributes:
        collectives: Its communication.
        overlap: The collectives with the matrix multiplications that overlap with each; empty if the schedule
            does not show the overlap.
        memory: Memory on each device.
        compile_seconds: Time of tracing and compiling.
    """

    collectives: list[Collective]
    memory: ProgramMemory
    compile_seconds: float
    overlap: tuple[OverlapReport, ...] = ()


class ProgramTooLargeError(Exception):
    """The compiler finds that a program does not fit its target's memory; the message is the compiler's."""


def plan_step(step: CompiledStep, batch: dict[str, Any]) -> StepPlan:
    """Compile a training step for the shapes of `batch` (abstract or real) and compute its cost.

    Raises:
        ProgramTooLargeError: The compiler rejects the program, as the one for TPUs does.
    """
    start = time.perf_counter()
    try:
        with disable_compilation_cache():
            compiled = step.lower(batch).compile()
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ProgramTooLargeError(
            str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2] or str(error)
        ) from error
    seconds = time.perf_counter() - start
    text, mesh = compiled.as_text(), step.placement.sizes
    beside = tuple(overlapped_flops(text, mesh)) if has_async_schedule(text) else ()
    return StepPlan(count_collectives(text, mesh), ProgramMemory.of(compiled), seconds, beside)


@contextlib.contextmanager
def disable_compilation_cache() -> Iterator[None]:
    """Compile without writing to the persistent compilation cache: programs for absent devices can't be read
    back from it."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def text_batch(data: TextData) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of text, the longest if lengths vary, without opening the corpus."""
    shape = (data.batch_size, data.sequence_length)
    dtypes = {name: np.dtype(dtype) for name, dtype in data.leaves.items()}
    return {name: jax.ShapeDtypeStruct((*shape, *each.shape), each.base) for name, each in dtypes.items()}
