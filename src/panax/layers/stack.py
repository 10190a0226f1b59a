"""Stacks: the blocks of one repeating period, stored stacked along `layer` and run by a scan. A model runs
its stacks in sequence."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from ..core import Module, scope, stack, stacked_modules
from ..parallel import RematPolicy, rematerialize, scan_layers
from .block import Block, Context
from .whole_rows import run_block


class Stack(Module):
    """Layers with one repeating period.

    Attributes:
        first: Index of its first layer in the model.
        repeats: Number of periods.
        blocks: For each position in the period, the layers at that position, stacked.
    """

    first: int = eqx.field(static=True)
    repeats: int = eqx.field(static=True)
    blocks: tuple[Block, ...] = stacked_modules("layer")

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, remat: RematPolicy, state: Any = None
    ) -> tuple[Float[Array, "batch residual embed"], Any]:
        """Run all layers in sequence.

        Args:
            state: State of this stack's reporting layers, with a leading axis over them; None if they have
                none.

        Returns:
            The residual stream, and the reports of the layers with such a leading axis; None if no layer
            reports.
        """
        period = len(self.blocks)

        def one_block(x: jax.Array, block: Block, index: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            return run_block(block, x, context._replace(key=key), state)

        run = rematerialize(one_block, remat)

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, list[Any]]:
            blocks, repeat, states = scanned
            reports = []
            for place, block in enumerate(blocks):
                index = self.first + repeat * period + place
                # The debugger runs layer by layer, with concrete indices; in a compiled scan the index is traced.
                with scope(f"layers.{'*' if isinstance(index, Tracer) else int(index)}"):
                    x, reported = run(x, block, index, states[place])
                reports += [] if reported is None else [reported]
            return x, reports

        x, reports = scan_layers(one_period, x, (self.blocks, jnp.arange(self.repeats), self.split_state(state)))
        if not reports:
            return x, None
        return x, jax.tree.map(lambda *places: _interleaved(places), *reports)

    @property
    def layers(self) -> tuple[Block, ...]:
        """One abstract layer for each position in the period."""

        def one(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

        return tuple(jax.tree.map(one, block) for block in self.blocks)

    @property
    def num_reporting(self) -> int:
        """Number of layers that report."""
        return self.repeats * sum(block.reports for block in self.blocks)

    def split_state(self, state: Any) -> tuple[Any, ...]:
        """Split the state of the reporting layers by position in the period; None for layers that do not report."""
        reports = [block.reports for block in self.blocks]
        rows = [
            slice(sum(reports[:place]), None, sum(reports)) if reports_here else None
            for place, reports_here in enumerate(reports)
        ]
        return tuple(None if at is None else jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in rows)


def _interleaved(places: tuple[jax.Array, ...]) -> jax.Array:
    """Merge the per-position reports of all periods into layer order."""
    return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])


def build_stacks(
    key: jax.Array, stacks: Sequence[tuple[Sequence[Any], int]], build: Callable[[jax.Array, Any], Block]
) -> tuple[Stack, ...]:
    """Initialize the stacks.

    Args:
        stacks: For each stack, (the kinds of one period's layers, number of periods).
        build: Initializes a layer of one kind from a key.
    """
    built, first = [], 0
    for period, repeats in stacks:
        stack_key = jax.random.fold_in(key, first)
        blocks = tuple(
            stack(jax.random.fold_in(stack_key, place), repeats, lambda key, kind=kind: build(key, kind))
            for place, kind in enumerate(period)
        )
        built.append(Stack(blocks=blocks, first=first, repeats=repeats))
        first += repeats * len(period)
    return tuple(built)


def run_stacks(
    stacks: Sequence[Stack],
    x: Float[Array, "batch residual embed"],
    context: Context,
    remat: RematPolicy = "none",
    state: Any = None,
) -> tuple[Float[Array, "batch residual embed"], Any]:
    """Run several stacks in sequence, as `Stack` does."""
    reports = []
    for stack_, stack_state in zip(stacks, split_state_by_stack(stacks, state)):
        x, reported = stack_(x, context, remat, stack_state)
        reports += [] if reported is None else [reported]
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else None


def split_state_by_stack(stacks: Sequence[Stack], state: Any) -> list[Any]:
    """Split the state of all reporting layers by stack."""
    ends = list(itertools.accumulate(stack_.num_reporting for stack_ in stacks))
    spans = [slice(end - stack_.num_reporting, end) for stack_, end in zip(stacks, ends)]
    return [jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in spans]


def list_layers(stacks: Sequence[Stack]) -> list[Block]:
    """Return every layer, abstract, in order."""
    return [layer for stack_ in stacks for _ in range(stack_.repeats) for layer in stack_.layers]
