"""`panax inspect`: what a recipe is, before anything runs."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ..core import pair_axes
from ..core.errors import RecipeError
from ..mesh import Placement
from ..run import Experiment
from ..run.description import describe
from ..run.prepare import Prepared, prepare
from .overrides import experiment_from
from .recipes import built_in


def inspect(arguments: Sequence[str]) -> int:
    """Print the parameter table, bytes, FLOPs per token and the resolved settings."""
    if not arguments or arguments[0].startswith("-"):
        raise RecipeError(f"expected `panax inspect RECIPE`; the recipes are {', '.join(sorted(built_in()))}")
    console = Console()
    prepared = prepare(
        experiment_from(arguments, "inspect"), lambda line: console.print(line, style="dim", highlight=False)
    )
    print_inspection(prepared, console)
    return 0


def print_inspection(prepared: Prepared, console: Console) -> None:
    """Print everything that is known of a run that has not begun."""
    experiment = prepared.experiment
    placement = getattr(prepared.step, "placement", None) or Placement.create(devices=jax.devices()[:1])
    program = prepared.step.program
    table = _table(program.abstract.params, program.axes.params, prepared.step.shardings.params, program.trainable)
    for number, line in enumerate(table):
        console.print(line, style="" if number else "bold", highlight=False, markup=False, no_wrap=True, soft_wrap=True)
    mesh = " ".join(f"{axis}={size}" for axis, size in placement.sizes.items() if size > 1) or "one device"
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.abstract.params))
    console.print(f"mesh           {mesh}", highlight=False)
    console.print(f"number         {total:,} parameters", highlight=False)
    for name, tree, shardings in (
        ("parameters", program.abstract.params, prepared.step.shardings.params),
        ("optimizer", program.abstract.optimizer_state, prepared.step.shardings.optimizer_state),
    ):
        whole, each = _bytes(tree, shardings)
        console.print(f"{name:14} {_size(whole)}, {_size(each)} on each device", highlight=False)
    _print_flops(prepared, console)
    console.print("settings")
    console.print_json(json.dumps(describe(_resolved(prepared, experiment))))


def _resolved(prepared: Prepared, experiment: Experiment) -> dict[str, Any]:
    return {field: getattr(experiment, field) for field in experiment.__dataclass_fields__ if field != "task"} | {
        "task": prepared.task
    }


def _print_flops(prepared: Prepared, console: Console) -> None:
    length = prepared.data.facts.sequence_length
    flops = prepared.task.flops_per_token(length) if length else None
    if flops is not None:
        console.print(f"compute        {flops:,.0f} FLOPs for a token's forward and backward pass", highlight=False)


def _table(params: Any, axes: Any, shardings: Any, trainable: Any) -> list[str]:
    """Aligned columns, never wrapped or cut off: names are there to be copied."""
    rows = [("parameter", "shape", "axes", "layout", "bytes", "on each device")]
    places = jax.tree.leaves(shardings)
    for (name, leaf, leaf_axes), place, free in zip(pair_axes(params, axes), places, jax.tree.leaves(trainable)):
        layout = " ".join(
            f"{axis}:{'·'.join((part,) if isinstance(part, str) else part)}"
            for axis, part in zip(leaf_axes, getattr(place, "spec", ()))
            if part
        )
        rows.append(
            (
                name if free else f"{name} (frozen)",
                " ".join(map(str, leaf.shape)),
                " ".join(axis or "-" for axis in leaf_axes),
                layout or "replicated",
                _size(_leaf_bytes(leaf.shape, leaf.dtype)),
                _size(_leaf_bytes(place.shard_shape(leaf.shape), leaf.dtype)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return [
        "  ".join(cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


def _leaf_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _bytes(tree: Any, shardings: Any) -> tuple[int, int]:
    whole = each = 0
    for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        whole += _leaf_bytes(leaf.shape, leaf.dtype)
        each += _leaf_bytes(place.shard_shape(leaf.shape), leaf.dtype)
    return whole, each


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
