"""A copy of a state in host memory, already laid out as the files of a checkpoint.

Each process copies the shards that it owns. Memory is page-aligned, allocated once and reused between saves:
on fresh memory the first touch of each page cost twenty times as much as the copy (0.4 against 9 GB/s), and
the loop would wait for that.
"""

import dataclasses
import mmap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import CheckpointError
from ..core.params.axes import named_leaves
from .manifest import ArrayEntry, Chunk, compute_checksum
from .slices import ArraySlice, Device, slice_devices, split_slice

CHUNK_BYTES = 2**22
"""Size of a chunk, which has a checksum and is read at once: a layout of many more devices reads little that
it does not need."""

FILE_BYTES = 2**26
"""Size up to which a file takes chunks: the unit that is written, and retried, at once."""

_PAGE = mmap.PAGESIZE
_ALIGN = 64
_PAGES_FROM_BYTES = 2**20
_COPIERS = 2


@dataclasses.dataclass(frozen=True)
class SnapshotChunk:
    """A planned chunk: its slice of a device's shard, and its position in the snapshot's memory."""

    array: str
    device: Device
    box: ArraySlice
    within: tuple[slice, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """A planned file: its memory, in whole pages, and its chunks."""

    begin: int
    end: int
    pieces: tuple[SnapshotChunk, ...]


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """The files that one process writes of a state.

    Attributes:
        arrays: Every array of the state, without chunks.
    """

    arrays: Mapping[str, ArrayEntry]
    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        return self.files[-1].end if self.files else 0


def is_key(leaf: Any) -> bool:
    """Return True if a (possibly abstract) leaf is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(leaf: jax.Array) -> jax.Array:
    """Return the array to store: the leaf itself, or the words of a random key."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def plan_save(tree: Any) -> SavePlan:
    """Plan which pieces this process writes, and their layout in files.

    A shard that several devices hold has one owner, the same in every process: the holders take turns from
    shard to shard and from array to array, so that replicas share the work.
    """
    arrays: dict[str, ArrayEntry] = {}
    owned: list[tuple[str, Device, ArraySlice, ArraySlice]] = []
    here = jax.process_index()
    for turn, (name, leaf) in enumerate(named_leaves(tree).items()):
        stored = key_data(leaf)
        impl = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
        arrays[name] = ArrayEntry(stored.shape, stored.dtype.name, key_impl=impl)
        for number, (box, devices) in enumerate(slice_devices(stored.sharding, stored.shape).items()):
            owner = devices[(turn + number) % len(devices)]
            if owner.process_index == here and box.size:
                limit = max(1, CHUNK_BYTES // stored.dtype.itemsize)
                owned += [(name, owner, box, piece) for piece in split_slice(box, limit)]
    return SavePlan(arrays, tuple(_lay_out(owned, arrays)))


def _lay_out(
    owned: Sequence[tuple[str, Device, ArraySlice, ArraySlice]], arrays: Mapping[str, ArrayEntry]
) -> list[FilePlan]:
    files: list[FilePlan] = []
    begin, here, current = 0, 0, []
    for name, device, shard, box in owned:
        size = box.size * arrays[name].itemsize
        if current and here + size - begin > FILE_BYTES:
            end = _round_up(here, _PAGE)
            files.append(FilePlan(begin, end, tuple(current)))
            begin, here, current = end, end, []
        here = _round_up(here, _ALIGN if size < _PAGES_FROM_BYTES else _PAGE)
        current.append(SnapshotChunk(name, device, box, box.relative_slices(shard), here, here + size))
        here += size
    if current:
        files.append(FilePlan(begin, _round_up(here, _PAGE), tuple(current)))
    return files


class Snapshot:
    """Memory for one copy of a state, reused for each.

    Attributes:
        plan: Its layout.
    """

    def __init__(self, plan: SavePlan) -> None:
        """Allocate the memory, and touch it in the background."""
        self.plan = plan
        self._memory = mmap.mmap(-1, max(plan.nbytes, _PAGE))
        self.buffer = memoryview(self._memory)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._copied = [threading.Event() for _ in plan.files]
        self._broken: BaseException | None = None
        self._touching = threading.Thread(target=self._touch, name="panax-touch", daemon=True)
        self._touching.start()

    def _touch(self) -> None:
        for begin in range(0, len(self._bytes), CHUNK_BYTES):
            self._bytes[begin : begin + CHUNK_BYTES : _PAGE] = 0

    def take(self, tree: Any) -> None:
        """Copy a state; when this returns, the devices' buffers may be donated."""
        self.begin()
        self.copy(tree)

    def begin(self) -> None:
        """Discard the previous copy: `wait_for` waits for the next one from now on."""
        self._broken = None
        for event in self._copied:
            event.clear()

    def wait_for(self, number: int) -> None:
        """Wait until file `number` of the plan is copied.

        Raises:
            CheckpointError: The state could not be copied.
        """
        self._copied[number].wait()
        if self._broken is not None:
            raise CheckpointError(f"the state could not be copied to host memory: {self._broken}")

    def copy(self, tree: Any) -> None:
        """Copy a state, after `begin`; another thread may write each file as soon as it is copied."""
        try:
            self._copy_all(tree)
        except BaseException as error:
            self._broken = error
            for event in self._copied:
                event.set()
            raise

    def _copy_all(self, tree: Any) -> None:
        self._touching.join()
        stored = {name: key_data(leaf) for name, leaf in named_leaves(tree).items()}
        shards = {
            name: {shard.device: shard.data for shard in leaf.addressable_shards} for name, leaf in stored.items()
        }
        planned_chunks = [piece for file in self.plan.files for piece in file.pieces]
        for name, device in dict.fromkeys((piece.array, piece.device) for piece in planned_chunks):
            shards[name][device].copy_to_host_async()
        with ThreadPoolExecutor(_COPIERS) as copiers:
            copying = [
                [copiers.submit(self._copy, shards[piece.array][piece.device], piece) for piece in file.pieces]
                for file in self.plan.files
            ]
            for event, pieces_of_file in zip(self._copied, copying):
                for copied in pieces_of_file:
                    copied.result()
                event.set()

    def _copy(self, shard: jax.Array, piece: SnapshotChunk) -> None:
        values = np.asarray(shard)[piece.within]
        room = self._bytes[piece.begin : piece.end].view(values.dtype).reshape(values.shape)
        # The bytes of a little-endian host are those of the file; others are not supported by JAX.
        np.copyto(room, values)

    def chunks(self, plan: FilePlan, file: str) -> dict[str, list[Chunk]]:
        """Return each array's chunks in a file of this plan, with their checksums."""
        chunks: dict[str, list[Chunk]] = {}
        for piece in plan.pieces:
            digest = compute_checksum(self.buffer[piece.begin : piece.end])
            chunks.setdefault(piece.array, []).append(Chunk(piece.box, file, piece.begin - plan.begin, digest))
        return chunks


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
