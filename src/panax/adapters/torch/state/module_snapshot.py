"""Restoration of the user's own module, exactly as it was: after a trace, after the check, and after any
exception in either."""

import contextlib
import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .python_state import HeldValue, PythonState
from .weights import TensorSlot


@contextlib.contextmanager
def restore_after(module: nn.Module, loss: Any, *, unless_successful: bool = False) -> Iterator[PythonState]:
    """Undo all changes inside the context to the module, to the Python values that it and its loss reach, and
    to random generators.

    Parameters and buffers are the same objects afterwards, with the same values, gradients and flags; hooks,
    attributes and caches are restored too. Any exception inside, including an interrupt, is raised again
    afterwards.

    Args:
        unless_successful: True to leave the changes if no exception is raised.

    Yields:
        The Python values before any change.
    """
    state = PythonState(module, loss)
    tensors = _tensors(module)
    flags = {part: part.training for part in module.modules()}

    def put_back() -> None:
        state.restore()
        for part, flag in flags.items():
            part.training = flag
        tensors()

    failed = True
    with preserve_generators():
        try:
            yield state
            failed = False
        finally:
            if failed or not unless_successful:
                retry_interrupted(put_back)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the states of the random generators of Python, NumPy and PyTorch afterwards."""
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        retry_interrupted(lambda: _set_generators(*generators))


def retry_interrupted(restore: Callable[[], None]) -> None:
    """Run `restore`, and once more if an interrupt cuts it short."""
    try:
        restore()
    except BaseException:
        restore()
        raise


@contextlib.contextmanager
def swap_tensors(
    module: nn.Module, tensors: Mapping[TensorSlot, Any], aliases: Iterable[HeldValue] = ()
) -> Iterator[None]:
    """Replace the module's parameters and buffers, and all aliases of these in Python code, by other tensors
    inside the context.

    `torch.func.functional_call` does not restore a module that has two names, or tensors that a forward
    registers.
    """
    tensors_before = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]

    aliases = list(aliases)
    replacement_by_id = {id(getattr(part, name)): tensor for (part, name), tensor in tensors.items()}

    def put_back() -> None:
        for put, tensor in aliases:
            put(tensor)
        for part, parameters, buffers in tensors_before:
            _refill(part._parameters, parameters)
            _refill(part._buffers, buffers)

    try:
        for (part, name), tensor in tensors.items():
            slots: Any = part._parameters if name in part._parameters else part._buffers
            slots[name] = tensor
        for put, tensor in aliases:
            put(replacement_by_id[id(tensor)])
        yield
    finally:
        retry_interrupted(put_back)


def _refill(slots: Any, before: Mapping[str, Any]) -> None:
    if isinstance(slots, dict):
        slots.clear()
        slots.update(before)
        return
    # Those of a scripted module are a view of C++ state, with the names that it was compiled with.
    for name, tensor in before.items():
        slots[name] = tensor


def clear_fake_caches() -> None:
    """Clear the caches of `functools` that hold a tensor of a trace, which has no values outside of the trace."""
    for cache in [*_collected_caches(), *_FROZEN.caches()]:
        # Most are empty, and a look at what a cache refers to takes ten times as long as its size.
        if cache.cache_info().currsize and _holds_fake(cache):
            cache.cache_clear()


def _collected_caches() -> list[Any]:
    """Return the caches in the collector's lists, which hold up to millions of objects and are therefore compared by
    type only."""
    kind = functools._lru_cache_wrapper
    return [each for each in gc.get_objects() if type(each) is kind]


class _FrozenCaches:
    """Caches among the objects that `gc.freeze` took from the collector's lists.

    They are searched for once after each freeze, which takes a collection and a check of every object of the process.
    """

    def __init__(self) -> None:
        self._count = 0
        self._frozen_caches: list[weakref.ref[Any]] = []

    def caches(self) -> Iterator[Any]:
        """Yield the caches that still exist."""
        if gc.get_freeze_count() > self._count:
            gc.unfreeze()
            gc.collect()
            self._frozen_caches = [weakref.ref(each) for each in _collected_caches()]
            gc.freeze()
            self._count = gc.get_freeze_count()
        for reference in self._frozen_caches:
            if (cache := reference()) is not None:
                yield cache


_FROZEN = _FrozenCaches()


def _holds_fake(cache: Any, depth: int = 5) -> bool:
    for each in gc.get_referents(cache):
        if isinstance(each, FakeTensor):
            return True
        inner = type(each) in (dict, tuple, list) or type(each).__name__ == "_lru_list_elem"
        if (
            inner
            and depth
            and len(each if isinstance(each, dict | tuple | list) else ()) < 1000
            and _holds_fake(each, depth - 1)
        ):
            return True
    return False


def _tensors(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores flags, gradients and hooks of parameters, and values of buffers."""
    parameters = [(p, p.requires_grad, p.grad, _hooks_of(p)) for p in module.parameters()]
    buffers = [
        (b, b.detach().clone())
        for b in module.buffers()
        if not b.is_meta and b.layout == torch.strided and not b.is_inference()
    ]

    def put_back() -> None:
        for p, requires_grad, grad, hooks in parameters:
            p.requires_grad_(requires_grad)
            p.grad = grad
            for held, before in hooks:
                held.clear()
                held.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                # Its version does not show it: BatchNorm writes statistics past it.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    return put_back


def _hooks_of(tensor: torch.Tensor) -> list[tuple[Any, dict[Any, Any]]]:
    held = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [(hooks, dict(hooks)) for hooks in held if hooks is not None]


def _set_generators(pythons: Any, numpys: Any, torchs: torch.Tensor) -> None:
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)
