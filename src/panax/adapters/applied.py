"""`BoundModel`: what a loss sees as its model where a library's model is two functions: one makes variables, one uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core import Batch
from ..core.errors import RecipeError
from ..data.loading.iterable import as_batch

Variables = Any


class BoundModel:
    """A model with its variables, to be called like a function. Each call goes on from the state that the one before left.

    Attributes:
        variables: What it holds now, in the library's own form; while the model is being created, what its calls have made.
    """

    def __init__(self, call: Callable[..., tuple[Any, Variables]], variables: Variables, key: jax.Array):
        """
        Args:
            call: `(variables, key, *arguments, **keywords) -> (output, variables)`.
            key: Of the first call; each further one has its own, folded from it.
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
    """The batch that variables are made for: zeros of the example's shapes and dtypes, so that none of it ends in a program.

    Raises:
        RecipeError: There is none.
    """
    if example is None:
        raise RecipeError(f"{what} has no variables before it sees a batch; give task(..., example=batch)")
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in as_batch(example).items()}
