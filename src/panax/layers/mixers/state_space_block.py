"""Layer of recurrent and hybrid models: a state-space mixer, a delta net or a convolution, then an optional feed-forward."""

from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Int

from ...core import scope
from ...core.protocols import AcceptedOrder
from ..block import Block, Context, Positions
from ..feed_forward import FeedForward
from ..moe.moe import MixtureOfExperts
from ..moe.recorded_cache import split_cache
from ..moe.routing import RouterState, RouterTerms
from ..norm import Norm
from ..transformer import add_residual, apply_feed_forward, extend_feed_forward
from .delta_net import DeltaNet
from .short_convolution import ShortConvolution
from .state_space import StateSpace


class StateSpaceBlock(Block):
    """A recurrent mixer, then an optional feed-forward, each with a pre-norm and a residual connection."""

    positions: ClassVar[Positions | None] = "shards"

    mixer_norm: Norm
    mixer: StateSpace | DeltaNet | ShortConvolution
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | MixtureOfExperts | None
    dropout: float = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: RouterState | None = None
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """Run the layer; the report is the router's terms if the feed-forward is a mixture of experts.

        Args:
            state: The selection bias and recorded experts of a mixture, if it has either.
        """
        with scope("mixer"):
            branch = self.mixer(self.mixer_norm(x), context.position, context.segment)
            x = add_residual(x, branch, self.dropout, context, 0)
        return self._fed(x, context, state)

    @property
    def reports(self) -> bool:
        return isinstance(self.feed_forward, MixtureOfExperts)

    @property
    def row_order(self) -> AcceptedOrder:
        return "contiguous"

    def flops(self, length: int) -> float:
        return self.mixer.flops + (0.0 if self.feed_forward is None else self.feed_forward.flops)

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Any:
        return self.mixer.empty_cache(batch, length, dtype)

    @property
    def cache_axes(self) -> Any:
        return self.mixer.cache_axes

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        cache: Any,
        start: Int[Array, " batch"],
        state: RouterState | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        mixer: Any = self.mixer  # Any kind, as is its cache.
        record, cache = split_cache(cache)
        branch, cache = mixer.extend(self.mixer_norm(x), context.position, cache, start, context.valid)
        x = add_residual(x, branch, self.dropout, context, 0)
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x, cache
        with scope("feed_forward"):
            normed = self.feed_forward_norm(x)
            branch, cache = extend_feed_forward(self.feed_forward, normed, context, state, (record, cache), start)
            return add_residual(x, branch, self.dropout, context, 1), cache

    def _fed(self, x: Any, context: Context, state: Any) -> tuple[Any, RouterTerms | None]:
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x, None
        with scope("feed_forward"):
            branch, terms = apply_feed_forward(self.feed_forward, self.feed_forward_norm(x), context, state)
            return add_residual(x, branch, self.dropout, context, 1), terms
