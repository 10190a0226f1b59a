"""Criteria with a mean that is not over rows, as a sum and a weight, which add up over micro-batches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def is_sum(criterion: Any) -> bool:
    """Return True if a criterion is a sum over rows, not a mean."""
    return isinstance(criterion, nn.Module) and getattr(criterion, "reduction", None) == "sum"


def value_of(criterion: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """Compute a criterion: (sum, weight) if targets are ignored or weighted by class, otherwise its own
    return value.

    PyTorch divides by the class weights of the targets that count. A mean over rows would give all
    micro-batches the same weight, regardless of their targets.
    """
    settings = _settings(criterion)
    if settings is None or targets.is_floating_point() or targets.is_complex():
        return criterion(outputs, targets)
    function, weight, ignored, more = settings
    total = function(outputs, targets, weight=weight, ignore_index=ignored, reduction="sum", **more)
    counted = targets != ignored
    if weight is None:
        return total, counted.sum().float()
    weights = weight[torch.where(counted, targets, torch.zeros_like(targets))]
    return total, (weights * counted).sum().float()


def _settings(criterion: Any) -> tuple[Any, torch.Tensor | None, int, dict[str, Any]] | None:
    """Return (function, class weights, ignored target, further arguments) of a criterion that averages over
    targets; otherwise None."""
    if criterion in (F.cross_entropy, F.nll_loss):
        return criterion, None, -100, {}
    if type(criterion) not in (nn.CrossEntropyLoss, nn.NLLLoss) or criterion.reduction != "mean":
        return None
    if criterion._forward_hooks or criterion._forward_pre_hooks or "forward" in vars(criterion):
        return None
    if type(criterion) is nn.NLLLoss:
        return F.nll_loss, criterion.weight, criterion.ignore_index, {}
    return F.cross_entropy, criterion.weight, criterion.ignore_index, {"label_smoothing": criterion.label_smoothing}
