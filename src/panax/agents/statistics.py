"""Running means and variances of all previous values, for the normalization of observations and rewards."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

_EPSILON = 1e-8


class Statistics(eqx.Module):
    """Statistics of each element of an array, over all arrays that were added.

    Attributes:
        count: Number of arrays.
        mean: Their mean.
        variance: Their variance, with the count as its divisor.
    """

    count: Float[Array, ""]
    mean: Float[Array, "..."]
    variance: Float[Array, "..."]

    @classmethod
    def create(cls, shape: tuple[int, ...]) -> "Statistics":
        """Create empty statistics, which leave the values that they normalize unchanged."""
        return cls(jnp.float32(0.0), jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))

    def update(self, values: Float[Array, "*seen"]) -> "Statistics":
        """Return the statistics updated with more arrays, along their leading axes; on a mesh, with those of
        all devices.

        Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances (1979).
        """
        axes = tuple(range(values.ndim - self.mean.ndim))
        number = jnp.float32(values.size // max(1, self.mean.size))
        mean, variance = values.mean(axis=axes), values.var(axis=axes)
        count = self.count + number
        mean_difference = mean - self.mean
        known = jnp.where(self.count > 0, self.variance, 0.0) * self.count
        squares = known + variance * number + mean_difference * mean_difference * self.count * number / count
        return Statistics(count, self.mean + mean_difference * number / count, squares / count)

    def normalize(self, values: Float[Array, "*seen"], limit: float) -> Float[Array, "*seen"]:
        """Subtract the mean, divide by the standard deviation, and clip to `limit` on both sides."""
        return self.scale(values - jnp.broadcast_to(self.mean, values.shape), limit)

    def scale(self, values: Float[Array, "*seen"], limit: float) -> Float[Array, "*seen"]:
        """Divide by the standard deviation only, and clip to `limit` on both sides."""
        deviation = jnp.sqrt(self.variance + _EPSILON)
        return jnp.clip(values / jnp.broadcast_to(deviation, values.shape), -limit, limit)
