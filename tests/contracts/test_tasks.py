"""Every adapter trains a model as the model's own framework does, on any mesh, and gives it back.

The models are those of tests/adapted, one file a framework. A tolerance here is of a tensor's norm.
"""

import contextlib
import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from adapted.case import MOMENTUM, RATE, ROWS, Case, batch

import panax
from panax.checkpoint import Checkpointer, restore
from panax.core import named_leaves
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig
from panax.train.mesh_execution import split_rows

NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "adapted").glob("[!_]*.py") if path.stem != "case")
STEPS, SAVED = 20, 10

# Float32 sums of the same terms in another order, relative to the result: the bound that the issue sets.
TOLERANCE = 1e-5
# A gradient that is nothing but rounding (a bias before a BatchNorm) is compared with what it is the rounding of. Its terms are
# one for each row, of the size of the whole gradient's; each is rounded to 2**-24, at most a few times on its way through the
# layers, and rows are added.
FLOOR = 4 * 2.0**-24 * np.sqrt(ROWS)
# The errors of single steps add up, at worst, to their number times one of them.
OF_ALL_STEPS = STEPS * TOLERANCE

MESHES = {
    "fsdp": MeshShape(fsdp=8),
    "tensor": MeshShape(replica=4, fsdp=1, tensor=2),
    "both": MeshShape(fsdp=4, tensor=2),
}

compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture(scope="module", params=NAMES)
def case(request) -> Case:
    return importlib.import_module(f"adapted.{request.param}").CASE


@contextlib.contextmanager
def promotion(dtypes, ranks):
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
        yield


@pytest.fixture(autouse=True)
def in_its_own_ways():
    """Frameworks are written for JAX's usual promotion; Panax is traced under the strict one."""
    with promotion("standard", "allow"):
        yield


def host(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def compiled(task, mesh=None):
    return panax.compile_step(
        task,
        batch(),
        Optax(transformation=optax.sgd(RATE, MOMENTUM)),
        mesh=mesh or MeshShape(replica=1, fsdp=1),
        devices=None if mesh else jax.devices()[:1],
        config=StepConfig(clip_norm=None),
    )


def gradient(state):
    """The gradient of the first step: momentum that began as zero."""
    momentum = host(state.optimizer_state)
    return {
        name: next(leaf for path, leaf in momentum.items() if path.endswith(f"trace.{name}"))
        for name in named_leaves(state.params)
    }


@dataclasses.dataclass
class Trained:
    """Twenty steps on one device, and what was seen on the way, on the host.

    Attributes:
        first: Parameters and model state before the first step.
        second: The same after it.
        keys: What the model draws from in each step.
        compiled_late: What was compiled in the second step.
        halfway: The state after `SAVED_EXIT_CODES` steps.
    """

    step: Any
    first: Any = None
    second: Any = None
    gradient: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    keys: list[jax.Array] = dataclasses.field(default_factory=list)
    compiled_late: list[str] | None = None
    halfway: Any = None
    state: Any = None
    evaluation: float = 0.0


@functools.cache
@promotion("strict", "raise")
def trained(task) -> Trained:
    run = Trained(compiled(task))
    state = run.step.init(0)
    run.first = both(state)
    for i in range(STEPS):
        run.keys.append(jax.random.fold_in(state.step_key, 0))
        before = len(compilations)
        state, scalars = run.step(state, batch(i))
        late = compilations[before:]
        run.losses.append(float(scalars["loss"]))
        if i == 0:
            run.second, run.gradient = both(state), gradient(state)
        if i == 1:
            run.compiled_late = late
        if i + 1 == SAVED:
            run.halfway = jax.tree.map(lambda leaf: leaf.copy(), state)
    run.state = state
    run.evaluation = run.step.evaluate(state, [batch(STEPS)])["loss"]
    return run


def both(state):
    return jax.tree.map(np.array, (state.params, state.model_state))


def begin(case, run):
    """The framework's own training, from the first weights of `run`."""
    case.own.start(case.task.model.rebuild(*run.first))


def assert_close(found, expected, tolerance=TOLERANCE, scale=None):
    """Norm-wise per tensor; `scale` is what tensors are relative to where that is not themselves."""
    assert found.keys() == expected.keys()
    norms = {name: np.linalg.norm(leaf) for name, leaf in (scale or expected).items()}
    floor = FLOOR * np.sqrt(sum(norm**2 for norm in norms.values()))
    for name in expected:
        distance = np.linalg.norm(found[name].astype(np.float64) - expected[name])
        assert distance <= tolerance * norms[name] + floor, (name, distance, norms[name], floor)


def test_loss_and_all_gradients_are_the_frameworks_own(case):
    run = trained(case.task)
    begin(case, run)
    loss, gradients = case.own.gradients(batch(0), run.keys[0])
    assert run.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    assert_close(run.gradient, gradients)


def test_statistics_are_the_frameworks_own(case):
    run = trained(case.task)
    begin(case, run)
    before = case.statistics(case.own.model)
    case.own.step(batch(0), run.keys[0])
    after = case.statistics(case.own.model)
    assert_close(case.statistics(case.task.model.rebuild(*run.second)), after)
    assert not before or any(not np.array_equal(before[name], after[name]) for name in before)


def test_twenty_steps_stay_with_the_frameworks_own(case):
    run = trained(case.task)
    begin(case, run)
    losses = [case.own.step(batch(i), run.keys[i]) for i in range(STEPS)]
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(run.losses, losses, rtol=OF_ALL_STEPS)
    weights = case.weights(case.own.model)
    moved = {name: leaf - host(run.first[0])[name] for name, leaf in weights.items()}
    assert_close(host(run.state.params), weights, OF_ALL_STEPS, scale=moved)
    assert_close(case.statistics(case.task.trained(run.state)), case.statistics(case.own.model), OF_ALL_STEPS)
    assert run.evaluation == pytest.approx(case.own.evaluate(batch(STEPS)), rel=OF_ALL_STEPS)


def test_weights_come_back_in_the_frameworks_own_form(case):
    run = trained(case.task)
    model = case.task.trained(run.state)
    weights = case.weights(model)
    for name, leaf in host(run.state.params).items():
        np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    case.own.start(model)
    assert case.own.evaluate(batch(STEPS)) == pytest.approx(run.evaluation, rel=TOLERANCE)


def test_evaluation_is_without_noise_and_leaves_the_state(case):
    run = trained(case.task)
    again = run.step.evaluate(run.state, [batch(STEPS)])["loss"]
    assert again == run.evaluation
    if case.statistics(case.task.trained(run.state)) or case.noisy is case.task:
        begin(case, run)
        case.own.start(case.task.trained(run.state))
        training, _ = case.own.gradients(batch(STEPS), run.keys[0])
        assert abs(training - run.evaluation) > 0.01 * run.evaluation


def test_masks_follow_the_key_of_the_step(case):
    if case.noisy is None:
        return
    params, state = jax.tree.map(jax.numpy.asarray, trained(case.noisy).first)
    rows = {name: jax.numpy.asarray(leaf) for name, leaf in batch().items()}
    loss = jax.jit(lambda key: case.noisy.loss(params, state, rows, key, True).losses["objective"].mean)
    keys = jax.random.split(jax.random.key(0))
    assert float(loss(keys[0])) == float(loss(keys[0]))
    assert float(loss(keys[0])) != float(loss(keys[1]))


def test_nothing_is_compiled_after_the_first_step(case):
    assert trained(case.task).compiled_late == []


def test_resumes_bitwise_from_a_checkpoint(case, tmp_path):
    run = trained(case.task)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(run.halfway, SAVED, {})
    checkpointer.finish()
    step = run.step.compiled
    state = restore(checkpointer.open(SAVED), step.program.abstract, step.shardings)
    for i in range(SAVED, STEPS):
        state, scalars = run.step(state, batch(i))
        assert float(scalars["loss"]) == run.losses[i]
    for name, leaf in host((state.params, state.model_state, state.optimizer_state)).items():
        expected = host((run.state.params, run.state.model_state, run.state.optimizer_state))[name]
        np.testing.assert_array_equal(leaf, expected, err_msg=name)


@pytest.mark.parametrize(
    "mesh", ["both", pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("tensor", marks=pytest.mark.slow)]
)
@promotion("strict", "raise")
def test_sharded_is_unsharded(case, mesh):
    run = trained(case.task)
    step = compiled(case.task, MESHES[mesh])
    state = step.init(0)
    for name, leaf in host((state.params, state.model_state)).items():
        np.testing.assert_array_equal(leaf, host(run.first)[name], err_msg=f"{name}: depends on the mesh")
    parts = max(leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.params))
    assert parts == MESHES[mesh].fsdp * MESHES[mesh].tensor
    for i in range(3):
        state, scalars = step(state, batch(i))
        assert float(scalars["loss"]) == pytest.approx(run.losses[i], rel=3 * TOLERANCE)
        if i == 0:
            assert_close(gradient(state), run.gradient)
            assert_close(host(state.model_state), host(run.second[1]))


def test_micro_batches_of_a_weighted_loss_add_up_exactly(case):
    task = case.weighted
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype), params)
    state = jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, leaf.dtype), state)
    rows = {**batch(), "row": np.arange(ROWS, dtype=np.int32)}

    @jax.jit
    def in_parts(params, state, rows):
        trainable = jax.tree.map(lambda _: True, params)
        return [
            task.gradients(params, state, split_rows(rows, count), jax.random.key(0), trainable) for count in (1, 4)
        ]

    full, parts = in_parts(params, state, jax.tree.map(jax.numpy.asarray, rows))
    assert float(parts.losses["objective"].mean) == pytest.approx(float(full.losses["objective"].mean), rel=TOLERANCE)
    assert_close(host(parts.gradients), host(full.gradients))
