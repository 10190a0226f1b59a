"""The source of batches of examples; their order is a function of (seed, epoch), so it resumes exactly at any
position.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, SourcedBatch

from ..images.augmentation import Augmentation
from ..images.mixup import MIX, MIXED_LABEL, Mixing, make_generator, mix_partners
from ..text.packing import permutation
from ..text.token_source import WantedRows, check_position
from .examples import AugmentedExamples, Examples

Example = dict[str, np.ndarray]
Augment = Callable[[Example, np.random.Generator], Example]
"""A random change of one example; the generator depends only on the seed, the epoch and the example's
index.
"""

MASK = "loss_mask"
_AUGMENT = 0x6175676D656E74
_IMAGE = 0x696D616765


class ExampleSource:
    """Source of global batches of examples, independent of the number of devices and processes.

    Each batch has the examples' leaves, and `loss_mask`, float32 (batch): 1, or 0 for padding rows of the
    last batch. An endless source continues a batch that reaches past an epoch with examples of the next one.

    Attributes:
        num_batches: Number of batches; None if endless.

    >>> from panax.data.loading.examples import Arrays
    >>> source = ExampleSource(Arrays({"x": np.arange(5)}), batch_size=2, epochs=1)
    >>> [(batch["x"].tolist(), batch["loss_mask"].tolist()) for batch, _ in source.batches()]
    [([0, 2], [1.0, 1.0]), ([1, 4], [1.0, 1.0]), ([3, 0], [1.0, 0.0])]
    """

    owns_memory = True  # of each batch: nothing writes to it after it was yielded

    def __init__(
        self,
        examples: Examples,
        *,
        batch_size: int,
        seed: int = 0,
        epochs: int | None = None,
        augment: Augment | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Draw batches of `batch_size` examples, for `epochs` epochs or endlessly.

        Args:
            seed: Seed of the order and of `augment`.
            augment: Function applied to each example when it is drawn; it must preserve the leaves' names and
                return the same shapes for every example.
            augmentation: Augmentation of images, applied before `augment`.

        Raises:
            RecipeError: `batch_size` or `epochs` is less than 1, a leaf is called `loss_mask`, or the
                examples are not images, or have no labels to be mixed.
        """
        if batch_size < 1 or (epochs is not None and epochs < 1):
            raise RecipeError(f"batch_size={batch_size}, epochs={epochs}; expected at least 1")
        if MASK in examples.axes:
            raise RecipeError(f"the examples have a leaf {MASK!r}, which this source adds; rename theirs")
        mixing = None if augmentation is None else augmentation.mixing
        if (
            augmentation is not None
            and augmentation.has_per_image_changes
            and not isinstance(examples, AugmentedExamples)
        ):
            raise RecipeError(f"an augmentation is for images; {type(examples).__name__} gives {list(examples.axes)}")
        if mixing is not None and (not {"image", "label"} <= set(examples.axes) or batch_size < 2):
            raise RecipeError(
                f"mixing needs the leaves image and label, and 2 rows or more; got {list(examples.axes)}, {batch_size} rows"
            )
        self.examples = examples
        self.batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self._augmentation = augmentation
        self._mixing = mixing
        self._total = None if epochs is None else epochs * examples.num_examples
        self.num_batches = None if self._total is None else -(-self._total // batch_size)
        self._latest: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def axes(self) -> Mapping[str, Axes]:
        mixed: Mapping[str, Axes] = {} if self._mixing is None else {MIXED_LABEL: ("batch",), MIX: ("batch",)}
        return {**self.examples.axes, **mixed, MASK: ("batch",)}

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return "exact"

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on, or from the beginning if it is None.

        Raises:
            DataError: The position is invalid, or is of other examples, another seed or batch size. While
                batches are drawn: there are too many bad records.
        """
        return self.batches_of(range(self.batch_size), position)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield `batches` with only `rows` of each global batch."""
        return self._draw(0 if position is None else self._start(position), np.asarray(rows, np.int64))

    def _identity(self) -> dict[str, int | str]:
        return {"seed": self._seed, "batch_size": self.batch_size, "fingerprint": self.examples.fingerprint}

    def _start(self, position: Position) -> int:
        check_position(position, self._identity())
        epoch, index, size = position.get("epoch"), position.get("index"), self.examples.num_examples
        if not (isinstance(epoch, int) and isinstance(index, int) and epoch >= 0 and 0 <= index < size):
            limits = f"0 <= epoch and 0 <= index < {size}"
            raise DataError(f"the saved data position has epoch {epoch!r} and index {index!r}; expected {limits}")
        return epoch * size + index

    def _draw(self, start: int, rows: npt.NDArray[np.int64]) -> Iterator[SourcedBatch]:
        while self._total is None or start < self._total:
            end = start + self.batch_size if self._total is None else min(start + self.batch_size, self._total)
            epoch, index = divmod(end, self.examples.num_examples)
            position = {"epoch": epoch, "index": index, **self._identity()}
            yield SourcedBatch(self._batch(start, rows, end), position)
            start += self.batch_size

    def _batch(self, start: int, rows: npt.NDArray[np.int64], end: int) -> Example:
        """Assemble `rows` of the batch that starts at index `start` of the endless order; rows from `end` on are
        padding.
        """
        indices = start + rows
        is_example = indices < end
        batch = self._examples(indices, end) if self._mixing is None else self._mixed(self._mixing, start, rows, end)
        for leaf in batch.values():
            leaf[~is_example] = 0
        return {**batch, MASK: is_example.astype(np.float32)}

    def _examples(self, indices: npt.NDArray[np.int64], end: int) -> Example:
        """Read and augment the examples at these indices of the order; indices from `end` on repeat the last
        one before it.
        """
        epochs, index = np.divmod(np.where(indices < end, indices, end - 1), self.examples.num_examples)
        numbers = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            at = epochs == epoch
            numbers[at] = self._order(epoch)[index[at]]
        augmentation = self._augmentation
        if augmentation is not None and augmentation.has_per_image_changes:
            assert isinstance(self.examples, AugmentedExamples)
            batch = self.examples.read_augmented(
                numbers, augmentation, lambda row: self._generator(_IMAGE, int(epochs[row]), int(numbers[row]))
            )
        else:
            batch = self.examples.read(numbers)
        if not getattr(self.examples, "owns_memory", False):
            # A user's class may reuse its buffer, or return arrays that it retains.
            batch = {name: np.array(leaf) for name, leaf in batch.items()}
        return batch if self._augment is None else self._augmented(batch, epochs, numbers)

    def _mixed(self, mixing: Mixing, start: int, rows: npt.NDArray[np.int64], end: int) -> Example:
        """Mix each of `rows` with its partner, which is read too if it is not among them."""
        read_rows = np.union1d(rows, mix_partners(rows, self.batch_size))
        batch = self._examples(start + read_rows, end)
        first, second = (np.searchsorted(read_rows, each) for each in (rows, mix_partners(rows, self.batch_size)))
        has_no_partner = start + mix_partners(rows, self.batch_size) >= end
        out = {name: leaf[first] for name, leaf in batch.items()}
        out |= {MIXED_LABEL: batch["label"][second], MIX: np.ones(len(rows), np.float32)}
        for row in np.flatnonzero(~has_no_partner).tolist():
            pair = batch["image"][first[row]], batch["image"][second[row]]
            bits = make_generator(self._seed, start + int(rows[row]))
            out["image"][row], out[MIX][row] = mixing.apply(*pair, bits)
        return out

    def _generator(self, purpose: int, epoch: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self._seed % 2**64, purpose], counter=[0, 0, epoch, number]))

    def _augmented(self, batch: Example, epochs: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Example:
        assert self._augment is not None
        examples = []
        for row, (epoch, number) in enumerate(zip(epochs.tolist(), numbers.tolist(), strict=True)):
            example = {name: leaf[row] for name, leaf in batch.items()}
            changed = self._augment(example, self._generator(_AUGMENT, epoch, number))
            examples.append({name: np.array(leaf) for name, leaf in changed.items()})
            if examples[-1].keys() != batch.keys():
                raise DataError(f"augment gave the leaves {list(examples[-1])}; expected {list(batch)}")
        return {name: np.stack([example[name] for example in examples]) for name in batch} if examples else batch

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            size = self.examples.num_examples
            latest = self._latest = epoch, permutation(size, seed=self._seed, epoch=epoch, purpose="documents")
        return latest[1]
