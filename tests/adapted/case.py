"""`Case`: a small model of one framework with its task, and the same model trained in the framework's own way.

A new framework is a new file in this folder, named as it is to be called, with a `CASE`. tests/contracts/test_tasks.py finds it
by its name and imports it when it gets there, so a file imports its framework at the top. Its model should
- have BatchNorm and dropout, where the framework has them, and a bias before the BatchNorm, with a gradient of exactly zero;
- have a matrix that fsdp=4 times tensor=2 divides (`SIZES`);
- end in the mean cross-entropy of integer labels, or whatever the framework's users write.

If a framework draws dropout's masks from a key of JAX's, its own run gets the key that the adapter got, and the masks are
equal. Otherwise `task` has a rate of 0 and `noisy` has another.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from panax.adapters.adapted_task import AdaptedTask
from panax.core import named_leaves

SIZES = (24, 32, 8)
"""Inputs, hidden units and classes."""

ROWS = 16
RATE, MOMENTUM = 0.05, 0.9
"""Of the stochastic gradient descent that all train with."""

Named = Mapping[str, np.ndarray]


class Own(abc.ABC):
    """The framework's own training of the case's model, written as its manual writes it.

    Attributes:
        model: In the framework's own form, as `task.trained` gives it.
    """

    model: Any

    @abc.abstractmethod
    def start(self, model: Any) -> None:
        """Begin from these weights, with an optimizer that knows nothing yet. Must copy what it changes in place."""

    @abc.abstractmethod
    def gradients(self, batch: Mapping[str, np.ndarray], key: jax.Array) -> tuple[float, Named]:
        """The loss of a batch in training, and its gradients by the names that Panax uses; changes nothing."""

    @abc.abstractmethod
    def step(self, batch: Mapping[str, np.ndarray], key: jax.Array) -> float:
        """Take one step of the framework's own optimizer, `RATE` and `MOMENTUM`; returns the loss before it."""

    @abc.abstractmethod
    def evaluate(self, batch: Mapping[str, np.ndarray]) -> float:
        """The loss in evaluation mode."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A framework's part of the contract.

    Attributes:
        task: The model adapted.
        noisy: The same with dropout; `task` itself where its masks are equal, None where the framework has no dropout.
        weighted: A task that treats each row by itself (no BatchNorm, no dropout), with a loss of (sum, weight) with the batch's
            leaf `weight`; or a mean, where the framework's losses are means.
        own: The framework's own training of the same model.
        weights: The parameters of a model in the framework's own form, by the names that Panax uses.
        statistics: Whatever else it carries from step to step, by any names.
    """

    task: AdaptedTask
    noisy: AdaptedTask | None
    weighted: AdaptedTask
    own: Own
    weights: Callable[[Any], Named]
    statistics: Callable[[Any], Named]


def batch(index: int = 0) -> dict[str, np.ndarray]:
    """Inputs that determine their labels, a weight for each row that is 0 for some."""
    inputs, _, classes = SIZES
    rng = np.random.default_rng(index)
    centers = np.random.default_rng(99).standard_normal((classes, inputs))
    y = rng.integers(0, classes, ROWS)
    x = centers[y] + rng.standard_normal((ROWS, inputs))
    weight = rng.integers(0, 3, ROWS)
    return {"x": x.astype(np.float32), "y": y.astype(np.int32), "weight": weight.astype(np.float32)}


def flat(tree: Any) -> Named:
    """The arrays of a pytree on the host, by their dotted paths."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
