"""Each rule of the check by itself: what devices hold of the result of one small function."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from panax.core import use_layout
from panax.mesh import MeshShape, Placement
from panax.spmd.checking.states import Kind
from panax.spmd.checking.walk import Walk, input_states
from panax.spmd.linear import shift_right
from panax.spmd.segments import sums_by_blocks
from panax.spmd.sharding_marks import (
    ValueState,
    assert_cotangent_sharding,
    assert_sharding,
    mark_shared_cotangent,
)

ROWS, COLUMNS = 8, 4
X = jnp.ones((ROWS, COLUMNS))


def holds(function, *specs):
    """The state, along an axis of two devices, of what `function` makes of arrays that are laid out by `specs`."""
    placement = Placement.create(MeshShape(replica=1, fsdp=1, tensor=2), devices=jax.devices()[:2])
    mesh: Mesh = placement.mesh
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with use_layout(placement):
        program = jax.make_jaxpr(mapped)(*[X] * len(specs))
    (equation,) = [e for e in program.jaxpr.eqns if e.primitive.name == "shard_map"]
    jaxpr = equation.params["jaxpr"]
    (state,) = Walk("tensor").run(jaxpr, list(input_states(jaxpr, equation.params["in_specs"], "tensor")))
    return state


SPLIT, COLUMN, WHOLE = P("tensor"), P(None, "tensor"), P()

# Function, layouts of its operands, and what the result is; with the dimensions that it is split along.
CASES = {
    "whole": (jnp.sin, (WHOLE,), Kind.WHOLE, ()),
    "elementwise": (jnp.sin, (SPLIT,), Kind.SPLIT, (0,)),
    "sum over the split dimension": (lambda x: x.sum(axis=0), (SPLIT,), Kind.PARTIAL, ()),
    "sum over another one": (lambda x: x.sum(axis=1), (SPLIT,), Kind.SPLIT, (0,)),
    "sum of whole numbers": (lambda x: (x > 0).astype(jnp.int32).sum(axis=0), (SPLIT,), Kind.SPLIT, ()),
    "largest": (lambda x: x.max(axis=0), (SPLIT,), Kind.SPLIT, ()),
    "nonlinear of a term": (lambda x: jnp.sin(x.sum(axis=0)), (SPLIT,), Kind.WRONG, ()),
    "scaled term": (lambda x, y: x.sum(axis=0) * y[0], (SPLIT, WHOLE), Kind.PARTIAL, ()),
    "term by a term": (lambda x: x.sum(axis=0) * x.sum(axis=0), (SPLIT,), Kind.WRONG, ()),
    "term plus a whole value": (lambda x, y: x.sum(axis=0) + y[0], (SPLIT, WHOLE), Kind.WRONG, ()),
    "term plus zero": (lambda x: jnp.zeros(COLUMNS) + x.sum(axis=0), (SPLIT,), Kind.PARTIAL, ()),
    "product over the split dimension": (lambda x, y: x.T @ y, (SPLIT, SPLIT), Kind.PARTIAL, ()),
    "product with a split result": (lambda x, y: x @ y.T, (SPLIT, WHOLE), Kind.SPLIT, (0,)),
    "all-reduce of a term": (lambda x: lax.psum(x.sum(axis=0), "tensor"), (SPLIT,), Kind.WHOLE, ()),
    "all-reduce of a whole value": (lambda x: lax.psum(x, "tensor"), (WHOLE,), Kind.WRONG, ()),
    "all-reduce of parts": (lambda x: lax.psum(x, "tensor"), (SPLIT,), Kind.WRONG, ()),
    "gather": (lambda x: lax.all_gather(x, "tensor", axis=0, tiled=True), (SPLIT,), Kind.WHOLE, ()),
    "gather along another dimension": (
        lambda x: lax.all_gather(x, "tensor", axis=1, tiled=True), (SPLIT,), Kind.WRONG, (),
    ),
    "scatter": (
        lambda x, y: lax.psum_scatter(x.T @ y, "tensor", scatter_dimension=0, tiled=True),
        (SPLIT, SPLIT), Kind.SPLIT, (0,),
    ),
    "heads for positions": (
        lambda x: lax.all_to_all(x, "tensor", split_axis=1, concat_axis=0, tiled=True), (SPLIT,), Kind.SPLIT, (1,),
    ),
    "put together and cut again": (lambda x: x.T.reshape(-1).reshape(COLUMNS, -1), (SPLIT,), Kind.SPLIT, (1,)),
    "handed on": (lambda x: shift_right(x, "tensor"), (SPLIT,), Kind.SPLIT, ()),
    "handed on, with zeros for the first": (lambda x: shift_right(x, "tensor"), (WHOLE,), Kind.SPLIT, ()),
    "sent around": (lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), (WHOLE,), Kind.WHOLE, ()),
    "a cotangent as declared": (
        lambda x, y: jax.vjp(lambda x: assert_cotangent_sharding(x, {"tensor": ValueState.SPLIT}) * 2, x[0])[1](y.sum(axis=0))[0],
        (WHOLE, SPLIT), Kind.SPLIT, (0,),
    ),
    "sums by blocks of a device's rows": (
        lambda x: sums_by_blocks(jnp.tile(x, (9, 1)), jnp.arange(len(x) * 9) // 4, 9), (SPLIT,), Kind.PARTIAL, (),
    ),
    "sums by blocks at a device's own places": (
        lambda x: sums_by_blocks(jnp.ones((ROWS // 2, 3)), jnp.argsort(x[:, 0]), 9), (SPLIT,), Kind.PARTIAL, (),
    ),
    "sums by blocks of columns": (
        lambda x: sums_by_blocks(jnp.tile(x, (9, 1)), jnp.arange(len(x) * 9) // 4, 18), (COLUMN,), Kind.SPLIT, (1,),
    ),
    "sums by blocks of whole rows": (
        lambda x: sums_by_blocks(jnp.tile(x, (9, 1)), jnp.arange(len(x) * 9) // 4, 18), (WHOLE,), Kind.WHOLE, (),
    ),
    "sums by blocks of a term": (
        lambda x: sums_by_blocks(jnp.outer(jnp.ones(3), x.sum(axis=0)), jnp.array([0, 0, 1]), 2), (SPLIT,),
        Kind.PARTIAL, (),
    ),
    "turned": (lambda x: x.T.reshape(2, 2, -1), (COLUMN,), Kind.SPLIT, (0,)),
    "own part of a whole value": (
        lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * 4, 4, axis=0), (WHOLE,), Kind.SPLIT, (0,),
    ),
    "masked by a device's own": (lambda x: jnp.where(lax.axis_index("tensor") == 0, x, 0.0), (WHOLE,), Kind.SPLIT, ()),
    "rows added at places": (
        lambda x: jnp.zeros((3, COLUMNS)).at[jnp.arange(4) % 3].add(x), (SPLIT,), Kind.PARTIAL, (),
    ),
    "sum in a loop": (
        lambda x: lax.scan(lambda total, row: (total + row.sum(), None), jnp.float32(0), x.reshape(2, 2, COLUMNS))[0],
        (SPLIT,), Kind.PARTIAL, (),
    ),
    "a branch": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (WHOLE,), Kind.WHOLE, ()),
    "rematerialized": (lambda x: jax.checkpoint(lambda x: x.sum(axis=0))(x), (SPLIT,), Kind.PARTIAL, ()),
    "unknown kernel": (
        lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4, COLUMNS), jnp.float32), x),
        (SPLIT,), Kind.UNKNOWN, (),
    ),
    "declared": (lambda x: assert_sharding(jnp.sin(x.sum(axis=0)), {"tensor": ValueState.WHOLE}), (SPLIT,), Kind.WHOLE, ()),
    "shared": (lambda x: mark_shared_cotangent(x / 2, ("tensor",)), (WHOLE,), Kind.PARTIAL, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_devices_hold(case):
    function, specs, kind, dims = CASES[case]
    state = holds(function, *specs)
    assert state.kind is kind, state
    assert state.dims == frozenset(dims), state


def test_what_nobody_reads_is_harmless():
    def unread(x):
        jnp.sin(x.sum(axis=0))
        return lax.psum(x.sum(axis=0), "tensor")

    assert holds(unread, SPLIT).kind is Kind.WHOLE
