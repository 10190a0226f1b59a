"""Flax Linen, trained with `flax.training.train_state`."""

from typing import Any

import flax.linen as nn
import jax
import optax
from flax.training import train_state

from panax.adapters.flax_linen import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch, flat

INPUTS, HIDDEN, CLASSES = SIZES


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        names = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(HIDDEN, kernel_init=names, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = nn.Dropout(0.25, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES, name="head")(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def weighted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


class State(train_state.TrainState):
    batch_stats: Any


@jax.jit
def differentiate(state, batch, key):
    def objective(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), updates

    (value, updates), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    return value, gradients, updates["batch_stats"]


evaluate = jax.jit(Net().apply, static_argnames="train")


class LinenOwn(Own):
    def start(self, model):
        self.state = State.create(
            apply_fn=Net().apply,
            params=model["params"],
            batch_stats=model["batch_stats"],
            tx=optax.sgd(RATE, MOMENTUM),
        )

    @property
    def model(self):
        return {"params": self.state.params, "batch_stats": self.state.batch_stats}

    def gradients(self, batch, key):
        value, gradients, _ = differentiate(self.state, batch, key)
        return float(value), flat(gradients)

    def step(self, batch, key):
        value, gradients, statistics = differentiate(self.state, batch, key)
        self.state = self.state.apply_gradients(grads=gradients, batch_stats=statistics)
        return float(value)

    def evaluate(self, batch):
        logits = evaluate(self.model, batch["x"], train=False)
        return float(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean())


adapted = task(Net(), loss, example=batch(), axis_names={"mlp": "ffn"})

CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(nn.Dense(CLASSES), weighted, example=batch()),
    own=LinenOwn(),
    weights=lambda variables: flat(variables["params"]),
    statistics=lambda variables: flat(variables["batch_stats"]),
)
