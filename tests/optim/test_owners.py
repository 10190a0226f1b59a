"""Which matrices lie together, who owns how many of them, and what that sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimized import AXES, LAYERS, SHAPES

from panax.core.layout.layout import current_layout
from panax.mesh import MeshShape, Placement
from panax.optim.matrix.orientation import TransposedView
from panax.optim.parameter import Parameter
from panax.optim.sharded.owner_shards import OwnedArray, OwnedMatrices, map_to_owners
from panax.optim.sharded.shard import ParameterShard

NAMES = ("expert", "query", "out", "up", "down")


def described(names=NAMES):
    return {name: Parameter(name, SHAPES[name], "float32", AXES[name]) for name in names}


def group_of(parameter):
    parts = [OwnedArray.of(ParameterShard.of(parameter))]
    return OwnedMatrices.of(parts, parts)


def test_matrices_of_one_shape_come_to_one_group_whichever_way_they_map():
    with Placement.create(MeshShape(fsdp=4, tensor=2)).activate():
        groups = {name: group_of(parameter) for name, parameter in described().items()}
    assert groups["up"] == groups["down"] and groups["query"] == groups["out"] and groups["up"] != groups["query"]
    (up,), (query,) = groups["up"].inputs, groups["query"].inputs
    assert up.shape == (8, 16) and query.shape == (8, 24)
    assert up.dim_axes == (("fsdp",), ("tensor",)) and up.split == groups["up"].owner_axes
    assert [TransposedView.of(parameter).transposed for parameter in described(("up", "down")).values()] == [
        False,
        True,
    ]


def test_layers_on_stages_and_experts_are_shared_out_among_those_that_have_them():
    with Placement.create(MeshShape(stage=2, fsdp=2, expert=2)).activate():
        groups = {name: group_of(parameter) for name, parameter in described().items()}
    assert groups["up"].owner_axes == ("fsdp", "expert") and groups["expert"].owner_axes == ("fsdp",)


def test_what_owns_nothing_is_filled_up():
    group = OwnedMatrices((), (), ("replica", "fsdp"))
    sizes = {"replica": 2, "fsdp": 4}
    assert [group.num_owned(matrices, sizes) for matrices in (1, 8, 9)] == [1, 1, 2]


def test_parts_of_one_matrix_on_different_devices_are_refused():
    up = Parameter("up", SHAPES["up"], "float32", AXES["up"])
    other = Parameter("beside", (LAYERS, 8, 8), "float32", (None, "statistic", "statistic"))
    with Placement.create(MeshShape(stage=2, fsdp=4)).activate():
        parts = [OwnedArray.of(ParameterShard.of(up)), OwnedArray(ParameterShard.of(other), (0,), (1, 2), (8, 8))]
        with pytest.raises(ValueError, match=r"the stacks of .*'beside'.* are split over \[\(\), \('stage',\)\]"):
            OwnedMatrices.of(parts, parts)


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"replica": 8}, {"stage": 2, "expert": 2, "tensor": 2}],
)
def test_each_owner_sees_whole_matrices_and_their_results_find_their_way_back(mesh):
    parameters = described()
    random = np.random.default_rng(0)
    arrays = {name: jnp.asarray(random.standard_normal(SHAPES[name]), jnp.float32) for name in NAMES}

    statistics = {name: Parameter(name, (*leading(name), 8, 8), "float32", kept_axes(name)) for name in NAMES}
    beside = {name: jnp.asarray(random.standard_normal(statistics[name].shape), jnp.float32) for name in NAMES}

    def work(matrices, statistics):
        # Of the whole matrix, and not the same for any part of it.
        first = matrices * jnp.abs(matrices).sum((1, 2), keepdims=True) + jnp.cumsum(matrices, 2)
        return first, statistics @ statistics + matrices @ matrices.mT

    def on_one(name):
        matrices, stored = np.asarray(arrays[name], np.float64), np.asarray(beside[name], np.float64)
        oriented = TransposedView.of(parameters[name])
        order = (*oriented.stack_dims, *oriented.rows, *oriented.columns)
        stack = matrices.transpose(order)
        flat = stack.reshape(-1, *oriented.shape)
        result = flat * np.abs(flat).sum((1, 2), keepdims=True) + np.cumsum(flat, 2)
        flat_kept = stored.reshape(-1, 8, 8)
        second = flat_kept @ flat_kept + flat @ flat.transpose(0, 2, 1)
        return result.reshape(stack.shape).transpose(np.argsort(order)), second.reshape(stored.shape)

    placement = Placement.create(MeshShape(**mesh))
    lies = placement.storage_shardings(arrays, {name: AXES[name] for name in NAMES})
    rests = placement.storage_shardings(beside, {name: one.axes for name, one in statistics.items()})

    def local(arrays, beside):
        parts = {
            name: [
                OwnedArray.of(ParameterShard.of(parameters[name])),
                OwnedArray.of_statistic(ParameterShard.of(statistics[name])),
            ]
            for name in NAMES
        }
        actual = map_to_owners(work, parts, {name: [arrays[name], beside[name]] for name in NAMES}, parts)
        return {name: actual[name][0] for name in NAMES}, {name: actual[name][1] for name in NAMES}

    with placement.activate():
        layout = current_layout()
        specs = tuple({name: one.spec for name, one in where.items()} for where in (lies, rests))
        shared = jax.jit(
            jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=specs, check_vma=False)
        )(jax.device_put(arrays, lies), jax.device_put(beside, rests))  # fmt: skip
    for name in NAMES:
        for actual, wanted in zip(shared, on_one(name)):
            np.testing.assert_allclose(actual[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def leading(name):
    parameter = described()[name]
    return tuple(parameter.shape[dim] for dim in parameter.stack_dims)


def kept_axes(name):
    parameter = described()[name]
    return (*(parameter.axes[dim] for dim in parameter.stack_dims), "statistic", "statistic")
