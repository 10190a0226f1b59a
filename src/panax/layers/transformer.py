"""Transformer layer: attention, then feed-forward."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from ..core import dropout, scope
from ..core.layout.requirements import AllToAllRequirement
from ..kernels.product import materialize
from ..parallel import ContextAttention
from .attention.attention import Attention
from .attention.latent_attention import LatentAttention
from .block import Block, Context, Positions
from .feed_forward import FeedForward
from .moe.moe import MixtureOfExperts
from .moe.recorded_cache import RecordedCache, split_cache
from .moe.routing import RouterState, RouterTerms, Tokens
from .norm import Norm


class TransformerBlock(Block):
    """Attention and feed-forward, each with a residual connection, and norms before it, after it, or both.

    Attributes:
        feed_forward_norm: None with `parallel` if the attention's norm is that of both.
        parallel: True if both have the same input; else the feed-forward's is the attention's result.
        multiplier: Factor of both outputs, before they are added to the residual stream.
    """

    positions: ClassVar[Positions | None] = "shards"
    positional_cache: ClassVar[bool] = True

    attention_norm: Norm | None
    attention: Attention | LatentAttention
    attention_post_norm: Norm | None
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | MixtureOfExperts
    feed_forward_post_norm: Norm | None
    dropout: float = eqx.field(static=True)
    parallel: bool = eqx.field(static=True, default=False)
    multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: RouterState | None = None
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """Run the layer; the report is the router's terms if the feed-forward is a mixture of experts.

        Args:
            state: The selection bias and recorded experts of a mixture, if it has either.
        """
        with scope("attention"):
            normed = _normalized(self.attention_norm, x)
            branch = self.attention(normed, context.position, context.segment, context.attention)
            attended = self._add(x, branch, self.attention_post_norm, context, 0)
        with scope("feed_forward"):
            branch, terms = apply_feed_forward(
                self.feed_forward, self._feed_forward_input(x, normed, attended), context, state
            )
            return self._add(attended, branch, self.feed_forward_post_norm, context, 1), terms

    @property
    def reports(self) -> bool:
        return isinstance(self.feed_forward, MixtureOfExperts)

    def exchange_requirements(self, attention: ContextAttention) -> tuple[AllToAllRequirement, ...]:
        return (self.attention.exchange_requirement,) if attention == "ulysses" else ()

    def flops(self, length: int) -> float:
        return self.attention.flops(length) + self.feed_forward.flops

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Any:
        return self.attention.empty_cache(batch, length, dtype)

    @property
    def cache_axes(self) -> Any:
        return self.attention.cache_axes

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        cache: Any,
        start: Int[Array, " batch"],
        state: RouterState | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        attention: Any = self.attention  # Either kind, as is its cache.
        record, cache = split_cache(cache)
        normed = _normalized(self.attention_norm, x)
        branch, cache = attention.extend(normed, context.position, cache, start)
        attended = self._add(x, branch, self.attention_post_norm, context, 0)
        x = self._feed_forward_input(x, normed, attended)
        branch, cache = extend_feed_forward(self.feed_forward, x, context, state, (record, cache), start)
        return self._add(attended, branch, self.feed_forward_post_norm, context, 1), cache

    def _feed_forward_input(self, x: jax.Array, normed: jax.Array, attended: jax.Array) -> jax.Array:
        """Return the feed-forward's input.

        Args:
            x: The layer's input.
            normed: The attention's input.
            attended: The residual stream after the attention.
        """
        if self.parallel and self.feed_forward_norm is None:
            return normed
        return _normalized(self.feed_forward_norm, x if self.parallel else attended)

    def _add(self, x: jax.Array, branch: jax.Array, post_norm: Norm | None, context: Context, place: int) -> jax.Array:
        branch = _normalized(post_norm, branch)
        branch = branch if self.multiplier == 1.0 else branch * self.multiplier
        return add_residual(x, branch, self.dropout, context, place)


def _normalized(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def apply_feed_forward(
    feed_forward: FeedForward | MixtureOfExperts, x: jax.Array, context: Context, state: RouterState | None
) -> tuple[jax.Array, RouterTerms | None]:
    """Run a layer's feed-forward, dense or mixture of experts."""
    if isinstance(feed_forward, FeedForward):
        return feed_forward(x), None
    return feed_forward(x, _router_inputs(context, state))


def extend_feed_forward(
    feed_forward: FeedForward | MixtureOfExperts,
    x: jax.Array,
    context: Context,
    state: RouterState | None,
    cache: tuple[RecordedCache | None, Any],
    start: jax.Array,
) -> tuple[jax.Array, Any]:
    """Run a layer's feed-forward on each row's next positions, and record the experts that it used if the cache does.

    Args:
        cache: The result of `split_cache`, with the layer's own cache after these positions.
        start: Index of each row's first new position.

    Returns:
        The branch, and the layer's whole cache.
    """
    record, layer_cache = cache
    if record is None or isinstance(feed_forward, FeedForward):
        return apply_feed_forward(feed_forward, x, context, state)[0], layer_cache
    branch, _, assigned = feed_forward.run_recorded(x, _router_inputs(context, state))
    return branch, record.write(layer_cache, assigned, start)


def _router_inputs(context: Context, state: RouterState | None) -> Tokens:
    bias, experts = RouterState() if state is None else state
    key = None if context.key is None or not context.train else jax.random.fold_in(context.key, 2)
    return Tokens(context.valid, context.place, context.row, key, bias, experts)


def add_residual(x: jax.Array, branch: jax.Array, rate: float, context: Context, place: int) -> jax.Array:
    """Add a layer's branch to the residual stream, after dropout.

    Args:
        place: Index of the branch in its layer.
    """
    if context.key is not None and context.row is not None:
        branch = dropout(branch, rate, jax.random.fold_in(context.key, place), context.row, context.place)
    return materialize(x + branch)
