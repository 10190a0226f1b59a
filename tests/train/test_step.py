"""The step: losses with weights, frozen parameters, the guard, shapes, tasks of every kind."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from drawing import drawn

from panax.core import Evaluation, Gradients, Loss, Mean, RecipeError, Task, TrainingError, named_leaves
from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Optax, Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig, evaluate_all

SGD = Sgd(schedule=Schedule(peak=0.1, decay="constant"))


@dataclasses.dataclass(frozen=True)
class Regression(Task):
    """Two losses with their own weights, a running mean as model state, and noise by row."""

    noise: float = 0.0

    def init(self, key):
        return {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}, {"mean": jnp.zeros(4), "seen": jnp.float32(0)}

    def parameter_axes(self, params):
        return {"w": ("embed", "ffn"), "b": ("norm",)}

    def loss(self, params, state, batch, key, train):
        x = batch["x"]
        if train and self.noise:
            draw = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), (4,)))
            x = x + self.noise * draw(batch["row"])
        error = x @ params["w"] + params["b"][None] - batch["y"]
        weight = batch["weight"]
        losses = {
            "fit": Loss(((error**2).sum(1) * weight).sum(), weight.sum()),
            "size": Loss(jnp.abs(params["w"]).sum() * x.shape[0], jnp.float32(x.shape[0]), 0.01),
        }
        new = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "seen": state["seen"] + x.shape[0]}
        return Evaluation(
            losses, new if train else state, {"error": Mean(jnp.abs(error).sum(), jnp.float32(error.size))}
        )


BATCH_AXES = {"x": ("batch", None), "y": ("batch", None), "weight": ("batch",)}


def data(rows=16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 4), np.float32),
        "y": rng.standard_normal((rows, 3), np.float32),
        "weight": rng.integers(0, 4, rows).astype(np.float32),
    }


def make(task=None, optimizer=SGD, devices=1, axes=BATCH_AXES, shapes=1, frozen=(), **config):
    program = Program.create(task or Regression(), optimizer, num_steps=100, config=StepConfig(**config), frozen=frozen)
    placement = Placement.create(MeshShape(replica=devices, fsdp=1), devices=jax.devices()[:devices])
    return CompiledStep(program, placement, axes, shapes_allowed=shapes)


def run(step, batches, state=None):
    state = step.init(0) if state is None else state
    for batch in batches:
        state, scalars = step(state, step.put(batch))
    return state, {name: float(value) for name, value in scalars.items()}


def test_the_loss_is_divided_once_by_the_global_weight():
    batch = data()
    step = make(clip_norm=None)
    before = {name: np.asarray(leaf) for name, leaf in step.init(0).params.items()}
    state, scalars = run(step, [batch])
    error = batch["x"] @ before["w"] + before["b"] - batch["y"]
    w = batch["weight"] / batch["weight"].sum()
    gradient = 2 * batch["x"].T @ (error * w[:, None]) + 0.01 * np.sign(before["w"])
    np.testing.assert_allclose(state.params["w"], before["w"] - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scalars["loss"], (error**2).sum(1) @ w + 0.01 * np.abs(before["w"]).sum(), rtol=1e-5)
    np.testing.assert_allclose(scalars["loss/size"], np.abs(before["w"]).sum(), rtol=1e-5)


@pytest.mark.parametrize("devices, parts", [(1, 4), (1, 16), (4, 2), (8, 2)])
def test_weights_and_noise_do_not_depend_on_parts_and_devices(devices, parts):
    task, batch = Regression(noise=0.5), data()
    one, scalars_one = run(make(task, clip_norm=None), [batch])
    many, scalars = run(make(task, devices=devices, micro_batches=parts, clip_norm=None), [batch])
    for name in one.params:
        np.testing.assert_allclose(many.params[name], one.params[name], rtol=1e-6, atol=1e-6)
    for name in ("loss", "error", "gradient_norm"):
        assert scalars[name] == pytest.approx(scalars_one[name], rel=2e-6), name


def test_model_state_goes_through_the_micro_batches_in_order():
    state, _ = run(make(micro_batches=4), [data()])
    assert float(state.model_state["seen"]) == 16
    mean = np.zeros(4)
    for part in range(4):
        mean = 0.9 * mean + 0.1 * data()["x"][part::4].mean(0)
    np.testing.assert_allclose(state.model_state["mean"], mean, rtol=1e-5, atol=1e-6)


def test_evaluation_divides_once_over_uneven_batches_and_leaves_the_state():
    step = make(shapes=2)
    state = step.init(0)
    a, b = data(16, 1), data(8, 2)
    both = {name: np.concatenate([a[name], b[name]]) for name in a}
    apart = evaluate_all(step, state, [a, b])
    together = evaluate_all(make(), state, [both])
    for name in together:
        assert apart[name] == pytest.approx(together[name], rel=1e-5), name
    assert float(state.model_state["seen"]) == 0


def test_clipping_scales_the_whole_gradient_to_the_norm():
    batch = data()
    free, scalars = run(make(clip_norm=None), [batch])
    clipped, _ = run(make(clip_norm=0.5), [batch])
    first = make().init(0).params
    ratio = 0.5 / scalars["gradient_norm"]
    for name in first:
        moved, moved_clipped = free.params[name] - first[name], clipped.params[name] - first[name]
        np.testing.assert_allclose(moved_clipped, moved * ratio, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25])
def test_a_bad_batch_is_skipped_counted_and_leaves_everything_as_it_was(bad):
    adam = AdamW(schedule=Schedule(peak=0.1, decay="constant"))
    step = make(optimizer=adam, spike_factor=100.0)
    state, _ = run(step, [data(seed=i) for i in range(3)])
    before = {name: np.asarray(leaf) for name, leaf in named_leaves((state.params, state.optimizer_state)).items()}
    poisoned = data(seed=9)
    poisoned["x"][3, 1] = bad
    poisoned["weight"][3] = 1.0
    state, scalars = run(step, [poisoned], state)
    for name, leaf in named_leaves((state.params, state.optimizer_state)).items():
        np.testing.assert_array_equal(leaf, before[name], err_msg=name)
    assert (scalars["skipped"], scalars["skipped_in_a_row"], int(state.step)) == (1, 1, 4)
    state, scalars = run(step, [data(seed=10)], state)
    assert (scalars["skipped"], scalars["skipped_in_a_row"]) == (1, 0)


def test_frozen_parameters_have_no_moments_and_stay():
    adam = AdamW(schedule=Schedule(peak=0.1, decay="constant"))
    step = make(optimizer=adam, frozen=("b",))
    first = np.asarray(step.init(0).params["b"])
    state, _ = run(step, [data(seed=i) for i in range(3)])
    np.testing.assert_array_equal(state.params["b"], first)
    assert not [name for name in named_leaves(state.optimizer_state) if name.endswith(".b")]
    assert [name for name in named_leaves(state.optimizer_state) if name.endswith(".w")]


def test_a_frozen_prefix_that_matches_nothing_is_an_error():
    with pytest.raises(RecipeError, match="'c' matches no parameter; the first ones are b, w"):
        make(frozen=("c",))


def test_a_new_shape_is_an_error_that_names_the_leaf():
    step = make()
    state, _ = run(step, [data(16)])
    with pytest.raises(TrainingError, match=r"batch\['x'\] was float32\[16, 4\] and is now float32\[8, 4\]"):
        step(state, step.put(data(8)))


def test_the_order_of_a_batch_s_leaves_changes_nothing():
    step = make()
    state, _ = run(step, [data(16)])
    seconds = step.compile_seconds
    step(state, dict(reversed(step.put(data(16)).items())))
    assert step.compile_seconds == seconds


def test_announced_shapes_compile_once_each():
    step = make(shapes=2)
    state, _ = run(step, [data(16), data(8)])
    seconds = step.compile_seconds
    run(step, [data(8), data(16)], state)
    assert step.compile_seconds == seconds
    with pytest.raises(TrainingError, match="2 are allowed"):
        step(state, step.put(data(4)))


def test_a_batch_with_other_leaves_is_an_error():
    step = make()
    with pytest.raises(TrainingError, match="leaves are"):
        step.put({"x": data()["x"]})


class OwnGradients(Regression):
    """A task that brings its gradients itself, as a traced graph does."""

    def gradients(self, params, state, micro_batches, key, trainable):
        batch = jax.tree.map(lambda leaf: leaf[0], micro_batches)
        result = self.loss(params, state, batch, key, True)
        gradients = jax.tree.map(lambda p, keep: jnp.ones_like(p) if keep else None, params, trainable)
        return Gradients(gradients, result.losses, result.state, result.metrics)


def test_a_task_may_bring_its_own_gradients():
    step = make(OwnGradients(), clip_norm=None)
    first = np.asarray(step.init(0).params["w"])
    state, _ = run(step, [data()])
    np.testing.assert_allclose(state.params["w"], first - 0.1, rtol=1e-6)


def test_any_optax_transformation_trains():
    step = make(optimizer=Optax(transformation=optax.lamb(0.01)))
    state, first = run(step, [data()])
    _, last = run(step, [data()] * 20, state)
    assert last["loss"] < first["loss"]


def test_a_foreign_loss_runs_on_the_same_mesh():
    """Code that knows nothing of meshes sees whole arrays."""

    class Foreign(Regression):
        def loss(self, params, state, batch, key, train):
            x = batch["x"].reshape(-1, 2, 2).reshape(-1, 4)
            out = jnp.take(jnp.tanh(x @ params["w"] + params["b"][None]), jnp.array([2, 0, 1]), axis=1)
            total = ((out - batch["y"]) ** 2).sum()
            return Evaluation({"fit": Loss(total, jnp.float32(batch["x"].shape[0]))}, state, {})

    one, scalars_one = run(make(Foreign()), [data()])
    many, scalars = run(make(Foreign(), devices=8), [data()])
    assert scalars["loss"] == pytest.approx(scalars_one["loss"], rel=1e-6)
    np.testing.assert_allclose(many.params["w"], one.params["w"], rtol=1e-5, atol=1e-6)


def test_evaluation_mode_is_without_dropout():
    program = Program.create(tiny.task(), tiny.ADAMW, num_steps=10)
    params, state = drawn(tiny.task().init)
    batch = {name: jnp.asarray(leaf) for name, leaf in tiny.batch().items()} | {"row": jnp.arange(tiny.ROWS)}
    loss = jax.jit(lambda train, key: program.task.loss(params, state, batch, key, train).losses["cross_entropy"].sum,
                   static_argnums=0)  # fmt: skip
    keys = [jax.random.key(i) for i in range(2)]
    assert float(loss(False, keys[0])) == float(loss(False, keys[1]))
    assert float(loss(True, keys[0])) != float(loss(True, keys[1]))


def test_bfloat16_compute_keeps_float32_masters_and_moments():
    program = Program.create(tiny.task(compute_dtype="bfloat16"), tiny.ADAMW, num_steps=10)
    floats = [leaf.dtype for leaf in jax.tree.leaves(program.abstract) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float32")}


def test_rematerialization_changes_no_gradient():
    params, state = drawn(tiny.task().init)
    batch = {name: leaf[None] for name, leaf in {**tiny.batch(), "row": np.arange(tiny.ROWS, dtype=np.int32)}.items()}
    trainable = jax.tree.map(lambda _: True, params)

    def gradients(remat):
        task = tiny.task(remat=remat)
        return jax.jit(partial(task.gradients, trainable=trainable))(params, state, batch, jax.random.key(1)).gradients

    plain = named_leaves(gradients("none"))
    for remat in ("products", "full"):
        for name, leaf in named_leaves(gradients(remat)).items():
            scale = float(jnp.linalg.norm(plain[name])) + 1e-12
            # The same operations, fused otherwise.
            assert float(jnp.linalg.norm(leaf - plain[name])) <= 1e-6 * scale, (remat, name)


class OneLoss(Regression):
    """Of the two losses the one that the mask weighs."""

    def loss(self, params, state, batch, key, train):
        found = super().loss(params, state, batch, key, train)
        name = next(iter(found.losses))
        return found._replace(losses={name: found.losses[name]})


def _broken_mask(step, state, weight):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    batch = {"x": x, "y": x[:, :3], "weight": np.full(8, weight, np.float32)}
    before = jax.tree.map(np.asarray, (state.params, state.optimizer_state))
    after, scalars = step(state, step.put(batch))
    for left, right in zip(
        jax.tree.leaves(before), jax.tree.leaves((after.params, after.optimizer_state)), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    return {name: float(value) for name, value in scalars.items()}


@pytest.mark.parametrize("weight", [0.0, float("nan"), -1.0])
def test_a_mask_of_nothing_or_of_nonsense_moves_no_weight(weight):
    """Weight decay would, and a loss that looks finite would hide it."""
    decaying = AdamW(schedule=Schedule(peak=0.1, decay="constant"), weight_decay=0.5)
    program = Program.create(OneLoss(), decaying, num_steps=9)
    axes = {"x": ("batch", None), "y": ("batch", None), "weight": ("batch",)}
    step = CompiledStep(program, Placement.create(devices=jax.devices()[:1]), axes)
    scalars = _broken_mask(step, step.init(0), weight)
    assert scalars["skipped"] == 1
    assert scalars["loss"] == 0.0 if weight == 0.0 else not np.isfinite(scalars["loss"])


def test_a_learning_rate_is_reported_where_it_is_known():
    for optimizer, rate in (
        (SGD, 0.1),
        (
            Optax(
                transformation=optax.scale_by_adam(), of_schedule=True, schedule=Schedule(peak=0.2, decay="constant")
            ),
            0.2,
        ),
        (Optax(transformation=optax.adam(0.3)), None),
    ):
        reported = optimizer.reported_rate(10)
        assert reported is None if rate is None else float(reported(0)) == pytest.approx(rate)
    with pytest.raises(RecipeError, match=r"optimizer\.schedule has no effect on Optax"):
        Optax(transformation=optax.adam(0.3), schedule=Schedule(peak=0.2))
