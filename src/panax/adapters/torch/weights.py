"""A module's tensors as host arrays, and back; those of a module on the meta device are read from safetensors, slice by slice."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from ...core.errors import RecipeError, nearest
from .lowering import DTYPES
from .values import as_numpy, refuse_large


class TensorArray:
    """A tensor of the module, from which shards are read; not copied until the module is about to change."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()
        self._own = False
        self.shape = tuple(tensor.shape)
        self.dtype = np.dtype(DTYPES[tensor.dtype])

    def __getitem__(self, index: Any) -> np.ndarray:
        return as_numpy(self._tensor[index])

    def keep(self) -> None:
        """Hold the values of now, whatever becomes of the module."""
        if not self._own:
            self._tensor, self._own = self._tensor.clone(), True


class StoredArray:
    """A tensor in a safetensors file, of which only the asked slices are read."""

    def __init__(self, file: Path, name: str, like: torch.Tensor):
        self._file, self._name = file, name
        self.shape = tuple(like.shape)
        self.dtype = np.dtype(DTYPES[like.dtype])

    def __getitem__(self, index: Any) -> np.ndarray:
        with safe_open(self._file, framework="pt") as opened:
            return as_numpy(opened.get_slice(self._name)[index] if self.shape else opened.get_tensor(self._name))


def host_arrays(module: nn.Module, weights: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers by name.

    Args:
        weights: A safetensors file, or a folder of them, for what is on the meta device.

    Raises:
        RecipeError: Something on the meta device has no values anywhere, or the file holds another shape.
    """
    if weights is not None and not any(tensor.is_meta for tensor in _tensors(module)):
        raise RecipeError("weights= has no effect: no tensor of the module is on the meta device; leave it out")
    stored = {} if weights is None else _stored_names(Path(weights))
    _compute_buffers(module, stored)

    def one(name: str, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            refuse_large(tensor, name)
            return TensorArray(tensor)
        if name not in stored:
            raise RecipeError(
                f"{name} is on the meta device, which holds no values; give initialise=, or weights=, safetensors"
                + (f" with this name in it ({nearest(name, stored)})" if stored else "")
            )
        file, shape = stored[name]
        if shape != tuple(tensor.shape):
            raise RecipeError(
                f"{name} is {list(tensor.shape)} in the module and {list(shape)} in {file}; they don't fit"
            )
        return StoredArray(file, name, tensor)

    return (
        {name: one(name, p) for name, p in module.named_parameters()},
        {name: one(name, b) for name, b in module.named_buffers()},
    )


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _stored_names(place: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not files[0].exists():
        raise RecipeError(f"weights={str(place)!r} is no safetensors file and no folder that holds one")
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = (file, tuple(opened.get_slice(name).get_shape()))
    return found


def _compute_buffers(module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Give buffers on the meta device that no file holds the values that the module's own initialisation computes."""
    for path, part in module.named_modules():
        lone = [
            name for name, buffer in part.named_buffers(recurse=False)
            if buffer.is_meta and (f"{path}.{name}" if path else name) not in stored
        ]  # fmt: skip
        if not lone:
            continue
        compute: Any = getattr(part, "reset_parameters", None)
        initialise: Any = getattr(module, "_init_weights", None)
        if compute is None and initialise is not None:
            compute = functools.partial(initialise, part)
        if compute is None or any(True for _ in part.parameters(recurse=False)):
            raise RecipeError(
                f"buffer {path}.{lone[0]} is on the meta device and in no file, and its module can't compute it alone; build "
                "this module "
                f"on the CPU"
            )
        part.to_empty(device="cpu", recurse=False)
        compute()


Place = tuple[nn.Module, str]


def places(module: nn.Module) -> dict[Place, str]:
    """Every place of the module that holds a tensor, and the tensor's first name."""
    first: dict[int, str] = {}
    found: dict[Place, str] = {}
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    found[part, name] = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
    return found


def hold(part: nn.Module, name: str, tensor: Any) -> None:
    held: Any = part._parameters if name in part._parameters else part._buffers
    held[name] = tensor


def put_back(module: nn.Module, params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> nn.Module:
    """Write parameters and buffers into the module; what is on the meta device gets memory of its own, and ties stay."""
    values, made = {**params, **state}, {}
    for (part, name), first in places(module).items():
        tensor = getattr(part, name)
        value = torch.from_numpy(np.array(values[first], np.float32 if tensor.dtype == torch.bfloat16 else None))
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(value)
            continue
        if first not in made:
            value = value.to(tensor.dtype)
            free = tensor.requires_grad
            made[first] = nn.Parameter(value, requires_grad=free) if isinstance(tensor, nn.Parameter) else value
        hold(part, name, made[first])
    return module
