"""Functions of PyTorch that look at values only to check them, replaced while a module is traced by ones that don't look."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ....core.errors import RecipeError
from .registry import lowers


@torch.library.custom_op("panax::within", mutates_args=())
def within(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """`x`, whose values are checked to be from `low` to `high` in every step (`guards.py`)."""
    return x.clone()


@within.register_fake
def _shape(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return torch.empty_like(x)


@lowers(torch.ops.panax.within.default)
def _within(out: Any, x: Any, low: int, high: int) -> Any:
    return x


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0:
        raise RecipeError("one_hot without num_classes counts the classes in its values; give num_classes")
    x = torch.ops.panax.within(x, 0, num_classes - 1)
    return (x.unsqueeze(-1) == torch.arange(num_classes)).to(torch.int64)


REPLACED: dict[Any, Callable[..., Any]] = {torch.nn.functional.one_hot: _one_hot}


class Replacing(TorchFunctionMode):
    """Inside, the functions in `REPLACED` are their replacements."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = REPLACED.get(function, function)
        return call(*args, **(kwargs or {}))
