"""PyTorch's SGD, Adam and AdamW with their parameter groups and schedulers, as one optimizer that takes the
same steps.

Optax's optimizers of the same names differ in details (the position of epsilon, the first momentum, the factor of
weight decay), so the formulas here are PyTorch's.
"""

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...core import named_leaves
from ...core.errors import RecipeError
from ...optim import Chained, Schedule
from ...optim.per_layer import Scope

Rule = Literal["sgd", "adam"]

_INSTEAD = {
    "Adadelta": "optax.adadelta",
    "Adafactor": "panax.optim.Adafactor",
    "Adagrad": "optax.adagrad",
    "Adamax": "optax.adamax",
    "ASGD": "optax.sgd",
    "LBFGS": "torch's own loop, since it evaluates the loss several times a step",
    "Muon": "panax.optim.Muon",
    "NAdam": "optax.nadam",
    "RAdam": "optax.radam",
    "RMSprop": "optax.rmsprop",
    "Rprop": "optax.rprop",
    "SparseAdam": "optax.adam",
}


def from_torch(
    optimizer: torch.optim.Optimizer,
    parameters: torch.nn.Module | Mapping[str, torch.nn.Parameter],
    *,
    scheduler: Any = None,
    num_steps: int | None = None,
    steps_per_update: int = 1,
) -> "TorchOptimizer":
    """Translate an optimizer into one that steps as PyTorch's would, within 1e-6 in float32.

    Groups become sets of parameter names. A scheduler is evaluated once, for every step of the run. A
    parameter that is in no group is not updated, as in PyTorch; `foreach`, `fused` and `capturable` have no
    meaning here.

    Args:
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW` that has not taken a step.
        parameters: The module, or its parameters by name, to which the optimizer was given.
        scheduler: Any `torch.optim.lr_scheduler` that depends on the step alone.
        num_steps: Length of the run; needed with a scheduler; its last learning rate is used afterwards.
        steps_per_update: Steps of the run per `scheduler.step()`: those of an epoch, if it counts epochs.

    Raises:
        RecipeError: The optimizer or scheduler is of another kind, or has taken steps; or its parameters are not
            the module's.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise RecipeError(_refusal(optimizer))
    _refuse_replaced(optimizer, "step")
    for register, hooks in (
        ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
        ("torch.optim.optimizer.register_optimizer_step_pre_hook", _global_optimizer_pre_hooks),
        ("torch.optim.optimizer.register_optimizer_step_post_hook", _global_optimizer_post_hooks),
    ):
        for hook in hooks.values():
            raise RecipeError(
                f"the {kind.__name__} has a hook {getattr(hook, '__qualname__', hook)!r} that {register} has set, "
                f"which is never called here; remove it, or do its work in a custom loop with panax.compile_step"
            )
    if optimizer.state:
        raise RecipeError(f"the {kind.__name__} has taken steps already, and its moments would be lost; pass a new one")
    named = dict(parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters)
    names = {id(parameter): name for name, parameter in named.items()}
    tables = _tabulated(optimizer, scheduler, num_steps, steps_per_update)
    rule: Rule = "sgd" if kind is torch.optim.SGD else "adam"
    groups = tuple(
        _group(rule, group, tuple(_names(group["params"], names)), table)
        for group, table in zip(optimizer.param_groups, tables)
    )
    return TorchOptimizer(groups=groups, known=frozenset(named), name=kind.__name__)


class StepTable(NamedTuple):
    """A setting over the steps of a run.

    Attributes:
        values: One value for each step; the last one applies to all later steps.
    """

    values: tuple[float, ...]

    def at(self, step: jax.Array) -> jax.Array:
        if len(self.values) == 1:
            return jnp.float32(self.values[0])
        return jnp.asarray(self.values, jnp.float32)[jnp.minimum(step, len(self.values) - 1)]

    def log_at(self, step: jax.Array) -> jax.Array:
        """Return the logarithm of a value near 1, as exact as float32 allows."""
        with np.errstate(divide="ignore"):
            return StepTable(tuple(np.log(self.values).tolist())).at(step)

    def less_than_one_at(self, step: jax.Array) -> jax.Array:
        """Return one minus the value, rounded once."""
        return StepTable(tuple(1.0 - value for value in self.values)).at(step)


_ZERO, _BETA1, _BETA2 = StepTable((0.0,)), StepTable((0.9,)), StepTable((0.999,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same update, and the settings of PyTorch's group.

    Attributes:
        decoupled: True if decay shrinks the parameter directly (AdamW), and is not part of the gradient.
    """

    rule: Rule
    names: frozenset[str]
    lr: StepTable
    weight_decay: StepTable
    maximize: bool
    decoupled: bool = False
    momentum: StepTable = _ZERO
    dampening: float = 0.0
    nesterov: bool = False
    beta1: StepTable = _BETA1
    beta2: StepTable = _BETA2
    eps: float = 1e-8
    amsgrad: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        if self.rule == "sgd":
            return ("momentum",) if any(self.momentum.values) else ()
        return ("mean", "square", "largest") if self.amsgrad else ("mean", "square")


class TorchState(NamedTuple):
    """Number of steps taken, and each moment by parameter name."""

    steps: jax.Array
    moments: dict[str, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchOptimizer(Chained):
    """The optimizer that `from_torch` returns; `schedule` has no effect on it.

    Attributes:
        known: All parameter names of the module.
        name: PyTorch's class.
    """

    groups: tuple[ParameterGroup, ...]
    known: frozenset[str]
    name: str

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        if self.schedule != Schedule():
            raise RecipeError("optimizer.schedule has no effect on an optimizer of PyTorch's; use its lr_scheduler")

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Return the learning rate of the first group, by step."""
        return lambda step: self.groups[0].lr.at(jnp.asarray(step))

    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        def init(params: Any) -> TorchState:
            moments: dict[str, dict[str, jax.Array]] = {}
            for name, leaf in named_leaves(params).items():
                group = self._group_of(name)
                for moment in group.moments if group else ():
                    moments.setdefault(moment, {})[name] = jnp.zeros_like(leaf)
            return TorchState(jnp.int32(0), moments)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            assert params is not None
            weights = named_leaves(params)
            after: dict[str, dict[str, jax.Array]] = {moment: {} for moment in state.moments}
            changes = []
            for name, gradient in named_leaves(updates).items():
                group = self._group_of(name)
                if group is None:
                    changes.append(jnp.zeros_like(gradient))
                    continue
                moments = {moment: state.moments[moment][name] for moment in group.moments}
                step = _sgd if group.rule == "sgd" else _adam
                change, moments = step(group, state.steps, gradient, weights[name], moments)
                changes.append(change.astype(gradient.dtype))
                for moment, value in moments.items():
                    after[moment][name] = value.astype(state.moments[moment][name].dtype)
            return jax.tree.structure(updates).unflatten(changes), TorchState(state.steps + 1, after)

        return optax.GradientTransformation(init, update)

    def _group_of(self, name: str) -> ParameterGroup | None:
        if name not in self.known:
            raise RecipeError(
                f"the task trains {name}, which is not a parameter of the module that the {self.name} was made for; make both "
                f"from the same module"
            )
        return next((group for group in self.groups if name in group.names), None)


Moments = dict[str, jax.Array]


def _sgd(
    group: ParameterGroup, count: jax.Array, gradient: jax.Array, weight: jax.Array, moments: Moments
) -> tuple[jax.Array, Moments]:
    if group.maximize:
        gradient = -gradient
    if any(group.weight_decay.values):
        gradient = gradient + group.weight_decay.at(count) * weight
    if "momentum" in moments:
        momentum = group.momentum.at(count)
        # The first momentum is the gradient itself, independent of the dampening.
        running = momentum * moments["momentum"] + (1.0 - group.dampening) * gradient
        running = jnp.where(count == 0, gradient, running)
        moments = {"momentum": running}
        gradient = gradient + momentum * running if group.nesterov else running
    return -group.lr.at(count) * gradient, moments


def _adam(
    group: ParameterGroup, count: jax.Array, gradient: jax.Array, weight: jax.Array, moments: Moments
) -> tuple[jax.Array, Moments]:
    rate = group.lr.at(count)
    if group.maximize:
        gradient = -gradient
    shrink = jnp.zeros_like(weight)
    if any(group.weight_decay.values) and group.decoupled:
        shrink = rate * group.weight_decay.at(count) * weight
    elif any(group.weight_decay.values):
        gradient = gradient + group.weight_decay.at(count) * weight
    mean = moments["mean"] + group.beta1.less_than_one_at(count) * (gradient - moments["mean"])
    square = group.beta2.at(count) * moments["square"] + group.beta2.less_than_one_at(count) * gradient**2
    after = {"mean": mean, "square": square}
    if group.amsgrad:
        after["largest"] = square = jnp.maximum(moments["largest"], square)
    # 1 - beta^t loses its digits in float32 if beta^t is near 1.
    step_number = (count + 1).astype(jnp.float32)
    first = -jnp.expm1(step_number * group.beta1.log_at(count))
    second = -jnp.expm1(step_number * group.beta2.log_at(count))
    return -(shrink + rate / first * mean / (jnp.sqrt(square) / jnp.sqrt(second) + group.eps)), after


def _group(
    rule: Rule, group: Mapping[str, Any], names: tuple[str, ...], table: Mapping[str, StepTable]
) -> ParameterGroup:
    if group.get("differentiable"):
        raise RecipeError("differentiable=True is not supported: a step is not part of a graph; remove it")
    shared = {
        "rule": rule,
        "names": frozenset(names),
        "lr": table["lr"],
        "weight_decay": table["weight_decay"],
        "maximize": bool(group["maximize"]),
    }
    if rule == "sgd":
        return ParameterGroup(
            **shared,
            momentum=table["momentum"],
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
    return ParameterGroup(
        **shared,
        decoupled=bool(group["decoupled_weight_decay"]),
        beta1=table["beta1"],
        beta2=table["beta2"],
        eps=float(group["eps"]),
        amsgrad=bool(group["amsgrad"]),
    )


def _names(parameters: Iterable[torch.nn.Parameter], names: Mapping[int, str]) -> Iterator[str]:
    for parameter in parameters:
        if id(parameter) not in names:
            raise RecipeError(
                f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the module's; "
                f"make it with module.parameters() of the same module"
            )
        yield names[id(parameter)]


def _tabulated(
    optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int | None, steps_per_update: int
) -> list[dict[str, StepTable]]:
    """Tabulate, for each group, the settings that a scheduler may change, over the steps."""
    if scheduler is None:
        return [
            {name: StepTable((value,)) for name, value in _settings(group).items()} for group in optimizer.param_groups
        ]
    _check_scheduler(optimizer, scheduler, num_steps, steps_per_update)
    assert num_steps is not None
    # A copy of the scheduler and its optimizer, with the parameters and their state shared.
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    twin = copy.deepcopy(scheduler, memo)
    rows: list[list[dict[str, float]]] = []
    fixed = [_others(group) for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the scheduler runs ahead of the optimizer
        for step in range(num_steps):
            if step and step % steps_per_update == 0:
                twin.step()
            _refuse_moved(scheduler, fixed, [_others(group) for group in twin.optimizer.param_groups], step)
            rows.append([_settings(group) for group in twin.optimizer.param_groups])
    return [
        {name: _table([row[index][name] for row in rows]) for name in rows[0][index]}
        for index in range(len(optimizer.param_groups))
    ]


def _check_scheduler(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int | None, every: int) -> None:
    for part in [scheduler, *getattr(scheduler, "_schedulers", ())]:
        _refuse_replaced(part, "step")
        required = [p for p in inspect.signature(part.step).parameters.values() if p.default is p.empty]
        if isinstance(part, torch.optim.lr_scheduler.ReduceLROnPlateau) or required:
            raise RecipeError(
                f"{type(part).__name__} depends on values measured in training, but here the learning rate is a "
                f"function of the step; use a scheduler of the step, such as CosineAnnealingLR, or lower the rate in "
                f"a custom loop with panax.compile_step"
            )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise RecipeError(
            f"the {type(scheduler).__name__} belongs to another optimizer; pass the scheduler of this one"
        )
    if num_steps is None or num_steps < 1:
        raise RecipeError(f"num_steps={num_steps}; a scheduler needs the number of steps of the run")
    if every < 1:
        raise RecipeError(f"steps_per_update={every}; expected 1 or more")


def _settings(group: Mapping[str, Any]) -> dict[str, float]:
    settings = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    if "momentum" in group:
        settings["momentum"] = float(group["momentum"])
    if "betas" in group:
        settings["beta1"], settings["beta2"] = (float(beta) for beta in group["betas"])
    return settings


_FIXED = ("dampening", "nesterov", "eps", "amsgrad", "maximize", "decoupled_weight_decay", "differentiable")
"""Settings of a group with one value for the whole run; lr, weight_decay, momentum and betas are followed."""


def _others(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _FIXED if name in group} | {"params": [id(p) for p in group["params"]]}


def _refuse_moved(scheduler: Any, before: list[dict[str, Any]], after: list[dict[str, Any]], step: int) -> None:
    if len(before) != len(after):
        raise RecipeError(
            f"the {type(scheduler).__name__} makes {len(after)} groups of parameters of {len(before)} at step {step}; "
            "groups are fixed "
            f"here: pass all of them from the beginning, with a learning rate of 0 until then"
        )
    for index, (was, has) in enumerate(zip(before, after)):
        moved = [name for name in {**was, **has} if was.get(name) != has.get(name)]
        if moved:
            raise RecipeError(
                f"the {type(scheduler).__name__} changes {moved[0]!r} of group {index} at step {step}; lr, weight_decay, "
                "momentum and "
                f"betas are followed, and all else is fixed here: take the step in a custom loop with panax.compile_step"
            )


def _refuse_replaced(owner: Any, name: str) -> None:
    """Raise if a method is replaced on the instance, unless a scheduler has wrapped the class's method to count
    its calls."""
    replaced = vars(owner).get(name)
    if replaced is None:
        return
    function: Any = getattr(replaced, "__func__", replaced)
    inner = getattr(function, "__wrapped__", None)
    if getattr(function, "_wrapped_by_lr_sched", False) and inner is getattr(type(owner), name):
        return
    raise RecipeError(
        f"{name} of this {type(owner).__name__} is replaced by "
        f"{getattr(inner or function, '__qualname__', inner or function)!r}, which is never called here; do its work "
        f"in the forward, or in a custom loop with panax.compile_step"
    )


def _table(values: list[float]) -> StepTable:
    return StepTable((values[0],)) if len(set(values)) == 1 else StepTable(tuple(values))


def _refusal(optimizer: Any) -> str:
    name = type(optimizer).__name__
    bases = [
        base.__name__
        for base in type(optimizer).__mro__[1:]
        if base in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    ]
    if bases:
        return (
            f"{name} is a custom {bases[0]} with an unknown update; pass {bases[0]} itself, or an optax transformation"
        )
    instead = _INSTEAD.get(name)
    how = f"the nearest is {instead}" if instead else "write it as an optax transformation"
    return (
        f"the optimizer {name} is not translated; SGD, Adam and AdamW are, exactly. Give panax.optim.Optax(transformation=...) "
        f"instead: {how}"
    )
