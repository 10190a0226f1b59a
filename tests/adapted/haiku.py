"""Haiku: a transformed loss, and optax."""

import haiku as hk
import jax
import optax

from panax.adapters.haiku import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch, flat

INPUTS, HIDDEN, CLASSES = SIZES
OPTIMIZER = optax.sgd(RATE, MOMENTUM)


def loss(batch, is_training):
    x = hk.Linear(HIDDEN, name="up")(batch["x"])
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.25, x)
    logits = hk.Linear(CLASSES, name="head")(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def weighted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


transformed = hk.transform_with_state(loss)


@jax.jit
def evaluate(params, state, batch):
    return transformed.apply(params, state, None, batch, is_training=False)[0]


@jax.jit
def differentiate(params, state, key, batch):
    return jax.value_and_grad(transformed.apply, has_aux=True)(params, state, key, batch, is_training=True)


@jax.jit
def update(params, gradients, moments):
    updates, moments = OPTIMIZER.update(gradients, moments)
    return optax.apply_updates(params, updates), moments


class HaikuOwn(Own):
    def start(self, model):
        self.model = model
        self.moments = OPTIMIZER.init(model[0])

    def gradients(self, batch, key):
        (value, _), gradients = differentiate(*self.model, key, batch)
        return float(value), flat(gradients)

    def step(self, batch, key):
        (value, state), gradients = differentiate(*self.model, key, batch)
        params, self.moments = update(self.model[0], gradients, self.moments)
        self.model = params, state
        return float(value)

    def evaluate(self, batch):
        return float(evaluate(*self.model, batch))


adapted = task(loss, example=batch())

CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(hk.transform(lambda x: hk.Linear(CLASSES)(x)), weighted, example=batch()),
    own=HaikuOwn(),
    weights=lambda model: flat(model[0]),
    statistics=lambda model: flat(model[1]),
)
