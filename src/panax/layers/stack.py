"""Stacks: blocks of one repeating period, stored stacked along `layer` and run by a scan. A model runs one after the other."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..core import Module, scope, stack, stacked
from ..parallel import RematPolicy, rematerialize, scan_layers
from .block import Block, Context
from .whole_rows import run_block


class Stack(Module):
    """Layers of one repeating period.

    Attributes:
        first: The number of its first layer.
        repeats: Of the period.
        blocks: For each place in the period, the layers that have it.
    """

    first: int = eqx.field(static=True)
    repeats: int = eqx.field(static=True)
    blocks: tuple[Block, ...] = stacked("layer")

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, remat: RematPolicy, state: Any = None
    ) -> tuple[Float[Array, "batch residual embed"], Any]:
        """
        Args:
            state: Of this stack's reporting layers, where they have one, with a leading axis of these.

        Returns:
            The residual stream, and what its layers report, with such an axis too; None where none reports.
        """
        period = len(self.blocks)

        def one_block(x: jax.Array, block: Block, index: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            return run_block(block, x, context._replace(key=key), state)

        run = rematerialize(one_block, remat)

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, list[Any]]:
            blocks, repeat, states = scanned
            found = []
            for place, block in enumerate(blocks):
                index = self.first + repeat * period + place
                # The debugger runs layer by layer and knows which one it is in; a compiled scan is all of them at once.
                with scope(f"layers.{'*' if isinstance(index, Tracer) else int(index)}"):
                    x, reported = run(x, block, index, states[place])
                found += [] if reported is None else [reported]
            return x, found

        x, found = scan_layers(one_period, x, (self.blocks, jnp.arange(self.repeats), self._by_place(state)))
        if not found:
            return x, None
        return x, jax.tree.map(lambda *places: _interleaved(places), *found)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        context: Context,
        caches: Any,
        start: Int[Array, ""],
        state: Any = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        """As `Block.extend`; the caches are stacked like the layers."""

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, tuple[Any, ...]]:
            blocks, caches, states = scanned
            new = []
            for block, cache, state in zip(blocks, caches, states):
                x, cache = block.extend(x, context, cache, start, state)
                new.append(cache)
            return x, tuple(new)

        return jax.lax.scan(one_period, x, (self.blocks, caches, self._by_place(state)))

    def empty_caches(self, batch: int, length: int, dtype: Any) -> tuple[Any, ...]:
        return tuple(block.empty_cache(batch, length, dtype) for block in self.blocks)

    @property
    def layers(self) -> tuple[Block, ...]:
        """For each place in the period one layer, abstract."""

        def one(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

        return tuple(jax.tree.map(one, block) for block in self.blocks)

    @property
    def reporting(self) -> int:
        """How many of its layers report."""
        return self.repeats * sum(block.reports for block in self.blocks)

    def _by_place(self, state: Any) -> tuple[Any, ...]:
        """For each place in the period, its layers' states."""
        reports = [block.reports for block in self.blocks]
        rows = [slice(sum(reports[:place]), None, sum(reports)) if own else None for place, own in enumerate(reports)]
        return tuple(None if at is None else jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in rows)


def _interleaved(places: tuple[jax.Array, ...]) -> jax.Array:
    """What each place in a period found in each repeat, in the order of the layers."""
    return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])


def build_stacks(
    key: jax.Array, stacks: Sequence[tuple[Sequence[Any], int]], build: Callable[[jax.Array, Any], Block]
) -> tuple[Stack, ...]:
    """Draw the stacks.

    Args:
        stacks: (the kinds of one period's layers, repeats) of each.
        build: A layer of one kind.
    """
    found, first = [], 0
    for period, repeats in stacks:
        stack_key = jax.random.fold_in(key, first)
        blocks = tuple(
            stack(jax.random.fold_in(stack_key, place), repeats, lambda key, kind=kind: build(key, kind))
            for place, kind in enumerate(period)
        )
        found.append(Stack(blocks=blocks, first=first, repeats=repeats))
        first += repeats * len(period)
    return tuple(found)


def run_stacks(
    stacks: Sequence[Stack],
    x: Float[Array, "batch residual embed"],
    context: Context,
    remat: RematPolicy = "none",
    state: Any = None,
) -> tuple[Float[Array, "batch residual embed"], Any]:
    """As `Stack`, of all stacks one after the other."""
    found = []
    for stack_, own in zip(stacks, states_by_stack(stacks, state)):
        x, reported = stack_(x, context, remat, own)
        found += [] if reported is None else [reported]
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found) if found else None


def states_by_stack(stacks: Sequence[Stack], state: Any) -> list[Any]:
    """Each stack's part of what all reporting layers have."""
    ends = list(itertools.accumulate(stack_.reporting for stack_ in stacks))
    spans = [slice(end - stack_.reporting, end) for stack_, end in zip(stacks, ends)]
    return [jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in spans]


def layers_of(stacks: Sequence[Stack]) -> list[Block]:
    """Every layer, abstract, in their order."""
    return [layer for stack_ in stacks for _ in range(stack_.repeats) for layer in stack_.layers]
