"""`BoundModel`: the model that a loss receives from libraries with two functions for it: one creates variables,
one uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core import Batch
from ..core.errors import RecipeError
from ..data.loading.iterable import as_batch

Variables = Any


class BoundModel:
    """A model with its variables, to be called like a function. Each call continues from the state that the
    last one left.

    Attributes:
        variables: Its current variables, in the library's own form; while the model is being created, the
            variables that its calls have created so far.
    """

    def __init__(self, call: Callable[..., tuple[Any, Variables]], variables: Variables, key: jax.Array):
        """
        Args:
            call: `(variables, key, *arguments, **keywords) -> (output, variables)`.
            key: Key of the first call; further calls get keys that are derived from it.
        """
        self._call = call
        self._key = key
        self._calls = 0
        self.variables = variables

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        key = jax.random.fold_in(self._key, self._calls) if self._calls else self._key
        self._calls += 1
        output, self.variables = self._call(self.variables, key, *arguments, **keywords)
        return output


def example_batch(example: Any, what: str) -> Batch:
    """Return a batch to create variables for: zeros of the example's shapes and dtypes, so that none of its
    data ends up in a program.

    Raises:
        RecipeError: There is no example.
    """
    if example is None:
        raise RecipeError(f"{what} has no variables before it sees a batch; pass task(..., example=batch)")
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in as_batch(example).items()}
