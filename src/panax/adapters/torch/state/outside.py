"""Tensors outside the module that a loss depends on: parameters that PyTorch would train, and constants that
a loop may change."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ....core.errors import RecipeError
from .python_seen import MAX_BYTES
from .python_state import PythonState


def refuse_outside(sums: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor], before: PythonState) -> None:
    """Raise if PyTorch's backward pass would give a gradient to a tensor without a stand-in.

    Args:
        tensors: The module's parameters and buffers by name.

    Raises:
        RecipeError: The tensor is a parameter of a criterion, or a parameter of the module of which an object
            holds a view.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    stand_ins: list[Any] = [total.grad_fn for total in sums]
    visited: set[Any] = set()
    while stand_ins:
        function = stand_ins.pop()
        if function is None or function in visited:
            continue
        visited.add(function)
        stand_ins.extend(each for each, _ in function.next_functions)
        if type(function).__name__ != "AccumulateGrad":
            continue
        tensor = function.variable
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            continue  # a stand-in, or created in the forward
        if id(tensor) in names:
            raise RecipeError(
                f"the loss reaches the parameter {names[id(tensor)]!r} by way of a tensor that was computed from it before (in "
                f"an object such as a distribution that was made once), which would stay at its first value; compute it in the "
                f"forward"
            )
        place, _ = before.outside.get(id(tensor), (None, None))
        owner_text = "one that the forward itself makes" if place is None else f"{place.owner}, {place.display_name}"
        raise RecipeError(
            f"the loss depends on a parameter that is not the module's: {owner_text}, {list(tensor.shape)}; it "
            f"would never be trained. "
            f"Store its owner in the module (module.criterion = criterion), or set requires_grad_(False) on it if it is to stay "
            f"as it is"
        )


@dataclasses.dataclass(frozen=True)
class UserConstant:
    """A tensor of the user that is a constant of a traced step.

    Attributes:
        mark: Fingerprint by which changes are detected.
    """

    name: str
    tensor: torch.Tensor
    mark: Any

    @property
    def has_changed(self) -> bool:
        return _mark(self.tensor) != self.mark


def find_user_constants(constants: Iterable[torch.Tensor], before: PythonState) -> tuple[UserConstant, ...]:
    """Return the constants of a graph that the user's Python code holds."""
    memory = {_address(tensor) for tensor in constants} - {None}
    return tuple(
        UserConstant(f"{place.owner}, {place.display_name}", tensor, _mark(tensor))
        for place, tensor in before.outside.values()
        if _address(tensor) in memory
    )


def refuse_changed(constants: Iterable[UserConstant]) -> None:
    """Raise if a tensor that is a constant of the compiled steps has been changed."""
    for constant in constants:
        if constant.has_changed:
            raise RecipeError(
                f"a tensor that is not the module's ({constant.name}) was changed after the module was adapted, and "
                f"the compiled steps computed with its first values; hold it in the module as a buffer, and update it "
                f"in the forward, or give the computed value as a leaf of the batch. check=False in task(...) lets it "
                f"pass"
            )


def _address(tensor: torch.Tensor) -> int | None:
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _mark(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    step = max(1, flat.numel() * flat.element_size() // MAX_BYTES)
    # By its bits, since .data changes no version; of a large tensor, a subset.
    values = flat[::step].contiguous()
    data = torch.view_as_real(values) if values.is_complex() else values
    return tuple(tensor.shape), hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()
