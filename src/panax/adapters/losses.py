"""Return values of a user's loss, read as losses that add up exactly over micro-batches and devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import Loss, Losses, Mean, Metrics
from ..core.errors import RecipeError, describe_type

LOSS_FORMS = (
    "a scalar (the mean over the batch's rows), a pair (sum, weight), a mapping of names to these, "
    "or a pair of one of these and a mapping of metrics"
)
DEFAULT_LOSS_NAME = "objective"
"""Name of a loss without one."""


def read_loss(returned: Any, rows: int) -> tuple[Losses, Metrics]:
    """Read the losses and metrics from the return value of a loss function.

    A pair (sum, weight) is divided once by the weight of the global batch, so that micro-batches of
    unequal weight add up exactly. A scalar is taken as a mean over the batch's `rows`, which are its weight.

    Raises:
        RecipeError: The value has none of these forms.

    >>> losses, metrics = read_loss((jnp.float32(6.0), jnp.float32(3.0)), rows=4)
    >>> float(losses["objective"].mean), metrics
    (2.0, {})
    """
    terms, metrics = named_terms(returned)
    losses = {name: term if isinstance(term, Loss) else Loss(*_pair(name, term, rows)) for name, term in terms.items()}
    return losses, {
        name: value if hasattr(value, "merge") else Mean(*_pair(name, value, rows)) for name, value in metrics.items()
    }


def named_terms(returned: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Split the return value of a loss function, in any library: its losses by name, and its metrics.

    Raises:
        RecipeError: The value contains no loss.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    terms = returned if isinstance(returned, Mapping) else {DEFAULT_LOSS_NAME: returned}
    if not terms:
        raise RecipeError(f"the loss returned an empty mapping; expected {LOSS_FORMS}")
    return terms, metrics


def _pair(name: str, term: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    if isinstance(term, tuple | list) and len(term) == 2:
        total, weight = (_scalar(name, part) for part in term)
        return total, jax.lax.stop_gradient(weight)
    return _scalar(name, term) * rows, jnp.float32(rows)


def _scalar(name: str, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the loss {name!r} is {describe_type(value)}; expected {LOSS_FORMS}") from error
    if array.shape != () or array.dtype.kind in "c":
        raise RecipeError(
            f"the loss {name!r} is {array.dtype}{list(array.shape)}, which is not a scalar; expected {LOSS_FORMS}: "
            f"take its mean, or its sum with the number of terms"
        )
    return array.astype(jnp.float32)
