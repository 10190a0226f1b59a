"""Compiled programs by the shapes of their batches, of which few are allowed: each costs a compilation."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ...core.errors import TrainingError

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


class CompileClock:
    """Seconds of compilation so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measure(self, compile_: Callable[[], Any]) -> Any:
        """Return the result of a compilation, and count its seconds."""
        start = time.perf_counter()
        compiled = compile_()
        self.seconds += time.perf_counter() - start
        return compiled


class ShapeCache:
    """Programs of one kind, compiled when a batch of their shapes comes first."""

    def __init__(self, clock: CompileClock, max_shapes: int):
        self._clock, self._max_shapes = clock, max_shapes
        self._programs: dict[Signature, Any] = {}

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def programs(self) -> tuple[Any, ...]:
        """The programs compiled so far."""
        return tuple(self._programs.values())

    def get(self, batch: Mapping[str, Any], compile_: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Return the program for a batch (abstract or concrete); compile it if it is the first of its shapes.

        Raises:
            TrainingError: The batch has yet another shape.
        """
        signature = batch_signature(batch)
        if signature not in self._programs:
            if len(self) >= self._max_shapes:
                raise TrainingError(_shape_change(next(reversed(self._programs)), signature, self._max_shapes))
            self._programs[signature] = self._clock.measure(lambda: compile_(batch))
        return self._programs[signature]


def batch_signature(batch: Mapping[str, Any]) -> Signature:
    """Return the shapes and dtypes of a batch, independent of the order of its leaves."""
    # 64-bit types become 32-bit ones on the device.
    dtypes = {name: jax.dtypes.canonicalize_dtype(leaf.dtype).name for name, leaf in batch.items()}
    return tuple((name, batch[name].shape, dtypes[name]) for name in sorted(batch))


def _shape_change(old: Signature, new: Signature, allowed: int) -> str:
    old_leaves = {name: (shape, dtype) for name, shape, dtype in old}
    new_leaves = {name: (shape, dtype) for name, shape, dtype in new}

    def show(value: tuple[tuple[int, ...], str] | None) -> str:
        return "absent" if value is None else f"{value[1]}{list(value[0])}"

    changes = [
        f"batch[{name!r}] was {show(old_leaves.get(name))} and is now {show(new_leaves.get(name))}"
        for name in sorted({*old_leaves, *new_leaves})
        if old_leaves.get(name) != new_leaves.get(name)
    ]
    return (
        f"{'; '.join(changes)}. Each new shape costs a compilation, and {allowed} "
        f"{'is' if allowed == 1 else 'are'} allowed. Give every batch the same shape, or pad varying lengths to a few "
        f"sizes with data.buckets"
    )
