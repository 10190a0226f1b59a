"""Running means and variances of all that was seen so far: what observations and rewards are normalised by."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

_EPSILON = 1e-8


class Statistics(eqx.Module):
    """Of each element of an array, over all arrays that were added.

    Attributes:
        count: How many.
        mean: Theirs.
        variance: Theirs, divided by the count.
    """

    count: Float[Array, ""]
    mean: Float[Array, "..."]
    variance: Float[Array, "..."]

    @classmethod
    def create(cls, shape: tuple[int, ...]) -> "Statistics":
        """Of nothing: what is normalised by it stays as it is."""
        return cls(jnp.float32(0.0), jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))

    def update(self, values: Float[Array, "*seen"]) -> "Statistics":
        """With more arrays, whose leading axes are counted over; on a mesh, over those of all devices.

        Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
        """
        axes = tuple(range(values.ndim - self.mean.ndim))
        number = jnp.float32(values.size // max(1, self.mean.size))
        mean, variance = values.mean(axis=axes), values.var(axis=axes)
        count = self.count + number
        apart = mean - self.mean
        known = jnp.where(self.count > 0, self.variance, 0.0) * self.count
        squares = known + variance * number + apart * apart * self.count * number / count
        return Statistics(count, self.mean + apart * number / count, squares / count)

    def normalize(self, values: Float[Array, "*seen"], limit: float) -> Float[Array, "*seen"]:
        """Less the mean, by the standard deviation, clipped to `limit` on both sides."""
        return self.scale(values - jnp.broadcast_to(self.mean, values.shape), limit)

    def scale(self, values: Float[Array, "*seen"], limit: float) -> Float[Array, "*seen"]:
        """By the standard deviation alone, clipped to `limit` on both sides."""
        deviation = jnp.sqrt(self.variance + _EPSILON)
        return jnp.clip(values / jnp.broadcast_to(deviation, values.shape), -limit, limit)
