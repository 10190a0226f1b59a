"""The record of a run, stored next to its checkpoints under a name that is known without a listing:
`run/run.json`.

A listing of an object store can be empty although checkpoints exist: a proxy's page was returned instead, or
the listing is stale. So the record is read by its name, names the step that was committed last, and must itself be
in the listing. It also names the job that writes here: a job that was presumed dead finds the name of another
job in it, and stops saving.
"""

import dataclasses
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CheckpointError
from ..stores import ObjectNotFoundError, Store, is_remote
from ..system.files import expand_user
from ..system.lock import open_locked
from ..system.sealed_json import seal_json, unseal_json
from ..system.secure_dir import make_private_folder
from .manifest import compute_checksum

FOLDER = "run"
RECORD_FILE = f"{FOLDER}/run.json"

_ID = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Facts about the run with checkpoints in a store.

    Attributes:
        run: Permanent name of the run: 16 hexadecimal digits.
        writer: Name of the job that writes: 16 hexadecimal digits.
        newest: The step that was committed last; None before the first.
        kernels: Kernels for work on CPU, as the run's first job recorded them; empty on other devices.
        compute_dtype: Compute dtype of the run's task, if that was left to the devices; otherwise empty.
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
    """Read the record in a store; None if there is none.

    Raises:
        CheckpointError: The file is not a record.
        StoreError: The store can't be read.
    """
    try:
        text = store.read(RECORD_FILE)
    except ObjectNotFoundError:
        return None
    try:
        return RunRecord(**unseal_json(text, "record"))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{store.url}/{RECORD_FILE} is not the record of a run: {error}") from error


def write_record(store: Store, record: RunRecord) -> None:
    """Write a record to a store, replacing the one before.

    Raises:
        StoreError: The store rejected a request.
    """
    store.write(RECORD_FILE, [seal_json("record", dataclasses.asdict(record))])


def check_record_listed(store: Store, folders: Collection[str]) -> None:
    """Check that a list of a store's folders contains the record, which exists.

    Raises:
        CheckpointError: The list lacks the record.
    """
    if FOLDER not in folders:
        raise CheckpointError(
            f"{store.url} contains {RECORD_FILE}, but the store's listing lacks it: the listing is stale or comes "
            f"from a proxy, so the run's checkpoints are unknown. Check that the endpoint and its proxies answer "
            f"lists, then run the same command again"
        )


@contextmanager
def exclusive_writer(url: str) -> Iterator[None]:
    """Lock a location against other jobs of this machine that would write checkpoints to it, inside the
    context.

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
            f"another process writes checkpoints to {url}; wait for it, stop it, or choose another location with "
            f"--checkpoint.directory"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"can't write checkpoints to {url}: {error}; choose another location with --checkpoint.directory"
        ) from error
    with lock:
        yield
