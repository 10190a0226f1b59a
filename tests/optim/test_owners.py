"""Which matrices lie together, who owns how many of them, and what that sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimized import AXES, SHAPES

from panax.core.layout import current_layout
from panax.mesh import MeshShape, Placement
from panax.optim.owners import Group, Oriented, shared_out
from panax.optim.parameter import Parameter
from panax.optim.shard import Shard

NAMES = ("expert", "query", "out", "up", "down")


def described(names=NAMES):
    return {name: Parameter(name, SHAPES[name], "float32", AXES[name]) for name in names}


def test_matrices_of_one_shape_come_to_one_group_whichever_way_they_map():
    with Placement.create(MeshShape(fsdp=4, tensor=2)).activate():
        groups = {name: Group.of(Shard.of(parameter)) for name, parameter in described().items()}
    assert groups["up"] == groups["down"] and groups["query"] == groups["out"] and groups["up"] != groups["query"]
    assert groups["up"].shape == (8, 16) and groups["query"].shape == (8, 24)
    assert groups["up"].places == (("fsdp",), ("tensor",)) and groups["up"].copied == ()
    assert [Oriented.of(parameter).flipped for parameter in described(("up", "down")).values()] == [False, True]


def test_layers_on_stages_and_experts_are_shared_out_among_those_that_have_them():
    with Placement.create(MeshShape(stage=2, fsdp=2, expert=2)).activate():
        groups = {name: Group.of(Shard.of(parameter)) for name, parameter in described().items()}
    assert groups["up"].over == ("fsdp", "expert") and groups["expert"].over == ("fsdp",)


def test_what_owns_nothing_is_filled_up():
    group = Group((8,), (16,), (("fsdp",), ()), ("replica", "fsdp"))
    sizes = {"replica": 2, "fsdp": 4}
    assert [group.owned(matrices, sizes) for matrices in (1, 8, 9)] == [1, 1, 2]


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"replica": 8}, {"stage": 2, "expert": 2, "tensor": 2}],
)
def test_each_owner_sees_whole_matrices_and_their_results_find_their_way_back(mesh):
    parameters = described()
    random = np.random.default_rng(0)
    arrays = {name: jnp.asarray(random.standard_normal(SHAPES[name]), jnp.float32) for name in NAMES}

    def work(matrices):
        # Of the whole matrix, and not the same for any part of it.
        return matrices * jnp.abs(matrices).sum((1, 2), keepdims=True) + jnp.cumsum(matrices, 2)

    def on_one(name):
        matrices = np.asarray(arrays[name], np.float64)
        oriented = Oriented.of(parameters[name])
        stack = matrices.transpose(oriented.order)
        flat = stack.reshape(-1, *Group.of(Shard.of(parameters[name])).shape)
        result = flat * np.abs(flat).sum((1, 2), keepdims=True) + np.cumsum(flat, 2)
        return result.reshape(stack.shape).transpose(np.argsort(oriented.order))

    placement = Placement.create(MeshShape(**mesh))
    lies = placement.storage_shardings(arrays, {name: AXES[name] for name in NAMES})

    def local(arrays):
        return shared_out(work, {name: Shard.of(parameters[name]) for name in NAMES}, arrays)

    with placement.activate():
        layout = current_layout()
        specs = {name: sharding.spec for name, sharding in lies.items()}
        shared = jax.jit(
            jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
        )(jax.device_put(arrays, lies))  # fmt: skip
    for name in NAMES:
        np.testing.assert_allclose(shared[name], on_one(name), rtol=1e-4, atol=1e-4, err_msg=name)
