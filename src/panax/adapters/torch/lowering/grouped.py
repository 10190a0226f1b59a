"""Grouped matmuls of mixtures of experts, on Panax's kernels: the time is proportional to the rows, not to rows
times experts."""

from typing import Any

import jax.numpy as jnp
import torch

from ....core import current_target
from ....kernels.grouped.grouped_matmul import Groups, aligned_row_count, choose_tile, grouped_outer, grouped_product
from .registry import aten, register_lowering


@torch.library.custom_op("panax::grouped_mm", mutates_args=())
def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute `aten._grouped_mm`, which has a shape rule for bfloat16 only, though it also computes in float32
    (torch 2.11 to 2.13)."""
    return torch.ops.aten._grouped_mm.default(a, b, ends)


@grouped_mm.register_fake
def _shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if b.ndim == 2:
        return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


def _as_ours(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if offs is None or bias is not None or a.ndim != 2:
        return NotImplemented
    return torch.ops.panax.grouped_mm(a, b, offs)


TRACING_REPLACEMENTS = {aten._grouped_mm.default: _as_ours}
"""Operations that are replaced while PyTorch's execution is recorded."""


@register_lowering(torch.ops.panax.grouped_mm.default)
def _grouped_mm(out: Any, a: Any, b: Any, ends: Any) -> Any:
    """Multiply rows sorted by group by their group's matrix; or, for two matrices, one matmul for each group
    of columns and rows."""
    groups, rows = ends.shape[0], a.shape[1] if b.ndim == 2 else a.shape[0]
    target = current_target()
    tile = choose_tile(target, rows=rows, groups=groups)
    sizes = jnp.diff(ends, prepend=0)
    groups_of_rows = Groups(sizes=sizes, rows=aligned_row_count(rows, groups, tile), tile=tile)
    row = jnp.arange(rows)
    group = jnp.minimum((row[:, None] >= ends[None, :]).sum(1), groups - 1)
    place = groups_of_rows.starts[group] + row - (ends - sizes)[group]

    def aligned(x: Any) -> Any:
        return jnp.zeros((groups_of_rows.rows, x.shape[1]), x.dtype).at[place].set(x)

    if b.ndim == 3:
        return grouped_product(aligned(a), b.astype(a.dtype), groups_of_rows, target=target)[place]
    return grouped_outer(aligned(a.T), aligned(b.astype(a.dtype)), groups_of_rows, target=target)
