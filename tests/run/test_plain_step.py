"""A step for a custom loop: `panax.compile_step`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import panax
from panax.core.errors import DataError, LayoutError, RecipeError, TrainingError
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig

SGD = Optax(transformation=optax.sgd(0.1, momentum=0.9))


class Net(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(4, 16, key=first), eqx.nn.Linear(16, 1, key=second)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))[0]


def weighted(model, batch):
    errors = (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2
    return (jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"])), {"largest": jnp.max(errors)}


TASK = panax.adapters.equinox.task(lambda key: Net(key), weighted)


def batch_of(seed: int = 0, rows: int = 32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x[:, 0] * x[:, 1], "weight": rng.integers(0, 3, rows).astype(np.float32)}


def trained(*, steps: int = 4, **options):
    step = panax.compile_step(TASK, batch_of(), SGD, **options)
    state, losses = step.init(seed=3), []
    for seed in range(steps):
        state, metrics = step(state, batch_of(seed))
        losses.append(float(metrics["loss"]))
    return step, state, losses


def close(found, expected) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *jax.device_get((found, expected))
    )


@pytest.fixture(scope="module")
def alone():
    return trained(devices=jax.devices()[:1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mesh": MeshShape(fsdp=4, tensor=2)},
        {"devices": jax.devices()[:1], "config": StepConfig(micro_batches=4)},
        {"mesh": MeshShape(replica=2, fsdp=2), "devices": jax.devices()[:4], "config": StepConfig(micro_batches=2)},
    ],
    ids=["all devices", "fsdp and tensor", "micro-batches", "both"],
)
def test_the_same_on_any_mesh_and_in_parts(alone, options):
    _, expected, losses = alone
    _, state, found = trained(**options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        *jax.device_get((state.params, expected.params)),
    )


def test_it_is_optax_on_the_same_gradients(alone):
    _, state, losses = alone
    model = TASK.init(jax.random.split(jax.random.key(3))[0])[0]
    transformation = optax.chain(optax.clip_by_global_norm(1.0), SGD.transformation)
    moments = transformation.init(model)

    @jax.jit
    def one(model, moments, batch):
        def objective(model):
            (total, weight), _ = weighted(eqx.combine(model, static), batch)
            return total / weight

        loss, gradients = jax.value_and_grad(objective)(model)
        updates, moments = transformation.update(gradients, moments, model)
        return optax.apply_updates(model, updates), moments, loss

    static = eqx.filter(Net(jax.random.key(0)), eqx.is_array, inverse=True)
    with jax.numpy_dtype_promotion("standard"):
        for seed, loss in enumerate(losses):
            model, moments, expected = one(model, moments, batch_of(seed))
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
    close(state.params, model)


def test_the_state_is_donated_and_metrics_are_there(alone):
    step, _, _ = alone
    state = step.init()
    after, metrics = step(state, batch_of())
    assert state.params.up.weight.is_deleted() and not after.params.up.weight.is_deleted()
    assert {"loss", "largest", "gradient_norm"} <= metrics.keys()
    assert "learning_rate" not in metrics, "this optax transformation has a rate of its own, which is not known"
    evaluated = step.evaluate(after, [batch_of(1), batch_of(2)])
    totals = [weighted(TASK.trained(after), jax.tree.map(jnp.asarray, batch_of(seed)))[0] for seed in (1, 2)]
    assert evaluated["loss"] == pytest.approx(float(sum(t for t, _ in totals) / sum(w for _, w in totals)), rel=1e-5)


def test_a_batch_in_any_form():
    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["0"]) - batch["1"]) ** 2)

    task = panax.adapters.equinox.task(lambda key: Net(key), loss)
    x, y = batch_of()["x"], batch_of()["y"]
    step = panax.compile_step(task, (x.astype(np.float64), y), SGD)
    losses = []
    for form in [(x, y), [jnp.asarray(x), y], (torch.tensor(x), torch.tensor(y)), {"0": x, "1": y}]:
        _, metrics = step(step.init(), form)
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 1


def test_another_shape_is_an_error_that_names_it(alone):
    step, _, _ = alone
    with pytest.raises(TrainingError, match=r"batch\['x'\] was float32\[32, 4\] and is now float32\[16, 4\]"):
        step(step.init(), batch_of(rows=16))
    with pytest.raises(TrainingError, match=r"leaves are .*make them agree"):
        step(step.init(), {"x": batch_of()["x"]})


def test_what_can_not_be_is_refused():
    with pytest.raises(LayoutError, match="not divisible"):
        trained(mesh=MeshShape(fsdp=8), steps=1, config=StepConfig(micro_batches=3))
    with pytest.raises(DataError, match="axes are given for"):
        panax.compile_step(TASK, batch_of(), SGD, axes={"x": ("batch", None)})
    with pytest.raises(DataError, match="no leaf"):
        panax.compile_step(TASK, {}, SGD)
    with pytest.raises(RecipeError, match="'side' matches no parameter"):
        panax.compile_step(TASK, batch_of(), SGD, frozen=("side",))


class Pair(eqx.Module):
    generator: eqx.nn.Linear
    discriminator: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.generator, self.discriminator = eqx.nn.Linear(2, 2, key=first), eqx.nn.Linear(2, 1, key=second)


def score(pair, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return jnp.mean(jax.vmap(lambda z: pair.discriminator(pair.generator(z)))(noise))


def fool(pair, batch, key):
    return -score(pair, batch, key)


def tell(pair, batch, key):
    return score(pair, batch, key) - jnp.mean(jax.vmap(pair.discriminator)(batch["x"]))


def test_alternating_updates_share_parameters():
    batches = [{"x": x.astype(np.float32)} for x in np.random.default_rng(0).normal(size=(4, 16, 2))]
    halves = {"tell": ("discriminator", "generator", tell), "fool": ("generator", "discriminator", fool)}
    steps = {
        name: panax.compile_step(
            panax.adapters.equinox.task(lambda key: Pair(key), loss),
            batches[0],
            SGD,
            frozen=(other,),
            mesh=MeshShape(fsdp=2, tensor=4),
        )
        for name, (_, other, loss) in halves.items()
    }
    states = {name: step.init(0) for name, step in steps.items()}
    before = jax.device_get(states["tell"].params)
    for batch in batches:
        for name, other in (("tell", "fool"), ("fool", "tell")):
            trained_half, held, _ = halves[name]
            shared = jax.device_get(states[other].params)
            states[name], _ = steps[name](states[name].with_params(states[other].params), batch)
            after = jax.device_get(states[name].params)
            assert not np.array_equal(getattr(after, trained_half).weight, getattr(shared, trained_half).weight)
            np.testing.assert_array_equal(getattr(after, held).weight, getattr(shared, held).weight)
    trained = jax.device_get(states["fool"].params)
    assert not np.array_equal(trained.generator.weight, before.generator.weight)
    assert not np.array_equal(trained.discriminator.weight, before.discriminator.weight)
    moments = [leaf.shape for leaf in jax.tree.leaves(states["fool"].optimizer_state)]
    assert sorted(moments) == [(2,), (2, 2)]
