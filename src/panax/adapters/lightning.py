"""Lightning modules, unchanged: `training_step` is the loss, `configure_optimizers` the optimizer, logged
values are metrics.

Panax replaces the Trainer: loops, devices, precision, checkpoints. Requests of a module to its Trainer that can't be
met, and hooks that would never be called, are rejected by name.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ..core import Axes
from ..core.errors import RecipeError, describe_type
from ..core.measures import is_reserved
from ..data.loading.iterable import as_batch
from .adapted_task import AdaptedTask
from .torch import task as torch_task
from .torch.optimizers import TorchOptimizer, from_torch

_WITHOUT_EFFECT = re.compile(
    r"forward|training_step|validation_step|test_step|predict_step|configure_optimizers|\w+_dataloader|on_test_\w+|on_predict_\w+"
)
"""Methods that a module may override: used here, replaced by data, or without a part in training."""


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """Arguments for `Experiment` or `panax.compile_step`: `Experiment(**fit_arguments(...), data=loader)`.

    It unpacks as a pair too: `task, optimizer = fit_arguments(...)`.

    Attributes:
        optimizer: Steps as PyTorch's would; Lightning clips no gradients unless its Trainer is set to, so use
            `StepConfig(clip_norm=None)` for the same.
        num_steps: Length of the run, for which the optimizer's schedule was made.
    """

    task: AdaptedTask
    optimizer: TorchOptimizer
    num_steps: int

    def keys(self) -> tuple[str, ...]:
        """Return the names of the arguments."""
        return ("task", "optimizer", "num_steps")

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.task, self.optimizer))


def fit_arguments(
    module: Any,
    *,
    example: Any,
    num_steps: int,
    steps_per_epoch: int | None = None,
    ignore: Iterable[str] = (),
    sharding: Mapping[str, Axes] | None = None,
    compute_dtype: str = "float32",
    check: bool = True,
) -> FitArguments:
    """Adapt a `LightningModule`: return task, optimizer and length of the run, as arguments of an
    `Experiment`.

    Evaluation calls `validation_step`, if there is one. A step may pass its `batch_idx` on, and is rejected if
    it computes with it or branches on it.

    Args:
        module: A `LightningModule` of `lightning` or `pytorch_lightning`.
        example: A batch in the form of the module's dataloader.
        num_steps: Length of the run; also the value of `self.trainer.estimated_stepping_batches` and
            `max_steps`.
        steps_per_epoch: For a scheduler that counts epochs, as Lightning's do by default.
        ignore: Hooks of the module that need not be called; "batch_idx" sets the argument to 0, for a module that
            only uses it for logging.
        sharding: Patterns of parameter names to logical axes.
        compute_dtype: `bfloat16` runs the forward pass under `torch.autocast`, as the Trainer's
            `precision="bf16-mixed"` does.
        check: Compare loss and gradients with PyTorch's own on the example.

    Raises:
        RecipeError: The module uses manual optimization or several optimizers, overrides a hook that would not
            be called, needs an attribute of its Trainer that is not available, or can't be traced.
    """
    base = _lightning_base(module)
    ignore = frozenset(ignore)
    _refuse_hooks(module, base, ignore - {BATCH_INDEX})
    if not getattr(module, "automatic_optimization", True):
        raise RecipeError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False); write the loop with "
            f"panax.compile_step, one step for each optimizer"
        )
    index = 0 if BATCH_INDEX in ignore else BatchIndex(type(module).__name__)
    steps = _Steps(module, base, _Trainer(type(module).__name__, num_steps, steps_per_epoch), index)
    adapted = torch_task(module, steps, example, sharding=sharding, compute_dtype=compute_dtype, check=check)
    if check and steps.validates:
        adapted.notes = (*adapted.notes, *_not_validated(adapted, example))
    with _within(module, steps.trainer):
        configured = module.configure_optimizers()
    optimizer, scheduler, every = _configured(configured, steps_per_epoch)
    translated = from_torch(optimizer, module, scheduler=scheduler, num_steps=num_steps, steps_per_update=every)
    return FitArguments(adapted, translated, num_steps)


def _not_validated(adapted: AdaptedTask, example: Any) -> Iterator[str]:
    """Yield the reason why evaluation would be rejected, before a run has begun; nothing if it would not be."""
    params, state = jax.eval_shape(adapted.init, jax.random.key(0))
    batch = {name: jnp.asarray(leaf) for name, leaf in as_batch(example).items()}
    try:
        jax.eval_shape(lambda p, s, b: adapted.loss(p, s, b, jax.random.key(0), False), params, state, batch)
    except RecipeError as error:
        yield f"an evaluation would be refused: {error}"


class _Trainer:
    """A stand-in for the module's Trainer, with the length of the run."""

    def __init__(self, owner: str, num_steps: int, steps_per_epoch: int | None):
        self._owner = owner
        self.estimated_stepping_batches = self.max_steps = num_steps
        if steps_per_epoch is not None:
            self.num_training_batches = steps_per_epoch
            self.max_epochs = -(-num_steps // steps_per_epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        hint = "; pass steps_per_epoch" if name in ("num_training_batches", "max_epochs") else ""
        known = ", ".join(sorted(key for key in vars(self) if not key.startswith("_")))
        raise RecipeError(
            f"{self._owner} asks its Trainer for {name!r}, which is not available{hint}; known are {known}. Pass the "
            f"value to the module as an argument"
        )


BATCH_INDEX = "batch_idx"


class BatchIndex:
    """A stand-in for the batch number, which a compiled step does not know: it can only be passed on."""

    def __init__(self, owner: str):
        self._owner = owner

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RecipeError(
            f"{self._owner} computes or branches with batch_idx, which is unknown in the one compiled step for all "
            f"batches; count steps in a buffer and select with torch.where, or give the index as a leaf of the batch. "
            f"If only logging depends on it, ignore=('batch_idx',) holds it at 0"
        )


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "divmod", "rdivmod", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "neg", "pos",
    "invert", "abs", "float", "int", "index", "bool", "round", "floor", "ceil", "trunc", "eq", "ne", "lt", "le", "gt", "ge",
    "array", "hash", "getitem", "iter", "len", "contains", "str", "format", "torch_function",
):  # fmt: skip
    setattr(BatchIndex, f"__{_name}__", BatchIndex._refuse)


class _Steps:
    """A loss that calls the module's own steps."""

    def __init__(self, module: torch.nn.Module, base: type, trainer: _Trainer, index: Any):
        self.trainer, self.index = trainer, index
        self.validates = getattr(type(module), "validation_step", None) is not getattr(base, "validation_step", None)

    def __call__(self, module: Any, batch: Any) -> Any:
        validating = self.validates and not module.training
        name = "validation_step" if validating else "training_step"
        step = getattr(module, name)
        with _within(module, self.trainer) as logged:
            returned = step(*_arguments(step, batch, self.index))
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if loss is None and validating:
            loss = next((value for key, (value, _) in logged.items() if "loss" in key), None)
        if not isinstance(loss, torch.Tensor):
            raise RecipeError(
                f"{type(module).__name__}.{name} gave no loss ({type(returned).__name__}); expected a tensor, or a mapping "
                f"with 'loss'" + (", or a loss that it logs" if validating else "")
            )
        rows = _rows(batch)
        # Many modules log their own `loss`, which is not the step's figure of that name.
        metrics = {
            f"logged/{key}" if is_reserved(key) else key: (value * (count or rows), float(count or rows))
            for key, (value, count) in logged.items()
        }
        return loss, {key: (torch.as_tensor(total), torch.tensor(weight)) for key, (total, weight) in metrics.items()}


@contextlib.contextmanager
def _within(module: Any, trainer: _Trainer) -> Iterator[dict[str, tuple[torch.Tensor, int | None]]]:
    """Attach a trainer to the module, and yield the values that it logs: (value, batch size) by name."""
    logged: dict[str, tuple[torch.Tensor, int | None]] = {}

    def log(
        name: str, value: Any, *args: Any, batch_size: int | None = None, reduce_fx: Any = "mean", **rest: Any
    ) -> None:
        if getattr(reduce_fx, "__name__", reduce_fx) != "mean":
            raise RecipeError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): metrics are averaged here; log one that can be"
            )
        if not isinstance(value, torch.Tensor | int | float):
            raise RecipeError(
                f"self.log({name!r}) is given {describe_type(value)}; metrics are averaged here: log a number, or a "
                f"tensor of one"
            )
        logged[name] = (torch.as_tensor(value).detach().float(), batch_size)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **keywords: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **keywords)

    before = {name: vars(module).get(name) for name in ("log", "log_dict")}
    module.log, module.log_dict = log, log_dict
    module.trainer = trainer
    try:
        yield logged
    finally:
        module.trainer = None
        for name, value in before.items():
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _lightning_base(module: Any) -> type:
    for base in type(module).__mro__:
        if base.__name__ == "LightningModule" and base.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            return base
    raise RecipeError(
        f"module is {describe_type(module)}; expected a LightningModule. Another torch.nn.Module goes through "
        f"panax.adapters.torch.task"
    )


def _refuse_hooks(module: Any, base: type, ignore: frozenset[str]) -> None:
    hooks = {name for parent in base.__mro__ if "lightning" in parent.__module__ for name in vars(parent)}
    hooks = {name for name in hooks if not name.startswith("_") and inspect.isfunction(getattr(base, name, None))}
    mro = type(module).__mro__
    overrides = {name for child in mro[: mro.index(base)] for name in vars(child) if name in hooks}
    overrides = {name for name in overrides if not _WITHOUT_EFFECT.fullmatch(name)}
    for name in sorted(ignore - overrides):
        raise RecipeError(
            f"ignore: {type(module).__name__} overrides no hook {name!r}; those that it does are "
            f"{', '.join(sorted(overrides)) or 'none'}"
        )
    if overrides - ignore:
        listed = ", ".join(sorted(overrides - ignore))
        raise RecipeError(
            f"{type(module).__name__} overrides {listed}, which nothing calls here; do it before, in the data or in the loop, "
            f"and name it in ignore=(...) if it need not happen"
        )


def _arguments(step: Callable[..., Any], batch: Any, index: Any) -> tuple[Any, ...]:
    names = list(inspect.signature(step).parameters)
    if "dataloader_iter" in names:
        raise RecipeError("a training_step that takes dataloader_iter draws its own batches; let it take the batch")
    return (batch, index) if len(names) > 1 else (batch,)


def _rows(batch: Any) -> int:
    leaves = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return next(iter(leaves)).shape[0]


def _configured(configured: Any, steps_per_epoch: int | None) -> tuple[Any, Any, int]:
    """Return (optimizer, scheduler, steps of the run per scheduler step), from any form of Lightning."""
    optimizers, schedulers = configured, []
    if (
        isinstance(configured, tuple | list)
        and len(configured) == 2
        and all(isinstance(c, tuple | list) for c in configured)
    ):
        optimizers, schedulers = configured
    elif isinstance(configured, Mapping):
        optimizers = configured["optimizer"]
        schedulers = [configured["lr_scheduler"]] if configured.get("lr_scheduler") is not None else []
    if not isinstance(optimizers, tuple | list):
        optimizers = [optimizers]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        return _configured(optimizers[0], steps_per_epoch)
    if len(optimizers) != 1 or len(schedulers) > 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        names = ", ".join(type(part).__name__ for part in [*optimizers, *schedulers])
        raise RecipeError(
            f"configure_optimizers returned {names}; expected one optimizer and at most one scheduler. For several write the "
            f"loop with panax.compile_step, one step for each"
        )
    if not schedulers:
        return optimizers[0], None, 1
    config = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    every = int(config.get("frequency") or 1)
    if config.get("interval", "epoch") == "epoch":
        if steps_per_epoch is None:
            raise RecipeError(
                f"the {type(config['scheduler']).__name__} counts epochs, as Lightning's schedulers do unless they have "
                f"interval='step'; pass steps_per_epoch"
            )
        every *= steps_per_epoch
    return optimizers[0], config["scheduler"], every
