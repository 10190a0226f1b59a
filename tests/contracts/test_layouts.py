"""Every layout trains like one device: gradients, losses, parameters, with dropout on; and it does what its rules say."""

import functools
import re

import jax
import numpy as np
import pytest
import tiny

from panax.core import named_leaves
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig
from panax.train.update import number_rows, split_rows

LAYOUTS = {
    "one": (MeshShape(), 1),
    "ddp8": (MeshShape(replica=8, fsdp=1), 8),
    "fsdp8": (MeshShape(fsdp=8), 8),
    "hsdp2x4": (MeshShape(replica=2, fsdp=4), 8),
    "fsdp2": (MeshShape(fsdp=2), 2),
}

# Float32 sums of the same terms in another order. A gradient here is a sum of at most 512 tokens' terms; each order rounds
# to a relative 2**-24 * sqrt(512) ~ 1.4e-6 of the terms' own norm, forward and backward pass through 3 layers.
TOLERANCE = 1e-5

SGD = Sgd(schedule=Schedule(peak=0.5, decay="constant"))


def compiled(layout, optimizer=SGD, **config):
    shape, count = LAYOUTS[layout]
    program = Program.create(tiny.task(), optimizer, num_steps=100, config=StepConfig(**config))
    return CompiledStep(program, Placement.create(shape, devices=jax.devices()[:count]), tiny.AXES)


@functools.cache
def trained(layout, steps=5, **config):
    """Losses, and parameters as host arrays before and after."""
    step = compiled(layout, **config)
    state = step.init(0)
    first = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
    losses = []
    for i in range(steps):
        state, scalars = step(state, step.put(tiny.batch(i)))
        losses.append(float(scalars["loss"]))
    return losses, first, {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}


def assert_close(a: dict, b: dict, tolerance=TOLERANCE):
    for name in a:
        distance = np.linalg.norm(a[name] - b[name]) / (np.linalg.norm(b[name]) + 1e-12)
        assert distance <= tolerance, (name, distance)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_trains_like_one_device(layout):
    losses, first, last = trained(layout)
    losses_one, first_one, last_one = trained("one")
    for name in first:
        np.testing.assert_array_equal(
            first[name], first_one[name], err_msg=f"{name}: initialisation depends on the mesh"
        )
    np.testing.assert_allclose(losses, losses_one, rtol=TOLERANCE)
    # Five steps of plain SGD: the parameters' change is the sum of five gradients.
    for name in last:
        moved, moved_one = last[name] - first[name], last_one[name] - first_one[name]
        # Each step also rounds the parameter itself to float32, on both sides.
        rounding = 2 * 5 * 2.0**-24 * np.linalg.norm(last[name])
        assert np.linalg.norm(moved - moved_one) <= 10 * TOLERANCE * np.linalg.norm(moved_one) + rounding, name


@pytest.mark.parametrize("layout, parts", [("one", 4), ("hsdp2x4", 2)])
def test_micro_batches_give_the_gradient_of_the_whole_batch(layout, parts):
    step = compiled(layout)
    state, batch = step.init(0), step.put(tiny.batch())

    def gradients(parts, state, batch):
        micro_batches = split_rows(number_rows(batch), parts)
        trainable = step.program.trainable
        task = step.program.task
        return task.gradients(state.params, state.model_state, micro_batches, state.step_key, trainable).gradients

    with step.placement.activate():
        whole, split = (named_leaves(jax.jit(functools.partial(gradients, n))(state, batch)) for n in (1, parts))
    # The same terms of a sum, added in groups: each tensor as between layouts, and on one device, where the groups are the only
    # difference, the gradient as one vector to 1e-6. (Over devices, where rows are regrouped too, it is at 1.2e-6.)
    split, whole = ({name: np.asarray(leaf) for name, leaf in tree.items()} for tree in (split, whole))
    assert_close(split, whole)
    if layout == "one":
        distance = np.sqrt(sum(np.sum((split[name] - whole[name]) ** 2) for name in whole))
        assert distance <= 1e-6 * np.sqrt(sum(np.sum(leaf**2) for leaf in whole.values()))


def test_shards_are_where_the_rules_say():
    step = compiled("hsdp2x4")
    state = step.init(0)
    w_up = state.params.stacks[0].blocks[0].feed_forward.w_up
    assert w_up.shape == (1, 32, 64)
    assert w_up.addressable_shards[0].data.shape == (1, 8, 64)
    assert state.params.final_norm.scale.is_fully_replicated
    assert step.put(tiny.batch())["tokens"].addressable_shards[0].data.shape == (2, 32)


def test_moments_lie_like_their_parameters():
    step = compiled("fsdp8", tiny.ADAMW)
    state = step.init(0)
    moments = named_leaves(state.optimizer_state)
    for name, leaf in named_leaves(state.params).items():
        assert moments[f"0.mu.{name}"].sharding == leaf.sharding, name


@pytest.mark.parametrize("layout, gathers", [("ddp8", False), ("fsdp8", True)])
def test_collectives_are_those_of_the_layout(layout, gathers):
    text = compiled(layout).lower(tiny.batch()).compile().as_text()
    assert ("all-gather" in text) == gathers
    assert re.search(r"all-reduce|reduce-scatter", text)


@pytest.mark.parametrize("layout", ["one", "fsdp8"])
def test_the_second_step_compiles_nothing(layout):
    step = compiled(layout)
    state, _ = step(step.init(0), step.put(tiny.batch(0)))
    with jax.log_compiles(False):
        before = step.compile_seconds
        state, _ = step(state, step.put(tiny.batch(1)))
    assert step.compile_seconds == before
