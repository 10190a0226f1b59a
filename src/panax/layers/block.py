"""`Block`: one layer of a model, with everything the framework needs to know about it.

Stacks run blocks, pipelines distribute them over stages, generators extend them token by token, the mesh is
checked against their requirements, and their FLOPs are counted, all through this interface and independent of
the model.
"""

import abc
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..core import Module, named_leaves
from ..core.errors import RecipeError
from ..core.layout.requirements import AllToAllRequirement
from ..core.protocols import AcceptedOrder
from ..parallel import ContextAttention


class Context(NamedTuple):
    """Inputs shared by all blocks of one forward pass.

    Attributes:
        position: Position of each token in its document.
        segment: Index of the packed document of each token; 0 is padding, None means one document per row.
        row: Index of each row in the global batch.
        key: PRNG key; None disables dropout and jitter.
        place: Index of each position of the residual stream in its global row; defaults to 0, 1, 2, ...
        attention: Attention algorithm for rows sharded over the context axis.
        valid: False for padding, for each position of the residual stream; None if there is no padding.
        train: True if routers apply jitter.
        times: Time of each position's event, in seconds from an arbitrary origin; None if unknown.
        target_times: Time of the event that each position predicts, or of its own event; None if `times` is.
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
    """One layer, as a function on the residual stream's local shards.

    A subclass implements `__call__` and overrides whatever else differs. Layers of different classes may be
    mixed; those with equal parameter names, shapes and dtypes share slots in a pipeline.
    """

    positions: ClassVar[Positions | None] = None
    """Which positions of a row the layer needs. "each": every position is computed independently. "row": it
    reads other positions and receives whole rows. "shards": it handles a device's shard of the positions
    itself, with the functions of `panax.spmd`. None: unspecified. On a mesh that splits rows, a block from
    another package is compared with a single device before the first step, whatever it declares."""

    positional_cache: ClassVar[bool] = False
    """True if the cache of `extend` holds one entry for each position, which depends on that position and earlier
    ones: rows with a common beginning can then share it. A recurrent state is not of this kind."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: Any = None
    ) -> tuple[Float[Array, "batch residual embed"], Any]:
        """Return the residual stream after this layer, and the layer's report (None unless `reports`).

        Args:
            context: Shared inputs, with this layer's PRNG key.
            state: This layer's part of the model state, if any.
        """

    @property
    def reports(self) -> bool:
        """True if it has model state or returns a report, with arrays of equal shape across all reporting
        layers."""
        return False

    @property
    def row_order(self) -> AcceptedOrder:
        """The order of positions it accepts if rows are sharded over a context axis."""
        return "any"

    def exchange_requirements(self, attention: ContextAttention) -> tuple[AllToAllRequirement, ...]:
        """Return requirements on the mesh in addition to divisible parameters.

        Args:
            attention: Attention algorithm for rows sharded over the context axis.
        """
        return ()

    def flops(self, length: int) -> float:
        """Count the FLOPs of the forward matmuls per position, averaged over a row of `length`.

        By default, every parameter with two or more dimensions counts as one matmul operand applied to each
        position.
        """
        return 2.0 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self) if leaf.ndim > 1)

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Any:
        """Create the initial cache for `extend`, for the heads of this device; stacked if the layers are. Its arrays begin
        with the axis of rows.

        Raises:
            RecipeError: The layer does not support generation.
        """
        raise self._not_incremental()

    @property
    def cache_axes(self) -> Any:
        """Logical axes of each array of a cache, a tuple in place of each.

        Raises:
            RecipeError: The layer does not support generation.
        """
        raise self._not_incremental()

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        cache: Any,
        start: Int[Array, " batch"],
        state: Any = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """Run on each row's next positions; return the residual stream and the updated cache.

        Rows are independent of each other: any of them may be at another position, and may have fewer new
        positions than others.

        Args:
            context: `valid` is False for the positions after a row's last new one, which must not affect the row's
                later positions; None if all are new.
            start: Index of each row's first new position.

        Raises:
            RecipeError: The layer does not support generation.
        """
        raise self._not_incremental()

    def _not_incremental(self) -> RecipeError:
        return RecipeError(
            f"this model can't generate: its layer {type(self).__name__} lacks empty_cache, cache_axes or extend; implement "
            f"all three"
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        """Names, shapes and dtypes of the parameters; layers with equal signatures share slots in a
        pipeline."""
        return tuple((name, leaf.shape, jnp.dtype(leaf.dtype).name) for name, leaf in named_leaves(self).items())
