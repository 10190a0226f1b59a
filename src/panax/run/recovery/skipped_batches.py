"""Which batches a run leaves out, and why: kept in its checkpoints, on record beside them, and listed in the run's folder.

Batches are numbered by their place in the data's order, from 1: one for each step, and those that were left out before.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoint import raise_on_all_processes
from ...checkpoint.manifest import Manifest, compute_checksum
from ...checkpoint.record import FOLDER
from ...core.errors import CheckpointError
from ...job.agreement import broadcast_text, is_process_zero
from ...stores import ObjectNotFoundError, Store
from ...system import files, json_reader

FILE = f"{FOLDER}/rewinds.json"
"""The record beside the checkpoints: written before anything of the history that ended there is removed."""

LOG = "rewinds.jsonl"
"""The same for people and reports, in the run's folder."""

HOST_KEY = "batches"
"""The name under which a checkpoint keeps a `DataProgress`."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """One time that a run went back.

    Attributes:
        at: When, in seconds since the epoch.
        step: Steps taken before.
        to: The step it went back to.
        source: The checkpoint whose state that is.
        batches: What is left out from then on; nothing, where a step was corrupted.
        why: What happened, in words.
        data: The data whose batches these are: how often a run has gone on with other data before.
        seconds: Since the run came to step `to` the first time, as far as this session goes back.
    """

    at: float
    step: int
    to: int
    source: str
    batches: tuple[int, ...]
    why: str
    seconds: float
    data: int = 0

    @property
    def is_corruption(self) -> bool:
        """Whether it went back from a step that gave other values on other devices: no batch is at fault."""
        return not self.batches

    @classmethod
    def from_json(cls, said: Any) -> "Rollback":
        """From JSON values.

        Raises:
            ValueError: They are something else.
        """
        if not isinstance(said, Mapping) or set(said) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"expected a rewind, got {said!r}")
        seconds = [said[name] for name in ("at", "seconds")]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in seconds):
            raise ValueError(f"expected times in seconds, got {seconds!r}")
        if not all(isinstance(said[name], str) for name in ("source", "why")):
            raise ValueError(f"expected a reason in words, got {said!r}")
        return cls(
            **{
                **said,
                "batches": _counts(said["batches"]),
                **dict(zip(("step", "to"), _counts([said["step"], said["to"]]))),
            }
        )


@dataclasses.dataclass(frozen=True)
class DataProgress:
    """How far a run has come in its data.

    Attributes:
        drawn: The number of the last batch that a step has taken.
        skipped: Of the last batches, those in a row whose updates were skipped.
        rewinds: Oldest first.
        data: How often the run has gone on with other data, of which batches are numbered from 1 again.
        verified: The last step that gave the same on other devices; 0 where none was checked.
    """

    drawn: int = 0
    skipped: tuple[int, ...] = ()
    rewinds: tuple[Rollback, ...] = ()
    data: int = 0
    verified: int = 0

    @property
    def skipped_batches(self) -> frozenset[int]:
        """The batches that rewinds leave out."""
        return frozenset(number for rewind in self.rewinds if rewind.data == self.data for number in rewind.batches)

    def to_host(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` keeps, as JSON values; nothing where each step took the next batch, and was applied."""
        return {} if self == DataProgress(step) else {HOST_KEY: dataclasses.asdict(self)}

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "DataProgress":
        """What a checkpoint has kept.

        Raises:
            CheckpointError: It can't be used.
        """
        said = manifest.host.get(HOST_KEY)
        if said is None:
            return cls(manifest.step)
        try:
            rewinds = tuple(map(Rollback.from_json, said["rewinds"]))
            drawn, data, verified = _counts([said["drawn"], said["data"], said.get("verified", 0)])
            return cls(drawn, _counts(said["skipped"]), rewinds, data, verified)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"what the checkpoint of step {manifest.step} says of the batches left out can't be used: {error}"
            ) from error


def matches_history(manifest: Manifest, rewinds: Sequence[Rollback]) -> bool:
    """Whether a checkpoint is of the history that the rewinds tell.

    It has trained on no batch that they leave out, and was not saved between the step that a rewind from a corrupted step went
    back to and that rewind.
    """
    found = DataProgress.from_manifest(manifest)
    if any(each.is_corruption and manifest.step > each.to and each not in found.rewinds for each in rewinds):
        return False
    left_out = {number for each in rewinds if each.data == found.data for number in each.batches}
    return all(number > found.drawn or number in found.skipped_batches for number in left_out)


def read_rollbacks(store: Store) -> tuple[Rollback, ...] | None:
    """The record beside a run's checkpoints, in every process; None where there is none.

    Raises:
        CheckpointError: What is there is not such a record, or can't be read.
    """
    found: tuple[Rollback, ...] | None = None
    with raise_on_all_processes():
        if is_process_zero():
            found = _read(store)
    told = broadcast_text("" if found is None else json.dumps([dataclasses.asdict(each) for each in found]))
    return tuple(map(Rollback.from_json, json_reader.parse(told, constants=True))) if told else None


def _read(store: Store) -> tuple[Rollback, ...] | None:
    try:
        text = store.read(FILE)
    except ObjectNotFoundError:
        return None
    try:
        outer = json_reader.parse(text, constants=True)
        if outer["checksum"] != _seal(outer["rewinds"]):
            raise ValueError("its checksum does not hold")
        return tuple(map(Rollback.from_json, outer["rewinds"]))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{store.url}/{FILE} can't be used: {error}. It says which batches the run leaves out; remove it to go by what the "
            f"newest checkpoint says of them"
        ) from error


def write_rollbacks(store: Store, rewinds: Sequence[Rollback]) -> None:
    """Put the record into a store, in place of the one before.

    Raises:
        StoreError: The store refused.
    """
    said = [dataclasses.asdict(each) for each in rewinds]
    store.write(FILE, [json.dumps({"checksum": _seal(said), "rewinds": said}).encode()])


def append_rollback_log(folder: Path, rewinds: Sequence[Rollback]) -> None:
    """Add to the list in a run's folder what it lacks."""
    path = folder / LOG
    # A list for people: what is damaged in it stops no run.
    there = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines = [json.dumps(dataclasses.asdict(each)) for each in rewinds]
    files.append_lines(path, [line for line in lines if line not in there])


def format_batch_numbers(numbers: Sequence[int]) -> str:
    """Numbers of batches for a person.

    >>> format_batch_numbers([3]), format_batch_numbers([3, 4, 5, 9])
    ('batch 3', 'batches 3 to 5, 9')
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    said = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)
    return f"batches {said}" if len(numbers) > 1 else f"batch {said}"


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"expected whole numbers of at least 0, got {values!r}")
    return tuple(values)


def _seal(said: list[dict[str, Any]]) -> str:
    return compute_checksum(json.dumps(said, sort_keys=True).encode())
