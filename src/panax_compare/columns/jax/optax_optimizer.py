"""The optimizer of the columns in plain JAX and Flax."""

from typing import Any

import optax

from ...workload.compared_work import OptimizerNumbers


def make_optimizer(numbers: OptimizerNumbers, decayed: Any) -> optax.GradientTransformation:
    """Create the optimizer in optax.

    Args:
        decayed: A tree of bools like the parameters, or a function that makes one.
    """
    if numbers.name == "sgd":
        return optax.sgd(numbers.learning_rate)
    return optax.adamw(
        numbers.learning_rate,
        b1=numbers.b1,
        b2=numbers.b2,
        eps=numbers.epsilon,
        weight_decay=numbers.weight_decay,
        mask=decayed,
    )
