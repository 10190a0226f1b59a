"""Cost of a training step, read from its trace: before anything is compiled, and for devices that are not
attached."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from ...comms.fragments import OuterSync
from ...train import CompiledStep
from .liveness import peak_bytes
from .operations import StepWork, measure_work
from .program import read_program
from .traffic import Traffic, list_traffic
from .trip_counts import undeclared_loops


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of one training step on one device.

    Attributes:
        traffic: Its communication.
        work: Its computation.
        arguments: Bytes of the state and the batch.
        temporaries: Peak of the other bytes, estimated.
        unknown: Kernels without a declared cost and loops without a trip count: the other figures are then
            lower bounds.
        seconds: Time of tracing and reading.
    """

    traffic: tuple[Traffic, ...]
    work: StepWork
    arguments: int
    temporaries: int
    unknown: tuple[str, ...]
    seconds: float

    @property
    def memory(self) -> int:
        """Return the total memory in bytes."""
        return self.arguments + self.temporaries


def walk_step(step: CompiledStep, batch: dict[str, Any]) -> StepCost:
    """Trace a step for the shapes of `batch` (abstract or real), and compute its cost.

    Raises:
        LayoutError: The batch does not fit the mesh.
    """
    start = time.perf_counter()
    shardings = (step.shardings, step.placement.batch_shardings(batch, step.batch_axes))
    return _cost(step.trace(batch), shardings, step.placement.sizes, start)


def walk_renewal(step: CompiledStep) -> StepCost | None:
    """Compute the cost of the program that renews the optimizer's state after some steps; None if there is
    none."""
    if step.program.transformation.renewal is None:
        return None
    start = time.perf_counter()
    return _cost(step.trace_renewal(), step.shardings.optimizer_state, step.placement.sizes, start)


def walk_agreement(step: CompiledStep, sync: OuterSync | None = None) -> StepCost | None:
    """Compute the cost of the program that synchronizes replicas after local steps; None if there are no
    local steps.

    Args:
        sync: The synchronization; None for one of all replicas and all parameters.
    """
    if step.program.abstract.replicas is None:
        return None
    start = time.perf_counter()
    return _cost(step.trace_outer_sync(sync), step.shardings, step.placement.sizes, start)


def _cost(traced: Any, placed: Any, mesh: Mapping[str, int], start: float) -> StepCost:
    shardings = jax.tree.leaves(placed)
    shares = [_share(aval.shape, sharding) for aval, sharding in zip(traced.jaxpr.in_avals, shardings)]
    program = read_program(traced.jaxpr, shares)
    donated = [value for value, info in zip(program.inputs, jax.tree.leaves(traced.args_info)) if info.donated]
    work = measure_work(program)
    return StepCost(
        traffic=tuple(list_traffic(program, mesh)),
        work=work,
        arguments=sum(value.bytes for value in program.inputs),
        temporaries=peak_bytes(program, donated),
        unknown=(*work.unknown, *undeclared_loops(program)),
        seconds=time.perf_counter() - start,
    )


def traffic_of_trace(traced: Any, mesh: Mapping[str, int]) -> list[Traffic]:
    """List the communication of a traced step, from the explicit collectives of its program.

    Args:
        mesh: Mesh axis to size.
    """
    # Collectives are inside a `shard_map`, where arrays are local.
    return list_traffic(read_program(traced.jaxpr, [1.0] * len(traced.jaxpr.in_avals)), mesh)


def _share(shape: tuple[int, ...], sharding: Any) -> float:
    if sharding is None or not shape:
        return 1.0
    part = sharding.shard_shape(shape)
    share = 1.0
    for own, whole in zip(part, shape):
        share *= own / whole if whole else 1.0
    return share
