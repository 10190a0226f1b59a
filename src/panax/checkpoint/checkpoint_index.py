"""Index of the checkpoints in a store, as one job knows them: listed once, then updated with its own
actions."""

import dataclasses
import math
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from ..core.errors import CheckpointError, DamagedError, StoreError
from ..stores import ObjectNotFoundError, Store, open_store
from .chunk_reader import Checkpoint
from .manifest import MANIFEST_FILE, Manifest
from .run_record import RunRecord, check_record_listed, read_record, write_record

_LIST_AGAIN_SECONDS = 1.0

MAX_MANIFEST_BYTES = 2**30
"""Size above which a manifest is refused: that of two terabytes in chunks of 4 MiB has about 60 MB."""


class CheckpointIndex:
    """Index of the checkpoints in a store. Every process of a job has one, and the first one claims the
    location for its job."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store = store
        self._say = say
        self._found: dict[int, Manifest | CheckpointError] | None = None
        self._record: RunRecord | None = None

    @property
    def manifests(self) -> dict[int, Manifest | CheckpointError]:
        """Return the manifest of each step, or its error; listed on first use.

        Raises:
            CheckpointError: The contents contradict the list that the store returns.
            StoreError: The store can't be read.
        """
        if self._found is None:
            try:
                self._record = read_record(self._store)
            except StoreError:
                raise
            except CheckpointError as error:
                self._say(f"warning: {error}; it is written again")
                check_record_listed(self._store, self._store.folders())
            listing = self._listed()
            newest = None if self._record is None else self._record.newest
            if newest is not None and newest not in listing and self._is_committed(newest):
                time.sleep(_LIST_AGAIN_SECONDS)
                listing = self._listed()
                if newest not in listing:
                    # The record names it, and it exists under its name: the list is stale.
                    self._say(
                        f"warning: the store's listing lacks {self.url(newest)}, which exists: it is stale; other "
                        f"checkpoints that it lacks are unknown"
                    )
                    listing[newest] = self._manifest(newest)
            self._found = listing
        return self._found

    @property
    def run(self) -> str:
        """Return the id that the run's first job chose; empty if no record of the run has been read or written."""
        return "" if self._record is None else self._record.run

    def url(self, step: int) -> str:
        """Return the address that the checkpoint of a step has or would have."""
        return f"{self._store.url.rstrip('/')}/{step_folder(step)}"

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        return sorted(step for step, found in self.manifests.items() if isinstance(found, Manifest))

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of a step.

        Raises:
            CheckpointError: The checkpoint does not exist, or its manifest is damaged.
            StoreError: The store can't be read.
        """
        found = self.manifests.get(step)
        if found is None:
            raise CheckpointError(f"{self.url(step)} is not a checkpoint: {MANIFEST_FILE} is missing")
        if isinstance(found, CheckpointError):
            raise found
        return Checkpoint(self._store, step_folder(step), found)

    def evaluated_steps(self, steps: list[int]) -> list[int]:
        """Return the steps with evaluated checkpoints, best first, without those of a loss that is not finite."""
        manifests = ((step, self.manifests[step]) for step in steps)
        metrics = ((found.metric, step) for step, found in manifests if isinstance(found, Manifest))
        return [step for _, step in sorted((m, step) for m, step in metrics if m is not None and math.isfinite(m))]

    def refresh_step(self, step: int) -> None:
        """Read the manifest of a step that another process has listed; this process's list may be stale."""
        if step not in self.manifests:
            self.manifests[step] = self._manifest(step)

    def invalidate(self) -> None:
        """Discard the list, so that the next use reads the store again, with other processes' changes."""
        self._found = {}

    def acquire(self, kernels: str, compute_dtype: str) -> None:
        """Record this job as the only one that writes to the store; see `Checkpointer.acquire`."""
        _ = self.manifests  # Reads the record too.
        newest = None if self._record is None else self._record.newest
        self._record = RunRecord(self.run or secrets.token_hex(8), secrets.token_hex(8), newest, kernels, compute_dtype)
        write_record(self._store, self._record)

    def check_claim(self) -> None:
        """Raise a CheckpointError if another job has claimed the location since this one did."""
        if self._record is None:
            return
        record = read_record(self._store)
        if record is not None and record.writer != self._record.writer:
            raise CheckpointError(
                f"another job has written checkpoints to {self._store.url} since this one began: stop one of them, or give it "
                f"another location with --checkpoint.directory"
            )

    def record_commit(self, step: int) -> None:
        """Record the checkpoint of `step` as the last one committed."""
        self._update_newest(step)

    def record_removal(self, steps: list[int]) -> None:
        """Record the newest remaining checkpoint, if the newest was among the removed `steps`."""
        if self._record is not None and self._record.newest in steps:
            remaining = self.steps()
            self._update_newest(remaining[-1] if remaining else None)

    def _update_newest(self, newest: int | None) -> None:
        if self._record is not None:
            self._record = dataclasses.replace(self._record, newest=newest)
            write_record(self._store, self._record)

    def _listed(self) -> dict[int, Manifest | CheckpointError]:
        """Return the committed checkpoints in the store's list, which must contain the run's record if there
        is one."""
        folders = self._store.folders()
        if self._record is not None:
            check_record_listed(self._store, folders)
        listing: dict[int, Manifest | CheckpointError] = {}
        for folder in folders:
            step = parse_step(folder)
            sizes = {} if step is None else {entry.path: entry.size for entry in self._store.list(folder)}
            if step is not None and f"{folder}/{MANIFEST_FILE}" in sizes:
                listing[step] = self._manifest(step, sizes[f"{folder}/{MANIFEST_FILE}"])
        return listing

    def _is_committed(self, step: int) -> bool:
        """Return True if a checkpoint's manifest exists under its name."""
        try:
            self._store.read(f"{step_folder(step)}/{MANIFEST_FILE}")
        except ObjectNotFoundError:
            return False
        return True

    def _manifest(self, step: int, size: int = 0) -> Manifest | CheckpointError:
        found = _read_manifest(self._store, step_folder(step), size)
        if isinstance(found, Manifest) and found.step != step:
            return DamagedError(f"{self.url(step)}/{MANIFEST_FILE} is that of step {found.step}")
        return found


def open_checkpoint(where: str | Path) -> Checkpoint:
    """Open the checkpoint at an address, such as `runs/quickstart/checkpoints/step_00000100`.

    Raises:
        CheckpointError: The checkpoint does not exist, or its manifest is damaged.
    """
    store = open_store(where)
    sizes = {entry.path: entry.size for entry in store.list()}
    if MANIFEST_FILE not in sizes:
        raise CheckpointError(f"{where} is not a checkpoint: {MANIFEST_FILE} is missing")
    found = _read_manifest(store, "", sizes[MANIFEST_FILE])
    if isinstance(found, CheckpointError):
        raise found
    return Checkpoint(store, "", found)


def _read_manifest(store: Store, folder: str, size: int = 0) -> Manifest | CheckpointError:
    path = f"{folder}/{MANIFEST_FILE}" if folder else MANIFEST_FILE
    if size > MAX_MANIFEST_BYTES:
        return DamagedError(f"{store.url}/{path} has {size:,} bytes; a manifest has at most {MAX_MANIFEST_BYTES:,}")
    try:
        manifest = Manifest.from_json(store.read(path), f"{store.url}/{path}")
        manifest.check_covered()
    except ObjectNotFoundError as error:
        return DamagedError(f"{error}, though it is listed")
    except CheckpointError as error:
        return error
    return manifest


def parse_step(folder: str) -> int | None:
    """Return the step of a checkpoint's folder; None for the name of another folder.

    >>> parse_step("step_00000100"), parse_step("step_old")
    (100, None)
    """
    match = re.fullmatch(r"step_([0-9]{8,})", folder)
    return int(match[1]) if match else None


def step_folder(step: int) -> str:
    """Return the name of the checkpoint of a step, below the store's root."""
    return f"step_{step:08d}"
