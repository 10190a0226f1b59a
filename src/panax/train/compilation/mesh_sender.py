"""Batches on their way to the devices of a mesh: checked, in the order of its context axis, sharded over its data axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...core import Axes
from ...core.batch_checks import check_ranges, narrow_to_32_bits
from ...core.errors import TrainingError
from ...core.params.logical import Role, axis_for_role
from ...mesh import Placement
from ...mesh.legality import MeshRequirements, check, fit_rules
from ...mesh.topology import data_parallel_size
from ...parallel.context import zigzag_order, zigzag_parts
from ..batch_transfer import HeldRows, check_leaves, check_sizes, find_held_rows, global_array
from ..program import Program
from .mesh_requirements import mesh_requirements


class MeshSender:
    """Sends batches to the devices of a mesh.

    Attributes:
        program: The program that the batches are for.
        placement: The mesh, with rules that fit the program and the batches.
        batch_axes: The logical axes of each leaf of a batch.
    """

    def __init__(self, program: Program, placement: Placement, batch_axes: Mapping[str, Axes]):
        """
        Args:
            batch_axes: The logical axes of each leaf of a batch; the task's own take precedence.

        Raises:
            LayoutError: The task does not support the mesh, or a parameter is not divisible over it.
            DataError: The batch lacks a leaf that the task needs.
        """
        self.program = program
        self._rules = placement.rules
        self._needs: MeshRequirements = mesh_requirements(program)
        self._checked: set[Any] = set()
        check(self._needs, placement.rules, placement.sizes)
        self.batch_axes = program.task.leaf_axes(batch_axes)
        rules = fit_rules(placement.rules, self._needs, placement.sizes)
        if not any(axis_for_role(Role.POSITIONS) in axes for axes in self.batch_axes.values()):
            rules = rules.without_positions()
        self.placement = dataclasses.replace(placement, rules=rules, row_order=self._needs.row_order)
        check_leaves(program.task, batch_axes)

    @property
    def row_multiple(self) -> int:
        """The divisor of a batch's padded number of rows; 1 for no padding."""
        config = self.program.config
        return data_parallel_size(self.placement.sizes) * config.micro_batches if config.pad_rows else 1

    def held_rows(self, batch_size: int) -> HeldRows | None:
        """Return the rows of a global batch that this process's devices hold; None if it holds all of them.

        Raises:
            LayoutError: The rows are not divisible over their axes.
        """
        if jax.process_count() == 1:
            return None
        name = next(iter(self.batch_axes))
        row_numbers = {name: jax.ShapeDtypeStruct((batch_size,), np.int32)}
        sharding = self.placement.batch_shardings(row_numbers, {name: (axis_for_role(Role.ROWS),)})[name]
        return find_held_rows(sharding.addressable_devices, sharding, batch_size)

    def put(
        self, batch: Mapping[str, Any], held: HeldRows | None = None, *, owned: bool = False
    ) -> dict[str, jax.Array]:
        """Transfer a batch to the devices, with rows sharded over the data axes; returns before the transfer
        completes.

        On a CPU, the device's array may share the host memory, and an accelerator may read it after this
        returns. The batch is therefore copied first, and the caller may reuse its arrays.

        Args:
            held: The rows of the global batch that `batch` contains; None: all of them.
            owned: True if the arrays are not written to any more and need not be copied.

        Raises:
            DataError: A leaf has a value that the task does not allow, or the sizes of leaves do not match.
        """
        arrays = {name: np.asarray(leaf) if owned else np.array(leaf) for name, leaf in batch.items()}
        unknown = arrays.keys() ^ self.batch_axes.keys()
        if unknown:
            raise TrainingError(
                f"the batch's leaves are {sorted(arrays)}, the source declares {sorted(self.batch_axes)}; make them agree"
            )
        check_sizes({name: leaf.shape for name, leaf in arrays.items()}, self.batch_axes)
        if jax.process_count() == 1:
            check_ranges(arrays, self.program.task.leaf_ranges)
        # With several processes, raising in one would leave the others waiting, so the step checks (`prepare_batch`).
        arrays = narrow_to_32_bits(arrays, self.program.task.leaf_ranges)
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape if held is None else (held.batch_size, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in arrays.items()
        }
        self.check_batch(shapes, micro_batches=1)
        shardings = self.placement.batch_shardings(shapes, self.batch_axes)
        if self.program.task.names_axes:
            arrays = {name: self._as_held(leaf, self.batch_axes[name]) for name, leaf in arrays.items()}
        if jax.process_count() == 1:
            return jax.device_put(arrays, shardings)
        return {
            name: global_array(leaf, held or HeldRows(np.arange(len(leaf)), len(leaf)), shardings[name])
            for name, leaf in arrays.items()
        }

    def check_batch(self, batch: Mapping[str, Any], micro_batches: int) -> None:
        """Raise a LayoutError if a batch of these shapes cannot be sharded over the mesh."""
        leaves = tuple((f"batch leaf {name!r}", self.batch_axes[name], leaf.shape) for name, leaf in batch.items())
        if (leaves, micro_batches) not in self._checked:
            needs = dataclasses.replace(self._needs, batch=leaves, micro_batches=micro_batches)
            check(needs, self._rules, self.placement.sizes)
            self._checked.add((leaves, micro_batches))

    def _as_held(self, leaf: np.ndarray, axes: Axes) -> np.ndarray:
        """Permute positions to the order of the context axis."""
        parts = zigzag_parts(self.placement)
        if parts == 1 or axis_for_role(Role.POSITIONS) not in axes:
            return leaf
        dim = axes.index(axis_for_role(Role.POSITIONS))
        return np.take(leaf, zigzag_order(leaf.shape[dim], parts), axis=dim)
