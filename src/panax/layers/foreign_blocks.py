"""Check of blocks from other packages: their output on the mesh is compared with a single device before the
first step.

On a mesh that shards rows, a block that reads neighboring positions runs without error, but trains a
different model. Each such block therefore runs once on a few random rows, on the mesh and on one device, and
is rejected by name if the results differ.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..core import logical_axes, map_axes, pair_axes
from ..core.errors import LayoutError
from ..core.params.logical import Role, axis_for_role
from ..mesh import Placement
from ..mesh.placement import partition_entries
from ..parallel.context import sequence_positions, zigzag_order, zigzag_parts
from ..spmd.manual import map_over_shards
from .block import Block, Context
from .stack import Stack
from .whole_rows import run_block

TOLERANCE = 1e-3
"""Maximum error relative to the largest element: float32 sums in another order cause about a hundredth of it,
and a missing neighbor far more."""

_POSITIONS = 4
"""Positions of a row per device that shards it."""


def check_blocks(stacks: Iterable[Stack], placement: Placement) -> None:
    """Compare each foreign block of these (abstract) stacks on the mesh with one device, if the mesh shards
    rows.

    Raises:
        LayoutError: The results differ; the message names the block and the declarations that fix it.
    """
    sizes = placement.sizes
    if sizes["context"] * sizes["tensor"] == 1 or placement.devices.devices.flat[0] not in jax.devices():
        return
    for block in _foreign(stacks):
        _check(block, placement)


def _foreign(stacks: Iterable[Stack]) -> Iterator[Block]:
    known: set[Any] = set()
    for stack in stacks:
        for block in stack.layers:
            kind = (type(block), block.signature)
            if not type(block).__module__.startswith("panax.") and kind not in known and not block.reports:
                known.add(kind)
                yield block


def _check(block: Block, placement: Placement) -> None:
    sizes, rng = placement.sizes, np.random.default_rng(0)
    width = next((size for size in _sizes_of(block, "embed") or _sizes_of(block, "norm")), None)
    if width is None:
        warnings.warn(f"{_name(block)} has no dimension `embed`, so it is not compared with one device", stacklevel=3)
        return
    parts = 2 * sizes["context"] * sizes["tensor"]
    rows = int(np.prod([sizes[axis] for axis in placement.compute((axis_for_role(Role.ROWS),))[0]], dtype=int))
    x = rng.standard_normal((rows, _POSITIONS * parts, width)).astype(np.float32)
    params = jax.tree.map(functools.partial(_drawn, rng), block)
    try:
        expected = np.asarray(jax.jit(_alone)(params, x))
    except Exception as error:  # a user's block may need more than a few rows of random values
        warnings.warn(
            f"{_name(block)} could not be compared with one device on random rows ({type(error).__name__}: {error}); "
            f"panax.testing.check_task compares the whole task",
            stacklevel=3,
        )
        return
    order = zigzag_order(x.shape[1], zigzag_parts(placement))
    output = _on_mesh(block, params, x[:, order], placement)
    largest = np.abs(expected).max()
    for shard in output.addressable_shards:
        error = float(np.abs(np.asarray(shard.data) - expected[:, order][shard.index]).max() / largest)
        if not error <= TOLERANCE:
            raise LayoutError(_message(block, sizes, error))


def _message(block: Block, sizes: Any, error: float) -> str:
    axes = ", ".join(f"{axis}={sizes[axis]}" for axis in ("context", "tensor") if sizes[axis] > 1)
    return (
        f"the layer {_name(block)} gives different results on the mesh ({axes}) and on one device: they differ by "
        f"{error:.1%}. It "
        f'reads positions other than its own, and a device holds a part of them. Write `positions = "row"` in the class to get '
        f"whole rows; or use the functions of panax.spmd (`all_gather_sequence`, `local_sequence`) and write "
        f'`positions = "shards"`; or '
        f"set mesh.context and mesh.tensor to 1"
    )


def _name(block: Block) -> str:
    return f"{type(block).__module__}.{type(block).__qualname__}"


def _sizes_of(block: Block, axis: str) -> list[int]:
    return [
        leaf.shape[dim]
        for _, leaf, axes in pair_axes(block, logical_axes(block))
        for dim, name in enumerate(axes)
        if name == axis
    ]


def _drawn(rng: np.random.Generator, leaf: Any) -> np.ndarray:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.zeros(leaf.shape, leaf.dtype)
    return (rng.standard_normal(leaf.shape) * 0.3 + (0.5 if len(leaf.shape) < 2 else 0.0)).astype(np.float32)


def _alone(params: Any, x: jax.Array) -> jax.Array:
    position = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    context = Context(position, None, jnp.arange(x.shape[0], dtype=jnp.int32), None, position[0])
    return params(x, context, None)[0]


def _on_mesh(block: Block, params: Any, x: np.ndarray, placement: Placement) -> jax.Array:
    sizes = placement.sizes
    rows, stream, positions = (axis_for_role(role) for role in (Role.ROWS, Role.STREAM, Role.POSITIONS))

    def local(params: Any, x: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
        place = sequence_positions(
            x.shape[1], context=sizes["context"], tensor=sizes["tensor"] if position.shape[1] != x.shape[1] else 1
        )
        return run_block(params, x, Context(position, None, row, None, place), None)[0]

    def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
        return PartitionSpec(*partition_entries(placement.compute(axes)))

    lies = map_axes(
        lambda leaf, axes: PartitionSpec(*partition_entries(placement.storage(axes, leaf.shape))),
        block,
        logical_axes(block),
    )
    specs = (lies, spec((rows, stream, None)), spec((rows, positions)), spec((rows,)))
    order = zigzag_order(x.shape[1], zigzag_parts(placement))
    position = np.broadcast_to(order[None].astype(np.int32), x.shape[:2])
    arrays = (params, x, position, np.arange(len(x), dtype=np.int32))
    with placement.activate():
        run = jax.jit(map_over_shards(local, placement, specs, specs[1]))
        return run(
            *jax.tree.map(
                functools.partial(_placed, placement), arrays, specs, is_leaf=lambda n: isinstance(n, np.ndarray)
            )
        )


def _placed(placement: Placement, leaf: Any, spec: PartitionSpec) -> jax.Array:
    sharding = placement.sharding(*spec)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
