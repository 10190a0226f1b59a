"""Interface of an optimizer bound to its parameters: initial state, update, and sharding of the state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ..core.protocols import Axes
from ..kernels.precision import accumulation_dtype

ParameterSpecs = Mapping[str, tuple[tuple[int, ...], Axes]]
"""Parameter name to its global shape and logical axes."""


class Renewal(NamedTuple):
    """A periodic recomputation of part of the optimizer state (such as inverse roots), run as a separate
    program.

    Attributes:
        due: Return True if the renewal runs after the given step; steps are numbered from 1, and a skipped
            update counts too.
        description: The schedule as text, such as "after every 10 steps".
        renew: Takes the state and the trainable parameters (only their shapes are read); returns the state
            for the next step.
        adopt_renewed: Takes a step number and the state after that step; returns the state with arrays renewed
            some steps ago moved to where updates read them. Copies no data.
    """

    due: Callable[[int], bool]
    description: str
    renew: Callable[[Any, Any], Any]
    adopt_renewed: Callable[[int, Any], Any]


class Transformation(NamedTuple):
    """A map from gradients to parameter updates, usable wherever an `optax.GradientTransformation` is.

    Attributes:
        init: Takes the trainable parameters as global arrays; returns the initial state.
        update: Takes gradients, state and parameters as global arrays; returns the updates to add to the
            parameters, and the new state.
        axes: Takes an (abstract) state and the trainable parameters; returns the logical axes of each state
            leaf.
        average: Takes the updated parameters and the state; returns the parameter average to evaluate
            instead. None if the parameters themselves are evaluated.
        renewal: The periodic recomputation of part of the state; None if there is none.
        on_skipped_step: Takes a state and a number of steps; returns the state with its schedule advanced by that
            many steps without updates. None if unsupported.
        takes_loss: True if `update` also takes the batch's loss, as the keyword `value`.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    axes: Callable[[Any, ParameterSpecs], Any]
    average: Callable[[Any, Any], Any] | None = None
    renewal: Renewal | None = None
    on_skipped_step: Callable[[Any, Any], Any] | None = None
    takes_loss: bool = False


def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters in the accumulation dtype, rounding once to the parameter's dtype."""

    def one(param: jax.Array, update: jax.Array) -> jax.Array:
        wide = accumulation_dtype(param.dtype)
        return (param.astype(wide) + update.astype(wide)).astype(param.dtype)

    return jax.tree.map(one, params, updates)
