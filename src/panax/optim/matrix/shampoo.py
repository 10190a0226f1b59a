"""Shampoo: each block of a matrix preconditioned from both sides (arXiv:1802.09568), with blocking and
grafting as in arXiv:2002.09018 and arXiv:2309.06497."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ..moments import Moments, check_decay_rates
from ..parameter import Parameter
from ..sharded.owner_shards import OwnedArray, map_one_by_one, map_to_owners
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import StateByKind, StateSpec, UpdateInputs
from .blocks import MatrixBlocks
from .matrix_optimizer import MatrixOptimizer, matmul_float32, matrix_statistic, statistic_shards
from .orientation import TransposedView
from .roots import inverse_root

LEFT, RIGHT = "left", "right"
LEFT_ROOT, RIGHT_ROOT = "left_root", "right_root"
NEXT_LEFT_ROOT, NEXT_RIGHT_ROOT = "next_left_root", "next_right_root"
STATISTICS, ROOTS, NEXT_ROOTS = (LEFT, RIGHT), (LEFT_ROOT, RIGHT_ROOT), (NEXT_LEFT_ROOT, NEXT_RIGHT_ROOT)

POWER = 4
"""Order of the inverse root, for each of two sides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shampoo(MatrixOptimizer):
    """Shampoo for matrices that map one space to another, AdamW for all other parameters.

    Each array's update is rescaled to the norm of AdamW's (grafting), so a learning rate and weight decay
    tuned for AdamW fit; until the first roots exist, the update is AdamW's. A separate program computes roots
    after every `precondition_frequency` steps; updates use them `root_delay` steps later.

    Attributes:
        block: Maximum side of a block; larger matrices are cut evenly.
        precondition_frequency: Number of steps between computations of the roots.
        root_delay: Roots of the statistics after step n are used from step n + `root_delay` on: 1 for the
            next step, or more if the program that computes them runs alongside the steps and needs the time.
            Above 1, the upcoming roots are stored in addition to those in use.
        b_statistics: Decay rate of the running means of G G^T and G^T G of each block.
        ridge: Added to a side's statistics before taking a root, relative to their Frobenius norm.
        b1: Decay rate of the mean of gradients, which is preconditioned; `b2` and `epsilon` are AdamW's, for
            grafting and for other parameters.
    """

    steps_as_adam = True

    block: int = 1024
    precondition_frequency: int = 10
    root_delay: int = 1
    b_statistics: float = 0.95
    ridge: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b_statistics=self.b_statistics)
        if self.block < 1 or self.precondition_frequency < 1:
            raise RecipeError(
                f"optimizer.block={self.block}, optimizer.precondition_frequency={self.precondition_frequency}; expected 1 or "
                f"more, usually 1024 and 10"
            )
        if not 1 <= self.root_delay <= self.precondition_frequency:
            raise RecipeError(
                f"optimizer.root_delay={self.root_delay}; expected 1 to {self.precondition_frequency}, the steps until the next "
                f"roots (optimizer.precondition_frequency)"
            )
        if self.ridge <= 0:
            raise RecipeError(
                f"optimizer.ridge={self.ridge}; expected a positive number, usually 1e-6: statistics of few gradients have no "
                f"inverse without"
            )

    @property
    def _renews(self) -> tuple[str, str]:
        """State names that new roots are written to."""
        return ROOTS if self.root_delay == 1 else NEXT_ROOTS

    def blocks(self, parameter: Parameter) -> MatrixBlocks:
        """Return how a parameter's matrices are cut into blocks."""
        return MatrixBlocks.of(TransposedView.of(parameter).shape, self.block)

    def matrix_state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        blocks = self.blocks(parameter)
        kept = Moments.state_specs(parameter)
        for *kinds, later, size in zip(STATISTICS, ROOTS, NEXT_ROOTS, blocks.size):
            kinds += [later] if self._renews == NEXT_ROOTS else []
            kept |= dict.fromkeys(kinds, matrix_statistic(parameter, (*blocks.counts, size, size)))
        return kept

    def update_matrices(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        moments = {name: Moments.update(inputs[name], self.b1, self.b2) for name in shards}
        preconditioned = self._preconditioned(shards, inputs, moments)
        updates: dict[str, tuple[jax.Array, dict[str, jax.Array]]] = {}
        for name, shard in shards.items():
            entry, (towards, *statistics) = inputs[name], preconditioned[name]
            direction = moments[name].direction(entry, self.b1, self.b2, self.epsilon)
            size, norm = shard.norm(towards), shard.norm(direction)
            # AdamW's update if there are no roots yet, or if all gradients of this matrix were zero.
            update = jnp.where(size > 0, towards * (norm / jnp.where(size > 0, size, 1)), direction)
            kept = {
                **moments[name].arrays,
                **dict(zip(STATISTICS, statistics)),
                **{kind: entry.state[kind] for kind in {*ROOTS, *self._renews}},
            }
            updates[name] = -entry.rate * (update + entry.decay * entry.value), kept
        return updates

    def _preconditioned(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs], moments: Mapping[str, Moments]
    ) -> dict[str, list[jax.Array]]:
        """Compute the preconditioned mean of gradients, and the statistics after this gradient."""

        def work(
            gradient: jax.Array, mean: jax.Array, left: jax.Array, right: jax.Array, *roots: jax.Array
        ) -> list[jax.Array]:
            _, rows, columns = gradient.shape
            blocks = MatrixBlocks.of((rows, columns), self.block)
            cut, share = blocks.split(gradient), 1 - self.b_statistics
            left = self.b_statistics * left + share * matmul_float32(cut, cut.mT)
            right = self.b_statistics * right + share * matmul_float32(cut.mT, cut)
            towards = matmul_float32(matmul_float32(roots[0], blocks.split(mean)), roots[1])
            return [blocks.join(towards), left, right]

        owned_inputs, arrays, returned = {}, {}, {}
        for name, shard in shards.items():
            matrix, statistics = OwnedArray.of(shard), statistic_shards(shard, self.state_specs(shard.parameter))
            owned_inputs[name] = [matrix, matrix, *(statistics[kind] for kind in (*STATISTICS, *ROOTS))]
            arrays[name] = [
                inputs[name].gradient,
                moments[name].mean,
                *(inputs[name].state[kind] for kind in (*STATISTICS, *ROOTS)),
            ]
            returned[name] = [matrix, *(statistics[kind] for kind in STATISTICS)]
        return map_to_owners(map_one_by_one(work), owned_inputs, arrays, returned)

    def renewal_due(self, number: int) -> bool:
        return number % self.precondition_frequency == 0

    @property
    def renewal_description(self) -> str:
        delayed = "" if self.root_delay == 1 else f", used from {self.root_delay} steps later on"
        return f"after every {self.precondition_frequency} steps{delayed}"

    def renew(self, shards: Mapping[str, ParameterShard], states: Mapping[str, dict[str, jax.Array]]) -> StateByKind:
        def work(*statistics: jax.Array) -> list[jax.Array]:
            return [inverse_root(each, POWER, self.ridge) for each in statistics]

        parts, arrays = {}, {}
        for name, shard in shards.items():
            if self.is_matrix(shard.parameter.semantic_axes):
                known = statistic_shards(shard, self.state_specs(shard.parameter))
                parts[name] = [known[kind] for kind in STATISTICS]
                arrays[name] = [states[name][kind] for kind in STATISTICS]
        return {
            name: dict(zip(self._renews, roots))
            for name, roots in map_to_owners(map_one_by_one(work), parts, arrays, parts).items()
        }

    def adopt_renewed(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        adopted = number - (self.root_delay - 1)
        if self.root_delay == 1 or adopted < 1 or not self.renewal_due(adopted):
            return state
        # Swap without a copy; the next renewal overwrites the old roots.
        return {**state, **{kind: state[other] for kind, other in zip((*ROOTS, *NEXT_ROOTS), (*NEXT_ROOTS, *ROOTS))}}
