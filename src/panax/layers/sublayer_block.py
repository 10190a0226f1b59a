"""Layer of one sub-layer: attention or a feed-forward alone (Nemotron-H)."""

from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Int

from ..core import scope
from ..core.layout.requirements import AllToAllRequirement
from ..parallel import ContextAttention
from .attention.attention import Attention
from .block import Block, Context, Positions
from .feed_forward import FeedForward
from .moe.moe import MixtureOfExperts
from .moe.recorded_cache import split_cache
from .moe.routing import RouterState, RouterTerms
from .norm import Norm
from .transformer import add_residual, apply_feed_forward, extend_feed_forward


class SublayerBlock(Block):
    """Attention or a feed-forward, with a pre-norm and a residual connection."""

    positions: ClassVar[Positions | None] = "shards"
    positional_cache: ClassVar[bool] = True

    norm: Norm
    sublayer: Attention | FeedForward | MixtureOfExperts
    dropout: float = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: RouterState | None = None
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """Run the layer; the report is the router's terms if it is a mixture of experts.

        Args:
            state: The selection bias and recorded experts of a mixture, if it has either.
        """
        if isinstance(self.sublayer, Attention):
            with scope("attention"):
                branch = self.sublayer(self.norm(x), context.position, context.segment, context.attention)
                return add_residual(x, branch, self.dropout, context, 0), None
        with scope("feed_forward"):
            branch, terms = apply_feed_forward(self.sublayer, self.norm(x), context, state)
            return add_residual(x, branch, self.dropout, context, 0), terms

    @property
    def reports(self) -> bool:
        return isinstance(self.sublayer, MixtureOfExperts)

    def exchange_requirements(self, attention: ContextAttention) -> tuple[AllToAllRequirement, ...]:
        if isinstance(self.sublayer, Attention) and attention == "ulysses":
            return (self.sublayer.exchange_requirement,)
        return ()

    def flops(self, length: int) -> float:
        return self.sublayer.flops(length) if isinstance(self.sublayer, Attention) else self.sublayer.flops

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Any:
        return self.sublayer.empty_cache(batch, length, dtype) if isinstance(self.sublayer, Attention) else ()

    @property
    def cache_axes(self) -> Any:
        return self.sublayer.cache_axes if isinstance(self.sublayer, Attention) else ()

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        cache: Any,
        start: Int[Array, " batch"],
        state: RouterState | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        if isinstance(self.sublayer, Attention):
            branch, cache = self.sublayer.extend(self.norm(x), context.position, cache, start)
        else:
            both = split_cache(cache)
            branch, cache = extend_feed_forward(self.sublayer, self.norm(x), context, state, both, start)
        return add_residual(x, branch, self.dropout, context, 0), cache
