"""A module's tensors as host arrays, and back; those of a module on the meta device are read from
safetensors, slice by slice."""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ....core.errors import RecipeError, suggest_name
from ...wrappers import find_wrapper, strip_wrapper_names
from ..lowering import DTYPES
from ..tracing.values import as_numpy, refuse_large


class TensorArray:
    """A tensor of the module, from which shards are read; not copied until the module is about to change."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()
        self._own = False
        self.shape = tuple(tensor.shape)
        self.dtype = np.dtype(DTYPES[tensor.dtype])

    def __getitem__(self, index: Any) -> np.ndarray:
        return as_numpy(self._tensor[index])

    def copy_values(self) -> None:
        """Copy the current values, so that later changes of the module don't affect them."""
        if not self._own:
            self._tensor, self._own = self._tensor.clone(), True


class StoredArray:
    """A tensor in a safetensors file; only the requested slices are read."""

    def __init__(self, file: Path, name: str, like: torch.Tensor):
        self._file, self._name = file, name
        self.shape = tuple(like.shape)
        self.dtype = np.dtype(DTYPES[like.dtype])

    def __getitem__(self, index: Any) -> np.ndarray:
        with safe_open(self._file, framework="pt") as opened:
            return as_numpy(opened.get_slice(self._name)[index] if self.shape else opened.get_tensor(self._name))


def host_arrays(module: nn.Module, weights: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters and buffers by name, as host arrays.

    Args:
        weights: A safetensors file, or a folder of them, for tensors on the meta device.

    Raises:
        RecipeError: A tensor on the meta device has no stored values, or the file holds another shape.
    """
    if weights is not None and not any(tensor.is_meta for tensor in _tensors(module)):
        raise RecipeError("weights= has no effect: no tensor of the module is on the meta device; remove it")
    stored = {} if weights is None else _stored(Path(weights))
    names = _names_of(module)
    if stored:
        _refuse_wrapped(names, stored, weights)
    _compute_buffers(module, stored)

    def one(name: str, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            refuse_large(tensor, name)
            return TensorArray(tensor)
        stored_names = [each for each in names[name] if each in stored]
        if not stored_names:
            raise RecipeError(
                f"{name} is on the meta device, which holds no values; pass initialize=, or weights=, safetensors"
                + (f" with this name in it ({suggest_name(name, stored)})" if stored else "")
            )
        for each in stored_names:
            _refuse_other(each, stored[each], tensor)
        for each in stored_names[1:]:
            _refuse_untied(stored_names[0], each, stored)
        return StoredArray(stored[stored_names[0]].file, stored_names[0], tensor)

    return (
        {name: one(name, p) for name, p in module.named_parameters()},
        {name: one(name, b) for name, b in module.named_buffers()},
    )


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _names_of(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter and buffer, by its first."""
    names: dict[str, list[str]] = {}
    paths = {id(part): path for path, part in reversed(list(module.named_modules(remove_duplicate=False)))}
    for (part, name), first in find_tensor_slots(module).items():
        path = paths[id(part)]
        names.setdefault(first, []).append(f"{path}.{name}" if path else name)
    # Modules under several names too, like the names in a file.
    for all_of in (module.named_parameters, module.named_buffers):
        firsts = {id(tensor): name for name, tensor in all_of()}
        for name, tensor in all_of(remove_duplicate=False):
            known = names.setdefault(firsts[id(tensor)], [])
            if name not in known:
                known.append(name)
    return names


def find_unused_names(module: nn.Module, weights: str) -> list[str]:
    """Return the names in the files that the module does not have."""
    known = {name for names in _names_of(module).values() for name in names}
    return sorted(_stored(Path(weights)).keys() - known)


class SafetensorsEntry(NamedTuple):
    """A tensor in a safetensors file; `dtype` is safetensors' name for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


FLOATS, COMPLEX = ("F64", "F32", "F16", "BF16"), ("C64", "C128")
_ROWS_AT_ONCE = 4096


def _refuse_other(name: str, stored: SafetensorsEntry, tensor: torch.Tensor) -> None:
    """Raise if a stored tensor does not fit the module's tensor."""
    if stored.shape != tuple(tensor.shape):
        raise RecipeError(
            f"{name} is {list(tensor.shape)} in the module and {list(stored.shape)} in {stored.file}; they don't fit"
        )
    kind = (
        "C"
        if tensor.is_complex()
        else "F"
        if tensor.is_floating_point()
        else "B"
        if tensor.dtype == torch.bool
        else "I"
    )
    has = "C" if stored.dtype in COMPLEX else "F" if stored.dtype in FLOATS else "B" if stored.dtype == "BOOL" else "I"
    if stored.dtype.startswith("F8") or kind != has:
        raise RecipeError(
            f"{stored.file}: {name} holds {stored.dtype}, and is {str(tensor.dtype).removeprefix('torch.')} in the "
            "module; codes of "
            f"quantized weights are no weights without their scales: expected "
            + {"F": ", ".join(FLOATS), "C": ", ".join(COMPLEX), "B": "BOOL", "I": "integers"}[kind]
        )


def _refuse_untied(first: str, second: str, stored: Mapping[str, SafetensorsEntry]) -> None:
    """Raise if the file holds two values for tensors that are one in the module."""
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(safe_open(stored[name].file, framework="pt")).get_slice(name)
            for name in (first, second)
        )
        rows = stored[first].shape[0] if stored[first].shape else 0
        same = all(
            torch.equal(a[low : low + _ROWS_AT_ONCE], b[low : low + _ROWS_AT_ONCE])
            for low in range(0, rows, _ROWS_AT_ONCE)
        )
    if not same:
        raise RecipeError(
            f"{stored[second].file}: {first} and {second} are one parameter of the module and differ in the file; untie "
            "them in the "
            f"module, or remove one from the file"
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise RecipeError(
            f"{file} can't be read: {error}; it is missing or incomplete: fetch or save it again"
        ) from error


def _refuse_wrapped(names: Mapping[str, list[str]], stored: Mapping[str, SafetensorsEntry], weights: Any) -> None:
    """Raise if the names differ by the prefix of a wrapper."""
    module_names = [name for each in names.values() for name in each]
    if any(name in stored for name in module_names):
        return
    for name in stored:
        if (plain := strip_wrapper_names(name)) != name and plain in module_names:
            raise RecipeError(
                f"weights={str(weights)!r}: the names in it hold {find_wrapper({name})!r} ({name}), as those of a module "
                "in a wrapper do "
                f"(torch.compile, DataParallel); save the state of the module inside it, or rename its tensors ({plain})"
            )
    for name in module_names:
        if (plain := strip_wrapper_names(name)) != name and plain in stored:
            raise RecipeError(
                f"the module's names hold {find_wrapper({name})!r} ({name}), and those in weights={str(weights)!r} do not; "
                "adapt the module "
                f"inside its wrapper (torch.compile, DataParallel)"
            )


def _stored(place: Path) -> dict[str, SafetensorsEntry]:
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not files[0].exists():
        raise RecipeError(f"weights={str(place)!r} is neither a safetensors file nor a folder with one")
    entries = {}
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                if name in entries:
                    raise RecipeError(
                        f"weights={str(place)!r}: {name} is in {entries[name].file.name} and in {file.name}; pass one "
                        "file, or a folder "
                        f"without the other"
                    )
                tensor = opened.get_slice(name)
                entries[name] = SafetensorsEntry(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return entries


def _compute_buffers(module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Compute buffers on the meta device that no file holds, by the module's own initialization."""
    for path, part in module.named_modules():
        lone = [
            name for name, buffer in part.named_buffers(recurse=False)
            if buffer.is_meta and (f"{path}.{name}" if path else name) not in stored
        ]  # fmt: skip
        if not lone:
            continue
        compute: Any = getattr(part, "reset_parameters", None)
        initialize: Any = getattr(module, "_init_weights", None)
        if compute is None and initialize is not None:
            compute = functools.partial(initialize, part)
        if compute is None or any(True for _ in part.parameters(recurse=False)):
            raise RecipeError(
                f"buffer {f'{path}.' if path else ''}{lone[0]} is on the meta device and in no file, and its module "
                "can't compute it alone; build "
                "this module "
                f"on the CPU"
            )
        part.to_empty(device="cpu", recurse=False)
        compute()


TensorSlot = tuple[nn.Module, str]


def find_tensor_slots(module: nn.Module) -> dict[TensorSlot, str]:
    """Return every location in the module that holds a tensor, with the tensor's first name."""
    first: dict[int, str] = {}
    found: dict[TensorSlot, str] = {}
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    found[part, name] = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
    return found


def set_tensor(part: nn.Module, name: str, tensor: Any) -> None:
    held: Any = part._parameters if name in part._parameters else part._buffers
    held[name] = tensor


def write_back(module: nn.Module, params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> nn.Module:
    """Write parameters and buffers into the module; meta tensors get their own memory, and ties stay."""
    values, materialized = {**params, **state}, {}
    for (part, name), first in find_tensor_slots(module).items():
        tensor = getattr(part, name)
        value = torch.from_numpy(np.array(values[first], np.float32 if tensor.dtype == torch.bfloat16 else None))
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(value)
            continue
        if first not in materialized:
            value = value.to(tensor.dtype)
            free = tensor.requires_grad
            materialized[first] = nn.Parameter(value, requires_grad=free) if isinstance(tensor, nn.Parameter) else value
        set_tensor(part, name, materialized[first])
    return module
