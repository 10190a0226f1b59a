"""Batches that a run skips, and why: stored in its checkpoints, recorded alongside them, and listed in the
run's folder.

Batches are numbered by their position in the data's order, from 1: one for each step, in addition to those
skipped before.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...checkpoint import raise_on_all_processes
from ...checkpoint.manifest import Manifest
from ...checkpoint.run_record import FOLDER
from ...core.errors import CheckpointError
from ...job.agreement import broadcast_text, is_process_zero
from ...stores import ObjectNotFoundError, Store
from ...system import files, json_reader
from ...system.sealed_json import seal_json, unseal_json

FILE = f"{FOLDER}/rollbacks.json"
"""Record alongside the checkpoints: written before any checkpoint of the abandoned history is removed."""

FORMER_FILE = f"{FOLDER}/rewinds.json"
"""Name of the same record in stores of version 0.1.1."""

LOG = "rollbacks.jsonl"
"""List of the same rollbacks for users and reports, in the run's folder."""

FORMER_LOG = "rewinds.jsonl"
"""Name of that list in folders of version 0.1.1."""

HOST_KEY = "batches"
"""Name under which a checkpoint stores a `DataProgress`."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """One rollback of a run.

    Attributes:
        at: Time, in seconds since the epoch.
        step: Steps taken before.
        to: The step that the run returned to.
        source: The checkpoint with that state.
        batches: The batches skipped from then on; empty if a step was corrupted.
        why: What happened, as text.
        data: The data of these batches: how often the run had switched to other data before.
        seconds: Time since the run reached step `to` first, within this session.
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
        """Return True if the rollback was from a step that gave other values on other devices: no batch is at fault."""
        return not self.batches

    @classmethod
    def from_json(cls, fields: Any) -> "Rollback":
        """Read a rollback from JSON values.

        Raises:
            ValueError: The values do not describe a rollback.
        """
        if not isinstance(fields, Mapping) or set(fields) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"expected a rollback, got {fields!r}")
        seconds = [fields[name] for name in ("at", "seconds")]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in seconds):
            raise ValueError(f"expected times in seconds, got {seconds!r}")
        if not all(isinstance(fields[name], str) for name in ("source", "why")):
            raise ValueError(f"expected a reason as text, got {fields!r}")
        return cls(
            **{
                **fields,
                "batches": _counts(fields["batches"]),
                **dict(zip(("step", "to"), _counts([fields["step"], fields["to"]]))),
            }
        )


@dataclasses.dataclass(frozen=True)
class DataProgress:
    """Progress of a run in its data.

    Attributes:
        drawn: Number of the last batch that a step has taken.
        skipped: The last batches in a row with updates that were skipped.
        rollbacks: Rollbacks, oldest first.
        data: How often the run has switched to other data, with batches numbered from 1 again.
        verified: The last step that gave the same bits on other devices; 0 if none was checked.
    """

    drawn: int = 0
    skipped: tuple[int, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    data: int = 0
    verified: int = 0

    @property
    def skipped_batches(self) -> frozenset[int]:
        """Return the batches that rollbacks skip."""
        return frozenset(
            number for rollback in self.rollbacks if rollback.data == self.data for number in rollback.batches
        )

    def to_host(self, step: int) -> dict[str, Any]:
        """Return the progress at `step` as JSON values for a checkpoint; empty if each step took the next
        batch, and was applied."""
        return {} if self == DataProgress(step) else {HOST_KEY: dataclasses.asdict(self)}

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "DataProgress":
        """Read the progress in a checkpoint.

        Raises:
            CheckpointError: The record of the progress is invalid.
        """
        record = manifest.host.get(HOST_KEY)
        if record is None:
            return cls(manifest.step)
        try:
            rollbacks = tuple(map(Rollback.from_json, _listed(record)))
            drawn, data, verified = _counts([record["drawn"], record["data"], record.get("verified", 0)])
            return cls(drawn, _counts(record["skipped"]), rollbacks, data, verified)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"the record of skipped batches in the checkpoint of step {manifest.step} can't be used: {error}"
            ) from error


def matches_history(manifest: Manifest, rollbacks: Sequence[Rollback]) -> bool:
    """Return True if a checkpoint belongs to the history that the rollbacks describe.

    It has trained on no batch that they skip, and was not saved between a rollback from a corrupted step and
    the step that this rollback returned to.
    """
    progress = DataProgress.from_manifest(manifest)
    if any(each.is_corruption and manifest.step > each.to and each not in progress.rollbacks for each in rollbacks):
        return False
    skipped = {number for each in rollbacks if each.data == progress.data for number in each.batches}
    return all(number > progress.drawn or number in progress.skipped_batches for number in skipped)


def read_rollbacks(store: Store) -> tuple[Rollback, ...] | None:
    """Read the record alongside a run's checkpoints, in every process; None if there is none.

    Raises:
        CheckpointError: The file is not such a record, or can't be read.
    """
    local_rollbacks: tuple[Rollback, ...] | None = None
    with raise_on_all_processes():
        if is_process_zero():
            local_rollbacks = _read(store)
    text = broadcast_text(
        "" if local_rollbacks is None else json.dumps([dataclasses.asdict(each) for each in local_rollbacks])
    )
    return tuple(map(Rollback.from_json, json_reader.parse(text, constants=True))) if text else None


def _read(store: Store) -> tuple[Rollback, ...] | None:
    for file in (FILE, FORMER_FILE):
        with suppress(ObjectNotFoundError):
            text = store.read(file)
            break
    else:
        return None
    try:
        return tuple(map(Rollback.from_json, unseal_json(text, "rewinds", "rollbacks")))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{store.url}/{file} can't be used: {error}. It lists the batches that the run skips; remove it to use the list of "
            f"the newest checkpoint"
        ) from error


def _listed(record: Mapping[str, Any]) -> Any:
    """Return the rollbacks of a record, which version 0.1.1 called rewinds."""
    return record["rewinds" if "rewinds" in record else "rollbacks"]


def write_rollbacks(store: Store, rollbacks: Sequence[Rollback]) -> None:
    """Write the record into a store, replacing the one before.

    Raises:
        StoreError: The store refused the write.
    """
    rows = [dataclasses.asdict(each) for each in rollbacks]
    store.write(FILE, [seal_json("rollbacks", rows)])


def append_rollback_log(folder: Path, rollbacks: Sequence[Rollback]) -> None:
    """Append missing rollbacks to the list in a run's folder."""
    path = folder / LOG
    # A list for users: damage in it stops no run.
    written = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines = [json.dumps(dataclasses.asdict(each)) for each in rollbacks]
    files.append_lines(path, [line for line in lines if line not in written])


def format_batch_numbers(numbers: Sequence[int]) -> str:
    """Format numbers of batches for a message.

    >>> format_batch_numbers([3]), format_batch_numbers([3, 4, 5, 9])
    ('batch 3', 'batches 3 to 5, 9')
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    ranges = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)
    return f"batches {ranges}" if len(numbers) > 1 else f"batch {ranges}"


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"expected whole numbers of at least 0, got {values!r}")
    return tuple(values)
