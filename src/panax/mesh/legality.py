"""Checks that a model and its batch can be sharded over a mesh, and a search for the nearest legal meshes.
Plain Python.

The requirements are data (`MeshRequirements`), derived once from a program's shapes. A layout is thus checked
before anything is traced or compiled, also by a supervisor without jax. A rejected layout comes with legal
meshes of the same number of devices, written as command-line flags.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

from ..core.errors import LayoutError
from ..core.layout.requirements import AllToAllRequirement, PipelineRequirement
from ..core.params.logical import COMPUTE, LOGICAL_AXES, MESH_AXES, MeshAxes, Role, axis_for_role, lookup_axis
from ..core.protocols import RowOrder
from .rules import Rules, assign, divisors
from .topology import MeshShape, data_parallel_size

Sizes = Mapping[str, int]
ArrayAxes = tuple[str, tuple[str | None, ...], tuple[int, ...]]
"""Name, logical axes and shape of an array."""

NUM_SUGGESTIONS = 3
"""Number of meshes that an error lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRequirements:
    """Requirements of a program on its mesh.

    Attributes:
        arrays: Arrays of the state, sharded by the storage rules.
        batch: Leaves of a batch, sharded by the compute rules; empty if not known yet.
        supported: Mesh axes on which the task computes correctly.
        who: Name of the task, for messages.
        pipeline_requirement: How a pipeline partitions the model; None without one.
        exchange_requirements: All-to-alls of whole parts in the layers.
        splits_residual: True if the positions of the residual stream are sharded over the context and tensor
            axes.
        row_order: Which positions of a row the devices of the context axis hold.
        micro_batches: Number of micro-batches that a batch is split into.
    """

    arrays: tuple[ArrayAxes, ...] = ()
    batch: tuple[ArrayAxes, ...] = ()
    supported: frozenset[str] = frozenset(MESH_AXES)
    who: str = "the task"
    pipeline_requirement: PipelineRequirement | None = None
    exchange_requirements: tuple[AllToAllRequirement, ...] = ()
    splits_residual: bool = False
    row_order: RowOrder = "zigzag"
    micro_batches: int = 1

    @property
    def logical_sizes(self) -> dict[str, int]:
        """Logical axis to size."""
        return {axis: size for _, axes, shape in self.arrays for axis, size in zip(axes, shape) if axis is not None}


def fit_rules(rules: Rules, needs: MeshRequirements, mesh: Sizes) -> Rules:
    """Return the rules fitted to the model on one mesh; see `Rules.fit`."""
    stages = mesh.get("stage", 1)
    rest = stages == 1 or (needs.pipeline_requirement is not None and needs.pipeline_requirement.can_store_on(stages))
    fitted = rules.fit(needs.logical_sizes, mesh, layers_rest_on_stages=rest)
    return fitted if needs.splits_residual else fitted.with_whole_residual()


def check(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> None:
    """Check that the mesh is legal.

    Args:
        rules: The recipe's rules, not fitted to a mesh.

    Raises:
        LayoutError: The mesh is illegal; the message gives the sizes and the nearest legal meshes.

    >>> wide = MeshRequirements(arrays=(("w_q", ("embed", "heads"), (32, 4)),))
    >>> check(wide, Rules(), {"fsdp": 1, "tensor": 8})
    Traceback (most recent call last):
    panax.core.errors.LayoutError: w_q: heads=4 is not divisible by tensor=8; use tensor in {1, 2, 4} or another heads. Nearest \
layouts of 8 devices: --mesh.fsdp 2 --mesh.tensor 4; --mesh.replica 2 --mesh.tensor 4; --mesh.fsdp 4 --mesh.tensor 2
    """
    problem = find_problem(needs, rules, mesh)
    if problem is not None:
        raise LayoutError(problem + suggest_meshes(needs, rules, mesh, math.prod(mesh.values())))


def find_problem(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> str | None:
    """Return the first reason why the mesh is illegal; None if it is legal."""
    for axis, size in mesh.items():
        if size > 1 and axis not in needs.supported:
            known = ", ".join(a for a in MESH_AXES if a in needs.supported)
            return f"mesh.{axis}={size}: {needs.who} supports the mesh axes {known}; set mesh.{axis} to 1"
    fitted = fit_rules(rules, needs, mesh)
    try:
        for name, axes, shape in needs.arrays:
            assign(axes, shape, fitted.storage, mesh, name)
    except LayoutError as error:
        return str(error)
    of_model = _stages(needs, mesh) or _exchanges(needs, mesh) or _single(needs, rules, mesh)
    return of_model or _residual(needs, fitted, mesh) or _batch(needs, rules, mesh) or _computed(needs, fitted, mesh)


def _parallel(needs: MeshRequirements) -> list[str]:
    """Return the model's logical axes that its layers compute in parallel, alongside the residual stream."""
    present = needs.logical_sizes
    return [name for name, axis in LOGICAL_AXES.items() if axis.parallel and name in present]


def _split_over(rules: Rules, mesh: Sizes, logical: str) -> MeshAxes:
    """Return the mesh axes above size 1 that shard a logical axis in computation."""
    return tuple(axis for axis in rules.compute.get(logical, ()) if mesh.get(axis, 1) > 1)


def _residual(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> str | None:
    """Check that the residual stream is sharded over every axis along which layers scatter sums into it."""
    if not needs.splits_residual:
        return None
    stream = axis_for_role(Role.STREAM)
    over = rules.compute.get(stream, ())
    for logical in _parallel(needs):
        lacking = [axis for axis in _split_over(rules, mesh, logical) if axis not in over]
        if lacking:
            return (
                f"rules.compute: {logical} is split over {lacking[0]}={mesh[lacking[0]]}, and {stream} -> {tuple(over)} is not; "
                f"split {stream} over {lacking[0]} too"
            )
    return None


def _computed(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> str | None:
    """Check that layers sum over exactly the axes that shard the residual stream further than its rows."""
    if not needs.splits_residual:
        return None

    over = functools.partial(_split_over, rules, mesh)
    for logical in needs.logical_sizes:
        if over(logical) and logical in LOGICAL_AXES and logical not in COMPUTE:
            return (
                f"rules.compute: {logical} -> {over(logical)}, and {needs.who} computes {logical} whole; remove it from "
                f"rules.compute, or split it in rules.storage"
            )
        if over(logical) and lookup_axis(logical).role is not Role.LAYERS and not rules.storage.get(logical):
            return (
                f"rules.storage: {logical} is stored whole, and rules.compute has {logical} -> {over(logical)}; let "
                "storage be split "
                f"over these too"
            )
    stream, positions, rows = map(axis_for_role, (Role.STREAM, Role.POSITIONS, Role.ROWS))
    beyond = tuple(axis for axis in over(stream) if axis not in over(positions))
    clash = [axis for axis in beyond if axis in over(rows)]
    if clash or not {*over(positions)} <= {*over(stream), *over(rows)}:
        return (
            f"rules.compute: {stream} -> {over(stream)}, {positions} -> {over(positions)} and {rows} -> {over(rows)}; {stream} "
            f"takes {positions}'s axes and further ones that split no {rows}"
        )
    for logical in _parallel(needs):
        is_whole = not over(logical) and lookup_axis(logical).may_be_whole
        if not is_whole and {*over(logical)} != {*beyond}:
            return (
                f"rules.compute: {logical} is split over {over(logical)}, and {stream} over {beyond} beyond {positions}; split "
                f"both over the same mesh axes"
            )
    return None


def _stages(needs: MeshRequirements, mesh: Sizes) -> str | None:
    stages, divided = mesh.get("stage", 1), needs.pipeline_requirement
    if stages == 1 or divided is None or stages * divided.chunks <= divided.units:
        return None
    units, chunks = divided.units, divided.chunks
    max_stages = units // chunks
    if chunks == 1:
        return f"mesh.stage={stages} is more than the {units} layers; use stage up to {max_stages}"
    parts = f"mesh.stage={stages} x pipeline.chunks={chunks} = {stages * chunks}"
    fewer = f"use stage up to {max_stages}, or " if max_stages > 1 else "use "
    return f"{parts} is more than the {units} layers; {fewer}chunks up to {units // stages}"


def _exchanges(needs: MeshRequirements, mesh: Sizes) -> str | None:
    for one in needs.exchange_requirements:
        over, beside = mesh.get(one.axis, 1), mesh.get(one.split_axis, 1)
        if over == 1 or one.total % (over * beside) == 0:
            continue
        each = one.total // beside
        fits = ", ".join(map(str, divisors(each)))
        return (
            f"{one.what}: {one.unit}={one.total} / {one.split_axis}={beside} = {each} on each device is not divisible by "
            f"{one.axis}={over}; use {one.axis} in {{{fits}}}, or {one.advice}"
        )
    return None


def _single(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> str | None:
    """Check that an axis that only one mesh axis may shard is not sharded by several."""
    if not needs.splits_residual:
        return None
    for logical in needs.logical_sizes:
        reason = lookup_axis(logical).single
        axes = _split_over(rules, mesh, logical)
        if reason and len(axes) > 1:
            product = "·".join(f"{axis}={mesh[axis]}" for axis in axes)
            return f"rules.compute: {logical} is split over {product}; {reason}"
    return None


def _batch(needs: MeshRequirements, rules: Rules, mesh: Sizes) -> str | None:
    parts = data_parallel_size(mesh)
    for name, axes, shape in needs.batch:
        for axis, size in zip(axes, shape):
            divisor = parts * needs.micro_batches
            if lookup_axis(axis).role is Role.ROWS and size % divisor:
                return (
                    f"a batch of {size} rows is not divisible by {parts} data-parallel devices x {needs.micro_batches} "
                    f"micro-batches; use a multiple of {divisor} rows"
                )
            if lookup_axis(axis).role is Role.POSITIONS and needs.splits_residual:
                problem = _length(size, mesh, needs.row_order)
                if problem:
                    return problem
        try:
            assign(axes, shape, rules.compute, mesh, f"batch leaf {name!r}")
        except LayoutError as error:
            return str(error)
    return None


def _length(length: int, mesh: Sizes, order: RowOrder) -> str | None:
    context, tensor = mesh.get("context", 1), mesh.get("tensor", 1)
    each = 2 if order == "zigzag" and context > 1 else 1
    pieces = each * context * tensor
    if length % pieces == 0:
        return None
    how = f"context={context} x tensor={tensor}" if context > 1 else f"tensor={tensor}"
    how = f"2 x {how}" if each == 2 else how
    below, above = length // pieces * pieces, -(-length // pieces) * pieces
    use = f"{below} or {above}" if below else f"{above}"
    return (
        f"rows of {length} tokens are not divisible by {how}, the pieces that a row is cut into; use a length of {use}"
    )


def list_remarks(needs: MeshRequirements, mesh: Sizes) -> list[str]:
    """Return remarks on a mesh that is legal but probably not intended."""
    stages, count = mesh.get("stage", 1), needs.micro_batches
    if count >= stages:
        return []
    chunks = 1 if needs.pipeline_requirement is None else needs.pipeline_requirement.chunks
    idle = (stages - 1) / (count * chunks + stages - 1)
    return [
        f"mesh.stage={stages} with step.micro_batches={count}: each stage waits for {idle:.0%} of a step; use {stages} "
        f"micro-batches or more, best {4 * stages}"
    ]


def suggest_meshes(needs: MeshRequirements, rules: Rules, mesh: Sizes, num_devices: int) -> str:
    """Return a sentence that lists the nearest legal meshes, to append to a problem.

    Args:
        num_devices: Number of available devices. If no mesh of them is legal, meshes of the largest possible
            divisor are listed.
    """
    for count in reversed(divisors(num_devices)):
        legal = (
            legal_mesh
            for legal_mesh in neighboring_meshes(mesh, count)
            if find_problem(needs, rules, legal_mesh) is None
        )
        flags = [format_flags(legal_mesh, mesh) for legal_mesh in itertools.islice(legal, NUM_SUGGESTIONS)]
        if flags:
            some = "1 device" if count == 1 else f"{count} devices"
            fewer = "" if count == num_devices else f" (of {num_devices}, none is legal)"
            return f". Nearest layouts of {some}{fewer}: {'; '.join(flags)}"
    return ""


def neighboring_meshes(mesh: Sizes, num_devices: int) -> Iterator[dict[str, int]]:
    """Return every mesh of `num_devices`, nearest to `mesh` first.

    A mesh is near if it adds no new kind of parallelism and changes few of the requested axes by small
    factors. The data axes `replica` and `fsdp`, useful to every model, absorb the remaining devices.
    """

    def distance(other: Mapping[str, int]) -> tuple[int, int, float, float, float]:
        fixed = [axis for axis in MESH_AXES if axis not in ("fsdp", "replica")]
        num_new_axes = sum(mesh.get(axis, 1) == 1 < other[axis] for axis in fixed)
        changed = sum(other[axis] != mesh.get(axis, 1) for axis in fixed)
        by = {axis: abs(math.log2(other[axis] / mesh.get(axis, 1))) for axis in MESH_AXES}
        return num_new_axes, changed, sum(by[axis] for axis in fixed), by["replica"], by["fsdp"]

    return iter(sorted(enumerate_meshes(num_devices), key=distance))


def enumerate_meshes(count: int, axes: tuple[str, ...] = MESH_AXES) -> Iterator[dict[str, int]]:
    """Yield every mesh of `count` devices: mesh axis to size."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for size in divisors(count):
        for rest in enumerate_meshes(count // size, axes[1:]):
            yield {axes[0]: size, **rest}


def format_flags(mesh: Sizes, requested: Sizes) -> str:
    """Format a mesh as flags: its axes above 1, and requested axes that are now 1.

    >>> format_flags({"fsdp": 4, "tensor": 1}, {"fsdp": 2, "tensor": 2})
    '--mesh.fsdp 4 --mesh.tensor 1'
    """
    typed = [axis for axis in MESH_AXES if mesh.get(axis, 1) > 1 or requested.get(axis, 1) > 1]
    return " ".join(f"--mesh.{axis} {mesh.get(axis, 1)}" for axis in typed) or "--mesh.fsdp 1"


def resolve_mesh(
    shape: MeshShape, num_devices: int, needs: MeshRequirements | None = None, rules: Rules | None = None
) -> dict[str, int]:
    """Resolve a mesh shape as `shape.resolve`, with an error that names the nearest meshes of the available
    devices.

    Args:
        needs: Requirements on suggested meshes; none by default.

    Raises:
        LayoutError: The sizes do not fit `num_devices`.
    """
    try:
        return shape.resolve(num_devices)
    except LayoutError as error:
        requested = {axis: getattr(shape, axis) for axis in MESH_AXES}
        if (
            shape.auto
            or any(size == 0 or size < -1 for size in requested.values())
            or list(requested.values()).count(-1) > 1
        ):
            raise
        fixed = math.prod(size for size in requested.values() if size > 0)
        known = {axis: size if size > 0 else max(1, num_devices // fixed) for axis, size in requested.items()}
        proposed = suggest_meshes(needs or MeshRequirements(), rules or Rules(), known, num_devices)
        raise LayoutError(f"{error}{proposed}") from None
