"""Replacements, while a module is traced, of PyTorch functions that read values only to check them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ....core.errors import RecipeError
from ..state.randomness import RandomnessError
from .registry import register_lowering


@torch.library.custom_op("panax::within", mutates_args=())
def assert_in_range(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return `x`, with values that are checked to be from `low` to `high` in every step (`guards.py`)."""
    return x.clone()


@assert_in_range.register_fake
def _shape(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return torch.empty_like(x)


@register_lowering(torch.ops.panax.within.default)
def _within(out: Any, x: Any, low: int, high: int) -> Any:
    return x


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0:
        raise RecipeError("one_hot without num_classes counts the classes in its values; pass num_classes")
    x = torch.ops.panax.within(x, 0, num_classes - 1)
    return (x.unsqueeze(-1) == torch.arange(num_classes)).to(torch.int64)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {torch.nn.functional.one_hot: _one_hot}


class ReplacementMode(TorchFunctionMode):
    """Context that replaces the functions in `REPLACEMENTS`, and rejects operations that no graph records."""

    def __init__(self, parameters: Mapping[str, torch.Tensor] = MappingProxyType({})):
        """
        Args:
            parameters: Stand-ins for a module's parameters, by name.
        """
        super().__init__()
        self._names = {id(tensor): name for name, tensor in parameters.items()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise RandomnessError(
                f"it draws with generator= ({getattr(function, '__name__', function)}), and random numbers come from "
                f"the step's key here; draw once when the module is made and keep it in a buffer, or remove generator="
            )
        if function in _REFUSED:
            self._refuse(function, args)
        call: Any = REPLACEMENTS.get(function, function)
        return call(*args, **kwargs)

    def _refuse(self, function: Any, args: Any) -> None:
        name = self._names.get(id(args[0]))
        if function == _SET_DATA:
            what = "a tensor" if name is None else f"the parameter {name!r}"
            raise RandomnessError(
                f"it assigns .data of {what}, which a compiled step can't follow; "
                + (
                    "write it as an operation (copy_)"
                    if name is None
                    else "apply it in the forward to the value in use"
                )
                + ", or keep it in a buffer that the forward assigns again"
            )
        if name is None:
            return
        if function in (_GET_GRAD, _SET_GRAD) and not (function == _SET_GRAD and args[1] is None):
            raise RandomnessError(
                f"it uses .grad of the parameter {name!r}, and gradients are not kept between steps here; compute the "
                f"value by torch.autograd.grad, or keep it in a buffer"
            )
        if function in _ADD_HOOK:
            raise RandomnessError(
                f"it adds a hook to the parameter {name!r} in each forward, so that there is one more after each step; "
                "add it once, "
                f"when the module is made"
            )


_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_GET_GRAD, _SET_GRAD = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # pyright: ignore
_ADD_HOOK = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_REFUSED = {_SET_DATA, _GET_GRAD, _SET_GRAD, *_ADD_HOOK}
