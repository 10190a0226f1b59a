"""Users' events ordered by time, as examples for sequence models: a user's last events, and the next event
after each."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes
from panax.core.validation import Validated

from ...system import json_reader
from ..files.bounds import MAX_RECORD_BYTES, check_positive
from ..files.cache import read_or_build
from ..files.checksums import MAX_NAMES_BYTES, VERIFIED_FOLDER, read_sealed, write_sealed
from ..files.files import (
    BadRecordError,
    cache_identity,
    find_files,
    fingerprint,
    open_each_local,
    read_error,
    stat_files,
)
from ..files.memory_map import map_file
from ..files.skipped_files import describe_skipped_files
from ..loading.examples import BadRecordLog, describe_skipped_records, hash_integers, hash_names
from ..text.corpus import BadRecord
from .bags import EMPTY, parse_seconds
from .categories import NumberFormats, category_text, is_empty
from .table import TABLE_PATTERNS
from .table_files import read_blocks

FORMAT_VERSION = 2
_LARGEST_SPAN = 2**31 - 1

Events = Literal["all", "but_last", "last"]
"""Events that an example predicts: all but the first, all but the first and the last, or the last alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(Validated):
    """Rows of events (CSV, TSV, Parquet, NumPy), one example per user.

    A batch has `items`, int32 (batch, seq), a user's latest events except the last, padded with -1 at the
    end; `targets`, the item that followed each, -1 for none; `times`, int32, seconds of each event since the
    user's first.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        user: The column of the user.
        item: The column of the item, of any type; ids are assigned by frequency, the most frequent item is 0.
        time: The column of the time: a number of seconds, or a date in ISO 8601. Simultaneous events have the
            files' order.
        last: Number of a user's latest events to read.
        target_times: Also provide the leaf `target_times`, int32, the time of each target: a model that ranks
            the next item at a known time, such as that of a request, may use it in attention (HSTU).
        min_events: Users with fewer events are skipped; at least 3, as the last event may be held out.
        max_record_bytes: A row with more characters is an error, as is a larger value in Parquet.
        items_from: Files to take the ids of items from, like `paths`: those that a model was trained on, for
            events that it is evaluated on, so that an id means the same item in both. Events of other items
            are skipped and counted. (): `paths` itself.
    """

    paths: tuple[str, ...]
    user: str = "user"
    item: str = "item"
    time: str = "time"
    last: int = 50
    target_times: bool = False
    min_events: int = 3
    max_record_bytes: int = MAX_RECORD_BYTES
    items_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
        if len({self.user, self.item, self.time}) < 3:
            raise RecipeError(f"user={self.user!r}, item={self.item!r}, time={self.time!r}; expected three columns")
        if self.last < 1 or self.min_events < 3:
            raise RecipeError(
                f"last={self.last}, min_events={self.min_events}; expected at least 1 event read, and 3 events a user"
            )

    def open(self, root: Path, max_bad_records: int) -> "SequenceExamples":
        """Open the sequences; build them first if they do not exist.

        Raises:
            DataError: A file can't be read or lacks a column, no user has enough events, or too many rows are
                bad.
        """
        files = find_files(self.paths, TABLE_PATTERNS)
        settings = (self.user, self.item, self.time, self.min_events)
        if self.items_from:
            settings = (*settings, *cache_identity(find_files(self.items_from, TABLE_PATTERNS)))
        kind = f"sequences-v{FORMAT_VERSION}"
        name = f"{kind}-{fingerprint('sequences', *settings, *cache_identity(files))}"
        content = f"{kind}-{fingerprint('sequences', *settings, *stat_files(files))}"
        skipped = BadRecordLog(max_bad_records)
        built = read_or_build(
            root,
            name,
            build=lambda directory: self._build(files, directory, skipped, self._known_items(root, max_bad_records)),
            read=lambda directory: _read(directory, root / VERIFIED_FOLDER),
        )
        BadRecordLog(max_bad_records).begin(built.bad)
        notes = (*describe_skipped_files(self.paths, files), *built.notes, *describe_skipped_records(built.bad))
        return SequenceExamples(built.events, self.last, content, notes=notes, target_times=self.target_times)

    def _known_items(self, root: Path, max_bad_records: int) -> tuple[str, ...] | None:
        """Return the items of the files that ids are taken from; None if ids are counted in these files."""
        if not self.items_from:
            return None
        like = dataclasses.replace(self, paths=self.items_from, items_from=())
        return like.open(root, max_bad_records).item_names

    def _build(self, files: list[Any], directory: Path, skipped: BadRecordLog, known: tuple[str, ...] | None) -> None:
        spellings = {self.user: NumberFormats(), self.item: NumberFormats()}
        rows = self._rows(files, skipped, spellings)
        counts = Counter(item for _, item, _ in rows)
        words = sorted(counts, key=lambda word: (-counts[word], word)) if known is None else [*known]
        number = {word: i for i, word in enumerate(words)}
        of_user: dict[str, list[tuple[float, int]]] = {}
        for user, item, time in rows:
            if item in number:
                of_user.setdefault(user, []).append((time, number[item]))
        users = sorted(user for user, events in of_user.items() if len(events) >= self.min_events)
        if not users:
            raise DataError(
                f"{', '.join(self.paths)}: no user has min_events={self.min_events} events, of {len(of_user)} users; lower it, "
                f"or name the right columns"
            )
        items, times, offsets = [], [], [0]
        for user in users:
            events = sorted(of_user[user], key=lambda event: event[0])
            items += [item for _, item in events]
            times += [min(int(time - events[0][0]), _LARGEST_SPAN) for time, _ in events]
            offsets.append(len(items))
        arrays = {"items.bin": (items, "<i4"), "times.bin": (times, "<i4"), "offsets.bin": (offsets, "<i8")}
        for file, (values, dtype) in arrays.items():
            (directory / file).write_bytes(np.array(values, dtype).tobytes())
        (directory / "names.json").write_text(json.dumps({"items": words, "users": users}), encoding="utf-8")
        notes = [note for column, each in spellings.items() if (note := each.note(column)) is not None]
        unknown = sum(item not in number for _, item, _ in rows)
        if unknown:
            notes.append(
                f"{unknown:,} of {len(rows):,} events are of items that items_from does not have; they are skipped"
            )
        few = len(of_user) - len(users)
        if few:
            num_skipped = sum(map(len, of_user.values())) - len(items)
            notes.append(
                f"{few:,} of {len(of_user):,} users have fewer than min_events={self.min_events} events; they are "
                f"skipped, with {num_skipped:,} events"
            )
        header = {"num_users": len(users), "num_events": len(items), "bad_records": skipped.bad, "notes": notes}
        write_sealed(directory / "header.json", header, [*arrays, "names.json"])

    def _rows(
        self, files: list[Any], skipped: BadRecordLog, spellings: Mapping[str, NumberFormats]
    ) -> list[tuple[str, str, float]]:
        rows = []
        columns = [self.user, self.item, self.time]
        for name, path in open_each_local(files):
            for block in read_blocks(path, name, columns, self.max_record_bytes):
                for record in block.bad:
                    skipped.add(record)
                for where, user, item, time in zip(
                    block.where, *(block.columns[name] for name in columns), strict=True
                ):
                    try:
                        for column, value in ((self.user, user), (self.item, item)):
                            if is_empty(value):
                                raise BadRecordError(
                                    where, f"column {column!r} is empty; expected the event's user or item"
                                )
                            spellings[column].add(value)
                        names = category_text(user, self.user, where), category_text(item, self.item, where)
                        rows.append((*names, parse_seconds(time, self.time, where)))
                    except BadRecordError as error:
                        skipped.add(BadRecord(error.where, error.reason))
        return rows


class _EventsOfUsers(NamedTuple):
    """Events of all users, concatenated; user i has `offsets[i]` to `offsets[i + 1]`."""

    items: npt.NDArray[np.int32]
    times: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    item_names: tuple[str, ...]
    user_names: tuple[str, ...]


class _BuiltSequences(NamedTuple):
    events: _EventsOfUsers
    bad: list[BadRecord]
    notes: list[str]


def _read(directory: Path, verified_dir: Path) -> _BuiltSequences:
    path = directory / "header.json"
    header = read_sealed(path, verified_dir)
    try:
        users, count = int(header["num_users"]), int(header["num_events"])
        bad = [BadRecord(str(where), str(reason)) for where, reason in header["bad_records"]]
        names = json_reader.read(directory / "names.json", max_bytes=MAX_NAMES_BYTES)
        named = tuple(map(str, names["items"])), tuple(map(str, names["users"]))
        notes = [*map(str, header["notes"])]
    except (ValueError, KeyError, TypeError) as error:
        raise read_error(path, error) from error
    remedy = "remove its folder, and it is made again"
    items, times, offsets = (
        map_file(directory / file, np.dtype(dtype), (length,), remedy)
        for file, dtype, length in (
            ("items.bin", "<i4", count),
            ("times.bin", "<i4", count),
            ("offsets.bin", "<i8", users + 1),
        )
    )
    return _BuiltSequences(_EventsOfUsers(items, times, offsets, *named), bad, notes)


class SequenceExamples:
    """Users by index, each an example; see `Sequences` for the leaves.

    Attributes:
        num_ids: Number of items by leaf, as tasks expect it.
        item_names: Each item's name in the files, by its id.
        length: Positions of a row.
        notes: Notes for the user on the events read.
    """

    owns_memory = True  # of batches read: nothing else writes to them

    def __init__(
        self,
        events: _EventsOfUsers,
        last: int,
        content: str,
        numbers: npt.NDArray[np.int64] | None = None,
        predicts: Events = "all",
        notes: tuple[str, ...] = (),
        target_times: bool = False,
    ) -> None:
        self.notes, self._target_times = notes, target_times
        self._events, self._content = events, content
        self._predicts: Events = predicts
        self._numbers = np.arange(len(events.offsets) - 1) if numbers is None else numbers
        self.length = last
        self.num_examples = len(self._numbers)
        leaves = ("items", "targets", "times", *(("target_times",) if target_times else ()))
        self.axes: Mapping[str, Axes] = dict.fromkeys(leaves, ("batch", "seq"))
        self.num_ids: Mapping[str, int] = {"items": len(events.item_names)}
        self.item_names = events.item_names
        self.id_sets: Mapping[str, str] = {"items": fingerprint(*events.item_names)}
        chosen = "" if numbers is None else hash_integers(numbers)
        known = ("target_times",) if target_times else ()
        self.fingerprint = fingerprint("sequences", content, last, predicts, chosen, *known)

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        shape = len(numbers), self.length
        out = {name: np.full(shape, EMPTY, np.int32) for name in ("items", "targets")}
        out |= {name: np.zeros(shape, np.int32) for name in self.axes if name.endswith("times")}
        for row, user in enumerate(self._numbers[numbers].tolist()):
            begin, end = self._events.offsets[user : user + 2].tolist()
            end -= self._predicts == "but_last"
            first = max(begin, end - 1 - self.length)
            count = end - 1 - first
            out["items"][row, :count] = self._events.items[first : end - 1]
            out["times"][row, :count] = self._events.times[first : end - 1]
            if self._target_times:
                out["target_times"][row, :count] = self._events.times[first + 1 : end]
            following = self._events.items[first + 1 : end]
            if self._predicts == "last":
                out["targets"][row, count - 1] = following[-1]
            else:
                out["targets"][row, :count] = following
        return out

    def keys(self) -> npt.NDArray[np.uint64]:
        return hash_names([self._events.user_names[user] for user in self._numbers.tolist()])

    def take(self, numbers: npt.NDArray[np.int64]) -> "SequenceExamples":
        chosen = self._numbers[numbers]
        return SequenceExamples(
            self._events, self.length, self._content, chosen, self._predicts, self.notes, self._target_times
        )

    def split_last(self) -> tuple["SequenceExamples", "SequenceExamples"]:
        """Split leave-one-out: each user's events except the last for training, and the last event to predict."""
        return self._predicting("but_last"), self._predicting("last")

    def _predicting(self, which: Events) -> "SequenceExamples":
        return SequenceExamples(
            self._events, self.length, self._content, self._numbers, which, self.notes, self._target_times
        )

    def item_counts(self) -> npt.NDArray[np.int64]:
        """Count the occurrences of each item, for sampling or its correction."""
        return np.bincount(self._events.items, minlength=len(self.item_names)).astype(np.int64)
