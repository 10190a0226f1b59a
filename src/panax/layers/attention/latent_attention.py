"""Multi-head latent attention: keys and values are projected up from a latent, and the cache stores only the
latent.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3 (arXiv:2412.19437), section 2.1.1; the
released weights.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ...core import Module, normal, parameter
from ...core.errors import RecipeError
from ...core.layout.requirements import AllToAllRequirement
from ...core.validation import Validated
from ...kernels.attention.attention import AttentionOptions
from ...kernels.attention.key_cache import attended_mask
from ...kernels.registry import refuse_exact
from ...parallel.context_choice import ContextAttention
from ...spmd import all_gather_sequence, contract, gather
from ..norm import Norm
from .attention import attend, mean_attended_positions, ulysses_requirement, write_positions
from .rotary import Rotary

EPSILON = 1e-6
"""Epsilon of the latents' norms, independent of the decoder's other norms, as in the released models."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent(Validated):
    """Widths of latent attention.

    Attributes:
        q_rank: Width of the latent from which queries are projected up; 0 projects them directly from the
            residual stream.
        kv_rank: Width of the latent from which keys and values are projected up.
        nope_dim: Width of the part of a query or key that is not rotated.
        rope_dim: Width of the rotated part; a key's rotated part is shared by all heads.
        value_dim: Width of a head's value.
    """

    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        for name, minimum in (("q_rank", 0), ("kv_rank", 1), ("nope_dim", 1), ("rope_dim", 2), ("value_dim", 1)):
            if getattr(self, name) < minimum:
                raise RecipeError(f"model.latent.{name}={getattr(self, name)}; expected {minimum} or more")
        if self.rope_dim % 2:
            raise RecipeError(f"model.latent.rope_dim={self.rope_dim} is odd; rotary embedding turns pairs of features")
        if self.value_dim > self.head_dim:
            raise RecipeError(
                f"model.latent.value_dim={self.value_dim} is more than a key's width, nope_dim + rope_dim = {self.head_dim}; the "
                f"kernels take values as wide as keys or narrower"
            )

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.nope_dim + self.rope_dim


class LatentCache(NamedTuple):
    """Latents of the keys and values of the positions seen so far, for generation.

    Attributes:
        kv: The latent, normalized.
        k: The rotated part of the keys, shared by all heads.
    """

    kv: Float[Array, "batch length kv_rank"]
    k: Float[Array, "batch length rope_dim"]


class LatentAttention(Module):
    """Causal self-attention with queries, keys and values from latents.

    Over a tensor axis, each device computes the latents of its own positions, and gathers these instead of
    the wider residual stream.

    Attributes:
        q_norm: Norm of the query latent; None if queries come directly from the residual stream, with `w_q`
            in place of `w_q_down` and `w_q_up`.
        w_kv_down: Projection to the latent and the rotated part of the key, concatenated.
        w_kv_up: Projection to each head's key, without its rotated part, and value, concatenated.
        window: As in `Attention`, like `soft_cap` and `scale`.
    """

    q_norm: Norm | None
    kv_norm: Norm
    rotary: Rotary = eqx.field(static=True)
    latent: Latent = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    w_q: Float[Array, "embed heads head_dim"] | None = parameter(normal("embed"))
    w_q_down: Float[Array, "embed q_latent"] | None = parameter(normal("embed"))
    w_q_up: Float[Array, "q_rank heads head_dim"] | None = parameter(normal("q_rank"))
    w_kv_down: Float[Array, "embed kv_latent"] = parameter(normal("embed"))
    w_kv_up: Float[Array, "kv_rank heads key_value"] = parameter(normal("kv_rank"))
    w_o: Float[Array, "heads value_dim embed"] = parameter(normal("heads", "value_dim"))

    @classmethod
    def build(
        cls,
        key: jax.Array,
        embed: int,
        heads: int,
        latent: Latent,
        *,
        rotary: Rotary,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        output_gain: float = 1.0,
    ) -> "LatentAttention":
        """Initialize all parameters; `scale` defaults to `head_dim ** -0.5`, and is multiplied by the gain of
        the rotary scaling.

        >>> build = lambda key: LatentAttention.build(key, 64, 4, Latent(q_rank=32, kv_rank=16), rotary=Rotary())
        >>> jax.eval_shape(build, jax.random.key(0)).w_kv_up.shape
        (16, 4, 256)
        """
        keys = jax.random.split(key, 3)
        sizes = {
            "embed": embed,
            "heads": heads,
            "head_dim": latent.head_dim,
            "q_rank": latent.q_rank,
            "q_latent": latent.q_rank,
            "kv_rank": latent.kv_rank,
            "kv_latent": latent.kv_rank + latent.rope_dim,
            "key_value": latent.nope_dim + latent.value_dim,
            "value_dim": latent.value_dim,
        }
        absent = {"w_q": None} if latent.q_rank else {"w_q_down": None, "w_q_up": None}
        return cls.create(
            keys[0],
            sizes,
            q_norm=Norm.build(keys[1], latent.q_rank, epsilon=EPSILON) if latent.q_rank else None,
            kv_norm=Norm.build(keys[2], latent.kv_rank, epsilon=EPSILON),
            rotary=rotary,
            latent=latent,
            window=window,
            soft_cap=soft_cap,
            scale=(latent.head_dim**-0.5 if scale is None else scale) * rotary.score_gain,
            w_o=normal("heads", "value_dim", gain=output_gain),
            **absent,
        )

    def __call__(
        self,
        x: Float[Array, "batch residual embed"],
        position: Int[Array, "batch seq"],
        segment: Int[Array, "batch seq"] | None,
        over_devices: ContextAttention = "auto",
    ) -> Float[Array, "batch residual embed"]:
        """Attend as `Attention` does."""
        q, kv, k_rotated = self._project(x, position)
        up = contract("batch seq kv_rank, kv_rank heads key_value -> batch seq heads key_value", kv, self.w_kv_up)
        k, v = jnp.split(up, [self.latent.nope_dim], axis=-1)
        k_rotated = jnp.broadcast_to(k_rotated[:, :, None], (*k.shape[:3], self.latent.rope_dim))
        k = jnp.concatenate([k, k_rotated], axis=-1)
        # The kernels require values of the keys' width.
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - v.shape[-1])))
        options = AttentionOptions(window=self.window, soft_cap=self.soft_cap, scale=self.scale)
        out = attend(q, k, v, segment, over_devices, options)
        return self._output(checkpoint_name(out[..., : self.latent.value_dim], "attention"))

    @property
    def exchange_requirement(self) -> AllToAllRequirement:
        return ulysses_requirement(self.w_o.shape[-3])

    def flops(self, length: int) -> float:
        """Count FLOPs as `Attention.flops` does."""
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self) if leaf.ndim > 1)
        heads, widths = self.w_o.shape[-3], self.latent.head_dim + self.latent.value_dim
        return 2.0 * (weights + heads * widths * mean_attended_positions(length, True, self.window))

    def empty_cache(self, batch: int, length: int, dtype: Any) -> LatentCache:
        """Create an empty cache; stacked if the layers are."""
        shape = (*self.w_kv_down.shape[:-2], batch, length)
        return LatentCache(
            jnp.zeros((*shape, self.latent.kv_rank), dtype), jnp.zeros((*shape, self.latent.rope_dim), dtype)
        )

    @property
    def cache_axes(self) -> LatentCache:
        """Logical axes of a cache, which all heads share."""
        return LatentCache._make([("batch", None, None)] * 2)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: LatentCache,
        start: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch seq embed"], LatentCache]:
        """Attend to the cached positions and to `x`, which occupies each row of the cache from its `start` on.

        Queries are projected to the latent's width and attend to the latents directly; keys and values are
        never materialized.
        """
        q, kv, k_rotated = self._project(x, position)
        cache = LatentCache(
            write_positions(cache.kv, kv, start),
            write_positions(cache.k, k_rotated, start),
        )
        # b: batch, q: query, k: cached position, h: head, d: key feature, r: latent, v: value feature.
        w_k, w_v = jnp.split(gather(self.w_kv_up, "kv_rank heads key_value", x.dtype), [self.latent.nope_dim], axis=-1)
        q, q_rotated = jnp.split(q, [self.latent.nope_dim], axis=-1)
        q = jnp.einsum("bqhd,rhd->bqhr", q, w_k)
        scores = jnp.einsum("bqhr,bkr->bhqk", q, cache.kv, preferred_element_type=jnp.float32)
        scores += jnp.einsum("bqhd,bkd->bhqk", q_rotated, cache.k, preferred_element_type=jnp.float32)
        scores = scores * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        attended = attended_mask(start, x.shape[1], cache.kv.shape[1], self.window)
        weights = jax.nn.softmax(jnp.where(attended[:, None], scores, -jnp.inf), axis=-1).astype(x.dtype)
        return self._output(jnp.einsum("bhqk,bkr,rhv->bqhv", weights, cache.kv, w_v, optimize="optimal")), cache

    def _project(self, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries, the latent of keys and values, and the keys' rotated part, for the positions of
        whole rows."""
        refuse_exact("latent attention")
        down = contract("batch residual embed, embed kv_latent -> batch residual kv_latent", x, self.w_kv_down)
        kv, k_rotated = jnp.split(down, [self.latent.kv_rank], axis=-1)
        kv = self.kv_norm(kv)
        if self.w_q is None:
            assert self.q_norm is not None
            q = self.q_norm(
                contract("batch residual embed, embed q_latent -> batch residual q_latent", x, self.w_q_down)
            )
        else:
            q = x
        gathered = all_gather_sequence(jnp.concatenate([q, kv, k_rotated], axis=-1))
        q, kv, k_rotated = jnp.split(gathered, [q.shape[-1], q.shape[-1] + self.latent.kv_rank], axis=-1)
        if self.w_q is None:
            q = contract("batch seq q_rank, q_rank heads head_dim -> batch seq heads head_dim", q, self.w_q_up)
        else:
            q = contract("batch seq embed, embed heads head_dim -> batch seq heads head_dim", q, self.w_q)
        q, q_rotated = jnp.split(q, [self.latent.nope_dim], axis=-1)
        q = self.rotary.grow_queries(jnp.concatenate([q, self.rotary(q_rotated, position)], axis=-1), position)
        return q, kv, self.rotary(k_rotated[:, :, None], position)[:, :, 0]

    def _output(self, attended: jax.Array) -> jax.Array:
        return contract("batch seq heads value_dim, heads value_dim embed -> batch seq embed", attended, self.w_o)
