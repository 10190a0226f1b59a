"""Flax NNX, trained with `nnx.value_and_grad` and `nnx.Optimizer`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from panax.adapters.flax_nnx import task

from .case import MOMENTUM, RATE, SIZES, Case, Own

INPUTS, HIDDEN, CLASSES = SIZES


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(
            INPUTS,
            HIDDEN,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp")),
        )
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(HIDDEN, CLASSES, rngs=rngs)])

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.up(x))))
        return sum(head(x) for head in self.heads)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def weighted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


@nnx.jit
def train(model, optimizer, batch):
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradients)
    return value


differentiate = nnx.jit(nnx.value_and_grad(loss))
evaluate = nnx.jit(loss)


class NnxOwn(Own):
    def start(self, model):
        self.model = nnx.clone(jax.tree.map(jnp.asarray, model))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(RATE, MOMENTUM), wrt=nnx.Param)

    def gradients(self, batch, key):
        model = nnx.clone(self.model)
        model.train()
        nnx.reseed(model, default=key)
        value, gradients = differentiate(model, batch)
        return float(value), named(gradients)

    def step(self, batch, key):
        self.model.train()
        nnx.reseed(self.model, default=key)
        return float(train(self.model, self.optimizer, batch))

    def evaluate(self, batch):
        self.model.eval()
        return float(evaluate(self.model, batch))


def named(state):
    return {".".join(map(str, path)): jax.device_get(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}


adapted = task(lambda rngs: Net(rngs), loss, axis_names={"mlp": "ffn"})

CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(lambda rngs: nnx.Linear(INPUTS, CLASSES, rngs=rngs), weighted),
    own=NnxOwn(),
    weights=lambda model: named(nnx.state(model, nnx.Param)),
    statistics=lambda model: named(nnx.state(model, nnx.BatchStat)),
)
