"""Interfaces between packages: a Task's to the step, and a Source's to the loop.

All training goes through them. A built-in decoder, a traced PyTorch module, a pipeline with a custom schedule
and a generative adversarial pair are all a `Task`; packed text, a torch `DataLoader` and a Python list are
all a `Source`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Params = Any
"""Trained parameters: any pytree of arrays."""
ModelState = Any
"""A model's state that is not trained, such as running averages: any pytree of arrays."""
Axes = tuple[str | None, ...]
"""One logical axis name per dimension of an array; None for a dimension that is never sharded."""

Batch = Mapping[str, Any]
"""Leaf name to array. The first dimension of every leaf is the logical axis `batch`, of the same size in all
leaves.
"""

RowOrder = Literal["zigzag", "contiguous"]
"""Which positions of a row each device of a context axis holds. "zigzag": one piece from the front and one
from the back, so that causal attention costs the same on all devices. "contiguous": adjacent positions, in
device order.
"""

AcceptedOrder = Literal["any", "zigzag", "contiguous"]
"""Row orders that a model accepts."""

Position = Mapping[str, Any]
"""Position of a source: JSON values only, so that a checkpoint stores it as text."""


class SourcedBatch(NamedTuple):
    """One global batch, and the position of the source after it."""

    batch: dict[str, np.ndarray]
    position: Position


@runtime_checkable
class Source(Protocol):
    """An endless or finite sequence of global batches, independent of the devices.

    Attributes:
        axes: The logical axes of each leaf, `batch` first.
        resume: "exact" if `batches(position)` continues as if never stopped; "replay" if it must read and
            drop the batches already seen (which `batches` does, with a warning).
    """

    @property
    def axes(self) -> Mapping[str, Axes]: ...

    @property
    def resume(self) -> Literal["exact", "replay"]: ...

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on; from the beginning if it is None."""
        ...
