"""Activation checkpointing while a module is traced: records which operations a region holds, instead of
running them twice.

`torch.utils.checkpoint` runs a region again in the backward pass, on the module's own parameters. Under a
trace the region is run once, and its operations are marked; the backward pass recomputes them behind a
barrier (`graph.py`), with the same random bits.
"""

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.traceback import annotate

REGION_KEY = "panax_region"
"""Key, in a node's `custom` metadata, of the outermost checkpointed region that it is in."""


@contextlib.contextmanager
def mark_checkpoint_regions() -> Iterator[None]:
    """Mark operations traced inside the context with the number of their checkpointed region.

    The two functions that are replaced are those to which `torch.utils.checkpoint.checkpoint` delegates, by
    whatever name a module has imported it (torch 2.11 to 2.13).
    """
    numbers = itertools.count()
    inside = False

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return function(*args, **kwargs)
        inside = True
        try:
            with annotate({REGION_KEY: next(numbers)}):
                return function(*args, **kwargs)
        finally:
            inside = False

    def without_reentrant(
        function: Callable[..., Any],
        preserve: bool,
        context_fn: Any,
        check: str,
        debug: bool,
        early_stop: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[Any]:
        # The caller runs the function itself, between the two halves of this generator.
        nonlocal inside
        if inside:
            yield
            return
        inside = True
        try:
            with annotate({REGION_KEY: next(numbers)}):
                yield
        finally:
            inside = False

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return run(function, *args)

    module = importlib.import_module("torch.utils.checkpoint")
    usual = {name: getattr(module, name) for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction")}
    vars(module).update(zip(usual, (without_reentrant, Reentrant)))
    try:
        yield
    finally:
        vars(module).update(usual)
