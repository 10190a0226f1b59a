"""The first tier: copies of the state in the memory of hosts, so that a failure costs a few steps and no read
from the store.

Every process writes its part to its own host's tmpfs, which outlives it, and to that of a peer host, through
a server that each process runs there. After a failure the processes exchange lists of the parts on their
hosts; the newest step with every part complete on a host is read like any checkpoint, onto any layout, by any
number of processes: each part from the reader's own host if possible.
"""

import dataclasses
import hashlib
import hmac
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..core.errors import CheckpointError, PanaxError, RecipeError
from ..core.validation import Validated
from ..job.agreement import broadcast_text, gather_ints, gather_texts
from ..job.join import SECRET
from ..stores import LocalStore, Store
from ..stores.peer import PeerServer, PeerStore, UnionStore
from .chunk_reader import Checkpoint
from .commit import SaveAttempt, publish_part, write_part
from .manifest import Manifest, merge_manifests
from .memory_folder import MemoryFolder
from .restoration import raise_on_all_processes
from .snapshot import Snapshot, plan_save

_PART = re.compile(r"step_(\d{8,})/([^/]+)/part-(\d{5,})-of-(\d{5,})\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Validated):
    """Copies of the state in the memory of hosts, between the checkpoints in the store.

    A host holds two copies of its own part and two of a peer's, and a fifth to copy from.

    Attributes:
        every: Steps between two copies; 0 for none.
        directory: A folder in memory; empty: $PANAX_MEMORY, otherwise /dev/shm/panax-USER. Copies are stored
            in `panax-copies-USER` below it; nothing else there is touched.
        peers: True to send a second copy to another host. Without it the loss of a host loses its part.
    """

    every: int = 0
    directory: str = ""
    peers: bool = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise RecipeError(f"checkpoint.memory.every={self.every}; expected 0 or more")

    @property
    def folder(self) -> Path:
        """Return the folder in memory, below which this host stores the copies of all runs."""
        return Path(self.directory or os.environ.get("PANAX_MEMORY") or f"/dev/shm/panax-{os.getuid()}")


class _StoredPart(NamedTuple):
    """A part that is complete on a host."""

    step: int
    attempt: str
    process: int
    processes: int


class MemoryTier:
    """This process's share of the first tier. Every process of the job creates one and calls its methods at the
    same points."""

    def __init__(self, config: MemoryConfig, run: str, say: Callable[[str], None] = print) -> None:
        """
        Args:
            run: Name of the run; copies of other runs are ignored.

        Raises:
            CheckpointError: The folder is a link, another user's or can't be written; or this host's address
                is not known.
        """
        self._say = say
        with raise_on_all_processes():
            self._folder = MemoryFolder(config.folder, run)
        self._store = LocalStore(self._folder.path)
        token = _token(broadcast_text(secrets.token_hex(16)))
        names = gather_texts(socket.gethostname())
        self._server = PeerServer(self._store, token, "127.0.0.1" if len({*names}) == 1 else _own_address())
        addresses = gather_texts(self._server.address)
        # Two processes are on one host if they share the folder.
        self._hosts = gather_texts(f"{socket.gethostname()}:{self._store.url}")
        self._stores: list[Store] = [
            self._store if host == self._hosts[jax.process_index()] else PeerStore(address, token)
            for host, address in zip(self._hosts, addresses)
        ]
        peer = _peer(self._hosts, jax.process_index()) if config.peers else None
        self._peer = None if peer is None else self._stores[peer]
        if config.peers and peer is None:
            say("copies in memory stay on this host: there is no other one")
        self._name = broadcast_text(secrets.token_hex(4))
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._saved: int | None = None
        self._failure: Exception | None = None

    def newest(self, is_usable: Callable[[Manifest], bool] = lambda manifest: True) -> Checkpoint | None:
        """Return the newest state with all parts on some host, as a checkpoint; None if there is none.

        Args:
            is_usable: Returns False for manifests to skip; the same in every process.
        """
        parts_by_process = self._inventory()
        complete = {
            (part.step, part.attempt)
            for part in {part for parts in parts_by_process for part in parts}
            if {p.process for parts in parts_by_process for p in parts if p[:2] == part[:2]}
            >= set(range(part.processes))
        }
        for chosen in sorted(complete, reverse=True):
            failure, checkpoint, usable = "", None, False
            try:
                checkpoint = self._assemble(parts_by_process, *chosen)
                usable = is_usable(checkpoint.manifest)
            except PanaxError as error:
                failure = str(error)
            failures = [text for text in gather_texts(failure) if text]
            if failures:
                self._say(f"warning: the copy of step {chosen[0]} in memory is not used: {failures[0]}")
                return None
            if usable:
                return checkpoint
        return None

    def forget(self, after: int) -> None:
        """Remove the copies of steps after `after`: the run has rolled back. Every process of the job calls
        it."""
        self.wait()
        self._saved = self._failure = None
        # A later copy of the same step must share no file with one that a host has failed to remove.
        self._name = broadcast_text(secrets.token_hex(4))
        failure = ""
        if self._is_first_here:
            try:
                self._folder.check()
                self._store.delete([entry.path for entry in self._store.list() if _step_of(entry.path) > after])
            except (PanaxError, OSError) as error:
                failure = str(error)
        for text in filter(None, gather_texts(failure)):
            self._say(f"warning: copies in memory after step {after} stay there: {text}")

    def save(self, tree: Any, step: int, host: Mapping[str, Any]) -> None:
        """Copy a state, and write it to this host's memory and the peer's in the background. A failure is
        only a warning."""
        self._wait_for_previous()
        plan = plan_save(tree)
        if self._snapshot is None or self._snapshot.plan != plan:
            self._check_room(plan.nbytes)
            self._snapshot = Snapshot(plan)
        self._snapshot.take(tree)
        attempt = SaveAttempt(f"step_{step:08d}", self._name, jax.process_index(), jax.process_count())
        self._saved = step
        self._thread = threading.Thread(
            target=self._write, args=(attempt, self._snapshot, step, dict(host)), name="panax-memory", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the copy in progress, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self, *, forget: bool) -> None:
        """Stop the server.

        Args:
            forget: Remove the copies: the store has a newer state.
        """
        self.wait()
        self._server.close()
        if forget and self._is_first_here:
            self._folder.remove()
        self._folder.close()

    def _wait_for_previous(self) -> None:
        """Wait for the previous copy; once all processes have completed it, remove the copies before it."""
        self.wait()
        if self._saved is None:
            return
        step, failure = self._saved, self._failure
        self._saved = self._failure = None
        if failure is not None:
            self._say(f"warning: no copy of step {step} in memory: {failure}")
        if gather_ints(int(failure is None)).all() and self._is_first_here:
            try:
                self._remove_before(step)
            except (PanaxError, OSError) as error:
                self._say(f"warning: copies before that of step {step} stay in memory: {error}")

    def _remove_before(self, step: int) -> None:
        self._folder.check()
        kept = f"step_{step:08d}/{self._name}/"
        copies = [entry.path for entry in self._store.list() if -1 < _step_of(entry.path) <= step]
        self._store.delete(path for path in copies if not path.startswith(kept))

    @property
    def _is_first_here(self) -> bool:
        """Return True in the first process of each host, which lists and removes the host's copies."""
        return self._hosts.index(self._hosts[jax.process_index()]) == jax.process_index()

    def _write(self, attempt: SaveAttempt, snapshot: Snapshot, step: int, host: Mapping[str, Any]) -> None:
        try:
            for store in (self._store, self._peer):
                if store is not None:
                    part = write_part(store, attempt, snapshot, step=step, attachments={}, host=host, metric=None)
                    publish_part(store, attempt, part)
        except (PanaxError, OSError) as error:
            self._failure = error

    def _inventory(self) -> list[list[_StoredPart]]:
        """List the parts on each process's host, as reported by the first process of each host."""
        own_parts: list[_StoredPart] = []
        if self._is_first_here:
            sizes = {entry.path: entry.size for entry in self._store.list()}
            for path in sizes:
                match = _PART.fullmatch(path)
                if match and self._is_complete(path, sizes):
                    own_parts.append(_StoredPart(int(match[1]), match[2], int(match[3]), int(match[4])))
        inventories = gather_texts(" ".join("/".join(map(str, part)) for part in own_parts))
        return [[_parse_part(text) for text in each.split()] for each in inventories]

    def _is_complete(self, path: str, sizes: Mapping[str, int]) -> bool:
        """Return True if a part can be read and its files exist; their bytes are checked when they are
        read."""
        folder = path.split("/")[0]
        try:
            manifest = Manifest.from_json(self._store.read(path), path)
        except PanaxError:
            return False
        return all(sizes.get(f"{folder}/{file}") == size for file, size in manifest.files.items())

    def _assemble(self, parts_by_process: list[list[_StoredPart]], step: int, attempt: str) -> Checkpoint:
        folder = f"step_{step:08d}"
        this_host = self._hosts[jax.process_index()]
        holders: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        parts = []
        processes = next(part.processes for each in parts_by_process for part in each if part[:2] == (step, attempt))
        for process in range(processes):
            # Those of this host first, then round the ring from here, so that not all read from the same one.
            holding_processes = [
                i for i, each in enumerate(parts_by_process) if _StoredPart(step, attempt, process, processes) in each
            ]
            holding_processes.sort(
                key=lambda i: (self._hosts[i] != this_host, (i - jax.process_index()) % len(parts_by_process))
            )
            path = SaveAttempt(folder, attempt, process, processes).part(process)
            part = self._read_part(path, holding_processes)
            parts.append(part)
            for file, size in part.files.items():
                holders[f"{folder}/{file}"], sizes[f"{folder}/{file}"] = holding_processes, size
        manifest = merge_manifests(parts)
        manifest.check_covered()
        return Checkpoint(UnionStore("memory of hosts", self._stores, holders, sizes), folder, manifest)

    def _read_part(self, path: str, holding_processes: list[int]) -> Manifest:
        for holder in holding_processes[:-1]:
            try:
                return Manifest.from_json(self._stores[holder].read(path), path)
            except PanaxError as error:
                self._say(f"warning: {error}; asking another host")
        return Manifest.from_json(self._stores[holding_processes[-1]].read(path), path)

    def _check_room(self, nbytes: int) -> None:
        needed, free = 4 * nbytes, shutil.disk_usage(self._store.url).free
        if needed > free:
            self._say(
                f"warning: copies in memory need up to {needed / 2**30:.1f} GiB in {self._store.url}, which has "
                f"{free / 2**30:.1f} GiB; they may fail, and then only the store protects the run"
            )


def _token(nonce: str) -> str:
    """Return the token with which the job's processes sign requests: `nonce`, keyed with the agents' secret if
    there is one."""
    secret = os.environ.get(SECRET, "")
    return hmac.new(secret.encode(), b"panax memory " + nonce.encode(), hashlib.sha256).hexdigest() if secret else nonce


def _peer(hosts: list[str], process: int) -> int | None:
    """Return the process of the next host, round the ring of hosts, that takes this one's copy; None on a
    single host."""
    ring = list(dict.fromkeys(hosts))
    if len(ring) == 1:
        return None
    rank = [i for i, host in enumerate(hosts) if host == hosts[process]].index(process)
    next_host = ring[(ring.index(hosts[process]) + 1) % len(ring)]
    next_host_processes = [i for i, host in enumerate(hosts) if host == next_host]
    return next_host_processes[rank % len(next_host_processes)]


def _own_address() -> str:
    configured_address = os.environ.get("PANAX_ADDRESS")
    if configured_address:
        return configured_address
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise CheckpointError(
            f"the address of this host ({socket.gethostname()}) is not known: {error}; name it with $PANAX_ADDRESS"
        ) from error
    if address.startswith("127."):
        raise CheckpointError(
            f"this host's name ({socket.gethostname()}) means {address}, which its peers can't reach; name its address in the "
            f"job's network with $PANAX_ADDRESS, or set checkpoint.memory.peers=False"
        )
    return address


def _step_of(path: str) -> int:
    """Return the step of a copy's file; -1 for any other file."""
    match = re.match(r"step_(\d{8,})/[0-9a-f]{8}(-\d+)?/", path)
    return int(match[1]) if match else -1


def _parse_part(text: str) -> _StoredPart:
    step, attempt, process, processes = text.split("/")
    return _StoredPart(int(step), attempt, int(process), int(processes))
