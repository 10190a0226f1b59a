"""Distribution of a model's layers over pipeline stages: which layers a stage holds, how they get there, and
how it runs them.

Between steps, layers are stored where they are computed if every stage has the same number of layers,
adjacent in storage. Otherwise (126 layers on 16 stages, several chunks per stage, two kinds of stacks) they
are stored sharded along `embed`, as one array that is the same on any mesh. An all-to-all then moves each
stage's layers to it at the beginning of a step, and their gradients back at the end.

Layers with different parameters, such as dense ones and mixtures of experts, cannot share an array: adjacent
layers with equal parameters form a run (`units.py`), and a stage holds its part of each run.

Terms: a stage holds `chunks` virtual stages; a chunk has `slots` for units of each run, some of which may be
empty.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import current_layout, current_target, logical_axes, use_layout
from ...core.layout.declarations import declare_branch_probs
from ...core.layout.layout import Layout, axis_size
from ...core.protocols import Axes
from ...parallel import RematPolicy, rematerialize, scan_layers
from ...parallel.pipeline import AXIS
from ...parallel.schedules import layers_by_stage
from ...spmd.collectives import scatter_dims
from ...spmd.sharding_marks import ValueState, assert_sharding
from ...spmd.step_gather import FixedWeight, StepWeight, step_gather_dtype
from ...spmd.weight_gather import gather_weight_as
from ...spmd.weights import gather_axes, gathers_together
from ..block import Context
from ..stack import Stack
from ..units import LayerUnit, group_runs


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of this stage.

    Attributes:
        runs: The stage's part of each run, in layer order.
        stacks: The model's stacks, as stored.
        reporting: Number of reporting layers in the whole model.
    """

    runs: tuple["StageRun", ...]
    stacks: Sequence[Stack]
    reporting: int

    @classmethod
    def of(
        cls, model_stacks: Sequence[Stack], chunks: int, dtype: Any, *, trainable: Sequence[Any] | None = None
    ) -> "StageLayers":
        """Move each stage's layers to it, and gather them in `dtype` if weights are gathered once per
        step.

        Args:
            trainable: Bools with the structure of the stacks: weights that are not trained become
                `FixedWeight`. None if no gradients are computed.
        """
        stages, runs, start = axis_size(AXIS), [], 0
        groups = group_runs(model_stacks)
        reporting = (
            unit.first + place
            for group in groups
            for unit in group
            for place, reports in enumerate(unit.reports)
            if reports
        )
        rows = {layer: row for row, layer in enumerate(reporting)}
        unit_indices = layers_by_stage(sum(map(len, groups)), stages=stages, chunks=chunks)
        for group in groups:
            # order: [stage, chunk, slot] to the unit's index in its run, padded with -1 to equal length.
            units = [
                [[n - start for n in chunk if start <= n < start + len(group)] for chunk in stage]
                for stage in unit_indices
            ]
            longest = max(len(chunk) for stage in units for chunk in stage)
            order = np.array([[[*chunk, *[-1] * (longest - len(chunk))] for chunk in stage] for stage in units])
            alone = len(groups) == 1
            run = StageRun.of(group, order, model_stacks, dtype, rows, alone=alone)
            runs.append(run.bring(model_stacks, model_stacks if trainable is None else trainable))
            start += len(group)
        return cls(tuple(runs), model_stacks, len(rows))

    @property
    def weights(self) -> list[list[Any]]:
        """The weights of each run, with the leading axes [chunk, slot]."""
        return [run.weights for run in self.runs]

    @property
    def chunks(self) -> int:
        return self.runs[0].order.shape[1]

    def run(
        self, weights: list[list[Any]], x: jax.Array, context: Context, chunk: jax.Array, remat: RematPolicy, state: Any
    ) -> tuple[jax.Array, Any]:
        """Run one chunk's layers in sequence; the reports are placed in an array with a row per reporting
        layer of the model."""
        total = None
        for run, run_weights in zip(self.runs, weights):
            x, reports = run.run(run_weights, x, context, chunk, remat, state)
            for rows, terms in reports:
                placed = jax.tree.map(lambda t, rows=rows: _in_rows(t, rows, self.reporting), terms)
                total = placed if total is None else jax.tree.map(jnp.add, total, placed)
        return x, total

    def restore_grads(self, gradients: list[list[Any]]) -> Any:
        """Return gradients with the structure of `weights` to the storage layout of the stacks."""
        stacks = list(self.stacks)
        for run, run_gradients in zip(self.runs, gradients):
            flat = [None if g is None else run.return_grad(g, axes) for g, axes in zip(run_gradients, run.axes)]
            for number, stack in zip(
                run.stack_indices, _by_stack([self.stacks[n] for n in run.stack_indices], flat, run.period)
            ):
                stacks[number] = stack
        return tuple(stacks)


@dataclasses.dataclass(frozen=True)
class StageRun:
    """A stage's part of a run of units with equal parameters.

    Attributes:
        units: All units of the run.
        order: [stage, chunk, slot] to unit; -1 for an empty slot.
        weights: The leaves of a unit, each with the leading axes [chunk, slot].
        treedefs: The distinct units by static settings (such as windows).
        unit_kinds: For each unit, the index of its treedef.
        rows: For each unit, the indices of its reporting layers among the model's reporting layers.
        axes: The logical axes of each leaf, `layer` first.
        alone: True if it is the only run. Running an empty slot then costs no time, since other stages fill
            theirs.
        dtype: The dtype in which weights are gathered.
    """

    layout: Layout
    units: list[LayerUnit]
    order: np.ndarray
    weights: list[Any]
    treedefs: list[Any]
    unit_kinds: np.ndarray
    rows: np.ndarray
    axes: list[Axes]
    alone: bool
    dtype: Any

    @classmethod
    def of(
        cls,
        units: list[LayerUnit],
        order: np.ndarray,
        model_stacks: Sequence[Stack],
        dtype: Any,
        rows: dict[int, int],
        *,
        alone: bool,
    ) -> "StageRun":
        layout = current_layout()
        assert layout is not None
        period, numbers = len(units[0].reports), sorted({unit.stack for unit in units})
        stacks = [model_stacks[n] for n in numbers]
        # Units of equal structure share a branch of the program; a unit's kind is the index of its structure.
        treedefs: list[Any] = []
        kinds: list[int] = []
        for stack in stacks:
            places = [stack.blocks] if period > 1 else [(block,) for block in stack.blocks]
            structures = [jax.tree.structure(blocks) for blocks in places]
            for treedef in structures:
                if treedef not in treedefs:
                    treedefs.append(treedef)
            kinds += [treedefs.index(treedef) for treedef in structures] * stack.repeats
        axes = list(treedefs[0].flatten_up_to(logical_axes(stacks[0]).blocks[:period]))
        unit_rows = [
            [rows[unit.first + place] for place, reports in enumerate(unit.reports) if reports] for unit in units
        ]
        run = cls(
            layout, units, order, [], treedefs, np.array(kinds), np.array(unit_rows, np.int32), axes, alone, dtype
        )
        return run

    def bring(self, model_stacks: Sequence[Stack], trainable: Sequence[Any]) -> "StageRun":
        """Return the run with this stage's part of its weights."""
        stacks = [model_stacks[n] for n in self.stack_indices]
        trained = _list_trained(stacks, [trainable[n] for n in self.stack_indices], self.period)
        together = self.treedefs[0].flatten_up_to(_gathers_together(stacks[0].blocks[: self.period]))
        weights = []
        for leaf, axes, is_trained, apart in zip(
            _by_unit(stacks, self.period), self.axes, trained, together, strict=True
        ):
            weight = self.bring_to_stage(leaf, axes, stays_split=apart)
            weights.append(weight if is_trained else FixedWeight(weight))
        return dataclasses.replace(self, weights=weights)

    @property
    def period(self) -> int:
        """Number of layers per unit."""
        return len(self.units[0].reports)

    @property
    def stack_indices(self) -> list[int]:
        """Indices of the stacks that the run spans."""
        return sorted({unit.stack for unit in self.units})

    @property
    def _all_must_run(self) -> bool:
        """True if a stage must run empty slots too, because the units of other stages wait for its collective
        permutes."""
        rings = self.layout.sizes.get("context", 1) > 1 or self.layout.overlap
        return rings and not current_target().traits.permutes_apart

    @property
    def is_stored_in_place(self) -> bool:
        """True if the layers are stored where they are computed."""
        return self.layout.storage(("layer",))[0] == (AXIS,)

    def run(
        self, weights: list[Any], x: jax.Array, context: Context, chunk: jax.Array, remat: RematPolicy, state: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array, Any]]]:
        """Run one chunk's units; return the output, and for each reporting layer of a unit its rows and
        report, with a leading axis of slots."""
        # mine: [slot] to unit for this stage and chunk; the other arrays are indexed alike.
        mine = jnp.asarray(self.order)[jax.lax.axis_index(AXIS), chunk]
        kinds = jnp.asarray(self.unit_kinds)[mine]
        first = jnp.asarray([unit.first for unit in self.units])[mine]
        rows = jnp.asarray(self.rows)[mine]

        def one(x: jax.Array, leaves: list[Any], unit: Any, kind: Any, first: Any, rows: Any) -> tuple[jax.Array, Any]:
            def branch(treedef: Any) -> Any:
                return lambda x, leaves: _run_blocks(treedef.unflatten(leaves), x, context, first, rows, state)

            # All stages run one program, so units of different structure are branches, chosen by the unit's kind.
            branches = [branch(treedef) for treedef in self.treedefs]

            def chosen(x: jax.Array, leaves: list[Any]) -> tuple[jax.Array, Any]:
                if len(branches) == 1:
                    return branches[0](x, leaves)
                with declare_branch_probs(*np.bincount(self.unit_kinds) / len(self.unit_kinds)):
                    return jax.lax.switch(kind, branches, x, leaves)

            # Rematerialize inside the condition below: outside, it would copy the weights to save them.
            unit_of = rematerialize(chosen, remat)

            if (self.order >= 0).all():
                return unit_of(x, leaves)
            # Run the empty slot and discard its result if that is free or required; otherwise skip it.
            if self.alone or self._all_must_run:
                y, reports = unit_of(x, leaves)
                return jnp.where(unit >= 0, y, x), reports
            nothing = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(unit_of, x, leaves)[1]
            )
            filled = (self.order >= 0).mean(axis=(1, 2)).max()
            with declare_branch_probs(1 - filled, filled):
                return jax.lax.cond(unit >= 0, unit_of, lambda x, leaves: (x, nothing), x, leaves)

        x, reports = scan_layers(
            lambda x, scanned: one(x, *scanned), x, (weights, mine, kinds, first, rows), may_unroll=False
        )
        # Reports of empty slots are placeholders; row -1 marks them.
        filled = jnp.where((mine >= 0)[:, None], rows, -1)
        return x, [(filled[:, place], terms) for place, terms in enumerate(reports)]

    def bring_to_stage(self, leaf: jax.Array, axes: Axes, *, stays_split: bool) -> Any:
        """Convert a stored leaf of all units to this stage's part of it, [chunk, slot, ...].

        Args:
            stays_split: True for a part of a weight that gathers its own parts at each use.
        """
        chunks, slots = self.order.shape[1:]
        dim = self._split_dim(axes)
        per_step = self.layout.zero.gathers_per_step and not stays_split
        gathers = self._gathers(axes)
        # Cast before communication if the weight is gathered or moved once per step.
        early = per_step and (any(gathers) or (dim is not None and not self.is_stored_in_place))
        value = leaf.astype(step_gather_dtype(axes, self.dtype)) if early else leaf
        if not self.is_stored_in_place:
            # Empty slots hold unit 0 as a placeholder.
            order = np.maximum(self.order, 0)
            if dim is None:
                value = value[jnp.asarray(order.reshape(len(order), -1))[jax.lax.axis_index(AXIS)]]
            else:
                value = jax.lax.all_to_all(value[order.reshape(-1)], AXIS, split_axis=0, concat_axis=dim, tiled=True)

        def by_chunk(x: jax.Array) -> jax.Array:
            return x.reshape(chunks, slots, *x.shape[1:])

        if value.dtype == leaf.dtype and not (per_step and any(gathers)):
            return by_chunk(value)
        scattered = per_step and not self.layout.zero.scatters_per_step
        gathered = gather_weight_as(value, axes, gathers, value.dtype) if per_step else value
        slot = jnp.zeros(value.shape if scattered else gathered.shape, leaf.dtype)
        return StepWeight(by_chunk(gathered), by_chunk(slot), scattered)

    def return_grad(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        """Convert a gradient with the layout of `bring_to_stage` to the storage layout of all units."""
        gradient = gradient.reshape(-1, *gradient.shape[2:])
        if self.layout.zero.scatters_per_step:
            gradient = scatter_dims(gradient, self._gathers(axes))
        if self.is_stored_in_place:
            return gradient
        dim, order = self._split_dim(axes), self.order.reshape(len(self.order), -1)
        count = len(self.unit_kinds)
        if dim is None:
            places = jnp.asarray(np.where(order < 0, count, order))[jax.lax.axis_index(AXIS)]
        else:
            gradient = jax.lax.all_to_all(gradient, AXIS, split_axis=dim, concat_axis=0, tiled=True)
            places = np.where(order < 0, count, order).reshape(-1)
        placed = jnp.zeros((count, *gradient.shape[1:]), gradient.dtype).at[places].set(gradient, mode="drop")
        return assert_sharding(placed, {AXIS: ValueState.PARTIAL if dim is None else ValueState.SPLIT}, dim or 0)

    def _split_dim(self, axes: Axes) -> int | None:
        """Return the dimension, other than the layers', that is sharded over stages in storage."""
        return next((dim for dim, stored in enumerate(self.layout.storage(axes)) if AXIS in stored), None)

    def _gathers(self, axes: Axes) -> tuple[tuple[str, ...], ...]:
        with use_layout(self.layout.without_axis(AXIS)):
            return gather_axes(axes)


def _run_blocks(
    blocks: Any, x: jax.Array, context: Context, first: Any, rows: Any, state: Any
) -> tuple[jax.Array, Any]:
    """Run one unit's layers; return the output and their reports."""
    reports: list[Any] = []
    for place, block in enumerate(blocks):
        key = None if context.key is None else jax.random.fold_in(context.key, first + place)
        row = rows[len(reports)] if block.reports else None
        block_state = None if row is None else jax.tree.map(lambda leaf, row=row: leaf[row], state)
        x, reported = block(x, context._replace(key=key), block_state)
        reports += [] if reported is None else [reported]
    return x, reports


def _in_rows(terms: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    places = jnp.where(rows < 0, count, rows)
    return jnp.zeros((count, *terms.shape[1:]), terms.dtype).at[places].set(terms, mode="drop")


def _gathers_together(blocks: Any) -> Any:
    """Return bools with the structure of `blocks`: True for the parts of a weight that gathers them itself."""

    def one(node: Any) -> Any:
        return jax.tree.map(lambda _: True, node) if gathers_together(node) else False

    return jax.tree.map(one, blocks, is_leaf=gathers_together)


def _list_trained(stacks: Sequence[Stack], trainable: Sequence[Any], period: int) -> list[bool]:
    """Return for each leaf of a unit whether it is trained in any of the units."""
    trained = []
    for stack, mask in zip(stacks, trainable, strict=True):
        flags = [
            jax.tree.structure(block).flatten_up_to(block_mask)
            for block, block_mask in zip(stack.blocks, mask.blocks, strict=True)
        ]
        trained += [[flag for block in flags for flag in block]] if period > 1 else flags
    return [any(flag is not False for flag in flags) for flags in zip(*trained, strict=True)]


def _by_unit(stacks: Any, period: int) -> list[jax.Array]:
    """Return for each leaf of a unit the arrays of all units, in layer order."""
    parts: list[list[jax.Array]] = []
    for stack in stacks:
        places = [jax.tree.leaves(stack.blocks)] if period > 1 else [jax.tree.leaves(block) for block in stack.blocks]
        parts.append(
            [
                leaves[0] if len(places) == 1 else jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:])
                for leaves in zip(*places)
            ]
        )
    return parts[0] if len(parts) == 1 else [jnp.concatenate(leaves) for leaves in zip(*parts)]


def _by_stack(stacks: Any, leaves: list[jax.Array | None], period: int) -> list[Any]:
    """Invert `_by_unit`, in the structure of `stacks`."""
    start, rebuilt = 0, []
    for stack in stacks:
        places = 1 if period > 1 else len(stack.blocks)
        local = jax.tree.leaves(stack.blocks[0])[0].shape[0] * places
        mine = [None if leaf is None else leaf[start : start + local] for leaf in leaves]
        if period > 1:
            blocks = jax.tree.structure(stack.blocks).unflatten(mine)
        else:
            blocks = tuple(
                jax.tree.structure(block).unflatten(None if leaf is None else leaf[place::places] for leaf in mine)
                for place, block in enumerate(stack.blocks)
            )
        rebuilt.append(dataclasses.replace(stack, blocks=blocks))
        start += local
    return rebuilt
