"""A teacher's most likely tokens of each target with loss of a token file, in a folder."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError

from ...system import json_reader
from ...system.files import expand_user
from ..files.files import fingerprint
from ..files.memory_map import check_mapped
from ..formats.npy_header import map_npy
from ..text.tokens import TokenStore

_ABOUT, _SLOTS, _TOKENS, _VALUES = "teacher.json", "slots.npy", "tokens.npy", "log_probabilities.npy"
_ADVICE = "compute it again with panax.add_teacher"


class TeacherFacts(NamedTuple):
    """The tokens, the weights and the settings of a stored teacher.

    Attributes:
        content: The token file's hash.
        weights: A description of the teacher's weights: their fingerprint.
        top_k: Number of tokens of each target.
        temperature: Divisor of the teacher's logits.
        layout: How documents were laid into the teacher's rows.
    """

    content: str
    weights: str
    top_k: int
    temperature: float
    layout: str

    @property
    def fingerprint(self) -> str:
        return fingerprint("teacher", *self)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTeacher:
    """The teacher's k most likely tokens of each target with loss; the arrays are mapped from files.

    Attributes:
        slots: For each token of the token file, its row in the other arrays; -1 without a target with loss.
        tokens: Ids, of shape (target, k).
        log_probabilities: Those of the ids, at the temperature.
    """

    facts: TeacherFacts
    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    log_probabilities: npt.NDArray[np.float32]

    def read(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Read ids and log-probabilities of tokens by their index in the token file, with one more dimension than the
        indices; zeros for -1, and for tokens without any.

        Raises:
            DataError: A file was truncated while it was in use.
        """
        check_mapped(self.slots, self.tokens, self.log_probabilities)
        slots = np.where(indices >= 0, self.slots[np.maximum(indices, 0)], -1)
        has_any = (slots >= 0)[..., None]
        slots = np.maximum(slots, 0)
        return np.where(has_any, self.tokens[slots], 0), np.where(has_any, self.log_probabilities[slots], np.float32(0))


def create_teacher(folder: str | Path, facts: TeacherFacts, counted: npt.NDArray[np.bool_]) -> StoredTeacher:
    """Create the files of a teacher; its arrays are then filled in place.

    Args:
        counted: True for the tokens of the token file that get values.
    """
    root = expand_user(folder)
    slots = np.where(counted, np.cumsum(counted) - 1, -1)
    shape = (int(counted.sum()), facts.top_k)
    np.save(root / _SLOTS, slots)
    tokens = np.lib.format.open_memmap(root / _TOKENS, "w+", np.int32, shape)
    values = np.lib.format.open_memmap(root / _VALUES, "w+", np.float32, shape)
    (root / _ABOUT).write_text(json.dumps(facts._asdict()), encoding="utf-8")
    return StoredTeacher(facts, slots, tokens, values)


def read_facts(folder: str | Path) -> TeacherFacts:
    """Read the description of a stored teacher.

    Raises:
        DataError: The folder does not hold one.
    """
    path = expand_user(folder) / _ABOUT
    try:
        return TeacherFacts(**json_reader.read_as(dict, path))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder} does not hold a teacher's log-probabilities ({error}); {_ADVICE}") from error


def load_teacher(folder: str | Path, store: TokenStore) -> StoredTeacher:
    """Open a stored teacher of a token file.

    Raises:
        DataError: The files can't be read, or are of other tokens.
    """
    facts, root = read_facts(folder), expand_user(folder)
    try:
        slots, tokens, values = (map_npy(root / name, name) for name in (_SLOTS, _TOKENS, _VALUES))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} does not hold a teacher's log-probabilities ({error}); {_ADVICE}") from error
    if facts.content != store.content or slots.shape != (len(store.tokens),):
        raise DataError(
            f"{folder} holds a teacher's log-probabilities of other tokens: the corpus, its tokenizer or its chat template "
            f"have changed since; {_ADVICE}"
        )
    if not tokens.shape == values.shape == (int(slots.max(initial=-1)) + 1, facts.top_k):
        raise DataError(f"{folder} holds arrays of {tokens.shape} and {values.shape}, which do not match; {_ADVICE}")
    return StoredTeacher(facts, slots, tokens, values)
