"""Padding of a varying dimension to one of a few sizes: a step is compiled once per size, not once per
length."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, Source, SourcedBatch


class BucketedSource:
    """Another source's batches, padded along one logical axis to the smallest bucket that holds them.

    Attributes:
        buckets: The sizes, ascending.

    >>> from panax.data.loading.iterable import IterableSource
    >>> lines = [{"tokens": np.ones((2, 3), np.int32)}, {"tokens": np.ones((2, 6), np.int32)}]
    >>> source = IterableSource(lines, axes={"tokens": ("batch", "seq")}, epochs=1)
    >>> [b.batch["tokens"].shape for b in BucketedSource(source, (4, 8)).batches()]
    [(2, 4), (2, 8)]
    """

    def __init__(
        self,
        source: Source,
        buckets: tuple[int, ...],
        *,
        axis: str = "seq",
        pad: Mapping[str, int | float] | None = None,
        mask: str | None = None,
    ) -> None:
        """Pad the batches of `source`.

        Args:
            buckets: The sizes that the dimension may have.
            axis: Logical axis of the dimension.
            pad: Padding value of each leaf; 0 for leaves not named.
            mask: Add a leaf of this name, (batch, axis) in float32, 1 for data and 0 for padding, for a loss
                that has no other way to exclude padding.

        Raises:
            RecipeError: `buckets` is empty or has a size below 1; no leaf has the axis; or `pad` or `mask` names
                a wrong leaf.
        """
        if not buckets or min(buckets) < 1:
            raise RecipeError(f"buckets={buckets}; expected one or more sizes of at least 1")
        axes = dict(source.axes)
        self._source = source
        self.buckets = tuple(sorted(set(buckets)))
        self._axis = axis
        self._pad = dict(pad or {})
        self._mask = mask
        self._dimensions = {name: leaf_axes.index(axis) for name, leaf_axes in axes.items() if axis in leaf_axes}
        if not self._dimensions:
            have = ", ".join(f"{name!r}: {leaf_axes}" for name, leaf_axes in axes.items())
            raise RecipeError(f"no leaf has the axis {axis!r} ({have}); name it in the source's axes")
        if unknown := set(self._pad) - set(self._dimensions):
            raise RecipeError(
                f"pad={self._pad} has no effect on {', '.join(unknown)}; no such leaf has the axis {axis!r}"
            )
        if mask in axes:
            raise RecipeError(f"mask={mask!r} is already a leaf; it is padded with 0, so remove mask")
        self._axes: Mapping[str, Axes] = axes if mask is None else {**axes, mask: ("batch", axis)}

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self._axes

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self._source.resume

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield padded batches from `position` on.

        Raises:
            DataError: A batch is longer than the largest bucket, or its leaves differ in length.
        """
        for batch, after in self._source.batches(position):
            yield SourcedBatch(self._padded(batch), after)

    def _padded(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        lengths = {name: batch[name].shape[dimension] for name, dimension in self._dimensions.items()}
        length, *others = set(lengths.values())
        if others:
            raise DataError(f"the leaves of a batch differ along {self._axis!r}: {lengths}; expected one length")
        place = int(np.searchsorted(self.buckets, length))
        if place == len(self.buckets):
            raise DataError(
                f"a batch has {length} along {self._axis!r}, more than the largest bucket, {self.buckets[-1]}; "
                "cut it, or give a larger bucket"
            )
        extra = self.buckets[place] - length
        padded = dict(batch)
        for name, dimension in self._dimensions.items():
            widths = [(0, extra if d == dimension else 0) for d in range(batch[name].ndim)]
            padded[name] = np.pad(batch[name], widths, constant_values=self._pad.get(name, 0))
        if self._mask is not None:
            rows = len(next(iter(batch.values())))
            padded[self._mask] = np.repeat((np.arange(length + extra) < length)[None].astype(np.float32), rows, axis=0)
        return padded
