"""A user's parts of a step: on two meshes the algorithm of one device, with state that is resumed, begins or is dropped."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_parts import DelayedScaling, GradientNoise, LowRankView, MeanNorm, Teacher, float8_values

import panax
from panax.agents import Ppo
from panax.checkpoint import CheckpointConfig
from panax.core import Evaluation, Loss, RecipeError, Task, named_leaves
from panax.data import Arrays, ExampleSource
from panax.environments import CartPole
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.spmd import contract, contract_gathered, local_sequence, sum_over_sequence
from panax.train import CompiledStep, Program, StepConfig, StepPart

RATE, STEPS, ROWS, LENGTH, EMBED, FFN = 0.2, 3, 8, 4, 16, 24
SGD = Sgd(schedule=Schedule(peak=RATE, decay="constant", warmup_steps=0))
MESHES = {"fsdp=4 tensor=2": MeshShape(replica=1, fsdp=4, tensor=2), "replica=2 fsdp=4": MeshShape(replica=2, fsdp=4)}


@dataclasses.dataclass(frozen=True)
class Fit(Task):
    """A feed-forward layer with a residual, fitted to targets, which are in the batch."""

    mesh_axes = frozenset({"replica", "fsdp", "tensor"})
    names_axes = True

    def init(self, key: jax.Array) -> Any:
        draw = jax.random.normal(key, (2, EMBED, FFN))
        return {"w": draw[0] / EMBED**0.5, "down": draw[1].T / FFN**0.5}, {}

    def parameter_axes(self, params: Any) -> Any:
        return {"w": ("embed", "ffn"), "down": ("ffn", "embed")}

    def loss(self, params: Any, state: Any, batch: Any, key: Any, train: bool) -> Evaluation:
        x, y = (local_sequence(batch[name]) for name in ("x", "targets" if "targets" in batch else "y"))
        (up,) = contract_gathered(x, ("batch seq embed, embed ffn -> batch seq ffn", params["w"]))
        down = contract("batch seq ffn, ffn embed -> batch seq embed", jnp.tanh(up), params["down"])
        total = sum_over_sequence(jnp.sum((x + down - y) ** 2))
        return Evaluation({"squares": Loss(total, jnp.float32(y.shape[0] * LENGTH * EMBED))}, state, {})


def predict(params: Any, x: jax.Array) -> jax.Array:
    """What the task's model computes of global arrays."""
    return x + jnp.tanh(x @ params["w"]) @ params["down"]


AXES = {"x": ("batch", "seq", None), "y": ("batch", "seq", None)}


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((ROWS, LENGTH, EMBED), np.float32) for name in "xy"}


PARTS = {
    "gradient noise": GradientNoise(),
    "low-rank view": LowRankView("w"),
    "teacher": Teacher(predict),
    "float8": DelayedScaling(),
}


def reference(part: StepPart, params: Any, state: Any, step: int, data: Any) -> tuple[Any, Any, float]:
    """A step of plain jnp on one device: the next parameters, the next state of the part, and the loss."""

    def loss(params: Any, targets: Any) -> Any:
        return jnp.mean((predict(params, data["x"]) - targets) ** 2)

    value_and_grad = jax.value_and_grad(loss)
    if isinstance(part, GradientNoise):
        value, gradients = value_and_grad(params, data["y"])
        run_key = jax.random.split(jax.random.key(0))[1]
        for number, name in enumerate(sorted(params)):
            noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(run_key, step), number), params[name].shape)
            gradients[name] += part.scale / (1.0 + step) ** 0.275 * noise
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), None, value
    if isinstance(part, LowRankView):
        seen = {**params, "w": params["w"] + state["a"] @ state["b"]}
        value, gradients = value_and_grad(seen, data["y"])
        a, b, gradient = state["a"], state["b"], gradients["w"]
        return params, {"a": a - part.rate * gradient @ b.T, "b": b - part.rate * a.T @ gradient}, value
    if isinstance(part, Teacher):
        value, gradients = value_and_grad(params, predict(state, data["x"]))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        return params, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, state, params), value
    assert isinstance(part, DelayedScaling)
    seen = {name: float8_values(w, state[name].max()) for name, w in params.items()}
    value, gradients = value_and_grad(seen, data["y"])
    params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
    history = {name: jnp.append(state[name][1:], jnp.abs(w).max()) for name, w in params.items()}
    return params, history, value


def compiled(parts: tuple[StepPart, ...], mesh: MeshShape | None = None, **config: Any) -> CompiledStep:
    program = Program.create(Fit(), SGD, num_steps=10, config=StepConfig(**{"clip_norm": None, **config}), parts=parts)
    one = MeshShape(replica=1, fsdp=1)
    placement = Placement.create(mesh or one, devices=None if mesh else jax.devices()[:1])
    return CompiledStep(program, placement, AXES)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_its_algorithm_on_every_mesh(name: str, mesh: str) -> None:
    step, part = compiled((PARTS[name],), MESHES[mesh]), PARTS[name]
    state = step.init(0)
    params, own = (jax.tree.map(np.asarray, each) for each in (state.params, (state.parts or {}).get(part.name)))
    first = params
    for number in range(STEPS):
        state, scalars = step(state, step.put(batch(number)))
        params, own, loss = reference(part, params, own, number, batch(number))
        np.testing.assert_allclose(scalars["loss"], loss, rtol=1e-5)
    for ours, expected in ((state.params, params), ((state.parts or {}).get(part.name), own)):
        theirs = named_leaves(expected)
        for leaf, value in named_leaves(ours).items():
            np.testing.assert_allclose(value, theirs[leaf], atol=1e-5, err_msg=leaf)
    if name == "low-rank view":
        np.testing.assert_array_equal(state.params["w"], first["w"])


def test_a_skipped_update_keeps_the_state_of_updates_and_advances_what_comes_after() -> None:
    step = compiled((Teacher(predict), DelayedScaling(), GradientNoise()))
    state, _ = step(step.init(0), step.put(batch()))
    before = jax.tree.map(np.asarray, state.parts)
    broken = batch(1)
    broken["y"][0] = np.inf
    broken["x"][0] = np.inf
    state, scalars = step(state, step.put(broken))
    assert scalars["skipped"] == 1
    assert state.parts is not None
    for name, value in state.parts["float8"].items():
        np.testing.assert_array_equal(value, before["float8"][name])
    assert (np.asarray(state.parts["teacher"]["w"]) != before["teacher"]["w"]).any()
    assert np.isfinite(scalars["teacher_distance"])


def test_parts_stand_before_those_that_they_name() -> None:
    program = compiled((GradientNoise(), DelayedScaling()), clip_norm=1.0, ema_decay=0.9).program
    names = [part.name for part in program.parts]
    assert names.index("gradient_noise") == names.index("clip_norm") - 1
    assert names.index("float8") == names.index("optimizer") + 1 == names.index("average") - 1
    # Without clipping, noise is added before what comes after it.
    names = [part.name for part in compiled((GradientNoise(),)).program.parts]
    assert names.index("gradient_noise") == names.index("optimizer") - 1


@dataclasses.dataclass(frozen=True)
class Nameless(StepPart):
    pass


@dataclasses.dataclass(frozen=True)
class Misplaced(StepPart):
    name = "misplaced"
    before = "optimiser"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Nameless(),), r"Nameless.name=''; expected a name that no other part of the step has"),
        ((GradientNoise(), GradientNoise(2.0)), "GradientNoise.name='gradient_noise'; expected a name that no other"),
        ((GradientNoise,), "a step part is a type; expected an object of a subclass of StepPart"),
        ((Misplaced(),), "Misplaced.before='optimiser'; expected a part of Panax; did you mean 'optimizer'"),
    ],
)
def test_names_that_mean_nothing_are_refused(parts: tuple[StepPart, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        compiled(parts)


def test_a_loop_of_ones_own_takes_parts() -> None:
    devices, parts = jax.devices()[:1], (Teacher(predict),)
    step = panax.compile_step(Fit(), batch(), SGD, devices=devices, axes=AXES, step_parts=parts)
    _, scalars = step(step.init(0), batch())
    assert "teacher_distance" in scalars


def test_an_agent_takes_parts() -> None:
    """In each of a step's updates; the state goes with them."""
    task = Ppo(environment=CartPole(), environments=8, steps=16, epochs=2, minibatches=2)
    program = Program.create(
        task, SGD, num_steps=4, config=StepConfig(clip_norm=None), parts=(MeanNorm(), GradientNoise())
    )
    step = CompiledStep(
        program, Placement.create(MeshShape(replica=1, fsdp=1), devices=jax.devices()[:1]), {"row": ("batch",)}
    )
    state, scalars = step(step.init(0), step.put({"row": np.arange(8, dtype=np.int32)}))
    assert state.parts is not None and state.parts["mean_norm"] > 0 and np.isfinite(scalars["loss"])


def test_a_part_of_gradients_is_short() -> None:
    assert len(inspect.getsource(GradientNoise).splitlines()) <= 40


def experiment(folder: Path, steps: int, *parts: StepPart) -> panax.Experiment:
    data = ExampleSource(Arrays(batch()), batch_size=ROWS, seed=0)
    return panax.Experiment(
        name="parts", task=Fit(), data=data, optimizer=SGD, num_steps=steps, step_parts=parts, directory=str(folder),
        mesh=MeshShape(replica=1, fsdp=1), checkpoint=CheckpointConfig(every=2), step=StepConfig(clip_norm=None),
    )  # fmt: skip


def test_a_run_is_resumed_with_a_part_added_or_removed(tmp_path: Path) -> None:
    def run(steps: int, *parts: StepPart) -> tuple[Any, str]:
        lines: list[str] = []
        result = panax.fit(
            experiment(tmp_path / "run", steps, *parts),
            devices=jax.devices()[:1],
            say=lines.append,
            accept_changes=True,
        )
        return result.state, "\n".join(lines)

    state, _ = run(2, Teacher(predict))
    saved = np.asarray(state.parts["teacher"]["w"])
    state, said = run(4, Teacher(predict), DelayedScaling())
    assert "the state of float8, which the checkpoint lacks, begins here" in said
    assert (np.asarray(state.parts["teacher"]["w"]) != saved).any() and state.parts["float8"]["w"].shape == (4,)
    state, said = run(6, DelayedScaling())
    assert "the checkpoint's state of the step part teacher is dropped" in said
    assert set(state.parts) == {"float8"}
    state, said = run(8)
    assert "the checkpoint's state of the step part float8 is dropped" in said
    assert state.parts is None
    # Without a change, a resumed run is the undisturbed one.
    undisturbed = panax.fit(experiment(tmp_path / "other", 4, Teacher(predict)), devices=jax.devices()[:1], quiet=True)
    for steps in (2, 4):
        once = panax.fit(experiment(tmp_path / "again", steps, Teacher(predict)), devices=jax.devices()[:1], quiet=True)
    for name, leaf in named_leaves(undisturbed.state.parts).items():
        np.testing.assert_array_equal(leaf, named_leaves(once.state.parts)[name])
