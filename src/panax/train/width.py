"""Settings found on a narrow model, for a wide one: maximal update parametrisation (muP, arXiv:2203.03466, Table 3, for Adam).

A task names the narrower one whose settings fit. Which dimensions grow is read from both tasks' parameters. Where what goes in
and what comes out of a weight both grow, its rate is divided by the growth of what goes in; so it is where what goes in grows
alone (the head, a router), whose first numbers are divided by the root of that growth, too. All else stays: weights begin with a
variance of one over what goes in already. Weight decay of such weights is multiplied by the growth, so that a step takes off the
same share.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax

from ..core import Task, named_leaves, pair_axes
from ..core.errors import RecipeError
from ..core.logical import traits_of
from ..core.protocols import Axes
from ..optim import Optimizer, ShardedOptimizer
from ..optim.parameter import matrix_of


@dataclasses.dataclass(frozen=True)
class WidthFactors:
    """What a wider task changes of a narrower one's settings, by parameter; 1 where nothing is said.

    Attributes:
        rates: Of the learning rate; weight decay takes their inverse.
        scales: Of the numbers that parameters begin with.
    """

    rates: Mapping[str, float]
    scales: Mapping[str, float]

    def of_optimizer(self, optimizer: Optimizer, trained: Collection[str]) -> Optimizer:
        """The narrow task's optimizer for the wide one.

        Args:
            trained: Names of the parameters that train.

        Raises:
            RecipeError: There is no rule for it, or it has factors already.
        """
        if not (isinstance(optimizer, ShardedOptimizer) and optimizer.steps_as_adam):
            raise RecipeError(
                f"task.base has a rule for optimizers whose updates are of Adam's size, and none for {type(optimizer).__name__}; "
                f"take AdamW, ScheduleFreeAdamW, Lion, Soap or Shampoo, or leave task.base out"
            )
        given = [name for name in ("rates", "decays") if getattr(optimizer, name)]
        if given:
            raise RecipeError(
                f"optimizer.{given[0]} and task.base both set factors of single parameters; leave one of them out"
            )
        rates = {name: rate for name, rate in self.rates.items() if name in trained}
        decays = {name: 1 / rate for name, rate in rates.items()} if optimizer.weight_decay else {}
        return dataclasses.replace(optimizer, rates=rates, decays=decays)

    def scaled(self, params: Any) -> Any:
        """Parameters as they were drawn, with those scaled that begin smaller."""
        scales = [self.scales.get(name, 1.0) for name in named_leaves(params)]
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten([leaf if scale == 1 else leaf * scale for leaf, scale in zip(leaves, scales)])

    def words(self) -> list[str]:
        """What a run says of it: a line for each factor, with the parameters that have it."""
        found: dict[tuple[float, float], list[str]] = {}
        for name, rate in self.rates.items():
            found.setdefault((rate, self.scales.get(name, 1.0)), []).append(name)
        return [
            f"muP  rate x {rate:.4g}" + (f", begun x {scale:.4g}" if scale != 1 else "") + f": {', '.join(names)}"
            for (rate, scale), names in found.items()
        ]


def width_factors(task: Task) -> WidthFactors | None:
    """The factors of a task that names a narrower one; None for others.

    Raises:
        RecipeError: The two differ in more than widths, or there is no rule for what differs.
    """
    narrow = task.narrower
    if narrow is None:
        return None
    (wide_arrays, axes), (narrow_arrays, _) = _described(task), _described(narrow)
    if wide_arrays.keys() != narrow_arrays.keys():
        odd = sorted(wide_arrays.keys() ^ narrow_arrays.keys())
        raise RecipeError(
            f"task.base: only one of both models has {', '.join(odd[:3])}; let them differ in widths alone"
        )
    rates: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name, shape in wide_arrays.items():
        growth = [wide / narrow for wide, narrow in zip(shape, narrow_arrays[name])]
        factors = _factors(name, growth, axes[name], name in task.read_outs)
        if factors is not None:
            rates[name], scale = factors
            if scale != 1:
                scales[name] = scale
    return WidthFactors(rates, scales)


def _described(task: Task) -> tuple[dict[str, tuple[int, ...]], dict[str, Axes]]:
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    named = list(pair_axes(params, task.meaning_axes(params)))
    return {name: leaf.shape for name, leaf, _ in named}, {name: tuple(axes) for name, _, axes in named}


def _factors(name: str, growth: list[float], axes: Axes, reads_out: bool) -> tuple[float, float] | None:
    """(of the rate, of the first numbers); None where neither changes."""
    matrix = matrix_of(axes)
    if matrix is None:
        return None
    into, out = (math.prod(growth[dim] for dim in dims) for dims in (matrix[::-1] if reads_out else matrix))
    if into == 1:
        return None
    reads_out |= any(traits_of(axes[dim]).read_out for dim in matrix[1])
    if out == 1 and not reads_out:
        raise RecipeError(
            f"task.base: of {name} what goes in grows by {into:g} and what comes out does not ({', '.join(map(str, axes))}), and "
            f"muP has no rule for that; let both grow (kv_heads with heads, the width of experts with embed)"
        )
    return 1 / into, into**-0.5 if out == 1 else 1.0
