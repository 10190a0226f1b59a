"""SOAP: Adam in the eigenbasis of Shampoo's statistics (arXiv:2409.11321)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ..moments import MEAN, SQUARE, Moments, bias_correction, check_decay_rates
from ..parameter import Parameter
from ..sharded.owner_shards import OwnedArray, map_one_by_one, map_to_owners
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import StateByKind, StateSpec, UpdateInputs
from .matrix_optimizer import MatrixOptimizer, matmul_float32, matrix_statistic, statistic_shards
from .orientation import TransposedView

STATISTICS = ("left", "right")
BASES = ("left_basis", "right_basis")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soap(MatrixOptimizer):
    """SOAP for matrices that map one space to another, AdamW for all other parameters.

    A gradient is rotated into the eigenbases of its row and column statistics, where Adam tracks its squares;
    the update is rotated back. A separate program updates the bases after the first step and after every
    `precondition_frequency` steps, by one power iteration followed by a QR factorization. The first step only
    initializes the statistics from its gradient; it does not update matrices.

    Attributes:
        precondition_frequency: Number of steps between updates of the bases.
        b_statistics: Decay rate of the running means of G G^T and G^T G.
        largest: Sides of a matrix larger than this have no statistics and are not rotated.
        b1: Decay rate of the mean of gradients; `b2` and `epsilon` apply to its squares. All three also serve
            AdamW for other parameters.
    """

    steps_as_adam = True

    precondition_frequency: int = 10
    b_statistics: float = 0.95
    largest: int = 8192
    b1: float = 0.95
    b2: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b_statistics=self.b_statistics)
        if self.precondition_frequency < 1 or self.largest < 2:
            raise RecipeError(
                f"optimizer.precondition_frequency={self.precondition_frequency}, optimizer.largest={self.largest}; expected 1 "
                f"or more, usually 10, and 2 or more"
            )

    def sides(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the sides of a matrix that have a basis: 0 for rows, 1 for columns."""
        return self._sides(TransposedView.of(parameter).shape)

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(side for side, size in enumerate(shape) if 1 < size <= self.largest)

    def matrix_state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        kept, shape = Moments.state_specs(parameter), TransposedView.of(parameter).shape
        for side in self._sides(shape):
            for kind in (STATISTICS[side], BASES[side]):
                kept[kind] = matrix_statistic(parameter, (shape[side], shape[side]))
        return kept

    def update_matrices(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        if not shards:
            return {}
        # One update fewer than AdamW's count: there is no basis yet for the first gradient.
        before = next(iter(inputs.values())).num_updates
        has_statistics = before > 0
        since = jnp.maximum(before - 1, 0)

        def work(gradient: jax.Array, mean: jax.Array, square: jax.Array, *kept: jax.Array) -> list[jax.Array]:
            sides = self._sides(gradient.shape[1:])
            statistics, bases = kept[: len(sides)], dict(zip(sides, kept[len(sides) :]))
            square = self.b2 * square + (1 - self.b2) * jnp.square(_rotate(gradient, bases))
            towards = _rotate(mean / bias_correction(self.b1, since), bases)
            towards = towards / (jnp.sqrt(square / bias_correction(self.b2, since)) + self.epsilon)
            after = [
                self.b_statistics * one + (1 - self.b_statistics) * _statistic(gradient, side)
                for side, one in zip(sides, statistics)
            ]
            return [_rotate(towards, bases, back=True), square, *after]

        # Owners receive (gradient, mean, square, statistics..., bases...) and return (update, square, statistics...).
        owned_inputs, arrays, returned = {}, {}, {}
        means: dict[str, jax.Array] = {}
        for name, shard in shards.items():
            entry, matrix, kept = (
                inputs[name],
                OwnedArray.of(shard),
                statistic_shards(shard, self.state_specs(shard.parameter)),
            )
            gradient = entry.gradient
            mean = self.b1 * entry.state[MEAN].astype(gradient.dtype) + (1 - self.b1) * gradient
            means[name] = jnp.where(has_statistics, mean, 0)
            square = jnp.where(has_statistics, entry.state[SQUARE].astype(gradient.dtype), 0)
            sides = self.sides(shard.parameter)
            kinds = [STATISTICS[side] for side in sides] + [BASES[side] for side in sides]
            owned_inputs[name] = [matrix, matrix, matrix, *(kept[kind] for kind in kinds)]
            arrays[name] = [gradient, means[name], square, *(entry.state[kind] for kind in kinds)]
            returned[name] = [matrix, matrix, *(kept[STATISTICS[side]] for side in sides)]
        updates = {}
        for name, (towards, square, *statistics) in map_to_owners(
            map_one_by_one(work), owned_inputs, arrays, returned
        ).items():
            entry, sides = inputs[name], self.sides(shards[name].parameter)
            kept = {MEAN: means[name], SQUARE: jnp.where(has_statistics, square, 0)}
            kept |= {STATISTICS[side]: one for side, one in zip(sides, statistics)}
            kept |= {BASES[side]: entry.state[BASES[side]] for side in sides}
            updates[name] = jnp.where(has_statistics, -entry.rate * (towards + entry.decay * entry.value), 0), kept
        return updates

    def renewal_due(self, number: int) -> bool:
        return number == 1 or number % self.precondition_frequency == 0

    @property
    def renewal_description(self) -> str:
        return f"after the first step, and every {self.precondition_frequency} steps"

    def renew(self, shards: Mapping[str, ParameterShard], states: Mapping[str, dict[str, jax.Array]]) -> StateByKind:
        def work(square: jax.Array, *both: jax.Array) -> list[jax.Array]:
            sides = self._sides(square.shape[1:])
            bases = []
            for side, statistics, basis in zip(sides, both, both[len(sides) :]):
                basis, order = _next_basis(statistics, basis)
                bases.append(basis)
                square = jnp.take_along_axis(square, jnp.expand_dims(order, 2 - side), axis=1 + side)
            return [square, *bases]

        parts, arrays, returned, kinds = {}, {}, {}, {}
        for name, shard in shards.items():
            if self.is_matrix(shard.parameter.semantic_axes) and (sides := self.sides(shard.parameter)):
                known = statistic_shards(shard, self.state_specs(shard.parameter))
                bases = [BASES[side] for side in sides]
                read = [STATISTICS[side] for side in sides] + bases
                parts[name] = [OwnedArray.of(shard), *(known[kind] for kind in read)]
                arrays[name] = [states[name][SQUARE], *(states[name][kind] for kind in read)]
                returned[name] = [OwnedArray.of(shard), *(known[kind] for kind in bases)]
                kinds[name] = (SQUARE, *bases)
        return {
            name: dict(zip(kinds[name], new))
            for name, new in map_to_owners(map_one_by_one(work), parts, arrays, returned).items()
        }


def _statistic(matrices: jax.Array, side: int) -> jax.Array:
    return matmul_float32(matrices.mT, matrices) if side else matmul_float32(matrices, matrices.mT)


def _rotate(x: jax.Array, bases: Mapping[int, jax.Array], *, back: bool = False) -> jax.Array:
    """Rotate matrices into the bases of their sides, or back; a side without a basis is not rotated."""
    if 0 in bases:
        x = matmul_float32(bases[0] if back else bases[0].mT, x)
    if 1 in bases:
        x = matmul_float32(x, bases[1].mT if back else bases[1])
    return x


def _next_basis(statistics: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute an orthonormal basis closer to the eigenvectors, largest eigenvalues first.

    Args:
        statistics: (matrices, side, side), symmetric; for zeros, every basis is an eigenbasis.
        basis: The previous basis, in columns; zeros if there is none yet.

    Returns:
        The new basis, and the order in which it takes the vectors of the old one.
    """
    # Rescale to about 1: the statistics of small gradients are too small to factorize.
    scale = jnp.max(jnp.abs(statistics), (1, 2), keepdims=True)
    known = scale > 0
    statistics = statistics / jnp.where(known, scale, 1)
    identity = jnp.broadcast_to(jnp.eye(statistics.shape[-1], dtype=statistics.dtype), statistics.shape)
    begins = ~jnp.any(basis != 0, (1, 2), keepdims=True)
    ahead = matmul_float32(statistics, jnp.where(begins, identity, basis))
    order = jnp.argsort(-jnp.sum(basis * ahead, 1), axis=1)
    turned = jnp.linalg.qr(jnp.take_along_axis(ahead, order[:, None], 2))[0]
    # The full eigendecomposition costs ten times as much, and runs only once.
    first = jax.lax.cond(jnp.any(begins & known), lambda: jnp.linalg.eigh(statistics)[1][:, :, ::-1], lambda: identity)
    usual = jnp.broadcast_to(jnp.arange(order.shape[-1]), order.shape)
    new_basis = jnp.where(begins, jnp.where(known, first, identity), jnp.where(known, turned, basis))
    return new_basis, jnp.where((known & ~begins)[:, 0], order, usual)
