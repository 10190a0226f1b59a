"""Gradients that are one step late: as written out, on every layout, resumed, and with batches that teach nothing."""

import dataclasses
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.comms import Comms
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.data import Arrays, ExampleSource
from panax.mesh import MeshShape, Placement
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask
from panax.optim import Schedule, Sgd
from panax.run import EvaluateConfig, Experiment, RollbackConfig
from panax.train import CompiledStep, Program, StepConfig

MODEL = VitConfig(num_classes=10, image_size=8, channels=1, patch=4, embed=64, num_layers=2, heads=4, ffn=128)
CONFIG = DecoderConfig(vocab_size=128, max_length=32, embed=64, num_layers=2, heads=4, ffn=128)
AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
SGD = Sgd(schedule=Schedule(peak=0.5, decay="constant"), momentum=0.5)


def batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (8, 33)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((8, 32), np.float32)}


def compiled(mesh, comms=None, **config) -> CompiledStep:
    program = Program.create(
        DecoderTask(model=CONFIG), SGD, num_steps=10, config=StepConfig(clip_norm=None, **config), comms=comms
    )
    devices = jax.devices()[: math.prod(mesh.values())]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), AXES)


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items() if name != "key"}


def taken(step: CompiledStep, batches, state=None):
    state = step.init(0) if state is None else state
    losses = []
    for one in batches:
        state, scalars = jax.block_until_ready(step(state, step.put(one)))
        losses.append(float(scalars["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def alone():
    """The plain step on one device, for gradients by hand."""
    step = compiled({})
    loss = jax.jit(jax.value_and_grad(lambda params, rows, step=step: _loss(step, params, rows)))
    return step, loss


def _loss(step, params, rows):
    found = step.program.task.loss(params, {}, rows, jax.random.key(0), True)
    (term,) = found.losses.values()
    return term.mean


@pytest.mark.parametrize("correction", [False, True])
def test_updates_are_those_of_the_batch_before(alone, correction):
    step, value_and_grad = alone
    late, losses = taken(
        compiled({"replica": 2, "fsdp": 2}, Comms(delayed=True, delay_correction=correction)), map(batch, range(4))
    )
    params = step.init(0).params
    zeros = jax.tree.map(jnp.zeros_like, params)
    momentum, moved, held = zeros, zeros, None
    for number in range(4):
        rows = {**batch(number), "row": np.arange(8, dtype=np.int32)}
        ahead = jax.tree.map(jnp.add, params, moved) if correction else params
        loss, gradient = value_and_grad(ahead, rows)
        assert losses[number] == pytest.approx(float(loss), rel=1e-5)
        if held is not None:
            momentum = jax.tree.map(lambda m, g: 0.5 * m + g, momentum, held)
            moved = jax.tree.map(lambda m: -0.5 * m, momentum)
            params = jax.tree.map(jnp.add, params, moved)
        held = gradient
    for name, w in host(late.params).items():
        expected = np.asarray(named_leaves(params)[name])
        np.testing.assert_allclose(w, expected, rtol=2e-5, atol=2e-6, err_msg=name)
    assert int(late.guard.skipped) == 0


LATE, BOTH = Comms(delayed=True), Comms(delayed=True, compress="int8")


@pytest.fixture(scope="module")
def on_two():
    return taken(compiled({"replica": 2}, LATE, micro_batches=2), map(batch, range(4)))


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"stage": 2, "fsdp": 2}], ids=str)
def test_layouts_inside_a_replica_change_nothing(on_two, mesh):
    state, losses = taken(compiled({"replica": 2, **mesh}, LATE, micro_batches=2), map(batch, range(4)))
    assert losses == pytest.approx(on_two[1], rel=1e-5)
    for name, w in host(state.params).items():
        assert np.linalg.norm(w - host(on_two[0].params)[name]) <= 1e-4 * np.linalg.norm(w), name


def test_a_batch_that_teaches_nothing_moves_nothing_one_step_late():
    step = compiled({"replica": 2}, BOTH)
    before, _ = taken(step, [batch(0), batch(1)])
    snapshot = host(before)
    empty = {**batch(2), "loss_mask": np.zeros((8, 32), np.float32)}
    # The gradient of batch 1 comes; that of the empty one is kept, and known to teach nothing.
    after, _ = taken(step, [empty], before)
    moved = host(after)
    assert int(after.guard.skipped) == 0
    assert not bool(after.delayed.teaches)
    assert any((moved[name] != snapshot[name]).any() for name in moved if name.startswith("params."))
    last, _ = taken(step, [batch(3)], after)
    still = host(last)
    assert int(last.guard.skipped) == 1
    for name in moved:
        if name.startswith(("params.", "optimizer_state.", "owed.")):
            np.testing.assert_array_equal(still[name], moved[name], err_msg=name)
    on, _ = taken(step, [batch(4)], last)
    assert int(on.guard.skipped) == 1
    assert any((w != still[name]).any() for name, w in host(on).items() if name.startswith("params."))


def test_a_gradient_that_is_not_finite_is_met_one_step_late():
    step = compiled({"replica": 2}, LATE)
    state, _ = taken(step, [batch(0), batch(1)])
    name = max(state.delayed.terms, key=lambda name: state.delayed.terms[name].size)
    spoiled = state.delayed.terms[name].at[0].set(jnp.nan)
    snapshot = host(state.params)
    late = dataclasses.replace(state.delayed, terms={**state.delayed.terms, name: spoiled})
    state, _ = taken(step, [batch(2)], dataclasses.replace(state, delayed=late))
    assert int(state.guard.skipped) == 1
    for name, w in host(state.params).items():
        np.testing.assert_array_equal(w, snapshot[name], err_msg=name)
    state, _ = taken(step, [batch(3)], state)
    assert int(state.guard.skipped) == 1


def experiment(folder, steps: int, comms: Comms, **more) -> Experiment:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (64, 8, 8, 1)).astype(np.uint8)
    label = (image.sum((1, 2, 3)) % 10).astype(np.int32)
    return Experiment(
        task=VitTask(model=MODEL),
        data=ExampleSource(Arrays({"image": image, "label": label}), batch_size=16),
        optimizer=SGD,
        num_steps=steps,
        comms=comms,
        evaluate=EvaluateConfig(every=0),
        directory=str(folder),
        **more,
    )


def fit(folder, steps: int, comms: Comms, lines: list[str] | None = None, **mesh):
    devices = jax.devices()[: math.prod(mesh.values())]
    run = experiment(folder, steps, comms, mesh=MeshShape(**{"fsdp": 1, **mesh}))
    return panax.fit(run, say=(lambda line: None) if lines is None else lines.append, devices=devices)


def test_a_resumed_run_has_the_late_gradient_and_other_replicas_begin_without(tmp_path):
    uninterrupted = fit(tmp_path / "whole", 4, BOTH, replica=2, fsdp=2)
    fit(tmp_path / "cut", 2, BOTH, replica=2, fsdp=2)
    shutil.copytree(tmp_path / "cut", tmp_path / "more")
    resumed = fit(tmp_path / "cut", 4, BOTH, replica=2, fsdp=2)
    for name, w in host(uninterrupted.state).items():
        np.testing.assert_array_equal(host(resumed.state)[name], w, err_msg=name)
    lines: list[str] = []
    four = fit(tmp_path / "more", 4, BOTH, lines, replica=4)
    assert any("one step late, is dropped" in line for line in lines)
    assert int(four.state.guard.skipped) == 0
    assert int(four.state.step) == 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"delayed": True, "local_steps": 4}, "remove one of them"),
        ({"delay_correction": False}, "no effect without comms.delayed"),
        ({"delayed": True, "over": ("replicas",)}, "not a mesh axis"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(RecipeError, match=told):
        Comms(**settings)


def test_one_replica_and_rewinding_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"comms\.delayed=True has no effect: the mesh has replica=1"):
        compiled({"fsdp": 2}, Comms(delayed=True))
    with pytest.raises(RecipeError, match=r"set rollback\.after=0"):
        experiment(tmp_path, 2, Comms(delayed=True), rollback=RollbackConfig(after=2))
