"""Keras on JAX, compiled with its own optimizer and trained by `train_on_batch`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

from panax.adapters.keras import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch

INPUTS, HIDDEN, CLASSES = SIZES


def net():
    return keras.Sequential(
        [
            keras.layers.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, name="up", kernel_regularizer=keras.regularizers.L2(1e-3)),
            keras.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(CLASSES, name="head"),
        ],
        name="net",
    )


def compiled(model):
    model.compile(
        optimizer=keras.optimizers.SGD(RATE, MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def unpack(batch):
    return batch["x"], batch["y"], None


class KerasOwn(Own):
    def start(self, model):
        self.model = compiled(net())
        for mine, given in zip(self.model.variables, model.variables):
            mine.assign(np.array(given.value))

    def seed(self, key):
        """The generator of the one dropout layer, set to what the adapter sets it to."""
        state = next(v for v in self.model.non_trainable_variables if "seed_generator_state" in v.path)
        state.assign(jax.random.key_data(jax.random.fold_in(key, 0)))

    def gradients(self, batch, key):
        self.seed(key)
        x, y, _ = unpack(batch)
        weights = [v.value for v in self.model.trainable_variables]
        others = [v.value for v in self.model.non_trainable_variables]

        def objective(weights):
            predicted, _, losses = self.model.stateless_call(weights, others, x, training=True, return_losses=True)
            return self.model.loss(y, predicted) + sum(losses)

        value, gradients = jax.jit(jax.value_and_grad(objective))(weights)
        return float(value), dict(zip(weights_of(self.model), map(np.asarray, gradients)))

    def step(self, batch, key):
        self.seed(key)
        x, y, _ = unpack(batch)
        self.model.reset_metrics()
        return float(self.model.train_on_batch(x, y))

    def evaluate(self, batch):
        x, y, _ = unpack(batch)
        return float(self.model.evaluate(x, y, verbose=0))


def weights_of(model):
    return {v.path.replace("/", "."): np.asarray(v.value) for v in model.trainable_variables}


def statistics_of(model):
    return {v.path: np.asarray(v.value) for v in model.non_trainable_variables if "seed_generator" not in v.path}


adapted = task(compiled(net()), unpack=unpack)

CASE = Case(
    task=adapted,
    noisy=adapted,
    weighted=task(
        keras.Sequential([keras.layers.Dense(CLASSES)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        example=batch(),
        unpack=unpack,
    ),
    own=KerasOwn(),
    weights=weights_of,
    statistics=statistics_of,
)
