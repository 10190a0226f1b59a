"""Transfer of settings from a narrow model to a wide one: maximal update parametrization (muP,
arXiv:2203.03466, Table 3, for Adam).

A task names the narrower task for which the settings were tuned. The growing dimensions are derived from both
tasks' parameters. If the inputs of a weight grow, its learning rate is divided by their growth; if only its
inputs grow (the head, a router), its initial values are also divided by the square root of that growth.
Everything else is unchanged: weights already start with a variance of one over the number of inputs. Weight
decay of such weights is multiplied by the growth, so that each step shrinks them by the same fraction.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax

from ..core import Task, named_leaves, pair_axes
from ..core.errors import RecipeError
from ..core.params.logical import lookup_axis
from ..core.protocols import Axes
from ..optim import Optimizer, ShardedOptimizer
from ..optim.parameter import matrix_dims


@dataclasses.dataclass(frozen=True)
class WidthFactors:
    """Changes to a narrower task's settings for a wider one, by parameter; 1 for parameters not listed.

    Attributes:
        rates: Learning-rate multipliers; weight decay uses their inverse.
        scales: Multipliers of the initial values.
    """

    rates: Mapping[str, float]
    scales: Mapping[str, float]

    def scale_optimizer(self, optimizer: Optimizer, trained: Collection[str]) -> Optimizer:
        """Adapt the narrow task's optimizer to the wide one.

        Args:
            trained: Names of the parameters that train.

        Raises:
            RecipeError: There is no rule for the optimizer, or it already has multipliers.
        """
        if not (isinstance(optimizer, ShardedOptimizer) and optimizer.steps_as_adam):
            raise RecipeError(
                f"task.base has a rule for optimizers with updates of Adam's size, and none for {type(optimizer).__name__}; "
                f"use AdamW, ScheduleFreeAdamW, Lion, Soap or Shampoo, or remove task.base"
            )
        conflicts = [name for name in ("lr_multipliers", "decay_multipliers") if getattr(optimizer, name)]
        if conflicts:
            raise RecipeError(
                f"optimizer.{conflicts[0]} and task.base both set factors of single parameters; remove one of them"
            )
        rates = {name: rate for name, rate in self.rates.items() if name in trained}
        decays = {name: 1 / rate for name, rate in rates.items()} if optimizer.weight_decay else {}
        return dataclasses.replace(optimizer, lr_multipliers=rates, decay_multipliers=decays)

    def scale_params(self, params: Any) -> Any:
        """Scale freshly initialized parameters."""
        scales = [self.scales.get(name, 1.0) for name in named_leaves(params)]
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten([leaf if scale == 1 else leaf * scale for leaf, scale in zip(leaves, scales)])

    def describe(self) -> list[str]:
        """Describe the factors: a line for each pair of factors, with the parameters that have it."""
        names_by_factors: dict[tuple[float, float], list[str]] = {}
        for name, rate in self.rates.items():
            names_by_factors.setdefault((rate, self.scales.get(name, 1.0)), []).append(name)
        return [
            f"muP  rate x {rate:.4g}" + (f", begun x {scale:.4g}" if scale != 1 else "") + f": {', '.join(names)}"
            for (rate, scale), names in names_by_factors.items()
        ]


def width_factors(task: Task) -> WidthFactors | None:
    """Return the factors of a task that names a narrower one; None for others.

    Raises:
        RecipeError: The two tasks differ in more than widths, or there is no rule for a difference.
    """
    narrow = task.mup_base_task
    if narrow is None:
        return None
    (wide_arrays, axes), (narrow_arrays, _) = _described(task), _described(narrow)
    if wide_arrays.keys() != narrow_arrays.keys():
        odd = sorted(wide_arrays.keys() ^ narrow_arrays.keys())
        raise RecipeError(
            f"task.base: only one of the two models has {', '.join(odd[:3])}; they may differ only in widths"
        )
    rates: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name, shape in wide_arrays.items():
        growth = [wide / narrow for wide, narrow in zip(shape, narrow_arrays[name])]
        factors = _factors(name, growth, axes[name], name in task.output_weights)
        if factors is not None:
            rates[name], scale = factors
            if scale != 1:
                scales[name] = scale
    return WidthFactors(rates, scales)


def _described(task: Task) -> tuple[dict[str, tuple[int, ...]], dict[str, Axes]]:
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    named = list(pair_axes(params, task.semantic_axes(params)))
    return {name: leaf.shape for name, leaf, _ in named}, {name: tuple(axes) for name, _, axes in named}


def _factors(name: str, growth: list[float], axes: Axes, reads_out: bool) -> tuple[float, float] | None:
    """Return the factors of the learning rate and of the initial values; None if neither changes."""
    matrix = matrix_dims(axes)
    if matrix is None:
        return None
    into, out = (math.prod(growth[dim] for dim in dims) for dims in (matrix[::-1] if reads_out else matrix))
    if into == 1:
        return None
    reads_out |= any(lookup_axis(axes[dim]).read_out for dim in matrix[1])
    if out == 1 and not reads_out:
        raise RecipeError(
            f"task.base: of {name} the input grows by {into:g} and the output does not ({', '.join(map(str, axes))}), and "
            f"muP has no rule for that; let both grow (kv_heads with heads, the width of experts with embed)"
        )
    return 1 / into, into**-0.5 if out == 1 else 1.0
