"""Interfaces between packages: a Task's to the step, a Source's to the loop, and a model's to generation.

All training goes through them. A built-in decoder, a traced PyTorch module, a pipeline with a custom schedule
and a generative adversarial pair are all a `Task`; packed text, a torch `DataLoader` and a Python list are
all a `Source`.
"""

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    # They import jax, without which data is read.
    from jaxtyping import Array, Float, Int

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


class IncrementalModel(abc.ABC):
    """A model that continues rows of tokens position by position, with its weights: a pytree, so that compiled programs take it
    as an argument.

    Rows are independent of each other: each has its own number of positions, and its results do not depend on the
    others.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    @abc.abstractmethod
    def max_length(self) -> int:
        """Maximum number of positions of a row."""

    @property
    def shares_prefixes(self) -> bool:
        """True if the first n positions of a row's cache depend on its first n tokens alone, and later ones do not
        change them: rows with a common beginning may then copy it. A recurrent state is not of this kind."""
        return False

    @property
    def records_experts(self) -> bool:
        """True if caches hold the experts that each position used, for `read_experts`."""
        return False

    @property
    def axes(self) -> Any:
        """Logical axes of each array of the model, a tuple in place of each; None if each device of a mesh has all of it."""
        return None

    @property
    def cache_axes(self) -> Any:
        """Logical axes of each array of a cache, a tuple in place of each, which begins with the axis of rows; None if
        caches are split by rows alone."""
        return None

    @abc.abstractmethod
    def empty_cache(self, rows: int, length: int) -> Any:
        """Create the cache of rows without positions; on a mesh, a device's shard of it for a device's rows.

        Raises:
            RecipeError: A layer of the model can't be run incrementally.
        """

    @abc.abstractmethod
    def extend(
        self,
        tokens: 'Int[Array, "rows seq"]',
        start: 'Int[Array, " rows"]',
        count: 'Int[Array, " rows"]',
        cache: Any,
    ) -> 'tuple[Float[Array, "rows seq width"], Any]':
        """Run on each row's next positions; return the hidden states that `logits` takes, and the cache.

        Args:
            start: Number of positions that each row's cache holds.
            count: Number of new positions of each row; tokens after these are ignored, and their hidden states have
                no meaning.
        """

    def read_experts(self, cache: Any) -> 'Int[Array, "rows length layer active"]':
        """Return the experts that each position of a cache used, of each mixture layer, if `records_experts`; those of positions
        that were not run have no meaning."""
        raise NotImplementedError(f"{type(self).__name__} records no experts")

    @abc.abstractmethod
    def logits(self, hidden: 'Float[Array, "*rows width"]') -> 'Float[Array, "*rows vocab"]':
        """Compute the logits of the next token, in float32."""
