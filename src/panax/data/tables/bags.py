"""Categorical columns of tables as bags of ids: whole numbers, hashes, a vocabulary's ids, or parts of a
date."""

import dataclasses
import datetime
import json
import math
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import RecipeError
from panax.core.validation import Validated

from ...system import json_reader
from ..files.checksums import MAX_NAMES_BYTES, VERIFIED_FOLDER, read_sealed, write_sealed
from ..files.files import BadRecordError, read_error
from .categories import NumberFormats, category_text, is_empty, is_unicode, parse_id, parse_number

LARGEST_ID = 2**31 - 1
EMPTY = -1
"""Padding of a bag: no id."""
PADDING_KEY = 0
"""Padding of a bag of keys."""

_PARTS = {"month": 12, "day": 31, "weekday": 7, "hour": 24}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerIds(Validated):
    """Values that are already ids: integers from 0.

    Attributes:
        rows: Number of ids; a value of this or more is a bad record. None: one more than the largest value.
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and not 1 <= self.rows <= LARGEST_ID:
            raise RecipeError(f"rows={self.rows}; expected 1 to {LARGEST_ID}, the number of ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashBuckets(Validated):
    """Ids by hashing: the hash of the column's name and the value, modulo `buckets`; values that collide
    share a vector.
    """

    buckets: int

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= LARGEST_ID:
            raise RecipeError(f"buckets={self.buckets}; expected 1 to {LARGEST_ID}, the number of ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountVocabulary(Validated):
    """Ids by frequency: the most frequent value is 0; values rarer than `min_count` share hash buckets after
    the others.

    Values are counted once, over all rows of the files including bad ones; the counts are cached under a hash
    of the files and settings.

    Attributes:
        min_count: Minimum number of occurrences of a value with a separate id.
        most: Maximum number of separate ids, for the most frequent values; None: no limit.
        hash_buckets: Number of ids that all other values share by hash, including values unseen so far.
        counted_in: The files to count, like a table's `paths`. For a table that a model is evaluated on,
            these are the files that it was trained on, so that ids mean the same values in both. (): the
            table's files.
    """

    min_count: int = 1
    most: int | None = None
    hash_buckets: int = 1
    counted_in: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("min_count", self.min_count), ("most", self.most), ("hash_buckets", self.hash_buckets)):
            if value is not None and not 1 <= value <= LARGEST_ID:
                raise RecipeError(f"{name}={value}; expected 1 to {LARGEST_ID}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calendar(Validated):
    """A part of a date in ISO 8601 (`2013-01-31 06:00:00`), or of seconds since 1970; months, days and hours
    count from 0.

    Attributes:
        zone: Time zone of the date part, such as "America/New_York"; a date without a zone is in UTC.
    """

    part: Literal["month", "day", "weekday", "hour"]
    zone: str = "UTC"

    def __post_init__(self) -> None:
        try:
            zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise RecipeError(
                f"zone={self.zone!r} is not in this machine's database of time zones; expected one like 'America/New_York'"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashedIds(Validated):
    """64-bit hashes of the column's name and the value, the keys of a growing table's rows."""


Ids = IntegerIds | HashBuckets | CountVocabulary | Calendar | HashedIds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bag(Validated):
    """A categorical column as bags of ids: a leaf int32 (batch, capacity), padded with -1. An empty value is
    an empty bag.

    With `ids=HashedIds()` the leaf is uint32 (batch, capacity, 2), the lower word first, padded with zeros.

    Attributes:
        column: Name of the column; its values are single values, Parquet lists, or text split by `separator`.
        ids: How a value is mapped to an id.
        leaf: Name of the batch's leaf; "": the column's name.
        capacity: Maximum number of ids in a bag.
        too_long: Handling of longer bags: the row is a bad record, or only the bag's first or last ids are
            used.
        separator: Text that separates values; "": the text is one value.
        weights: A column with one weight per id, split in the same way, for the leaf `LEAF_weights`, float32,
            0 for padding. "": none.
        log_share: Also provide the leaf `LEAF_log_share`, float32 (batch): the logarithm of the share of all
            rows that have this row's first id, for the sampling-bias correction of an in-batch softmax.
    """

    column: str
    ids: Ids
    leaf: str = ""
    capacity: int = 1
    too_long: Literal["bad_record", "first", "last"] = "bad_record"
    separator: str = ""
    weights: str = ""
    log_share: bool = False

    def __post_init__(self) -> None:
        if not self.column or self.column == self.weights:
            raise RecipeError(
                f"column={self.column!r}, weights={self.weights!r}; expected the names of two columns, or one"
            )
        if not 1 <= self.capacity <= LARGEST_ID:
            raise RecipeError(
                f"capacity={self.capacity}; expected at least 1, the most ids that a bag of {self.column!r} has"
            )
        if self.log_share and isinstance(self.ids, HashedIds):
            raise RecipeError(
                f"the bag of {self.column!r} has log_share=True with ids=HashedIds(), but hashed values may all be "
                f"distinct, without shares; use a CountVocabulary"
            )

    @property
    def name(self) -> str:
        return self.leaf or self.column

    @property
    def leaves(self) -> tuple[str, ...]:
        """Return the names of the batch's leaves that this column provides."""
        more = (("weights", bool(self.weights)), ("log_share", self.log_share))
        return (self.name, *(f"{self.name}_{what}" for what, is_there in more if is_there))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.weights) if self.weights else (self.column,)

    def values(self, value: Any) -> list[Any]:
        """Split one row's value into values; [] if it is empty."""
        if is_empty(value):
            return []
        if isinstance(value, list | tuple | np.ndarray):
            return [each for each in value if not is_empty(each)]
        if self.separator and isinstance(value, str):
            return [each for each in value.split(self.separator) if each]
        return [value]


def check_bags(bags: Sequence[Bag], other_leaves: Iterable[str]) -> None:
    """Raise a RecipeError if two leaves of a batch have the same name."""
    leaf_names = set(other_leaves)
    for bag in bags:
        for leaf in bag.leaves:
            if leaf in leaf_names:
                raise RecipeError(f"two leaves of a batch are called {leaf!r}; rename the leaf of one bag with leaf=")
            leaf_names.add(leaf)


class IdEncoder:
    """The encoder of a bag's column while files are read, from a row's values to its ids.

    Attributes:
        max_id: The largest id read so far, if values are ids.
        num_cut: Number of rows with more values than the bag's capacity.
    """

    def __init__(self, bag: Bag, words: Mapping[str, int] | None = None) -> None:
        """Encode `bag`; `words` has the ids, if the bag has a vocabulary."""
        self.bag, self.max_id, self.num_cut = bag, EMPTY, 0
        self._spellings = NumberFormats()
        self._words = words
        self._id_cache: dict[Any, int] = {}
        self._id: Callable[[Any, str], int] = {
            IntegerIds: self._number, HashBuckets: self._hash, CountVocabulary: self._word, Calendar: self._calendar_id,
            HashedIds: self._key,
        }[type(bag.ids)]  # fmt: skip

    @property
    def num_ids(self) -> int:
        ids = self.bag.ids
        match ids:
            case HashBuckets():
                return ids.buckets
            case CountVocabulary():
                return len(self._words or {}) + ids.hash_buckets
            case Calendar():
                return _PARTS[ids.part]
            case IntegerIds():
                return self.max_id + 1 if ids.rows is None else ids.rows
            case HashedIds():
                return 0

    def encode(self, value: Any, weights: Any, where: str) -> tuple[list[int], list[float]]:
        """Return the ids of one row, padded to the capacity, and their weights; no weights without a weight column.

        Raises:
            BadRecordError: A value has no id, there are too many values, or the numbers of weights and ids
                differ.
        """
        bag, values = self.bag, self.bag.values(value)
        bag_weights = self._weights(values, weights, where) if bag.weights else []
        if len(values) > bag.capacity:
            if bag.too_long == "bad_record":
                raise BadRecordError(
                    where,
                    f"column {bag.column!r} holds {len(values)} values; expected at most capacity={bag.capacity}: raise it, or "
                    f'keep some with too_long="first" or "last"',
                )
            self.num_cut += 1
            cut = slice(bag.capacity) if bag.too_long == "first" else slice(-bag.capacity, None)
            values, bag_weights = values[cut], bag_weights[cut]
        ids = [self._of(each, where) for each in values]
        missing = bag.capacity - len(ids)
        nothing = PADDING_KEY if isinstance(bag.ids, HashedIds) else EMPTY
        return ids + [nothing] * missing, bag_weights + [0.0] * missing if bag.weights else []

    def _weights(self, values: list[Any], weights: Any, where: str) -> list[float]:
        parts = dataclasses.replace(self.bag, column=self.bag.weights, weights="").values(weights)
        found = [parse_number(each) for each in parts]
        if len(found) != len(values) or not all(map(math.isfinite, found)):
            raise BadRecordError(
                where,
                f"column {self.bag.weights!r} holds {weights!r}; expected {len(values)} finite numbers, one for each id",
            )
        return found

    def notes(self) -> list[str]:
        """Return notes for the user on the values that were read."""
        spelled = (
            self._spellings.note(self.bag.column)
            if isinstance(self.bag.ids, HashBuckets | CountVocabulary | HashedIds)
            else None
        )
        cut = (
            f"column {self.bag.column!r}: {self.num_cut:,} rows hold more than capacity={self.bag.capacity} values, of which the "
            f"{self.bag.too_long} are kept"
        )
        return [line for line in (cut if self.num_cut else None, spelled) if line is not None]

    def _of(self, value: Any, where: str) -> int:
        # True and 1 are the same dictionary key, but different texts.
        is_bool = isinstance(value, bool)
        try:
            if not is_bool:
                return self._id_cache[value]
        except (KeyError, TypeError):
            pass
        value_id = self._id(value, where)
        self._spellings.add(value)
        if not is_bool and len(self._id_cache) < 2**20:
            self._id_cache[value] = value_id
        self.max_id = max(self.max_id, value_id)
        return value_id

    def _number(self, value: Any, where: str) -> int:
        rows = self.bag.ids.rows if isinstance(self.bag.ids, IntegerIds) else None
        number = parse_id(value)
        if not 0 <= number < (LARGEST_ID if rows is None else rows):
            range_ = "from 0 on" if rows is None else f"from 0 to {rows - 1} (rows={rows})"
            raise BadRecordError(
                where,
                f"column {self.bag.column!r} holds {value!r}; expected a whole number {range_}, or ids=HashBuckets(...)",
            )
        return number

    def _hash(self, value: Any, where: str) -> int:
        assert isinstance(self.bag.ids, HashBuckets)
        return hash_value(self.bag.column, category_text(value, self.bag.column, where)) % self.bag.ids.buckets

    def _key(self, value: Any, where: str) -> int:
        # 0 is not a key: one hash in 2^64 is changed to 1.
        return hash_value(self.bag.column, category_text(value, self.bag.column, where)) or 1

    def _word(self, value: Any, where: str) -> int:
        assert isinstance(self.bag.ids, CountVocabulary) and self._words is not None
        text = category_text(value, self.bag.column, where)
        known = self._words.get(text)
        return (
            len(self._words) + hash_value(self.bag.column, text) % self.bag.ids.hash_buckets if known is None else known
        )

    def _calendar_id(self, value: Any, where: str) -> int:
        assert isinstance(self.bag.ids, Calendar)
        seconds = parse_seconds(value, self.bag.column, where)
        date = datetime.datetime.fromtimestamp(seconds, zoneinfo.ZoneInfo(self.bag.ids.zone))
        return {"month": date.month - 1, "day": date.day - 1, "weekday": date.weekday(), "hour": date.hour}[
            self.bag.ids.part
        ]


def hash_value(column: str, text: str) -> int:
    """Return a 64-bit hash of a column's value, the same on every machine."""
    return xxhash.xxh64_intdigest(f"{column}\0{text}".encode())


def parse_seconds(value: Any, column: str, where: str) -> float:
    """Convert a time to seconds: a number unchanged, an ISO 8601 date as seconds since 1970 (UTC if it has no
    zone).

    Raises:
        BadRecordError: The value is neither.
    """
    try:
        if isinstance(value, datetime.datetime):
            date = value
        else:
            number = parse_number(value)
            if math.isfinite(number):
                return number
            date = datetime.datetime.fromisoformat(value)
        return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise BadRecordError(
            where, f"column {column!r} holds {value!r}; expected a time: a number, or a date in ISO 8601"
        ) from None


def count_values(bag: Bag, values: Iterable[Any], into: Counter[str]) -> None:
    """Count a block's values of a bag with a vocabulary; invalid values are ignored here and reported when
    rows are read.
    """
    for value in values:
        for each in bag.values(value):
            try:
                into[category_text(each, bag.column, "")] += 1
            except BadRecordError:
                continue


def log_frequencies(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Compute for each row the log of the share of rows with the same first id; rows without an id count
    together.

    >>> np.exp(log_frequencies(np.array([[3], [3], [-1], [0]], np.int32))).tolist()
    [0.5, 0.5, 0.25, 0.25]
    """
    first = ids[:, 0].astype(np.int64) - EMPTY
    counts = np.bincount(first)
    return np.log(counts[first] / len(first)).astype(np.float32)


def build_vocabulary(counts: Mapping[str, int], vocabulary: CountVocabulary) -> list[str]:
    """List the values with separate ids, in the order of the ids: by count, then by text.

    >>> build_vocabulary({"a": 1, "b": 3, "c": 3}, CountVocabulary(min_count=2))
    ['b', 'c']
    """
    frequent = (word for word, count in counts.items() if count >= vocabulary.min_count and is_unicode(word))
    kept = sorted(frequent, key=lambda word: (-counts[word], word))
    return kept[: vocabulary.most]


def write_vocabularies(directory: Path, words: Mapping[str, Sequence[str]]) -> None:
    """Write each bag's vocabulary to a directory of the cache."""
    (directory / "words.json").write_text(json.dumps(words, ensure_ascii=True), encoding="utf-8")
    write_sealed(
        directory / "header.json", {"num_words": {leaf: len(each) for leaf, each in words.items()}}, ["words.json"]
    )


def read_vocabularies(directory: Path, root: Path) -> dict[str, dict[str, int]]:
    """Read each bag's vocabulary, as values with their ids.

    Raises:
        DataError: The cache entry is damaged.
    """
    read_sealed(directory / "header.json", root / VERIFIED_FOLDER)
    path = directory / "words.json"
    try:
        found = json_reader.read(path, max_bytes=MAX_NAMES_BYTES)
        return {leaf: {word: i for i, word in enumerate(each)} for leaf, each in found.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise read_error(path, error) from error
