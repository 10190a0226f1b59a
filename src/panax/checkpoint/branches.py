"""Branches of a run: runs that begin at one of its checkpoints, which they read by address and checksum.

Nothing is copied or linked. The parent's store has a small file for each branch, `run/branches/ID.json`, that names the step
and the branch's location; the branch's store has `run/origin.json`, with the address and checksum of the manifest that it
begins with. A checkpoint stays as long as a branch needs it: the reference in the parent's store counts while the origin in the
branch's store exists.
"""

import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, StoreError
from ..stores import ObjectNotFoundError, Store, is_remote, join_url, open_store
from ..system.files import absolute_path
from ..system.sealed_json import seal_json, unseal_json
from .checkpoint_index import open_checkpoint, step_folder
from .chunk_reader import Checkpoint
from .manifest import MANIFEST_FILE, compute_checksum
from .run_record import FOLDER

BRANCHES = f"{FOLDER}/branches"
ORIGIN_FILE = f"{FOLDER}/origin.json"

YOUNG_SECONDS = 3600.0
"""A reference counts for this long even if the branch has no origin yet: the branch is being made."""

_ID = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class BranchReference:
    """A branch, as the store of its parent names it.

    Attributes:
        id: 16 hexadecimal digits, the same in the branch's origin.
        step: The step at which it begins.
        url: Location of the branch's checkpoints.
        made: Time, in seconds since 1970.
    """

    id: str
    name: str
    step: int
    url: str
    made: float

    def __post_init__(self) -> None:
        _check_fields(self.id, self.step, self.url)
        if not isinstance(self.name, str) or not isinstance(self.made, int | float):
            raise ValueError(f"expected a name and a time, got {self.name!r}, {self.made!r}")


@dataclasses.dataclass(frozen=True)
class BranchOrigin:
    """The checkpoint at which a branch begins.

    Attributes:
        url: Location of the parent's checkpoints.
        checksum: Checksum of the checkpoint's manifest, which has those of all its chunks.
    """

    id: str
    step: int
    url: str
    checksum: str

    def __post_init__(self) -> None:
        _check_fields(self.id, self.step, self.url)
        if not isinstance(self.checksum, str) or not _ID.fullmatch(self.checksum):
            raise ValueError(f"expected a checksum of 16 hexadecimal digits, got {self.checksum!r}")

    def open(self) -> Checkpoint:
        """Open the checkpoint, if it is still the one that the branch began with.

        Raises:
            CheckpointError: It does not exist any more, or is another one.
        """
        address = join_url(self.url, step_folder(self.step))
        try:
            checksum = compute_checksum(open_store(self.url).read(_manifest_path(self.step)))
        except ObjectNotFoundError as error:
            raise CheckpointError(
                f"this run is a branch that begins at {address}, which does not exist any more; put it back, or make another "
                f"branch from another step"
            ) from error
        if checksum != self.checksum:
            raise CheckpointError(
                f"this run is a branch that begins at {address}, which has changed since: its manifest has the checksum "
                f"{checksum}, expected {self.checksum}"
            )
        return open_checkpoint(address)


def _check_fields(branch: Any, step: Any, url: Any) -> None:
    if not isinstance(branch, str) or not _ID.fullmatch(branch):
        raise ValueError(f"expected 16 hexadecimal digits, got {branch!r}")
    if type(step) is not int or step < 0 or not isinstance(url, str):
        raise ValueError(f"expected a step and an address, got {step!r}, {url!r}")


def _manifest_path(step: int) -> str:
    return f"{step_folder(step)}/{MANIFEST_FILE}"


def make_branch(parent: str, step: int, branch: str, name: str) -> BranchOrigin:
    """Make a branch: reference the parent's checkpoint, then write the branch's origin.

    Args:
        parent: Location of the parent's checkpoints.
        branch: Location of the branch's checkpoints; nothing may be there.

    Raises:
        CheckpointError: The checkpoint does not exist, or the branch's location is in use.
        StoreError: A store rejected a request.
    """
    parent, branch = _absolute(parent), _absolute(branch)
    source, target = open_store(parent), open_store(branch)
    if read_origin(target) is not None or target.folders():
        raise CheckpointError(f"{branch} holds a run already; choose another name or directory for the branch")
    try:
        checksum = compute_checksum(source.read(_manifest_path(step)))
    except ObjectNotFoundError as error:
        raise CheckpointError(f"{join_url(parent, step_folder(step))} is not a checkpoint") from error
    origin = BranchOrigin(secrets.token_hex(8), step, parent, checksum)
    reference = BranchReference(origin.id, name, step, branch, time.time())
    # First the reference: from then on the parent keeps the checkpoint.
    path = f"{BRANCHES}/{reference.id}.json"
    source.write(path, [seal_json("branch", dataclasses.asdict(reference))])
    try:
        target.write(ORIGIN_FILE, [seal_json("origin", dataclasses.asdict(origin))])
        # A parent that was pruning meanwhile may have removed it.
        origin.open()
    except (CheckpointError, StoreError):
        target.delete([ORIGIN_FILE])
        source.delete([path])
        raise
    return origin


def read_origin(store: Store) -> BranchOrigin | None:
    """Read the origin of the run in a store; None if it is not a branch.

    Raises:
        CheckpointError: The file is not an origin.
        StoreError: The store can't be read.
    """
    try:
        text = store.read(ORIGIN_FILE)
    except ObjectNotFoundError:
        return None
    try:
        return BranchOrigin(**unseal_json(text, "origin"))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{store.url}/{ORIGIN_FILE} is not the origin of a branch: {error}") from error


def live_branches(store: Store, now: Callable[[], float] = time.time) -> Mapping[int, tuple[BranchReference, ...]]:
    """Return the branches that need a checkpoint of this store, by step.

    A branch counts unless its location can be read and has no origin of its id: a location that can't be reached keeps the
    checkpoint.

    Raises:
        CheckpointError: A reference is damaged, so that the step that it keeps is not known.
        StoreError: The store can't be read.
    """
    needed: dict[int, tuple[BranchReference, ...]] = {}
    for entry in store.list(BRANCHES):
        try:
            reference = BranchReference(**unseal_json(store.read(entry.path), "branch"))
        except ObjectNotFoundError:
            continue
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{store.url}/{entry.path} is not the reference of a branch ({error}), so no checkpoint can be removed; remove "
                f"the file if no branch needs it"
            ) from error
        if now() - reference.made < YOUNG_SECONDS or _has_origin(reference):
            needed[reference.step] = (*needed.get(reference.step, ()), reference)
    return needed


def _has_origin(reference: BranchReference) -> bool:
    """Return False only if the branch's location is known to have no origin of this id."""
    try:
        if not is_remote(reference.url) and not Path(reference.url).parent.parent.is_dir():
            # A disk that is not mounted looks like one without the branch.
            return True
        origin = read_origin(open_store(reference.url))
    except (CheckpointError, StoreError):
        return True
    return origin is not None and origin.id == reference.id


def check_no_branch(store: Store, step: int) -> None:
    """Check that no branch needs the checkpoint of a step.

    Raises:
        CheckpointError: A branch does; the message names it.
        StoreError: The store can't be read.
    """
    names = [f"{each.name} ({each.url})" for each in live_branches(store).get(step, ())]
    if names:
        raise CheckpointError(
            f"{store.url}/{step_folder(step)} is the beginning of {', '.join(names)}; remove the branch's folder first, and the "
            f"checkpoint is free an hour after the branch was made"
        )


def _absolute(url: str) -> str:
    return url.rstrip("/") if is_remote(url) else str(absolute_path(url))
