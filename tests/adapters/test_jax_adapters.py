"""The adapters of Haiku, Equinox and Keras beyond the contract: weights that exist, batches, wrong calls."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import panax
from panax.adapters import equinox, haiku
from panax.adapters import keras as keras_adapter
from panax.adapters.keras import unpack_batch
from panax.core import RecipeError, TrainingError
from panax.mesh import MeshShape
from panax.train import StepConfig

BATCH = {"x": np.ones((4, 6), np.float32), "y": np.arange(4, dtype=np.int32)}
KEY = jax.random.key(0)


def square(model, batch):
    return (model(batch["x"]) ** 2).mean()


def network(x):
    return hk.Linear(8)(x)


class Keyed(eqx.Module):
    """A typed key among the fields of a model that exists."""

    linear: eqx.nn.Linear
    key: jax.Array
    train: bool = eqx.field(static=True)

    def __init__(self, train=False):
        self.linear, self.key, self.train = eqx.nn.Linear(6, 8, key=KEY), jax.random.key(7), train

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.key, (8,))


def test_an_equinox_model_with_a_typed_key():
    model = Keyed()
    task = equinox.task(model, rows)
    step = panax.compile_step(task, BATCH, mesh=MeshShape(fsdp=4, tensor=2))
    state = step.init()
    expected = rows(model, BATCH)
    state, metrics = step(state, BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)
    trained = task.trained(state)
    assert trained.key == model.key and not task.notes
    assert "Keyed has the field train=True, which evaluation keeps" in equinox.task(Keyed(True), rows).notes[0]


@pytest.mark.parametrize("function", [network, hk.transform(network), hk.transform_with_state(network)])
def test_haiku_plain_or_transformed(function):
    task = haiku.task(function, square, example=BATCH)
    assert task.name == "network"
    params, _ = jax.jit(task.init)(KEY)
    expected = jax.jit(hk.transform(network).init)(KEY, BATCH["x"])
    np.testing.assert_array_equal(params["linear"]["w"], expected["linear"]["w"])


def test_haiku_weights_that_exist():
    variables = hk.transform_with_state(network).init(KEY, BATCH["x"])
    task = haiku.task(network, square, variables=variables)
    np.testing.assert_array_equal(task.model.initial[0]["linear"]["w"], variables[0]["linear"]["w"])


@pytest.mark.parametrize(
    "function, loss, example, message",
    [
        (hk.Linear, square, BATCH, "expected a function that makes its modules when called"),
        (network, square, None, r"network has no variables before it sees a batch; pass task\(..., example=batch\)"),
        (network, lambda model, batch: 0.0, BATCH, "the loss never calls its model"),
        (lambda batch, weights: 0.0, None, BATCH, r"can't be called.*'weights'"),
    ],
)
def test_what_makes_no_haiku_task(function, loss, example, message):
    with pytest.raises(RecipeError, match=message):
        haiku.task(function, loss, example=example)


def rows(model, batch):
    return (jax.vmap(model)(batch["x"]) ** 2).mean()


def test_an_equinox_model_that_exists_keeps_its_weights():
    model = eqx.nn.MLP(6, 8, 16, 1, key=KEY)
    task = equinox.task(model, rows)
    np.testing.assert_array_equal(task.model.initial[0].layers[0].weight, model.layers[0].weight)


def test_what_equinox_layers_are():
    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        conv: eqx.nn.Conv2d
        layers: list

        def __init__(self, key):
            self.embed = eqx.nn.Embedding(16, 8, key=key)
            self.conv = eqx.nn.Conv2d(3, 8, 3, key=key)
            self.layers = [eqx.nn.Linear(8, 32, key=key), eqx.nn.GRUCell(8, 8, key=key)]

    axes = equinox.task(lambda key: Net(key), rows)._axes
    assert axes["embed.weight"] == ("features", "width")
    assert axes["conv.weight"] == ("features", "width", None, None)
    assert axes["layers.0.weight"] == axes["layers.1.weight_ih"] == ("features", "width")
    assert axes["layers.0.bias"] == (None,)


@pytest.mark.parametrize(
    "create, message",
    [
        (eqx.nn.Linear, "expected a function of a key: lambda key"),
        (lambda key: jnp.ones(3), "expected an equinox.Module, or a pair"),
    ],
)
def test_what_makes_no_equinox_model(create, message):
    with pytest.raises(RecipeError, match=message):
        equinox.task(create, rows)


def test_a_state_that_the_loss_leaves_out():
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    task = equinox.task(lambda key: make(6, "rows", mode="batch"), lambda model, batch: batch["x"].mean())
    with pytest.raises(RecipeError, match="expected a loss with the keyword state that returns"):
        task.loss(*task.init(KEY), {"x": jnp.ones((4, 6))}, KEY, True)


def test_a_batch_of_another_shape():
    task = equinox.task(lambda key: eqx.nn.Linear(6, 8, key=key), rows)
    step = panax.compile_step(task, BATCH, mesh=MeshShape(replica=1, fsdp=1), devices=jax.devices()[:1])
    state, _ = step(step.init(), BATCH)
    with pytest.raises(TrainingError, match=r"batch\['x'\] was float32\[4, 6\] and is now float32\[8, 6\]"):
        step(state, {name: np.concatenate([leaf, leaf]) for name, leaf in BATCH.items()})


def dense(**compiled):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
    if compiled:
        model.compile(**compiled)
    return model


def test_keras_weights_are_kept_and_come_back():
    model = dense()
    before = np.asarray(model.weights[0].value)
    task = keras_adapter.task(model, loss="sparse_categorical_crossentropy", metrics=["accuracy"], example=BATCH)
    step = panax.compile_step(task, BATCH, mesh=MeshShape(fsdp=4, tensor=2))
    state = step.init()
    (weights,) = (leaf for name, leaf in state.params.items() if name.endswith("kernel"))
    np.testing.assert_array_equal(weights, before)
    state, scalars = step(state, BATCH)
    assert 0 <= float(scalars["accuracy"]) <= 1
    trained = task.trained(state)
    assert trained is model and not np.array_equal(model.weights[0].value, before)


# Keras turns its variables to arrays in a way that NumPy 2 deprecates.
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.slow
def test_a_trained_keras_model_is_saved_and_loaded(tmp_path):
    model = dense(loss="mse", optimizer="adam")
    task = keras_adapter.task(model, loss="sparse_categorical_crossentropy")
    trained = task.trained(panax.compile_step(task, BATCH).init())
    trained.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    np.testing.assert_array_equal(loaded.weights[0].value, model.weights[0].value)


def test_a_keras_model_that_is_not_built_is_built_from_the_example():
    model = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(RecipeError, match=r"is not built, so it has no variables; pass task\(..., example=batch\)"):
        keras_adapter.task(model, loss="mse")
    assert len(keras_adapter.task(model, loss="mse", example=BATCH)._axes) == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_fill_up_a_batch_count_nothing_in_keras(weighted):
    rng = np.random.default_rng(0)
    rows = {"x": rng.standard_normal((4, 6), np.float32), "y": np.arange(4, dtype=np.int32)}
    rows |= {"sample_weight": np.float32([1, 2, 0, 3])} if weighted else {}
    task = keras_adapter.task(dense(), loss="sparse_categorical_crossentropy", metrics=["accuracy"], example=rows)
    params, state = jax.tree.map(jnp.asarray, task.model.initial)

    def measured(batch):
        result = task.loss(params, state, batch, KEY, False)
        return [float(x) for x in (result.losses["objective"].mean, result.metrics["accuracy"].value)]

    filling = rows | {"x": rng.standard_normal((4, 6), np.float32), "y": rows["y"][::-1]}
    padded = {name: np.concatenate([leaf, filling[name]]) for name, leaf in rows.items()}
    assert measured(padded | {"loss_mask": np.float32([1] * 4 + [0] * 4)}) == pytest.approx(measured(rows), rel=1e-5)


def test_batches_of_keras():
    x, y, w = object(), object(), object()
    assert unpack_batch({"x": x, "y": y}) == (x, y, None) == unpack_batch({"0": x, "1": y})
    assert unpack_batch({"0": x, "1": y, "2": w}) == (x, y, w) == unpack_batch({"x": x, "y": y, "sample_weight": w})
    assert unpack_batch({"image": x, "text": w, "y": y}) == ({"image": x, "text": w}, y, None)
    with pytest.raises(RecipeError, match=r"leaves \['image', 'label'\]; expected \(x, y\), or names with y"):
        unpack_batch({"image": x, "label": y})


ROOT = keras.metrics.RootMeanSquaredError()


class OwnStep(keras.Model):
    def train_step(self, state, data):
        return {}, state


@pytest.mark.parametrize(
    "model, keywords, message",
    [
        (dense(), {}, r"not compiled and no loss is given; use task\(model, loss=...\)"),
        (OwnStep(), {"loss": "mse"}, "OwnStep overrides train_step"),
        (
            dense(),
            {"loss": "mse", "metrics": [ROOT], "example": BATCH},
            r"metric root_mean_squared_error \(Root.* is not a mean",
        ),
        (dense(), {"loss": "mse", "metrics": ["mae"]}, r"metrics are made for the shapes of a batch; pass"),
        (keras.layers.Dense(3), {"loss": "mse"}, "expected a keras.Model"),
    ],
)
def test_what_makes_no_keras_task(model, keywords, message):
    with pytest.raises(RecipeError, match=message):
        keras_adapter.task(model, **keywords)


def test_keras_on_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(RecipeError, match="Keras runs on tensorflow; set KERAS_BACKEND=jax"):
        keras_adapter.task(dense(), loss="mse")


@pytest.mark.parametrize("constraint", ["unit_norm", "non_neg", "max_norm"])
def test_a_constraint_of_keras_is_refused(constraint):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, kernel_constraint=constraint)])
    with pytest.raises(RecipeError, match=r"dense.*kernel of .* has the constraint .*apply after each update"):
        keras_adapter.task(model, loss="mse")


def test_a_loss_of_keras_that_is_a_sum_is_one_micro_batch():
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    task = keras_adapter.task(dense(), loss=summed)
    batch = {name: np.repeat(leaf, 4, 0)[:16] for name, leaf in BATCH.items()}
    with pytest.raises(
        RecipeError, match=r"step.micro_batches=2: the loss SparseCategoricalCrossentropy has reduction='sum'"
    ):
        panax.compile_step(task, batch, config=StepConfig(micro_batches=2), devices=jax.devices()[:1])(
            *_first(task, batch)
        )
    assert keras_adapter.task(dense(), loss="mse").model.one_pass is None


def _first(task, batch):
    step = panax.compile_step(task, batch, devices=jax.devices()[:1])
    return step.init(), batch
