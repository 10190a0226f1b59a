"""Call of a user's loss on a module and a batch, and its results: sums with weights, before any division."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import RecipeError, describe_type
from ..losses import LOSS_FORMS, named_terms
from .tracing.criteria import value_of

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """Losses and metrics as (sum, weight), by name."""

    losses: Mapping[str, Pair]
    metrics: Mapping[str, Pair]


class Objective:
    """A loss on a module and a batch in the user's own form.

    Attributes:
        form: The user's form of a batch: the names of a mapping, or the length of a tuple.
    """

    def __init__(self, loss: Callable[..., Any] | None, form: "Form"):
        """
        Args:
            loss: `loss(module, batch)`; a criterion (an `nn.Module` or a function of `torch.nn.functional`), called as
                `criterion(module(inputs), targets)` on batches of two leaves; None: the module returns its loss itself.
        """
        self.loss = loss
        self.form = form

    def batch_of(self, leaves: Mapping[str, Any]) -> Any:
        return self.form.rebuild(leaves)

    def __call__(self, module: nn.Module, batch: Any) -> LossTerms:
        rows = next(iter(self.form.leaves(batch).values())).shape[0]
        terms, metrics = named_terms(self._returned(module, batch))
        return LossTerms(
            {name: _pair(name, term, rows) for name, term in terms.items()},
            {name: _pair(name, value, rows) for name, value in metrics.items()},
        )

    def _returned(self, module: nn.Module, batch: Any) -> Any:
        if self.loss is None:
            return _own_loss(module, batch)
        if is_criterion(self.loss):
            inputs, targets = batch if isinstance(batch, tuple | list) else batch.values()
            return value_of(self.loss, module(inputs), targets)
        return self.loss(module, batch)


def is_criterion(loss: Any) -> bool:
    """Return True if a loss takes outputs and targets, and not the module."""
    return isinstance(loss, nn.Module) or getattr(loss, "__module__", "") == "torch.nn.functional"


@dataclasses.dataclass(frozen=True)
class Form:
    """The user's form of a batch: a mapping, a tuple, a list, or one tensor."""

    kind: type
    names: tuple[str, ...]

    @classmethod
    def of(cls, batch: Any) -> "Form":
        if isinstance(batch, Mapping):
            return cls(dict, tuple(map(str, batch)))
        if isinstance(batch, tuple | list):
            return cls(type(batch) if type(batch) in (tuple, list) else tuple, tuple(map(str, range(len(batch)))))
        return cls(torch.Tensor, ("0",))

    def leaves(self, batch: Any) -> dict[str, Any]:
        if self.kind is dict:
            return {str(name): leaf for name, leaf in batch.items()}
        return dict(zip(self.names, batch if self.kind in (tuple, list) else (batch,)))

    def rebuild(self, leaves: Mapping[str, Any]) -> Any:
        if self.kind is dict:
            return {name: leaves[name] for name in self.names}
        if self.kind is torch.Tensor:
            return leaves["0"]
        return self.kind(leaves[name] for name in self.names)


def _own_loss(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return output
    raise RecipeError(
        f"{type(module).__name__} returned {describe_type(output)} without a loss, and no loss= is given; pass one, or a "
        "batch with "
        f"the labels that the model computes its loss from"
    )


def _pair(name: str, term: Any, rows: int) -> Pair:
    if isinstance(term, tuple | list) and len(term) == 2:
        total, weight = (_scalar(name, part) for part in term)
        return total, weight.detach()
    mean = _scalar(name, term)
    return mean * rows, torch.full((), float(rows))


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.full((), float(value))
    if not isinstance(value, torch.Tensor):
        raise RecipeError(f"the loss {name!r} is {describe_type(value)}; expected {LOSS_FORMS}")
    if value.numel() != 1 or value.is_complex():
        raise RecipeError(
            f"the loss {name!r} is {str(value.dtype).removeprefix('torch.')}{list(value.shape)}, which is not a scalar; "
            f"expected {LOSS_FORMS}: "
            f"take its mean, or its sum with the number of terms"
        )
    return value.reshape(()).float()
