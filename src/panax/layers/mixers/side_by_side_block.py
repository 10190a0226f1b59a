"""Layer with attention and a state-space mixer side by side, then a feed-forward (Falcon-H1)."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, Int

from ...core import scope
from ...core.layout.requirements import AllToAllRequirement
from ...core.protocols import AcceptedOrder
from ...parallel import ContextAttention
from ..attention.attention import Attention, Cache
from ..block import Block, Context, Positions
from ..feed_forward import FeedForward
from ..norm import Norm
from ..transformer import add_residual
from .state_space import StateSpace, StateSpaceCache


class BranchMultipliers(NamedTuple):
    """Factors of the inputs and outputs of a layer's branches.

    Attributes:
        attention_in: Factor of the attention's input, as `mixer_in` is of the mixer's.
        attention_out: Factor of the attention's output, as the other two are of their branches.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    feed_forward_out: float = 1.0


class SideBySideCache(NamedTuple):
    """Caches of both branches."""

    attention: Cache
    mixer: StateSpaceCache


class SideBySideBlock(Block):
    """Attention and a state-space mixer with one pre-norm, both added to the residual stream, then a feed-forward.

    Source: Falcon-H1 (arXiv:2507.22448), section 2.
    """

    positions: ClassVar[Positions | None] = "shards"

    norm: Norm
    attention: Attention
    mixer: StateSpace
    feed_forward_norm: Norm
    feed_forward: FeedForward
    multipliers: BranchMultipliers = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: None = None
    ) -> tuple[Float[Array, "batch residual embed"], None]:
        """Run the layer."""
        by, y = self.multipliers, self.norm(x)
        with scope("attention"):
            attended = self.attention(_times(y, by.attention_in), context.position, context.segment, context.attention)
        with scope("mixer"):
            mixed = self.mixer(_times(y, by.mixer_in), context.position, context.segment)
            both = _times(attended, by.attention_out) + _times(mixed, by.mixer_out)
            x = add_residual(x, both, self.dropout, context, 0)
        return self._fed(x, context), None

    @property
    def row_order(self) -> AcceptedOrder:
        return "contiguous"

    def exchange_requirements(self, attention: ContextAttention) -> tuple[AllToAllRequirement, ...]:
        return (self.attention.exchange_requirement,) if attention == "ulysses" else ()

    def flops(self, length: int) -> float:
        return self.attention.flops(length) + self.mixer.flops + self.feed_forward.flops

    def empty_cache(self, batch: int, length: int, dtype: Any) -> SideBySideCache:
        return SideBySideCache(
            self.attention.empty_cache(batch, length, dtype), self.mixer.empty_cache(batch, length, dtype)
        )

    @property
    def cache_axes(self) -> SideBySideCache:
        return SideBySideCache(self.attention.cache_axes, self.mixer.cache_axes)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        cache: SideBySideCache,
        start: Int[Array, " batch"],
        state: None = None,
    ) -> tuple[Float[Array, "batch seq embed"], SideBySideCache]:
        by, y = self.multipliers, self.norm(x)
        attended, keys = self.attention.extend(_times(y, by.attention_in), context.position, cache.attention, start)
        mixed, states = self.mixer.extend(_times(y, by.mixer_in), context.position, cache.mixer, start, context.valid)
        both = _times(attended, by.attention_out) + _times(mixed, by.mixer_out)
        x = add_residual(x, both, self.dropout, context, 0)
        return self._fed(x, context), SideBySideCache(keys, states)

    def _fed(self, x: Any, context: Context) -> Any:
        with scope("feed_forward"):
            branch = _times(self.feed_forward(self.feed_forward_norm(x)), self.multipliers.feed_forward_out)
            return add_residual(x, branch, self.dropout, context, 1)


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1.0 else x * factor
