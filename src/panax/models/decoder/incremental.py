"""The decoder as an `IncrementalModel`: its layers one by one, each with its own weights and cache.

Training scans over stacked layers, which compiles each kind of layer once. A scan slices a layer's weights and cache
out of their stacks, and on a CPU a slice is a copy: for one token, most of the time. Generation takes the stacks apart
once, and its programs read and update each layer's arrays in place.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import logical_axes
from ...core.errors import RecipeError
from ...core.params.logical import Role, axis_for_role, lookup_axis
from ...core.protocols import IncrementalModel
from ...layers import Context
from ...layers.block import Block
from ...layers.moe.recorded_cache import RecordedCache
from ...layers.stack import split_state_by_stack
from ...spmd import contract
from ...spmd.weights import is_wrapped_weight
from .logits import finish_logits, gather_logits
from .model import Decoder, layer_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IncrementalDecoder(IncrementalModel):
    """A decoder whose stacks are taken apart.

    Attributes:
        outer: The decoder without its layers and its head.
        head: The output matrix, inputs first: a product with few rows reads it in the order in which it lies. None for
            one that is computed from parts, which stays in `outer`.
        layers: Each layer with its own arrays.
        states: Each layer's part of the model state; None for layers without any.
        dtype: Dtype of activations and caches.
        records_experts: True if caches hold the experts that each position used.
    """

    outer: Decoder
    head: Any
    layers: tuple[Block, ...]
    states: tuple[Any, ...]
    dtype: str = dataclasses.field(metadata={"static": True})
    records_experts: bool = dataclasses.field(  # pyright: ignore[reportIncompatibleMethodOverride]
        default=False, metadata={"static": True}
    )

    @classmethod
    def create(
        cls, model: Decoder, state: Mapping[str, Any], dtype: str, *, records_experts: bool = False
    ) -> "IncrementalDecoder":
        """Take a decoder's stacks apart, and cast the matrices to `dtype`, which the layers would do in each step.

        Args:
            state: The task's model state.

        Raises:
            RecipeError: Experts choose their tokens, which depends on tokens that are not generated yet.
        """
        moe = model.config.feed_forward
        if moe is not None and moe.experts_choose and model.config.mixture_layers:
            raise RecipeError(
                "this model can't generate: its experts choose among all tokens of a row (choice='expert'), also those that "
                "come later; train a mixture in which tokens choose, choice='token'"
            )
        layers: list[Block] = []
        states: list[Any] = []
        for stack, stack_state in zip(model.stacks, split_state_by_stack(model.stacks, layer_state(state))):
            places = stack.split_state(stack_state)
            for repeat in range(stack.repeats):
                for block, block_state in zip(stack.blocks, places):
                    layer, layers_state = jax.tree.map(lambda leaf, at=repeat: leaf[at], (block, block_state))
                    layers.append(layer)
                    states.append(layers_state)
        outer = _cast_matrices(dataclasses.replace(model, stacks=(), value_head=None), dtype)
        head = None
        if not is_wrapped_weight(outer.output_table):
            # Its own table, if there is one, is not kept twice.
            head, outer = outer.output_table.T, dataclasses.replace(outer, head=None)
        cast = tuple(_cast_matrices(layer, dtype) for layer in layers)
        return cls(outer, head, cast, tuple(states), dtype, records_experts)

    @property
    def vocab_size(self) -> int:
        return self.outer.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.outer.config.max_length

    @property
    def shares_prefixes(self) -> bool:
        return all(layer.positional_cache for layer in self.layers)

    @property
    def axes(self) -> "IncrementalDecoder":
        states = jax.tree.map(lambda leaf: (None,) * leaf.ndim, self.states)
        return IncrementalDecoder(
            logical_axes(self.outer),
            None if self.head is None else ("embed", "vocab"),
            tuple(logical_axes(layer) for layer in self.layers),
            states,
            self.dtype,
            self.records_experts,
        )

    @property
    def cache_axes(self) -> tuple[Any, ...]:
        return tuple(
            RecordedCache.axes(layer.cache_axes) if self._records(layer) else layer.cache_axes for layer in self.layers
        )

    def empty_cache(self, rows: int, length: int) -> tuple[Any, ...]:
        moe = self.outer.config.feed_forward
        caches = []
        for layer in self.layers:
            cache = layer.empty_cache(rows, length, self.dtype)
            if moe is not None and self._records(layer):
                cache = RecordedCache.create(cache, moe, rows, length)
            caches.append(cache)
        return tuple(caches)

    def read_experts(self, cache: Any) -> Int[Array, "rows length layer active"]:
        return jnp.stack([each.experts for each in cache if isinstance(each, RecordedCache)], axis=2)

    def _records(self, layer: Block) -> bool:
        # The layers of a decoder that report are its mixtures.
        return self.records_experts and layer.reports

    def extend(
        self, tokens: Int[Array, "rows seq"], start: Int[Array, " rows"], count: Int[Array, " rows"], cache: Any
    ) -> tuple[Float[Array, "rows seq width"], Any]:
        place = jnp.arange(tokens.shape[1])[None]
        # Positions that are ignored are clipped to those that the model has.
        position = jnp.minimum(start[:, None] + place, self.max_length - 1)
        context = Context(position, valid=place < count[:, None])
        x = self.outer.embed(tokens, position, self.dtype)
        caches = []
        for layer, layer_cache, state in zip(self.layers, cache, self.states, strict=True):
            x, new = layer.extend(x, context, layer_cache, start, state)
            caches.append(new)
        return self.outer.normalize(x), tuple(caches)

    def logits(self, hidden: Float[Array, "*rows width"]) -> Float[Array, "*rows vocab"]:
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        if self.head is None:
            return gather_logits(self.outer, flat).reshape(*hidden.shape[:-1], -1)
        equation = "batch seq embed, embed vocab -> batch seq vocab"
        logits = contract(equation, flat, self.head, out_dtype=jnp.float32)
        return finish_logits(self.outer, logits).reshape(*hidden.shape[:-1], -1)


def _cast_matrices(module: Any, dtype: str) -> Any:
    """Cast arrays that are multiplied with activations to the dtype of these. Norms, taps and routers stay as they are, and so
    do the parts of weights that are computed from parts."""

    def cast(leaf: Any, axes: Any) -> Any:
        if is_wrapped_weight(leaf) or leaf.dtype != jnp.float32:
            return leaf
        is_matrix = axis_for_role(Role.WIDTH) in axes and not any(lookup_axis(axis).in_float32 for axis in axes)
        return leaf.astype(dtype) if is_matrix else leaf

    leaves, structure = jax.tree.flatten(module, is_leaf=is_wrapped_weight)
    return structure.unflatten(map(cast, leaves, structure.flatten_up_to(logical_axes(module))))
