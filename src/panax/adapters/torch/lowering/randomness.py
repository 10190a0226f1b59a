"""Random numbers from the step's key and the operation's index in the program, not from PyTorch's
generator."""

from typing import Any

import jax
import jax.numpy as jnp

from .registry import OutputSpec, aten, register_lowering

FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
    aten.random_.to: aten.random.to,
}
"""Operations that write random numbers into a tensor, with those that return them."""

RANDOM = {
    aten.bernoulli.p, aten.bernoulli.default, aten.uniform.default, aten.normal_functional.default, aten.exponential.default,
    aten.native_dropout.default, aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default,
    aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype, aten.randperm.default,
    aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float,
    aten.multinomial.default, getattr(aten.random, "from"), aten.random.to,
}  # fmt: skip
"""All operations that draw random numbers; each gets a separate key."""


def is_random(operation: Any) -> bool:
    return operation in RANDOM or operation in FUNCTIONAL


@register_lowering(aten.bernoulli.p)
def _bernoulli_p(out: OutputSpec, x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(out.key(), p, out.shape)


@register_lowering(aten.bernoulli.default)
def _bernoulli(out: OutputSpec, x: Any, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(out.key(), x, out.shape)


@register_lowering(aten.native_dropout.default)
def _native_dropout(out: Any, x: Any, p: Any, train: Any = True) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(out[0].key(), 1 - p, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - p, x.dtype), 0), kept


@register_lowering(aten.uniform.default)
def _uniform(out: OutputSpec, x: Any, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.uniform(out.key(), out.shape, minval=low, maxval=high)


@register_lowering(aten.normal_functional.default)
def _normal(out: OutputSpec, x: Any, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.normal(out.key(), out.shape) * std + mean


@register_lowering(
    aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float
)
def _normal_of(out: OutputSpec, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
    return jax.random.normal(out.key(), out.shape) * std + mean


@register_lowering(aten.exponential.default)
def _exponential(out: OutputSpec, x: Any, rate: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.exponential(out.key(), out.shape) / rate


@register_lowering(aten.rand.default, aten.rand_like.default)
def _rand(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jax.random.uniform(out.key(), out.shape)


@register_lowering(aten.randn.default, aten.randn_like.default)
def _randn(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jax.random.normal(out.key(), out.shape)


@register_lowering(aten.randint.default)
def _randint(out: OutputSpec, high: int, *args: Any, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@register_lowering(aten.randint.low)
def _randint_low(out: OutputSpec, low: int, high: int, *args: Any, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@register_lowering(aten.randint_like.default)
def _randint_like(out: OutputSpec, x: Any, high: int, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@register_lowering(aten.randint_like.low_dtype)
def _randint_like_low(out: OutputSpec, x: Any, low: int, high: int, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@register_lowering(getattr(aten.random, "from"))
def _random_from(out: OutputSpec, x: Any, low: int, high: int, *, generator: Any = None) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@register_lowering(aten.random.to)
def _random_to(out: OutputSpec, x: Any, high: int, *, generator: Any = None) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@register_lowering(aten.randperm.default)
def _randperm(out: OutputSpec, n: int, **kwargs: Any) -> Any:
    return jax.random.permutation(out.key(), n)


@register_lowering(aten.multinomial.default)
def _multinomial(out: OutputSpec, weights: Any, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    scores = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(out.key(), scores, axis=-1, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(scores + jax.random.gumbel(out.key(), scores.shape), count)[1]
