"""The lines at which the rooms meet: what a Task is to the step, and a Source to the loop.

Everything that trains passes here. A built-in decoder, a traced PyTorch module, a pipeline with its own schedule and a
generative adversarial pair are all a `Task`; packed text, a torch `DataLoader` and a Python list are all a `Source`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Params = Any
ModelState = Any
Axes = tuple[str | None, ...]
"""One logical axis name for each dimension of an array; None is a dimension that is never sharded."""

Batch = Mapping[str, Any]
"""Leaf name to array. Every leaf's first dimension is the logical axis `batch`, of the same size in all leaves."""

RowOrder = Literal["zigzag", "contiguous"]
"""Which positions of a row the devices of a context axis hold: each one piece from its front and one from its back, so that
causal attention costs all of them the same; or adjacent ones, in the devices' order."""

AcceptedOrder = Literal["any", "zigzag", "contiguous"]
"""Which of these a model takes."""

Position = Mapping[str, Any]
"""Where a source stands: JSON values only, so that a checkpoint holds it as text."""


class SourcedBatch(NamedTuple):
    """One global batch, and where the source stands after it."""

    batch: dict[str, np.ndarray]
    position: Position


@runtime_checkable
class Source(Protocol):
    """An endless or finite sequence of global batches, the same whatever the devices are.

    Attributes:
        axes: The logical axes of each leaf, `batch` first.
        resume: "exact" when `batches(position)` continues as if never stopped; "replay" when the only way back is
            to draw and drop the batches already seen (`batches` does it, with a warning).
    """

    @property
    def axes(self) -> Mapping[str, Axes]: ...

    @property
    def resume(self) -> Literal["exact", "replay"]: ...

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on; from the beginning when it is None."""
        ...
