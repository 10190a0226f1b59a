"""Examples with random access: arrays in memory or memory-mapped, opened tables and images, and their
splits.
"""

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.core.params.logical import batch_row_axes
from panax.core.protocols import Axes

from ..files.files import fingerprint
from ..files.memory_map import check_mapped
from ..images.augmentation import Augmentation, Generators
from ..text.corpus import BadRecord
from ..text.record_checks import raise_bad_records
from .iterable import as_array

_BLOCK_BYTES = 2**24
_LOG = logging.getLogger("panax.data")
_WARNED, _THEN_EACH = 20, 1000
"""Each of the first 20 bad records is warned about, then every thousandth."""


@runtime_checkable
class Examples(Protocol):
    """Interface of examples that can be read in any order, implemented by any class with these members.

    Attributes:
        num_examples: Number of examples.
        axes: The logical axes of each leaf of a batch, `batch` first.
        fingerprint: A hash that changes when the examples do.
    """

    num_examples: int
    axes: Mapping[str, Axes]
    fingerprint: str

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        """Read the examples with these indices; each is a row of every leaf."""
        ...

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return a hash of each example, for splits; it does not change when other examples are added."""
        ...

    def take(self, numbers: npt.NDArray[np.int64]) -> "Examples":
        """Return the subset with these indices."""
        ...


@runtime_checkable
class ExampleFiles(Protocol):
    """Interface of a recipe's config of examples."""

    def open(self, root: Path, max_bad_records: int) -> Examples:
        """Open the examples; expensive results are cached in the directory `root`."""
        ...


@runtime_checkable
class AugmentedExamples(Protocol):
    """Examples of images that can be augmented while they are read."""

    def read_augmented(
        self, numbers: npt.NDArray[np.int64], augmentation: Augmentation, generators: Generators
    ) -> dict[str, np.ndarray]:
        """Read the examples with these indices, each augmented with its row's generator in `generators`."""
        ...


class Arrays:
    """Examples from arrays with a common first dimension: NumPy (also memory-mapped), torch or JAX arrays.

    64-bit values become 32-bit; an integer that does not fit is an error.

    >>> digits = Arrays({"image": np.zeros((5, 8, 8)), "label": np.arange(5)})
    >>> {name: leaf.dtype.name for name, leaf in digits.read(np.array([4, 0])).items()}
    {'image': 'float32', 'label': 'int32'}
    """

    owns_memory = True  # nothing else writes to arrays that were read

    def __init__(
        self,
        arrays: Mapping[str, object],
        *,
        axes: Mapping[str, Axes] | None = None,
        content: str | None = None,
        numbers: npt.NDArray[np.int64] | None = None,
        num_classes: int | None = None,
        times: npt.NDArray[np.float64] | None = None,
        num_ids: Mapping[str, int] | None = None,
        id_sets: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Take examples from `arrays`.

        Args:
            arrays: Arrays by the names of the batch's leaves.
            axes: Their logical axes, `batch` first. None: `batch`, then None for each other dimension.
            content: A hash of their content; None computes it, which reads all of them.
            numbers: Indices of the rows that are the examples; None for all.
            num_classes: Number of classes of the leaf `label`, for a model that takes it from the data.
            times: Time of each row, for a split by time; not a leaf.
            num_ids: Number of ids of each leaf of ids, for a model that takes it from the data.
            id_sets: For leaves with ids assigned by counts, a hash of the vocabulary; the sources of a run
                are compared by it.
            notes: Notes for the user on how the arrays were made.

        Raises:
            RecipeError: There are no arrays, or `axes` has other names.
            DataError: Their first dimensions differ, or they are not numeric.
        """
        if not arrays or not all(isinstance(name, str) for name in arrays):
            raise RecipeError(f"arrays={list(arrays)}; expected one or more arrays by name")
        self._arrays = {name: as_array(array, name, owned=False) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1 or not min(lengths.values()):
            raise DataError(f"the arrays have {lengths} examples; expected one number for all, at least 1")
        self.axes: Mapping[str, Axes] = batch_row_axes(self._arrays)
        for name, leaf_axes in (axes or {}).items():
            if name not in self.axes or len(leaf_axes) != len(self.axes[name]) or leaf_axes[0] != "batch":
                raise RecipeError(
                    f"axes of {name!r} are {leaf_axes}; expected the same number as in {self.axes}, `batch` first"
                )
        self.axes = {**self.axes, **(axes or {})}
        self._content = content or _hash_of(self._arrays)
        self._numbers = numbers
        self.num_classes = num_classes
        self.num_ids: Mapping[str, int] = dict(num_ids or {})
        self.id_sets: Mapping[str, str] = dict(id_sets or {})
        self.notes = tuple(notes)
        self._times = times
        self.num_examples = min(lengths.values()) if numbers is None else len(numbers)
        chosen = "" if numbers is None else hash_integers(numbers)
        self.fingerprint = fingerprint("arrays", self._content, sorted(self._arrays), chosen)

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        check_mapped(*self._arrays.values())
        rows = numbers if self._numbers is None else self._numbers[numbers]
        return {name: array[rows] for name, array in self._arrays.items()}

    def read_augmented(
        self, numbers: npt.NDArray[np.int64], augmentation: Augmentation, generators: Generators
    ) -> dict[str, np.ndarray]:
        """Read the examples with these indices, with the leaf `image` augmented.

        Raises:
            RecipeError: The images are not bytes of shape (height, width, channel) with 1 or 3 channels.
        """
        batch = self.read(numbers)
        image = batch.get("image")
        if image is None or image.dtype != np.uint8 or image.ndim != 4 or image.shape[-1] not in (1, 3):
            found = {name: (leaf.dtype.name, leaf.shape[1:]) for name, leaf in batch.items()}
            raise RecipeError(
                f"an augmentation needs a leaf 'image' of uint8 (height, width, 1 or 3 channels); the arrays are {found}"
            )
        return batch | {"image": _augmented(image, augmentation, generators)}

    def keys(self) -> npt.NDArray[np.uint64]:
        numbers = np.arange(self.num_examples) if self._numbers is None else self._numbers
        return hash_names(map(str, numbers.tolist()))

    def take(self, numbers: npt.NDArray[np.int64]) -> "Arrays":
        rows = numbers if self._numbers is None else self._numbers[numbers]
        return Arrays(
            self._arrays, axes=self.axes, content=self._content, numbers=rows, num_classes=self.num_classes,
            times=self._times, num_ids=self.num_ids, id_sets=self.id_sets, notes=self.notes,
        )  # fmt: skip

    @property
    def times(self) -> npt.NDArray[np.float64] | None:
        """Return the time of each example, or None if there are no times."""
        if self._times is None or self._numbers is None:
            return self._times
        return self._times[self._numbers]

    def open(self, root: Path, max_bad_records: int) -> "Arrays":
        return self


def _augmented(image: np.ndarray, augmentation: Augmentation, generators: Generators) -> np.ndarray:
    from PIL import Image

    height, width, channels = image.shape[1:]

    def one(row: int) -> np.ndarray:
        pil_image = Image.fromarray(image[row, :, :, 0] if channels == 1 else image[row])
        changed = augmentation.apply(pil_image, (width, height), lambda as_is: as_is, generators(row))
        return np.asarray(changed, np.uint8).reshape(height, width, channels)

    return np.stack([one(row) for row in range(len(image))]) if len(image) else image


def split_by_hash(examples: Examples, held_out: float | int) -> tuple[Examples, Examples | None]:
    """Split examples into training and held-out ones by hash; adding examples moves no existing one.

    Args:
        held_out: Approximate fraction to hold out; 0 for none.

    Raises:
        RecipeError: `held_out` is not a fraction.
        DataError: One side would be empty.
    """
    if not 0 <= held_out < 1:
        raise RecipeError(f"held_out={held_out}; expected a fraction of the examples, from 0 to below 1")
    if held_out == 0:
        return examples, None
    is_held_out = examples.keys() < np.uint64(held_out * 2.0**64)
    if is_held_out.all() or not is_held_out.any():
        raise DataError(
            f"held_out={held_out} holds {int(is_held_out.sum())} of {examples.num_examples} examples out; expected some and not "
            "all: choose another fraction, or 0 for none"
        )
    return examples.take(np.flatnonzero(~is_held_out)), examples.take(np.flatnonzero(is_held_out))


def split_by_time(examples: Examples, held_out: float | int) -> tuple[Examples, Examples | None]:
    """Hold out the latest examples.

    Examples of equal time stay together, so slightly less than the fraction may be held out.

    Args:
        held_out: Approximate fraction to hold out; 0 for none.

    Raises:
        RecipeError: `held_out` is not a fraction, or the examples have no times.
        DataError: One side would be empty.
    """
    if not 0 <= held_out < 1:
        raise RecipeError(f"held_out={held_out}; expected a fraction of the examples, from 0 to below 1")
    if held_out == 0:
        return examples, None
    times = getattr(examples, "times", None)
    if times is None:
        raise RecipeError(
            f'split="time", and {type(examples).__name__} has no times; name a column, as in Table(time="date")'
        )
    latest = np.sort(times)[-max(1, round(held_out * len(times)))]
    is_held_out = times > latest if (times < latest).sum() == 0 else times >= latest
    if is_held_out.all() or not is_held_out.any():
        raise DataError(
            f"held_out={held_out} by time holds {int(is_held_out.sum())} of {examples.num_examples} examples out; "
            f"expected some and "
            f"not all: choose another fraction, or a column with more than one time"
        )
    return examples.take(np.flatnonzero(~is_held_out)), examples.take(np.flatnonzero(is_held_out))


class BadRecordLog:
    """Thread-safe list of the bad records found so far, up to a limit.

    Attributes:
        bad: The bad records.
        limit: Maximum number of bad records.
    """

    def __init__(self, limit: int, *, quiet: bool = False) -> None:
        """Accept at most `limit` bad records; `quiet` suppresses the warnings."""
        self.bad: list[BadRecord] = []
        self.limit = limit
        self._quiet = quiet
        self._locations: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, bad: Sequence[BadRecord]) -> None:
        """Count the bad records found when the examples were prepared.

        Raises:
            DataError: There are too many.
        """
        self.bad = [*bad]
        self._locations = {record.where for record in bad}
        raise_bad_records(len(self.bad), self.limit, self.bad)

    def add(self, record: BadRecord) -> None:
        """Count a bad record, if it is a new one.

        Raises:
            DataError: There are more bad records than the limit.
        """
        with self._lock:
            if record.where in self._locations:
                return
            self._locations.add(record.where)
            self.bad.append(record)
            raise_bad_records(len(self.bad), self.limit, self.bad)
            count = len(self.bad)
        if self._quiet or (count > _WARNED and count % _THEN_EACH):
            return
        _LOG.warning("bad record %d of at most %d: %s: %s", count, self.limit, record.where, record.reason)


def describe_skipped_records(bad: Sequence[BadRecord]) -> list[str]:
    """Return a line with the number of skipped records, or no line without any."""
    if not bad:
        return []
    return [f"{len(bad):,} unusable records are skipped; the first is {bad[0].where}: {bad[0].reason}"]


def hash_names(names: "Sequence[str] | map[str]") -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each name, the same on every machine."""
    return np.fromiter((xxhash.xxh64_intdigest(name.encode()) for name in names), np.uint64)


def hash_integers(numbers: npt.NDArray[np.int64]) -> str:
    return hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()


def _hash_of(arrays: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        rows = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))
        for begin in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[begin : begin + rows]).tobytes())
    return digest.hexdigest()
