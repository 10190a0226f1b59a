"""Opening weights: what is not a plain array trains on a mesh as on one device, and travels as it rests."""

import dataclasses

import jax
import jax.numpy as jnp
import low_rank
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from low_rank import EMBED, FFN, RANK, Adapted, LowRank

from panax.core import named_leaves
from panax.mesh import MeshShape, Placement, Rules
from panax.optim import Optax
from panax.plan.collectives import count_collectives
from panax.spmd import WeightLike, contract, gather_weight, gather_weight_early
from panax.train import CompiledStep, Program, StepConfig

MESH = MeshShape(replica=1, fsdp=4, tensor=2)


def compiled(task, shape=None, rules=None):
    config = StepConfig(clip_norm=None)
    program = Program.create(task, Optax(transformation=optax.sgd(0.5)), num_steps=10, config=config)
    one = MeshShape(replica=1, fsdp=1)
    placement = Placement.create(shape or one, rules, devices=None if shape else jax.devices()[:1])
    return CompiledStep(program, placement, low_rank.AXES)


def trained(step, steps=3):
    state, losses = step.init(0), []
    for _ in range(steps):
        state, scalars = step(state, step.put(low_rank.batch()))
        losses.append(float(scalars["loss"]))
    return losses, {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}


@pytest.mark.parametrize("zero", ["3", "2", "1"])
def test_a_low_rank_weight_on_an_int8_base_trains_like_on_one_device(zero):
    (one_losses, one), (losses, many) = (
        trained(compiled(Adapted())),
        trained(compiled(Adapted(), MESH, Rules(zero=zero))),
    )
    # Float32 sums of at most 128 tokens' terms in another order, three steps one after the other.
    np.testing.assert_allclose(losses, one_losses, rtol=1e-5)
    for name, leaf in one.items():
        assert np.linalg.norm(many[name].astype(np.float64) - leaf) <= 1e-5 * np.linalg.norm(leaf), name
    first = named_leaves(compiled(Adapted()).init(0).params)
    assert many["up.base"].dtype == np.int8
    frozen = {name for name in first if np.array_equal(many[name], first[name])}
    assert frozen == set(Adapted.frozen_parameters)


def test_the_base_travels_as_int8():
    step = compiled(Adapted(dtype=jnp.bfloat16), MESH)
    text = step.lower(low_rank.batch()).compile().as_text()
    gathered = [
        collective
        for collective in count_collectives(text, step.placement.sizes)
        if collective.kind == "all-gather" and collective.axes == ("fsdp",)
    ]
    columns = FFN // 2
    sizes = {(collective.dtype, collective.buffer_bytes * collective.times) for collective in gathered}
    columns = FFN // 2
    # Forward and again in the backward pass, whose compiler may share the two; what is float is small, or the plain matrix.
    base = [size for dtype, size in sizes if dtype == "s8"]
    assert base in ([EMBED * columns], [2 * EMBED * columns]), sizes
    small, plain = 4 * EMBED * RANK, EMBED * columns * 4
    assert all(size <= 2 * small or size in (plain, plain // 2) for dtype, size in sizes if dtype != "s8"), sizes


def test_a_gradient_comes_back_to_each_array_at_rest():
    weight = Adapted().init(jax.random.key(0))[0]["up"]
    assert isinstance(weight, WeightLike)
    x = jax.random.normal(jax.random.key(1), (5, EMBED))

    def ours(a, b):
        w = dataclasses.replace(weight, a=a, b=b)
        return jnp.sin(contract("batch embed, embed ffn -> batch ffn", x, w)).sum()

    def plain(a, b):
        dense = weight.base.astype(jnp.float32) * weight.scale[:, None] + a @ b
        return jnp.sin(x @ dense).sum()

    actual, wanted = (jax.grad(f, (0, 1))(weight.a, weight.b) for f in (ours, plain))
    for got, expected in zip(actual, wanted):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_value_is_a_constant_and_the_slot_takes_the_gradient():
    w = jnp.arange(6.0).reshape(2, 3)

    def read(w):
        opened = gather_weight(w, "embed ffn", jnp.bfloat16)
        return opened.value.astype(jnp.float32).sum() + (opened.slot * 3.0).sum()

    gradient = jax.grad(read)(w)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full((2, 3), 3.0))


def test_a_gradient_that_is_formed_early_is_returned_at_once():
    placement = Placement.create(MeshShape(replica=1, fsdp=8))
    w = jnp.ones((16, 4))

    def returned(w):
        opened = gather_weight_early(w, "embed ffn", jnp.float32)
        assert opened.value.shape == (16, 4)
        return opened.reduce_grad(opened.value).array

    spec = PartitionSpec("fsdp")
    with placement.activate():
        result = jax.jit(jax.shard_map(returned, mesh=placement.mesh, in_specs=spec, out_specs=spec, check_vma=False))(
            w
        )
    np.testing.assert_array_equal(result, np.full((16, 4), 8.0))


def test_a_low_rank_weight_lists_its_parts():
    structure = jax.tree.structure(Adapted().init(jax.random.key(0))[0]["up"])
    assert structure == jax.tree.structure(LowRank(0, 0, 0, 0))
