"""Random numbers: from the step's key and the place of the operation in the program, never from PyTorch's generator."""

from typing import Any

import jax
import jax.numpy as jnp

from .registry import Out, aten, lowers

FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
    aten.random_.to: aten.random.to,
}
"""What writes random numbers into a tensor, and the operation that returns them."""

RANDOM = {
    aten.bernoulli.p, aten.bernoulli.default, aten.uniform.default, aten.normal_functional.default, aten.exponential.default,
    aten.native_dropout.default, aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default,
    aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype, aten.randperm.default,
    aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float,
    aten.multinomial.default, getattr(aten.random, "from"), aten.random.to,
}  # fmt: skip
"""Every operation that draws; each takes a key of its own."""


def is_random(operation: Any) -> bool:
    return operation in RANDOM or operation in FUNCTIONAL


@lowers(aten.bernoulli.p)
def _bernoulli_p(out: Out, x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(out.key(), p, out.shape)


@lowers(aten.bernoulli.default)
def _bernoulli(out: Out, x: Any, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(out.key(), x, out.shape)


@lowers(aten.native_dropout.default)
def _native_dropout(out: Any, x: Any, p: Any, train: Any = True) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(out[0].key(), 1 - p, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - p, x.dtype), 0), kept


@lowers(aten.uniform.default)
def _uniform(out: Out, x: Any, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.uniform(out.key(), out.shape, minval=low, maxval=high)


@lowers(aten.normal_functional.default)
def _normal(out: Out, x: Any, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.normal(out.key(), out.shape) * std + mean


@lowers(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float)
def _normal_of(out: Out, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
    return jax.random.normal(out.key(), out.shape) * std + mean


@lowers(aten.exponential.default)
def _exponential(out: Out, x: Any, rate: Any = 1.0, *, generator: Any = None) -> Any:
    return jax.random.exponential(out.key(), out.shape) / rate


@lowers(aten.rand.default, aten.rand_like.default)
def _rand(out: Out, *args: Any, **kwargs: Any) -> Any:
    return jax.random.uniform(out.key(), out.shape)


@lowers(aten.randn.default, aten.randn_like.default)
def _randn(out: Out, *args: Any, **kwargs: Any) -> Any:
    return jax.random.normal(out.key(), out.shape)


@lowers(aten.randint.default)
def _randint(out: Out, high: int, *args: Any, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@lowers(aten.randint.low)
def _randint_low(out: Out, low: int, high: int, *args: Any, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@lowers(aten.randint_like.default)
def _randint_like(out: Out, x: Any, high: int, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@lowers(aten.randint_like.low_dtype)
def _randint_like_low(out: Out, x: Any, low: int, high: int, **kwargs: Any) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@lowers(getattr(aten.random, "from"))
def _random_from(out: Out, x: Any, low: int, high: int, *, generator: Any = None) -> Any:
    return jax.random.randint(out.key(), out.shape, low, high)


@lowers(aten.random.to)
def _random_to(out: Out, x: Any, high: int, *, generator: Any = None) -> Any:
    return jax.random.randint(out.key(), out.shape, 0, high)


@lowers(aten.randperm.default)
def _randperm(out: Out, n: int, **kwargs: Any) -> Any:
    return jax.random.permutation(out.key(), n)


@lowers(aten.multinomial.default)
def _multinomial(out: Out, weights: Any, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    scores = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(out.key(), scores, axis=-1, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(scores + jax.random.gumbel(out.key(), scores.shape), count)[1]
