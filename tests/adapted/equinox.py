"""Equinox, trained with `eqx.filter_value_and_grad`; BatchNorm keeps its statistics in an `eqx.nn.State`."""

import equinox as eqx
import jax
import optax

from panax.adapters.equinox import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, flat

INPUTS, HIDDEN, CLASSES = SIZES
OPTIMIZER = optax.sgd(RATE, MOMENTUM)


class Net(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(INPUTS, HIDDEN, key=first)
        self.norm = eqx.nn.BatchNorm(HIDDEN, "rows", momentum=0.9, mode="batch")
        self.drop = eqx.nn.Dropout(0.25)
        self.head = eqx.nn.Linear(HIDDEN, CLASSES, key=second)

    def __call__(self, x, state, key):
        x, state = self.norm(self.up(x), state)
        return self.head(self.drop(jax.nn.relu(x), key=key)), state


def loss(model, batch, state, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    logits, state = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="rows")(batch["x"], state, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), state


def weighted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch["x"]), batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


@eqx.filter_jit
def differentiate(model, batch, state, key):
    return eqx.filter_value_and_grad(loss, has_aux=True)(model, batch, state, key)


@eqx.filter_jit
def update(model, gradients, moments):
    updates, moments = OPTIMIZER.update(gradients, moments)
    return eqx.apply_updates(model, updates), moments


evaluate = eqx.filter_jit(loss)


class EquinoxOwn(Own):
    def start(self, model):
        self.model = model
        self.moments = OPTIMIZER.init(eqx.filter(self.model[0], eqx.is_inexact_array))

    def gradients(self, batch, key):
        model, state = self.model
        (value, _), gradients = differentiate(model, batch, state, key)
        return float(value), flat(gradients)

    def step(self, batch, key):
        model, state = self.model
        (value, state), gradients = differentiate(model, batch, state, key)
        model, self.moments = update(model, gradients, self.moments)
        self.model = model, state
        return float(value)

    def evaluate(self, batch):
        model, state = self.model
        return float(evaluate(eqx.nn.inference_mode(model), batch, state, jax.random.key(0))[0])


adapted = task(lambda key: eqx.nn.make_with_state(Net)(key), loss)

CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(lambda key: eqx.nn.Linear(INPUTS, CLASSES, key=key), weighted),
    own=EquinoxOwn(),
    weights=lambda model: flat(eqx.filter(model[0], eqx.is_inexact_array)),
    statistics=lambda model: flat(model[1]),
)
