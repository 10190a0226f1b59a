"""Commit of a checkpoint: every process writes its files and then its part, and the first one commits the
manifest.

    step_00000100/
        a1b2c3d4/00000-0000.bin              chunks of process 0
        a1b2c3d4/part-00000-of-00003.json    manifest of process 0, written after its chunks
        manifest.json                        the commit, after every part: one atomic write

Each attempt at a step uses new file names, so one write of the manifest replaces a checkpoint. Processes
exchange their parts through the store, without connections to each other; a process that dies leaves a
folder without manifest.
"""

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..core.errors import CheckpointError
from ..job.heartbeat import heartbeat
from ..stores import LinkableStore, ObjectNotFoundError, Store
from .manifest import MANIFEST_FILE, FileEntry, Manifest, compute_checksum, merge_manifests
from .named_objects import has_object, read_if_exists
from .snapshot import FilePlan, Snapshot

STALE_UPLOAD_SECONDS = 20.0
"""Time after which a listing that lacks a part is considered stale: reading a missing object takes a second
in some stores."""

_ASKED_BY_NAME = 4
"""Number of parts that are read by name in one poll."""

_POLL_SECONDS = (0.01, 1.0)
_WRITTEN = re.compile(r"step_\d{8,}/[0-9a-f]{8}(-\d+)?/.+")
"""Names of an attempt's files: only these are removed from a checkpoint's folder. Any other file there is not
ours."""


@dataclasses.dataclass(frozen=True)
class SaveAttempt:
    """One attempt to save a step, with the same name in every process.

    Attributes:
        folder: The checkpoint's folder, below the store's root.
        name: Unique name of the attempt.
    """

    folder: str
    name: str
    process: int = 0
    processes: int = 1

    def path(self, name: str) -> str:
        return f"{self.folder}/{self.name}/{name}"

    def part(self, process: int) -> str:
        return self.path(f"part-{process:05d}-of-{self.processes:05d}.json")

    def failure(self, process: int) -> str:
        return self.path(f"failed-{process:05d}")


def write_part(
    store: Store,
    attempt: SaveAttempt,
    snapshot: Snapshot,
    *,
    step: int,
    attachments: Mapping[str, str],
    host: Mapping[str, Any],
    metric: float | None,
) -> Manifest:
    """Write this process's files; they are durable and verified when it returns.

    Raises:
        StoreError: The store rejected a request.
    """
    chunks: dict[str, list] = {name: [] for name in snapshot.plan.arrays}
    files: dict[str, int] = {}
    entries: dict[str, FileEntry] = {}

    def write(number: int, plan: FilePlan) -> tuple[str, dict[str, list]]:
        name = f"{attempt.name}/{attempt.process:05d}-{number:04d}.bin"
        snapshot.wait_for(number)
        file_chunks = snapshot.chunks(plan, name)
        with turns:
            store.write(f"{attempt.folder}/{name}", [snapshot.buffer[plan.begin : plan.end]])
        heartbeat().report_progress("save")
        return name, file_chunks

    # One more than write, so that checksums are computed meanwhile.
    turns = threading.Semaphore(store.writers)
    with ThreadPoolExecutor(store.writers + 1, "panax-write") as writers:
        writing = [writers.submit(write, number, plan) for number, plan in enumerate(snapshot.plan.files)]
        try:
            for plan, written in zip(snapshot.plan.files, writing):
                name, file_chunks = written.result()
                files[name] = plan.end - plan.begin
                for array, added in file_chunks.items():
                    chunks[array] += added
        except BaseException:
            writers.shutdown(wait=True, cancel_futures=True)
            raise
    for name, text in attachments.items():
        data = text.encode()
        store.write(attempt.path(name), [data])
        file = f"{attempt.name}/{name}"
        files[file], entries[name] = len(data), FileEntry(file, compute_checksum(data))
    arrays = {
        name: dataclasses.replace(entry, chunks=tuple(chunks[name])) for name, entry in snapshot.plan.arrays.items()
    }
    return Manifest(step, arrays, files, entries, dict(host), metric, time.time())


def publish_part(store: Store, attempt: SaveAttempt, part: Manifest) -> None:
    """Publish this process's part, for the first process to find."""
    store.write(attempt.part(attempt.process), [part.to_json().encode()])


def commit(
    store: Store, attempt: SaveAttempt, own_part: Manifest, seconds: float, canceled: Callable[[], bool] = lambda: False
) -> Manifest:
    """Wait for the other processes' parts, check that all files exist, and write the manifest: the commit.

    Raises:
        CheckpointError: A process failed, or did not write its part within `seconds`; or a file has another
            size.
        StoreError: The store rejected a request.
    """
    parts = [own_part, *_parts(store, attempt, seconds, canceled)]
    manifest = merge_manifests(parts)
    manifest.check_covered()
    # A list has no checksum: a file is rejected only if two lists disagree with it.
    if _file_problem(store, attempt, manifest) and (problem := _file_problem(store, attempt, manifest)):
        raise CheckpointError(f"{problem}: not committed")
    store.write(f"{attempt.folder}/{MANIFEST_FILE}", [manifest.to_json().encode()])
    return manifest


def _file_problem(store: Store, attempt: SaveAttempt, manifest: Manifest) -> str:
    """Describe a file that is missing or has another size; empty if there is none."""
    listed_sizes = {entry.path: entry.size for entry in store.list(attempt.folder)}
    for file, size in manifest.files.items():
        listed_size = listed_sizes.get(f"{attempt.folder}/{file}")
        if listed_size is None and has_object(store, f"{attempt.folder}/{file}", size):
            continue  # The list is stale.
        if listed_size != size:
            return f"{store.url}/{attempt.folder}/{file} has {listed_size} bytes; {size} were written"
    return ""


def _parts(store: Store, attempt: SaveAttempt, seconds: float, canceled: Callable[[], bool]) -> Iterable[Manifest]:
    missing = set(range(1, attempt.processes))
    began, pause = time.monotonic(), _POLL_SECONDS[0]
    deadline = began + seconds
    while missing:
        # If the listing is stale, read a few parts by name in each poll.
        num_reads_by_name = _ASKED_BY_NAME if time.monotonic() > began + min(STALE_UPLOAD_SECONDS, seconds / 2) else 0
        listed_paths = {entry.path for entry in store.list(f"{attempt.folder}/{attempt.name}")}
        for process in sorted(missing):
            failure, part = attempt.failure(process), attempt.part(process)
            if not {failure, part} & listed_paths:
                num_reads_by_name -= 1
                if num_reads_by_name < 0:
                    continue
            if (failure in listed_paths or part not in listed_paths) and (
                reason := read_if_exists(store, failure)
            ) is not None:
                raise CheckpointError(f"process {process} could not write its part: {reason.decode(errors='replace')}")
            text = read_if_exists(store, part)
            if text is not None:
                yield Manifest.from_json(text, f"{store.url}/{part}")
                missing.discard(process)
        if missing and (time.monotonic() > deadline or canceled()):
            few = ", ".join(map(str, sorted(missing)[:5]))
            raise CheckpointError(
                f"{len(missing)} of {attempt.processes} processes ({few}) wrote no part within {seconds:.0f} s; not committed"
            )
        if missing:
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])


def discard(store: Store, attempt: SaveAttempt) -> bool:
    """Remove the files of an attempt that failed; False if its manifest exists, or may exist since a response
    was lost."""
    path = f"{attempt.folder}/{MANIFEST_FILE}"
    try:
        manifest = Manifest.from_json(store.read(path), f"{store.url}/{path}")
        if any(file.startswith(f"{attempt.name}/") for file in manifest.files):
            return False
    except ObjectNotFoundError:
        pass
    except CheckpointError:
        return False
    store.delete([entry.path for entry in store.list(f"{attempt.folder}/{attempt.name}")])
    return True


def remove(store: Store, folder: str) -> None:
    """Remove a checkpoint's files, and no others; its manifest first, so that the remains after a kill are
    not a checkpoint.

    If the folder is a link to a checkpoint, the link is removed.
    """
    path = f"{folder}/{MANIFEST_FILE}"
    if is_link(store, folder):
        store.delete([folder])
        return
    named: set[str] = set()
    with contextlib.suppress(ObjectNotFoundError, CheckpointError):  # if it is damaged, files with Panax's names
        named = {f"{folder}/{file}" for file in Manifest.from_json(store.read(path), f"{store.url}/{path}").files}
    store.delete([path])
    listed = {entry.path for entry in store.list(folder) if entry.path in named or _WRITTEN.fullmatch(entry.path)}
    # Include files that a stale list lacks.
    store.delete(sorted(named | listed))


def is_link(store: Store, folder: str) -> bool:
    """Return True if a checkpoint's folder is a link to another location."""
    return isinstance(store, LinkableStore) and store.is_link(folder)


def sweep(store: Store, folders: Iterable[str]) -> None:
    """Remove uncommitted leftovers of earlier processes from these folders, whether there is a checkpoint or
    not."""
    for folder in folders:
        if is_link(store, folder):
            continue  # Its files are not this run's.
        listed_paths = [entry.path for entry in store.list(folder)]
        committed = f"{folder}/{MANIFEST_FILE}" in listed_paths
        try:
            manifest = Manifest.from_json(
                store.read(f"{folder}/{MANIFEST_FILE}"), f"{store.url}/{folder}/{MANIFEST_FILE}"
            )
        except ObjectNotFoundError:
            if committed:
                continue  # Listed and not found: the store contradicts itself.
            keep = set()
        except CheckpointError:
            continue  # Damaged: left as it is, for a user to inspect.
        else:
            keep = {f"{folder}/{MANIFEST_FILE}", *(f"{folder}/{file}" for file in manifest.files)}
        store.delete([path for path in listed_paths if path not in keep and _WRITTEN.fullmatch(path)])
