"""Ranked layouts of a run on fewer processes, with which a supervisor continues when some are lost."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ...core.layout.target import device_target
from ...core.params.logical import Role, lookup_axis
from ...data.loading.example_source import MASK
from ...job.agreement import is_process_zero
from ...job.heartbeat import heartbeat
from ...mesh import Rules
from ...mesh.legality import MeshRequirements, enumerate_meshes, find_problem, fit_rules
from ...mesh.rules import MESH_AXES
from ...mesh.topology import data_parallel_size
from ...plan.search.auto import MEMORY_MARGIN, state_bytes
from ...system.replacement import replace_json
from ...train.compilation.mesh_requirements import mesh_requirements
from ...train.compiled_step import CompiledStep
from ..degraded_features import PROCESSES_VARIABLE
from ..preparation import PreparedRun

FILE = Path("job") / "layouts.json"
"""Path in the run's folder; `panax.cluster.supervisor.job_layout` reads it."""

LAYOUTS_PER_COUNT = 3
"""Number of layouts stored for each number of processes."""


@dataclasses.dataclass(frozen=True)
class FallbackLayout:
    """A layout on fewer devices.

    Attributes:
        mesh: Mesh axis to size.
        micro_batches: Number of micro-batches, enough that a device holds at most as many rows at one time as
            in the whole run.
        pad_rows: True if the batch has to be padded with rows of weight zero.
    """

    mesh: Mapping[str, int]
    micro_batches: int
    pad_rows: bool


def fallback_layouts(
    needs: MeshRequirements,
    rules: Rules,
    full_mesh: Mapping[str, int],
    micro_batches: int,
    devices: int,
    *,
    may_pad: bool,
) -> list[FallbackLayout]:
    """List the legal layouts on `devices` devices, best first.

    The axes that split a model are preserved if possible; then replicas are given up before shards, so that a
    device holds no more of the state than necessary.

    Args:
        needs: Requirements, with the leaves of a batch.
        full_mesh: The mesh of the whole run.
        micro_batches: The micro-batches of the whole run.
        may_pad: True if rows of weight zero are possible.

    >>> rows = MeshRequirements(batch=(("tokens", ("batch", "seq"), (32, 8)),))
    >>> [first, *_] = fallback_layouts(rows, Rules(), {"replica": 2, "fsdp": 2, "tensor": 1}, 1, 2, may_pad=False)
    >>> {axis: size for axis, size in first.mesh.items() if size > 1}, first.micro_batches
    ({'fsdp': 2}, 2)
    """
    rows = next(size for _, axes, shape in needs.batch for axis, size in zip(axes, shape) if _is_rows(axis))
    max_rows = rows // (data_parallel_size(full_mesh) * micro_batches)
    candidates = []
    for mesh in enumerate_meshes(devices):
        parts = data_parallel_size(mesh)
        if parts > rows or _begins_an_axis(mesh, full_mesh):
            continue
        count = max(math.ceil(rows / (parts * max_rows)), 1)
        even = next((n for n in range(count, 2 * count + 1) if rows % (parts * n) == 0), None)
        layout = FallbackLayout(mesh, count if even is None else even, even is None)
        filled = math.ceil(rows / (parts * layout.micro_batches)) * parts * layout.micro_batches
        if layout.pad_rows and not may_pad:
            continue
        if find_problem(_with_rows(needs, filled, layout.micro_batches), rules, mesh) is None:
            candidates.append((filled, layout))
    return [layout for _, layout in sorted(candidates, key=lambda each: _distance(each[1].mesh, full_mesh, each[0]))]


def rank_layouts(
    step: CompiledStep,
    rules: Rules,
    batch: Mapping[str, Any],
    processes: int,
    *,
    each: int,
    limit: int | None,
    parts: Sequence[int] = (),
) -> dict[int, list[FallbackLayout]]:
    """Rank the layouts for every smaller number of processes, best first.

    Args:
        rules: The rules of the experiment.
        batch: A global batch.
        processes: Number of processes of the whole job.
        each: Number of devices per process.
        limit: Memory of a device, in bytes, which must hold its shard of the state; None if that is not
            known.
        parts: The parts into which a ramp divides batches: a layout must hold these, too.
    """
    leaves = tuple((f"batch leaf {name!r}", step.batch_axes[name], leaf.shape) for name, leaf in batch.items())
    needs = dataclasses.replace(mesh_requirements(step.program), batch=leaves)

    def fits(mesh: Mapping[str, int]) -> bool:
        return limit is None or state_bytes(step.program, fit_rules(rules, needs, mesh), mesh) * MEMORY_MARGIN < limit

    layouts_by_count: dict[int, list[FallbackLayout]] = {}
    for count in range(processes - 1, 0, -1):
        layouts = fallback_layouts(
            needs,
            rules,
            step.placement.sizes,
            step.program.config.micro_batches,
            count * each,
            may_pad=MASK in batch,
        )
        layouts_by_count[count] = [
            layout for layout in layouts if fits(layout.mesh) and _divides(layout, batch, parts)
        ][:LAYOUTS_PER_COUNT]
    return layouts_by_count


def _divides(layout: FallbackLayout, batch: Mapping[str, Any], parts: Sequence[int]) -> bool:
    """Return True if the rows of each part of a batch divide over a layout, or are padded."""
    rows, over = next(iter(batch.values())).shape[0], data_parallel_size(layout.mesh) * layout.micro_batches
    return layout.pad_rows or all(rows // count % over == 0 for count in parts)


def write_fallback_layouts(prepared: PreparedRun, batch: Mapping[str, Any], parts: int = 1) -> None:
    """Write the layouts for every smaller number of processes to the run's folder, for the supervisor.

    Args:
        batch: The first training batch: during a ramp, a part of a global one.
        parts: The number of parts into which a global batch is divided now.
    """
    step, processes = prepared.step, jax.process_count()
    # If a job continues without some nodes, the layouts of the whole job are known already.
    is_full_job = processes > 1 and os.environ.get(PROCESSES_VARIABLE, "") == str(processes)
    if not is_full_job or not heartbeat().is_supervised or not is_process_zero() or not isinstance(step, CompiledStep):
        return
    rules, each, ramp = prepared.experiment.rules, jax.local_device_count(), prepared.experiment.batch_ramp
    batch = {
        name: jax.ShapeDtypeStruct((leaf.shape[0] * parts, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()
    }
    ranked = rank_layouts(step, rules, batch, processes, each=each, limit=_memory_limit(), parts=ramp.parts)
    content = {"processes": processes, "layouts": {n: [*map(dataclasses.asdict, r)] for n, r in ranked.items()}}
    replace_json(Path(prepared.folder) / FILE, content)


def _memory_limit() -> int | None:
    """Return the memory of a device, in bytes; None if devices share the host's, or don't report it."""
    device = jax.local_devices()[0]
    if not device_target(device).traits.own_memory:
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _is_rows(axis: str | None) -> bool:
    return lookup_axis(axis).role is Role.ROWS


def _with_rows(needs: MeshRequirements, rows: int, micro_batches: int) -> MeshRequirements:
    """Return the requirements with another number of rows in a batch."""
    batch = tuple(
        (name, axes, tuple(rows if _is_rows(axis) else size for axis, size in zip(axes, shape)))
        for name, axes, shape in needs.batch
    )
    return dataclasses.replace(needs, batch=batch, micro_batches=micro_batches)


def _begins_an_axis(mesh: Mapping[str, int], full_mesh: Mapping[str, int]) -> bool:
    """Return True if a mesh splits a model along an axis along which the whole run does not."""
    return any(mesh[axis] > 1 == full_mesh.get(axis, 1) for axis in MESH_AXES if axis not in ("replica", "fsdp"))


def _distance(mesh: Mapping[str, int], full_mesh: Mapping[str, int], rows: int) -> tuple[float, ...]:
    def by(axis: str) -> float:
        return abs(math.log2(mesh[axis] / full_mesh.get(axis, 1)))

    model = [axis for axis in MESH_AXES if axis not in ("replica", "fsdp")]
    changed = sum(mesh[axis] != full_mesh.get(axis, 1) for axis in model)
    # Fewer shards make a device hold more; fewer replicas don't.
    return float(changed), sum(map(by, model)), by("fsdp"), by("replica"), float(rows)
