"""What an optimizer is once it knows its parameters: a first state, an update, and where the state lies."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ..core.protocols import Axes
from ..kernels.precision import accumulation_dtype

Described = Mapping[str, tuple[tuple[int, ...], Axes]]
"""Parameter name to its whole shape and its logical axes."""


class Renewal(NamedTuple):
    """Work on an optimizer's state that not every step does, such as roots of matrices: steps that follow use what it gives.

    Attributes:
        due: Whether it comes after the step with this number, the first being 1. A step that was not applied counts.
        when: The same in words, such as "after every 10 steps".
        renewed: Takes a state and the parameters that train, of which only shapes are read; returns the state as the next step
            sees it.
        taken_over: Takes the number of a step and the state after it; returns the state in which what was renewed some steps
        ago
            stands where steps read it. Moves no bytes.
    """

    due: Callable[[int], bool]
    when: str
    renewed: Callable[[Any, Any], Any]
    taken_over: Callable[[int, Any], Any]


class Transformation(NamedTuple):
    """From gradients to what is added to the parameters. It can stand wherever an `optax.GradientTransformation` can.

    Attributes:
        init: Takes the parameters that train, whole; returns the first state.
        update: Takes gradients, a state and the parameters, all whole; returns what is added to the parameters, and the next
            state.
        axes: Takes an (abstract) state and the parameters that train; returns the logical axes of each leaf of the state.
        averaged: Takes the parameters after an update and the state; returns the average of them that is judged in their place.
            None where they are judged themselves.
        renewal: What of the state is renewed now and then, in a program of its own; None where nothing is.
        skipped: Takes a state and a number of steps that were not taken; returns the state with the schedule where it would be
            after them. None where that is not known.
        takes_loss: `update` is given the loss of the batch too, as `value`.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    axes: Callable[[Any, Described], Any]
    averaged: Callable[[Any, Any], Any] | None = None
    renewal: Renewal | None = None
    skipped: Callable[[Any, Any], Any] | None = None
    takes_loss: bool = False


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters after an update: added in the wider type, rounded once."""

    def one(param: jax.Array, update: jax.Array) -> jax.Array:
        wide = accumulation_dtype(param.dtype)
        return (param.astype(wide) + update.astype(wide)).astype(param.dtype)

    return jax.tree.map(one, params, updates)
