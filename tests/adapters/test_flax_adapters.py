"""The adapters of Flax beyond the contract: names, weights that exist, collections, wrong calls."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from panax.adapters import flax_linen, flax_nnx
from panax.core import RecipeError, named_leaves
from panax.core.errors import DataError

BATCH = {"x": np.ones((4, 6), np.float32)}
KEY = jax.random.key(0)


def square(model, batch):
    return (model(batch["x"]) ** 2).mean()


def axes(task):
    params, _ = jax.eval_shape(task.init, KEY)
    return {name: task._axes[name] for name in named_leaves(params)}


def evaluated(task, train=True, key=KEY):
    """The loss, the state afterwards and the metrics at freshly drawn weights."""
    params, state = jax.jit(task.init)(KEY)
    batch = {name: jnp.asarray(leaf) for name, leaf in BATCH.items()}
    return jax.jit(lambda key: task.loss(params, state, batch, key, train))(key)


class Net(nnx.Module):
    def __init__(self, rngs, sows=False):
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.sows = sows

    def __call__(self, x):
        self.count[...] += 1
        if self.sows:
            self.late = nnx.Intermediate(x)
        return self.up(x)


def test_any_variable_is_state():
    task = flax_nnx.task(lambda rngs: Net(rngs), square)
    assert int(evaluated(task).state["count"]) == 1
    assert int(evaluated(task, train=False).state["count"]) == 0


def test_what_a_model_sows_is_no_state():
    assert evaluated(flax_nnx.task(lambda rngs: Net(rngs, sows=True), square)).state.keys() == {"count"}


def test_a_variable_that_appears_late_is_an_error():
    def loss(model, batch):
        model.late = nnx.Variable(jnp.ones(2))
        return square(model, batch)

    with pytest.raises(
        RecipeError, match=r"changes the structure of the model's state, late from nothing to float32\[2\]"
    ):
        evaluated(flax_nnx.task(lambda rngs: Net(rngs), loss))


def test_an_nnx_model_that_exists_keeps_its_weights():
    model = Net(nnx.Rngs(3))
    task = flax_nnx.task(model, square)
    np.testing.assert_array_equal(task.model.initial[0]["up.kernel"], model.up.kernel[...])


def test_only_what_is_asked_for_trains():
    def create(rngs):
        return nnx.LoRA(6, 2, 8, base_module=nnx.Linear(6, 8, rngs=rngs), rngs=rngs)

    task = flax_nnx.task(create, square, trains=nnx.LoRAParam)
    assert sorted(task.frozen_parameters) == ["base_module.bias", "base_module.kernel"]
    assert sorted(axes(task)) == ["base_module.bias", "base_module.kernel", "lora_a", "lora_b"]


def test_nnx_names_and_attention():
    def create(rngs):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        return nnx.Sequential(
            nnx.Linear(6, 8, kernel_init=named, rngs=rngs), nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        )

    task = flax_nnx.task(create, square, axis_names={"model": "features"})
    result = axes(task)
    assert result["layers.0.kernel"] == (None, "features")
    assert result["layers.1.query.kernel"] == ("width", "features", None)
    assert result["layers.1.out.kernel"] == ("features", None, "width")
    assert axes(flax_nnx.task(create, square, axis_names={"model": None}))["layers.0.kernel"] == (None, None)
    with pytest.raises(
        RecipeError, match=r"layers.0.kernel: the model calls its axes 'model', which Panax does not know"
    ):
        flax_nnx.task(create, square)


@pytest.mark.parametrize(
    "create, message",
    [
        (Net, "expected a function of random streams: lambda rngs"),
        (3, "create is 3; expected a function"),
        (lambda rngs: {"w": jnp.ones(3)}, "create made a dict; expected an nnx.Module"),
    ],
)
def test_what_makes_no_nnx_model(create, message):
    with pytest.raises(RecipeError, match=message):
        flax_nnx.task(create, square)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "model"))
        x = nn.Dense(8, kernel_init=kernel)(x)
        self.sow("losses", "size", (x**2).mean())
        self.sow("intermediates", "x", x)
        if not deterministic:
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dropout(0.5)(x, deterministic=deterministic)


def linen(loss=square, **keywords):
    return flax_linen.task(Linen(), loss, axis_names={"model": "ffn"}, **({"example": BATCH} | keywords))


def asking(model, batch):
    output, collections = model(batch["x"], mutable=["losses"])
    return (output**2).mean(), {"size": collections["losses"]["size"][0]}


def test_linen_names_are_read():
    assert axes(linen(asking)) == {"Dense_0.bias": (None,), "Dense_0.kernel": ("embed", "ffn")}


def test_a_collection_that_the_loss_asks_for_is_no_state():
    result = evaluated(linen(asking))
    assert result.state == {} and float(result.metrics["size"].value) > 0


def test_a_mode_that_the_loss_leaves_out_is_set():
    task = linen(asking)
    other = jax.random.key(1)
    losses = [evaluated(task, train, key).losses["objective"].mean for train in (True, False) for key in (KEY, other)]
    assert float(losses[0]) != float(losses[1]) and float(losses[2]) == float(losses[3])


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model(x, False, mutable="losses"),
        lambda model, x: model(x, method="__call__", deterministic=False, mutable=["losses"]),
        lambda model, x: model(x, method=lambda module, x, deterministic: module(x, deterministic), mutable=["losses"]),
    ],
)
def test_ways_of_calling_a_module(call):
    task = linen(lambda model, batch: (call(model, batch["x"])[0] ** 2).mean())
    losses = [float(evaluated(task, key=key).losses["objective"].mean) for key in (KEY, jax.random.key(1))]
    assert losses[0] != losses[1]


def test_a_model_is_called_as_often_as_the_loss_likes():
    def twice(model, batch):
        first, second = (model(batch["x"], deterministic=False, mutable=["losses"])[0] for _ in range(2))
        return ((first - second) ** 2).mean()

    assert float(evaluated(linen(twice)).losses["objective"].mean) > 0.1


def test_linen_variables_that_exist():
    variables = nn.Dense(8).init(jax.random.key(5), BATCH["x"])
    task = flax_linen.task(nn.Dense(8), square, variables=variables)
    np.testing.assert_array_equal(task.model.initial[0]["kernel"], variables["params"]["kernel"])
    with pytest.raises(RecipeError, match=r"the variables are \['bias', 'kernel'\]; expected a collection params"):
        flax_linen.task(nn.Dense(8), square, variables=variables["params"])


def test_linen_draws_what_init_draws():
    params, _ = jax.jit(flax_linen.task(nn.Dense(8), square, example=BATCH).init)(KEY)
    expected = jax.jit(nn.Dense(8).init)(KEY, BATCH["x"])["params"]
    np.testing.assert_array_equal(params["kernel"], expected["kernel"])


@pytest.mark.parametrize(
    "module, loss, example, message",
    [
        (nn.Dense, square, BATCH, r"expected an instance of flax.linen.Module: Net\(\), not Net"),
        (nn.Dense(8), square, None, r"Dense has no variables before it sees a batch; pass task\(..., example=batch\)"),
        (nn.Dense(8), lambda model, batch: batch["x"].mean(), BATCH, "the loss never calls its model"),
    ],
)
def test_what_makes_no_linen_model(module, loss, example, message):
    with pytest.raises(RecipeError, match=message):
        flax_linen.task(module, loss, example=example)


class Changing(nnx.Module):
    """A model that changes something in its call besides its variables that are state."""

    def __init__(self, change=None):
        self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        self.calls, self.change = 0, change or (lambda self: None)
        self.kept = {"calls": 0}

    def __call__(self, x):
        self.change(self)
        return self.linear(x) * (1 + 0.1 * self.calls)


def counts(model):
    model.calls += 1


def counts_in_a_dictionary(model):
    model.kept["calls"] += 1


def clips(model):
    model.linear.kernel[...] = jnp.clip(model.linear.kernel[...], -0.1, 0.1)


def test_an_attribute_that_a_call_changes_is_refused():
    with pytest.raises(RecipeError, match=r"changes its attribute calls \(from 0 to 1\).*make it an nnx.Variable"):
        evaluated(flax_nnx.task(Changing(counts), square))
    with pytest.raises(RecipeError, match=r"changes its attribute kept.calls \(from 0 to 1\)"):
        evaluated(flax_nnx.task(Changing(counts_in_a_dictionary), square))


def test_a_parameter_that_a_call_changes_ends_the_run():
    task = flax_nnx.task(Changing(clips), square)
    params, state = task.load_initial(
        jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), jax.eval_shape(task.init, KEY))
    )
    result = task.loss(params, state, BATCH, KEY, True)
    with pytest.raises(DataError, match=r"a call of the model changes the parameter linear.kernel"):
        result.metrics["faults"].raise_if_failed("the batch")
    clipped = {**params, "linear.kernel": jnp.clip(params["linear.kernel"], -0.05, 0.05)}
    task.loss(clipped, state, BATCH, KEY, True).metrics["faults"].raise_if_failed("the batch")
    assert "faults" not in task.loss(params, state, BATCH, KEY, False).metrics


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_transformations_that_give_parameters_back_change_none(transform):
    class Inside(Changing):
        def __call__(self, x):
            return transform(lambda model, x: model(x))(self.linear, x)

    result = evaluated(flax_nnx.task(lambda rngs: Inside(), square))
    for metric in result.metrics.values():
        metric.raise_if_failed("the batch")


class OfTheMode(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.training = nnx.Linear(6, 3, rngs=rngs), True

    def __call__(self, x):
        return self.linear(x) if self.training else 0 * self.linear(x)


class LinenOfTheMode(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) if self.train else 0 * nn.Dense(3)(x)


class Around(nn.Module):
    inner: nn.Module
    more: tuple = ()

    def __call__(self, x):
        for each in (self.inner, *self.more):
            x = each(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: flax_nnx.task(lambda rngs: OfTheMode(rngs), square),
        lambda: flax_linen.task(LinenOfTheMode(), square, example=BATCH),
        lambda: flax_linen.task(Around(LinenOfTheMode()), square, example=BATCH),
        lambda: flax_linen.task(Around(nn.Dense(6), (LinenOfTheMode(),)), square, example=BATCH),
    ],
    ids=["nnx", "linen", "nested", "in a tuple"],
)
def test_a_mode_that_is_a_field_is_turned_in_evaluation(make):
    task = make()
    assert float(evaluated(task).losses["objective"].mean) > 0
    assert float(evaluated(task, train=False).losses["objective"].mean) == 0


def test_a_field_that_declares_itself_untrained_is_kept():
    task = flax_linen.task(LinenOfTheMode(train=False), square, example=BATCH)
    assert float(evaluated(task).losses["objective"].mean) == 0
