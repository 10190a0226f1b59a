"""Distributions over actions, for each space of actions, from the outputs of a policy."""

import abc
import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Num

from ..core.errors import RecipeError
from ..core.validation import Validated
from ..environments import Box, Discrete, Space

Continuous = Literal["gaussian", "squashed"]

Numbers = Float[Array, "*rows number"]
"""A policy's outputs for an action: logits, or means followed by logarithms of standard deviations."""

_LOG_ROOT_2_PI = 0.5 * math.log(2 * math.pi)

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
"""Nodes and weights of Gauss-Hermite quadrature over the standard normal distribution: the mean of a function
is the sum of its values at the nodes, times the weights."""
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Distribution(Validated, abc.ABC):
    """A family of distributions over the actions of one space; the outputs of a policy select a member.

    Samples are stored as they are drawn. `action` converts them for the environment.
    """

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """Return the number of network outputs for one action."""

    @property
    def num_log_stds(self) -> int:
        """Return the number of log standard deviations, which are parameters independent of the observation."""
        return 0

    @abc.abstractmethod
    def sample(self, numbers: Numbers, keys: Key[Array, "*rows"]) -> Num[Array, "..."]:
        """Sample one action for each row, with the row's key."""

    @abc.abstractmethod
    def mode(self, numbers: Numbers) -> Num[Array, "..."]:
        """Return the most likely sample, not yet converted by `action`."""

    @abc.abstractmethod
    def log_prob(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        """Return the log probability, or log density, of the action for `sample`."""

    @abc.abstractmethod
    def entropy(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        """Return the entropy in nats, differentiable with respect to `numbers`; a family without a closed form
        may estimate it from `sample`."""

    def action(self, sample: Num[Array, "..."]) -> Num[Array, "..."]:
        """Convert a sample to the environment's action."""
        return sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Categorical(Distribution):
    """One of `count` choices; the outputs are logits.

    >>> round(Categorical(count=2).entropy(jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32)).item(), 4)
    0.6931
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecipeError(f"Categorical.count={self.count}; expected at least one choice")

    @property
    def num_outputs(self) -> int:
        return self.count

    def sample(self, numbers: Numbers, keys: Key[Array, "*rows"]) -> Num[Array, "..."]:
        return jax.vmap(jax.random.categorical)(keys, numbers).astype(jnp.int32)

    def mode(self, numbers: Numbers) -> Num[Array, "..."]:
        return numbers.argmax(axis=-1).astype(jnp.int32)

    def log_prob(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        # A mask instead of a gather, whose transpose is a scatter.
        chosen = jax.nn.one_hot(sample, self.count, dtype=jnp.bool_)
        return jnp.where(chosen, jax.nn.log_softmax(numbers), 0.0).sum(axis=-1)

    def entropy(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        logs = jax.nn.log_softmax(numbers)
        return -(jnp.exp(logs) * logs).sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagonalGaussian(Distribution):
    """Independent normal distributions; samples are clipped to the bounds of the space only when the
    environment acts on them.

    Densities are those of the samples before clipping, as in stable-baselines3.
    """

    space: Box

    @property
    def num_outputs(self) -> int:
        return self.space.size

    @property
    def num_log_stds(self) -> int:
        return self.space.size

    def sample(self, numbers: Numbers, keys: Key[Array, "*rows"]) -> Num[Array, "..."]:
        mean, log_deviation = jnp.split(numbers, 2, axis=-1)
        noise = jax.vmap(lambda key: jax.random.normal(key, (self.space.size,), jnp.float32))(keys)
        return mean + jnp.exp(log_deviation) * noise

    def mode(self, numbers: Numbers) -> Num[Array, "..."]:
        return jnp.split(numbers, 2, axis=-1)[0]

    def log_prob(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        mean, log_deviation = jnp.split(numbers, 2, axis=-1)
        distance = (sample - mean) * jnp.exp(-log_deviation)
        return (-0.5 * distance * distance - log_deviation - _LOG_ROOT_2_PI).sum(axis=-1)

    def entropy(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        _, log_deviation = jnp.split(numbers, 2, axis=-1)
        return (log_deviation + 0.5 + _LOG_ROOT_2_PI).sum(axis=-1)

    def action(self, sample: Num[Array, "..."]) -> Num[Array, "..."]:
        return self.space.clip(sample.reshape(*sample.shape[:-1], *self.space.shape)).astype(self.space.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquashedGaussian(DiagonalGaussian):
    """Normal distributions mapped by `tanh` into the bounds of the space, which must be finite.

    Densities are of actions in [-1, 1], including tanh's derivative, as in SAC and stable-baselines3. The
    bounds' widths, a constant, are omitted. Source: SAC (arXiv:1801.01290), appendix C.
    """

    def __post_init__(self) -> None:
        if not self.space.is_bounded:
            raise RecipeError(
                f"a squashed distribution needs actions with finite bounds, not {self.space}; use 'gaussian'"
            )

    def log_prob(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        return super().log_prob(numbers, sample) - _log_slope(sample).sum(axis=-1)

    def entropy(self, numbers: Numbers, sample: Num[Array, "..."]) -> Float[Array, "*rows"]:
        """Compute the normal distribution's entropy in closed form, and the mean log derivative of tanh by
        quadrature; `sample` is not used.

        The negated log density of `sample` has the same mean but another gradient, since `sample` is a
        constant.
        """
        mean, log_deviation = jnp.split(numbers, 2, axis=-1)
        noise = jnp.broadcast_to(jnp.asarray(_NODES, mean.dtype), (*mean.shape, len(_NODES)))
        slope = _log_slope(mean[..., None] + jnp.exp(log_deviation)[..., None] * noise)
        return super().entropy(numbers, sample) + (slope @ jnp.asarray(_WEIGHTS, mean.dtype)).sum(axis=-1)

    def action(self, sample: Num[Array, "..."]) -> Num[Array, "..."]:
        return self.rescale_action(jnp.tanh(sample))

    def rescale_action(self, unit: Float[Array, "*rows element"]) -> Num[Array, "..."]:
        """Scale actions in [-1, 1] to the bounds of the space, in its shape, as the environment expects them.

        >>> box = Box(low=0.0, high=(1.0, 10.0), shape=(2,))
        >>> SquashedGaussian(space=box).rescale_action(jnp.array([[-1.0, 0.0]])).tolist()
        [[0.0, 5.0]]
        """
        unit = unit.reshape(*unit.shape[:-1], *self.space.shape)
        low, high = (
            jnp.broadcast_to(jnp.asarray(bound, jnp.float32), unit.shape)
            for bound in (self.space.lower, self.space.upper)
        )
        return (low + 0.5 * (unit + 1.0) * (high - low)).astype(self.space.dtype)


def _log_slope(u: jax.Array) -> jax.Array:
    """Compute log(1 - tanh(u)^2) in a form that does not round to log 0."""
    return 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))


def make_distribution(space: Space, continuous: Continuous = "gaussian") -> Distribution:
    """Return the family for a space of actions.

    Raises:
        RecipeError: No family supports the space.

    >>> make_distribution(Discrete(count=4)).num_outputs
    4
    """
    if isinstance(space, Discrete):
        return Categorical(count=space.count)
    if isinstance(space, Box) and space.dtype == "float32":
        return (SquashedGaussian if continuous == "squashed" else DiagonalGaussian)(space=space)
    raise RecipeError(f"no distribution over the actions {space}; expected Discrete, or a Box of float32")
