"""`Block`: one layer of a model, and all that there is to say of it.

A stack runs blocks, a pipeline divides them over its stages, a generator extends them token by token, a mesh is checked against
what they ask for, and their floating-point operations are counted: each works from what is written here, and knows no model.
"""

import abc
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..core import Module, named_leaves
from ..core.errors import RecipeError
from ..core.needs import AllToAllRequirement
from ..core.protocols import AcceptedOrder
from ..parallel import ContextAttention


class Context(NamedTuple):
    """What every block of one pass shares.

    Attributes:
        position: Of each token in its document.
        segment: Which packed document each token belongs to; 0 is padding, None is one document a row.
        row: Each row's index in the global batch.
        key: None when nothing is drawn: neither dropout nor jitter.
        place: Index in its whole row of each position of the residual stream; by default 0, 1, 2, ...
        attention: How rows that are split over the context axis attend.
        valid: False for padding, of each position of the residual stream; None where there is none.
        train: Whether routers draw their jitter.
        times: When each position's event was, in seconds from any beginning; None where nobody knows.
        target_times: When that was which each position predicts, or its own event; None as `times`.
    """

    position: Int[Array, "batch seq"]
    segment: Int[Array, "batch seq"] | None = None
    row: Int[Array, " batch"] | None = None
    key: Key[Array, ""] | None = None
    place: Int[Array, " residual"] | None = None
    attention: ContextAttention = "auto"
    valid: Bool[Array, "batch residual"] | None = None
    train: bool = False
    times: Int[Array, "batch seq"] | None = None
    target_times: Int[Array, "batch seq"] | None = None


Positions = Literal["each", "row", "shards"]


class Block(Module):
    """One layer: what it adds to the residual stream, on shards.

    A subclass writes `__call__`, and what of the rest is not so for it. Layers of different classes may follow each other; those
    whose parameters have equal names, shapes and dtypes share a place in a pipeline.
    """

    positions: ClassVar[Positions | None] = None
    """The positions of a row that it needs. "each": each is computed from itself alone. "row": it reads others, and is given
    whole rows. "shards": it is written for a device's part of them, with the functions of `panax.spmd`. None: it does not say. A
    block of another package is compared with one device before the first step on a mesh that splits rows, whatever it says."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: Any = None
    ) -> tuple[Float[Array, "batch residual embed"], Any]:
        """The residual stream after this layer, and what the layer reports; None where it does not `report`.

        Args:
            context: Its key is the layer's own.
            state: This layer's part of the model state, where it has one.
        """

    @property
    def reports(self) -> bool:
        """Whether it has a part in the model state, or returns arrays of its own, equal in shape for all layers that do."""
        return False

    @property
    def row_order(self) -> AcceptedOrder:
        """Which order of positions it takes, where rows are split over a context axis."""
        return "any"

    def exchanges(self, attention: ContextAttention) -> tuple[AllToAllRequirement, ...]:
        """What it asks of a mesh besides that its parameters divide over it.

        Args:
            attention: How rows that are split over the context axis attend.
        """
        return ()

    def flops(self, length: int) -> float:
        """Floating-point operations of the forward products for one position, the mean over a row of `length`.

        Unless told, every parameter of two dimensions and more is one factor of a product that each position meets.
        """
        return 2.0 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self) if leaf.ndim > 1)

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Any:
        """The cache that `extend` begins with; of stacked layers, stacked like them.

        Raises:
            RecipeError: The layer does not generate.
        """
        raise self._not_incremental()

    def extend(
        self, x: Float[Array, "batch seq embed"], context: Context, cache: Any, start: Int[Array, ""], state: Any = None
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """Run on the next positions, from `start` onward; returns the residual stream and the cache after them.

        Raises:
            RecipeError: The layer does not generate.
        """
        raise self._not_incremental()

    def _not_incremental(self) -> RecipeError:
        return RecipeError(
            f"this model can't generate: its layer {type(self).__name__} has neither empty_cache nor extend; write both"
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """By which a pipeline puts layers of equal parameters in one place."""
        return tuple((name, leaf.shape, jnp.dtype(leaf.dtype).name) for name, leaf in named_leaves(self).items())
