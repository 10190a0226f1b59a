"""The record of a run, kept beside its checkpoints under a name that is known without a list: `run/run.json`.

A list of an object store can be empty although checkpoints are there: a proxy's page answered instead, or the list is an old one.
So the record is read by its name, says which step was committed last, and must itself be in the list. It also names the job that
writes here: one that was taken for dead finds another's name in it, and stops saving.
"""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CheckpointError
from ..stores import ObjectNotFoundError, Store, is_remote
from ..system import json_reader
from ..system.files import expand_user
from ..system.lock import open_locked
from ..system.secure_dir import make_private_folder
from .manifest import compute_checksum

FOLDER = "run"
RECORD_FILE = f"{FOLDER}/run.json"

_ID = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What is known of the run whose checkpoints a store holds.

    Attributes:
        run: Names the run for good: 16 hexadecimal digits.
        writer: Names the job that writes: 16 hexadecimal digits.
        newest: The step that was committed last; None before the first.
        kernels: What work on CPU is done by, as the run's first job recorded it; empty on other devices.
        compute_dtype: What the run's task computes in, where that was left to the devices; else empty.
    """

    run: str
    writer: str
    newest: int | None = None
    kernels: str = ""
    compute_dtype: str = ""

    def __post_init__(self) -> None:
        for name in (self.run, self.writer):
            if not isinstance(name, str) or not _ID.fullmatch(name):
                raise ValueError(f"expected 16 hexadecimal digits, got {name!r}")
        if self.newest is not None and (type(self.newest) is not int or self.newest < 0):
            raise ValueError(f"expected a step, got {self.newest!r}")
        if not isinstance(self.kernels, str):
            raise ValueError(f"expected the text of a choice of kernels, got {self.kernels!r}")
        if self.compute_dtype not in ("", "float32", "bfloat16"):
            raise ValueError(f"expected float32, bfloat16 or nothing, got {self.compute_dtype!r}")


def read_record(store: Store) -> RunRecord | None:
    """The record in a store; None where there is none.

    Raises:
        CheckpointError: What is there is not a record.
        StoreError: The store can't be read.
    """
    try:
        text = store.read(RECORD_FILE)
    except ObjectNotFoundError:
        return None
    try:
        outer = json_reader.parse(text, constants=True)
        if outer["checksum"] != _seal(outer["record"]):
            raise ValueError("its checksum does not hold")
        return RunRecord(**outer["record"])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{store.url}/{RECORD_FILE} is not the record of a run: {error}") from error


def write_record(store: Store, record: RunRecord) -> None:
    """Put a record into a store, in place of the one before.

    Raises:
        StoreError: The store refused.
    """
    fields = dataclasses.asdict(record)
    store.write(RECORD_FILE, [json.dumps({"checksum": _seal(fields), "record": fields}).encode()])


def check_record_listed(store: Store, folders: Collection[str]) -> None:
    """See that a list of a store's folders holds the record, which is there.

    Raises:
        CheckpointError: It does not.
    """
    if FOLDER not in folders:
        raise CheckpointError(
            f"{store.url} holds a run's record ({RECORD_FILE}), but the list that the store answers lacks it: the answer is not a list "
            f"of this place, or an old one, so what checkpoints there are is not known. See that the endpoint and its proxies "
            f"answer lists, then run the same command again"
        )


@contextmanager
def exclusive_writer(url: str) -> Iterator[None]:
    """Keep other jobs of this machine from writing checkpoints to the same place while this one does.

    Raises:
        CheckpointError: Another job writes there, or the lock can't be made.
    """
    try:
        if is_remote(url):
            folder = make_private_folder(Path(tempfile.gettempdir()) / f"panax-locks-{os.geteuid()}")
            file = folder / compute_checksum(url.rstrip("/").encode())
        else:
            folder = expand_user(url)
            folder.mkdir(parents=True, exist_ok=True)
            # Not ".lock", which is the lock of a run's folder: that may be the same one.
            file = folder / ".checkpoints.lock"
        lock = open_locked(file)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process writes checkpoints to {url}; wait for it, stop it, or choose another place with "
            f"--checkpoint.directory"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"can't write checkpoints to {url}: {error}; choose another place with --checkpoint.directory"
        ) from error
    with lock:
        yield


def _seal(record: dict[str, object]) -> str:
    return compute_checksum(json.dumps(record, sort_keys=True).encode())
