"""Every optimizer within a training step: on another layout, over a bad batch, with frozen layers, resumed, compiled once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from optimized import compared
from test_on_shards import OPTIMIZERS

from panax.core import Evaluation, Loss, RecipeError, Task, TrainingError, named_leaves
from panax.mesh import MeshShape, Placement
from panax.optim import Muon, Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig, evaluate_all
from panax.train.debug import DebugStep

LAYERS, WIDTH, WIDER = 2, 8, 16
STEADY = Schedule(peak=1.0, decay="constant")
BATCH_AXES = {"x": ("batch", None), "y": ("batch", None)}

EACH = [pytest.param(name, marks=() if name in ("lamb", "muon", "soap") else pytest.mark.slow) for name in OPTIMIZERS]


@dataclasses.dataclass(frozen=True)
class Stacked(Task):
    """Layers in a stack, a norm, and a bias."""

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LAYERS, WIDTH, WIDER)),
            "down": jax.random.normal(down, (LAYERS, WIDER, WIDTH)),
            "scale": jnp.ones((LAYERS, WIDTH)),
            "bias": jnp.zeros((WIDTH,)),
        }, {}

    def parameter_axes(self, params):
        return {
            "up": ("layer", "embed", "ffn"), "down": ("layer", "ffn", "embed"), "scale": ("layer", "norm"), "bias": ("norm",),
        }  # fmt: skip

    def layer_parameters(self, params):
        return {layer: {name: (name, layer) for name in ("up", "down", "scale")} for layer in range(LAYERS)}

    def loss(self, params, state, batch, key, train):
        x = batch["x"]
        for layer in range(LAYERS):
            x = x + jnp.tanh(x * params["scale"][layer][None] @ params["up"][layer]) @ params["down"][layer]
        error = ((x + params["bias"][None] - batch["y"]) ** 2).sum(1)
        return Evaluation({"fit": Loss(error.sum(), jnp.float32(len(error)))}, state, {})


def batch(seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((16, WIDTH), np.float32) for name in ("x", "y")}


def optimizer_of(name):
    # Wide sides' statistics have no full rank after so few steps, and a rounding decides on the rest of a basis.
    return dataclasses.replace(OPTIMIZERS[name], largest=WIDTH) if name == "soap" else OPTIMIZERS[name]


def made(name, mesh, **options):
    program = Program.create(Stacked(), optimizer_of(name), num_steps=10, config=StepConfig(), **options)
    devices = jax.devices() if mesh else jax.devices()[:1]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), BATCH_AXES)


def taken(step, state, seeds):
    for seed in seeds:
        state, scalars = step(state, step.put(batch(seed)))
    return state, scalars


def numbers(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


@pytest.mark.parametrize("name", EACH)
def test_it_trains_on_a_mesh_as_on_one_device_and_continues_elsewhere(name):
    one, spread = made(name, {}), made(name, {"replica": 2, "fsdp": 4})
    alone, _ = taken(one, one.init(0), (1, 2, 3))
    state, _ = taken(spread, spread.init(0), (1, 2))
    stored = numbers(state.optimizer_state)
    # What a checkpoint does: whole arrays, onto another layout.
    moved = jax.device_put(jax.tree.map(jnp.copy, state), one.shardings)
    assert all((stored[key] == value).all() for key, value in numbers(moved.optimizer_state).items())
    together, _ = taken(spread, state, (3,))
    resumed, _ = taken(one, moved, (3,))
    # Gradients differ by the order of their sums before an optimizer sees them, and one of nearly zero may change its sign.
    bound = {"muon": 1e-3, "lion": 2e-2, "soap": 1e-3}.get(name, 1e-4)
    for other in (together, resumed):
        compared(other.params, alone.params, bound=bound)
    assert len(spread._train) == len(one._train) == 1


def test_roots_come_by_the_number_of_the_step_whoever_took_those_before():
    def roots(state):
        return {key: value for key, value in numbers(state.optimizer_state).items() if "root" in key}

    step, other = made("shampoo", {"fsdp": 8}), made("shampoo", {"fsdp": 2, "replica": 4})
    state, _ = taken(step, step.init(0), (1,))
    assert not any(value.any() for value in roots(state).values())
    state, _ = taken(step, state, (2, 3))
    third = roots(state)
    assert all(value.any() for value in third.values())
    state, _ = taken(other, jax.device_put(jax.tree.map(jnp.copy, state), other.shardings), (4,))
    fourth = roots(state)
    assert all((fourth[key] != value).any() for key, value in third.items())
    # A state that is not the last one that came: the number is read from it.
    begun, _ = taken(other, other.init(0), (1,))
    assert not any(value.any() for value in roots(begun).values())
    with pytest.raises(TrainingError, match=r"Muon has no state to renew between steps"):
        made("muon", {}).trace_renewal()


@pytest.mark.slow
def test_roots_wait_for_their_step_and_the_debugger_takes_them_too():
    optimizer = dataclasses.replace(OPTIMIZERS["shampoo"], root_delay=2)
    program = Program.create(Stacked(), optimizer, num_steps=10, config=StepConfig())
    compiled = CompiledStep(program, Placement.create(MeshShape(fsdp=1), devices=jax.devices()[:1]), BATCH_AXES)
    for step in (compiled, DebugStep(program, BATCH_AXES)):
        state = step.init(0)
        # In use, to come: after each step. The first roots are those after step 2, and used from step 4 on.
        for number, wanted in enumerate([(False, False), (False, True), (True, False), (True, True)], 1):
            state, _ = taken(step, state, (number,))
            roots = {name: leaf.any() for name, leaf in numbers(state.optimizer_state).items() if "root" in name}
            roots_seen = [
                {there for name, there in roots.items() if ("next" in name) == later} for later in (False, True)
            ]
            assert roots_seen == [{there} for there in wanted], (type(step), number)


@pytest.mark.parametrize("name", EACH)
def test_a_bad_batch_changes_nothing_and_frozen_layers_stay(name):
    step = made(name, {"fsdp": 8}, frozen=("layers.0", "bias"))
    first = numbers(step.init(0).params)
    state, _ = taken(step, step.init(0), (1,))
    before = state.params, state.optimizer_state
    if step.program.renewal_due(2):
        # Of what the good batch has left.
        before = state.params, step.renewal(jax.tree.map(jnp.copy, state.optimizer_state))
    before = numbers(before)
    bad = batch(2) | {"y": np.full((16, WIDTH), np.nan, np.float32)}
    state, scalars = step(state, step.put(bad))
    assert int(scalars["skipped"]) == 1
    after = numbers((state.params, state.optimizer_state))
    assert all((after[key] == value).all() for key, value in before.items())
    state, _ = taken(step, state, (3,))
    params = numbers(state.params)
    for key in ("up", "down", "scale"):
        assert (params[key][0] == first[key][0]).all() and (params[key][1] != first[key][1]).any(), key
    assert (params["bias"] == first["bias"]).all()
    assert not any(key.endswith("bias") for key in numbers(state.optimizer_state))


def test_gradients_are_clipped_by_layer_in_the_step():
    def trained(**config):
        program = Program.create(
            Stacked(), Sgd(schedule=STEADY), num_steps=10, config=StepConfig(clip_norm=None, **config)
        )
        step = CompiledStep(program, Placement.create(MeshShape(fsdp=8)), BATCH_AXES)
        first = step.init(0)
        before = numbers(first.params)
        state, _ = taken(step, first, (1,))
        return {name: value - before[name] for name, value in numbers(state.params).items()}

    plain, clipped = trained(), trained(clip_layer_norm=0.5)
    for name in ("up", "down", "scale"):
        for layer in range(LAYERS):
            length = np.linalg.norm(plain[name][layer])
            wanted = plain[name][layer] * min(1.0, 0.5 / length)
            np.testing.assert_allclose(clipped[name][layer], wanted, rtol=1e-4, atol=1e-5)
    assert any((trained(clip_ratio=0.01)[name] != plain[name]).any() for name in plain)


def test_an_average_that_the_optimizer_gives_is_judged():
    step = made("schedule_free", {"fsdp": 8}, frozen=("layers.0", "bias"))
    first = step.init(0)
    begins = numbers(first.params)
    assert all((numbers(first.averaged)[name] == begins[name]).all() for name in ("up", "down", "scale"))
    state, _ = taken(step, first, (1, 2, 3))
    averaged, params, offsets = numbers(state.averaged), numbers(state.params), state.optimizer_state["offset"]
    for name in ("up", "down", "scale"):
        np.testing.assert_allclose(
            averaged[name][1], (params[name] - np.asarray(offsets[name]) / 9)[1], rtol=1e-4, atol=1e-5
        )
        assert (averaged[name][0] == begins[name][0]).all() and (averaged[name][1] != params[name][1]).any(), name
    roots_seen = evaluate_all(step, state, [batch(4)])
    judged = dataclasses.replace(state, params=state.eval_params, averaged=None)
    plain = made("sgd", {"fsdp": 8}, frozen=("layers.0", "bias"))
    alone = dataclasses.replace(judged, optimizer_state=plain.init(0).optimizer_state)
    assert roots_seen["averaged"] == 1.0 and roots_seen["loss"] == pytest.approx(
        evaluate_all(plain, alone, [batch(4)])["loss"], rel=1e-6
    )
    with pytest.raises(RecipeError, match=r"step.ema_decay=0.9: ScheduleFreeAdamW averages the parameters itself"):
        Program.create(Stacked(), OPTIMIZERS["schedule_free"], num_steps=10, config=StepConfig(ema_decay=0.9))


@pytest.mark.slow
def test_a_decoder_trains_with_muon_on_a_mesh_as_on_one_device():
    roots_seen = []
    for mesh in ({}, {"fsdp": 2, "tensor": 2, "replica": 2}):
        program = Program.create(
            tiny.task(), Muon(dtype="float32", schedule=tiny.ADAMW.schedule), num_steps=10, config=StepConfig()
        )
        devices = jax.devices() if mesh else jax.devices()[:1]
        step = CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), tiny.AXES)
        state = step.init(0)
        losses = []
        for seed in range(2):
            state, scalars = step(state, step.put(tiny.batch(seed)))
            losses.append(float(scalars["loss"]))
        roots_seen.append((state.params, losses))
    (one, losses), (spread, others) = roots_seen
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    # Two steps at a rate of 0.01, of which AdamW's first one is the sign of a gradient.
    for name, value in numbers(one).items():
        assert np.abs(numbers(spread)[name] - value).mean() < 1e-4, name
