"""The journal of a run's rollouts: what was drawn, replied and rewarded, durable before it is used further.

After an interruption the same tokens are drawn again; replies of environments and rewards are read from the journal, since a
function may give another answer when it is asked twice.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..system import json_reader
from ..system.files import append_lines
from .reply_entry import MAX_REPLIES_BYTES, ReplyEntry

JOURNAL_FILE = "rollouts.jsonl"
"""File in the run's folder with a line for each rollout, and for each turn of it that an environment replied to."""


@dataclasses.dataclass(frozen=True)
class JournalEntry:
    """One rollout.

    Attributes:
        number: Number of the batch of prompts, from 1 in the data's order.
        step: Steps taken before.
        prompts: Index of each answer's prompt.
        digests: A hash of the tokens of each answer and its prompt.
        names: Names of the rewards.
        rewards: Value of each reward for each answer; None if it failed.
        errors: Why rewards failed, by the index of the answer.
    """

    number: int
    step: int
    prompts: tuple[int, ...]
    digests: tuple[str, ...]
    names: tuple[str, ...]
    rewards: tuple[tuple[float | None, ...], ...]
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return the entry as one line."""
        return json.dumps(
            {
                "rollout": self.number,
                "step": self.step,
                "prompts": self.prompts,
                "digests": self.digests,
                "names": self.names,
                "rewards": self.rewards,
                "errors": {str(index): error for index, error in self.errors.items()},
            }
        )

    @classmethod
    def from_json(cls, line: str) -> "JournalEntry":
        """Read the output of `to_json`.

        Raises:
            ValueError: The line has another form.
        """
        return cls.from_fields(json_reader.parse_as(dict, line))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "JournalEntry":
        """Read the fields of a line.

        Raises:
            ValueError: They have another form.
        """
        try:
            entry = cls(
                int(fields["rollout"]),
                int(fields["step"]),
                tuple(int(each) for each in fields["prompts"]),
                tuple(str(each) for each in fields["digests"]),
                tuple(str(each) for each in fields["names"]),
                tuple(tuple(_value(each) for each in values) for values in fields["rewards"]),
                {int(index): str(error) for index, error in fields["errors"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it does not describe a rollout: {error!r}") from error
        if not len(entry.prompts) == len(entry.digests) == len(entry.rewards):
            raise ValueError("it has other numbers of prompts, digests and rewards")
        if any(len(values) != len(entry.names) for values in entry.rewards):
            raise ValueError(f"an answer has other than {len(entry.names)} rewards")
        return entry


def _value(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a reward is {value!r}")
    return float(value)


class Journal:
    """The journal in a run's folder."""

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL_FILE
        self._later: dict[int, JournalEntry] = {}
        self._replies: dict[tuple[int, int], ReplyEntry] = {}

    def read(self, after: int) -> None:
        """Read the entries of rollouts after this one; an incomplete last line is left out.

        Raises:
            DataError: A line does not describe a rollout.
        """
        self._later, self._replies = {}, {}
        if not self._path.exists():
            return
        with open(self._path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    break
                try:
                    fields = json_reader.parse_as(dict, line, max_bytes=MAX_REPLIES_BYTES)
                    kind = ReplyEntry if "turn" in fields else JournalEntry
                    entry = kind.from_fields(fields)
                except ValueError as error:
                    raise DataError(
                        f"{self._path}, line {number}: {error}; restore the file, or move it away: the rewards of rollouts "
                        f"that the checkpoint does not hold are then asked for again"
                    ) from error
                # A rollback may have drawn one again.
                if entry.number <= after:
                    continue
                if isinstance(entry, ReplyEntry):
                    self._replies[entry.number, entry.turn] = entry
                else:
                    self._later[entry.number] = entry

    def find(self, number: int) -> JournalEntry | None:
        """Return the newest entry of a rollout; None if there is none."""
        return self._later.get(number)

    def find_replies(self, number: int, turn: int) -> ReplyEntry | None:
        """Return the newest replies to a turn of a rollout; None if there are none."""
        return self._replies.get((number, turn))

    def append(self, entries: Sequence[JournalEntry | ReplyEntry]) -> None:
        """Write entries, and wait until they are on the disk.

        Raises:
            OSError: The file can't be written.
        """
        append_lines(self._path, [entry.to_json() for entry in entries])
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
