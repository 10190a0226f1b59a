"""Reading of chunks from a store into slices of host memory: each chunk is read once and verified before use."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..core.errors import CheckpointError, DamagedError, StoreError
from ..job.heartbeat import heartbeat
from ..stores import ObjectNotFoundError, Store
from .manifest import ArrayEntry, Chunk, Manifest, compute_checksum, numpy_dtype
from .named_objects import has_object
from .slices import ArraySlice, full_slice

MAX_TEXT_BYTES = 2**30
"""Maximum size of an attachment stored as text: a model's description, a tokenizer."""

_ALIGN = 4096
_READS = 3
"""Number of reads of a chunk with a wrong checksum: a network flips bits too, and those are correct the next
time."""


class Checkpoint:
    """A committed checkpoint in a store. Opening it reads only its manifest.

    Attributes:
        folder: Its folder below the store's root; empty if the store is the checkpoint's own folder.
        bytes_read: Bytes read from the store so far.
    """

    def __init__(self, store: Store, folder: str, manifest: Manifest) -> None:
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._listed: dict[str, int] = {}

    @property
    def url(self) -> str:
        return "/".join(part for part in (self.store.url.rstrip("/"), self.folder) if part)

    def path(self, file: str) -> str:
        """Return a file of the checkpoint as a path in the store."""
        return f"{self.folder}/{file}" if self.folder else file

    def attachment(self, name: str) -> str | None:
        """Read the text that is stored in the checkpoint under a name; None if there is none.

        Raises:
            CheckpointError: The text is damaged, or can't be read.
        """
        entry = self.manifest.attachments.get(name)
        if entry is None:
            return None
        size = self.manifest.files[entry.file]
        if size > MAX_TEXT_BYTES:
            raise DamagedError(
                f"{self.url}/{entry.file} has {size:,} bytes; {name} is a text of at most {MAX_TEXT_BYTES:,}"
            )
        # Sizes in the manifest are trusted only if the store has the same: before memory is allocated.
        self._check_files([entry.file])
        data = bytearray(size)
        self._read_checked(entry.file, 0, memoryview(data), entry.checksum, name)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"{self.url}/{entry.file} is not UTF-8 text ({error}); it holds {name}") from error

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read an array, or its region `index`, such as one expert or some rows. Only chunks that overlap the
        region are read.

        Raises:
            CheckpointError: There is no such array, or it is damaged.
        """
        entry = self.manifest.arrays.get(name)
        if entry is None:
            few = ", ".join(list(self.manifest.arrays)[:5])
            raise CheckpointError(f"{self.url} has no array {name!r}; it has {few}, ...")
        box = full_slice(entry.shape)
        if index is not None:
            bounds = [part.indices(n)[:2] for part, n in zip(index, entry.shape)]
            bounds += [(0, n) for n in entry.shape[len(bounds) :]]
            box = ArraySlice(tuple(b for b, _ in bounds), tuple(max(0, e - b) for b, e in bounds))
        self.check_sizes([name])
        values = np.empty(box.shape, numpy_dtype(entry.dtype))
        with ThreadPoolExecutor(self.store.readers, "panax-read") as readers:
            for reading in self.fill(name, {box: values}, readers):
                reading.result()
        return values

    def fill(
        self,
        name: str,
        targets: Mapping[ArraySlice, np.ndarray],
        readers: ThreadPoolExecutor,
        is_needed: Callable[[ArraySlice, int], bool] = lambda box, number: True,
    ) -> list[Future[None]]:
        """Start reading the chunks that overlap the slices in `targets`, each once, into their row-major
        arrays.

        Args:
            is_needed: Returns True to fill a slice from its n-th overlapping chunk.
        """
        entry = self.manifest.arrays[name]
        jobs = []
        numbers = dict.fromkeys(targets, 0)
        for chunk in entry.chunks:
            overlapping = {}
            for box in targets:
                overlap = box.overlap(chunk.box)
                if overlap is not None:
                    if is_needed(box, numbers[box]):
                        overlapping[box] = overlap
                    numbers[box] += 1
            if overlapping:
                jobs.append(readers.submit(self._fill_from, name, entry, chunk, overlapping, targets))
        return jobs

    def _fill_from(
        self,
        name: str,
        entry: ArrayEntry,
        chunk: Chunk,
        overlapping: Mapping[ArraySlice, ArraySlice],
        targets: Mapping[ArraySlice, np.ndarray],
    ) -> None:
        first, part = next(iter(overlapping.items()))
        if part == chunk.box and chunk.box.contiguous_in(first):
            # The chunk has the same layout in the target as in the file: no extra memory.
            values = targets[first][(*chunk.box.relative_slices(first), ...)]
            remaining = [box for box in overlapping if box != first]
        else:
            values = allocate_aligned(chunk.box.shape, numpy_dtype(entry.dtype))
            remaining = list(overlapping)
        self._read_checked(chunk.file, chunk.offset, _bytes_of(values), chunk.checksum, name)
        for box in remaining:
            targets[box][overlapping[box].relative_slices(box)] = values[overlapping[box].relative_slices(chunk.box)]

    def _read_checked(self, file: str, offset: int, target: memoryview, expected: str, name: str) -> None:
        for _ in range(_READS):
            try:
                self.store.read_into(self.path(file), offset, target)
            except ObjectNotFoundError as error:
                raise DamagedError(f"{self.url}/{file} is missing; it holds {name}") from error
            except StoreError as error:
                with contextlib.suppress(StoreError):
                    self._of_their_sizes([file], refuse=True)
                raise CheckpointError(f"{name} in {self.url} can't be read: {error}") from error
            self.bytes_read += len(target)
            heartbeat().report_progress("restore")
            if compute_checksum(target) == expected:
                return
        raise DamagedError(
            f"{self.url}/{file} is damaged: bytes {offset} to {offset + len(target)}, part of {name}, are not those that were "
            f"written"
        )

    def check_sizes(self, names: Sequence[str]) -> None:
        """Check that every file of these arrays exists and has the recorded size, and that their chunks hold
        each value once.

        Raises:
            DamagedError: A file or a chunk is missing or wrong; raised before memory is allocated for the
                arrays.
        """
        self._check_files({chunk.file for name in names for chunk in self.manifest.arrays[name].chunks})
        for name in names:
            self.manifest.arrays[name].check_covered(f"{self.url}: {name}")

    def _check_files(self, files: Collection[str]) -> None:
        # Listed once: a list of a large checkpoint is a thousand requests.
        if not self._of_their_sizes(files):
            self._listed = self._list()
            if not self._of_their_sizes(files):
                # A list has no checksum: a file is rejected only if two lists disagree with it.
                self._listed = self._list()
                self._of_their_sizes(files, refuse=True)

    def _list(self) -> dict[str, int]:
        return {entry.path: entry.size for entry in self.store.list(self.folder)}

    def _of_their_sizes(self, files: Iterable[str], refuse: bool = False) -> bool:
        for file in files:
            size, expected = self._listed.get(self.path(file)), self.manifest.files[file]
            if size == expected or (refuse and size is None and has_object(self.store, self.path(file), expected)):
                continue
            if refuse and size is None:
                raise DamagedError(f"{self.url}/{file} is missing; expected a file of {expected} bytes")
            if refuse:
                raise DamagedError(f"{self.url}/{file} has {size} bytes; expected {expected}: it is cut short")
            return False
        return True

    def verify(self, say: Callable[[str], None] = lambda line: None) -> list[str]:
        """Read all files and return the problems, one line each; an empty list if the checkpoint is undamaged."""
        problems, absent = [], set()
        listed_sizes = self._list()
        for file, expected in self.manifest.files.items():
            size = listed_sizes.get(self.path(file))
            if size is None and has_object(self.store, self.path(file), expected):
                continue
            if size != expected:
                absent.add(file)
                problems.append(f"{file}: {'missing' if size is None else f'{size} bytes'}; expected {expected} bytes")
        for name, entry in self.manifest.arrays.items():
            try:
                entry.check_covered(name)
            except DamagedError as error:
                problems.append(str(error))
        with ThreadPoolExecutor(self.store.readers, "panax-verify") as readers:
            jobs = [
                readers.submit(self._verify_chunk, name, entry, chunk)
                for name, entry in self.manifest.arrays.items()
                for chunk in entry.chunks
                if chunk.file not in absent
            ]
            problems += [problem for job in jobs if (problem := job.result()) is not None]
        for name, entry in self.manifest.attachments.items():
            if entry.file not in absent:
                try:
                    self.attachment(name)
                except CheckpointError as error:
                    problems.append(str(error))
        return problems

    def _verify_chunk(self, name: str, entry: ArrayEntry, chunk: Chunk) -> str | None:
        data = bytearray(chunk.box.size * entry.itemsize)
        try:
            self._read_checked(chunk.file, chunk.offset, memoryview(data), chunk.checksum, name)
        except CheckpointError as error:
            return str(error)
        return None


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate page-aligned memory: for direct reads, and for adoption without a copy by a device that is the
    host itself.

    >>> allocate_aligned((3, 5), np.dtype("float32")).ctypes.data % 4096
    0
    """
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGN, np.uint8)
    begin = -room.ctypes.data % _ALIGN
    return room[begin : begin + size].view(dtype).reshape(shape)


def _bytes_of(values: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array, also for dtypes that Python's buffers don't support."""
    return memoryview(values.reshape(-1).view(np.uint8).data) if values.size else memoryview(b"")
