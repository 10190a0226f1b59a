"""Conversion of checkpoints to and from safetensors, and copies between stores: array by array, never all in
memory."""

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..core.errors import CheckpointError, describe_type
from ..stores import Store
from ..system import files as links
from ..system import json_reader
from ..system.replacement import replace_file, replace_json, replacement
from .chunk_reader import Checkpoint
from .inside import check_own_files, read_texts, reject_symlink_escape
from .manifest import MANIFEST_FILE, ArrayEntry, Chunk, FileEntry, Manifest, compute_checksum, numpy_dtype
from .slices import ArraySlice, full_slice, split_slice
from .snapshot import CHUNK_BYTES, FILE_BYTES

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Reader = Callable[[ArraySlice], np.ndarray]
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def export_tensors(
    checkpoint: Checkpoint, directory: str | Path, *, prefix: str = "params.", max_bytes: int = 5_000_000_000
) -> list[str]:
    """Write arrays as safetensors, under their own names, with an index if they take several files.

    Args:
        prefix: Prefix of the names of the arrays to take.
        max_bytes: The largest size of a file's tensors; a larger single one gets a separate file.

    Returns:
        The names written.

    Raises:
        CheckpointError: No array has that prefix, the folder holds weights already or can't be written, or
            the checkpoint is damaged.
    """
    folder = Path(directory)
    sizes = {name: entry.nbytes for name, entry in checkpoint.manifest.arrays.items() if name.startswith(prefix)}
    if not sizes:
        few = ", ".join(list(checkpoint.manifest.arrays)[:5])
        raise CheckpointError(
            f"{checkpoint.url} has no array with a name that begins with {prefix!r}; it has {few}, ..."
        )
    check_own_files(checkpoint)
    if next(folder.glob("*.safetensors*"), None) is not None:
        raise CheckpointError(f"{folder} holds weights already; choose another folder, or empty it")
    groups = list(group_by_bytes(sizes, max_bytes))
    files = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    files = files if len(groups) > 1 else [WEIGHTS_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in checkpoint.manifest.attachments:
            replace_file(folder / name, checkpoint.attachment(name) or "")
        for file, names in zip(files, groups):
            with replacement(folder / file) as partial:
                save_file({name: checkpoint.read(name) for name in names}, partial, metadata={"format": "panax"})
                links.apply_umask(partial)
        if len(groups) > 1:
            file_by_name = {name: file for file, names in zip(files, groups) for name in names}
            replace_json(
                folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_by_name}
            )
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} can't be written: {error}") from error
    return list(sizes)


def import_tensors(directory: str | Path, store: Store, folder: str = "") -> Manifest:
    """Create a checkpoint of step 0 from the safetensors in a folder; text files next to them become
    attachments.

    Raises:
        CheckpointError: There are no such files, or they are damaged, pickled, or links that lead out of the
            folder.
    """
    source = Path(directory)
    attachments = read_texts(source, "*.json", excluded=INDEX_FILE)
    return write_arrays(store, folder, _tensors(source), attachments=attachments)


def copy_checkpoint(checkpoint: Checkpoint, store: Store, folder: str = "", *, prefix: str = "") -> Manifest:
    """Write a checkpoint, or the arrays with names that begin with `prefix`, to another location; checked as
    it is read.

    Raises:
        CheckpointError: The checkpoint is damaged, or no array has that prefix.
    """
    check_own_files(checkpoint)
    manifest = checkpoint.manifest
    chosen = {name: entry for name, entry in manifest.arrays.items() if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{checkpoint.url} has no array with a name that begins with {prefix!r}")

    def reader(name: str) -> Reader:
        return lambda box: checkpoint.read(name, box.slices)

    return write_arrays(
        store,
        folder,
        ((name, dataclasses.replace(entry, chunks=()), reader(name)) for name, entry in chosen.items()),
        step=manifest.step,
        attachments={name: checkpoint.attachment(name) or "" for name in manifest.attachments},
        host=manifest.host,
        metric=manifest.metric,
    )


def write_arrays(
    store: Store,
    folder: str,
    arrays: Iterable[tuple[str, ArrayEntry, Reader]],
    *,
    step: int = 0,
    attachments: Mapping[str, str] | None = None,
    host: Mapping[str, Any] | None = None,
    metric: float | None = None,
) -> Manifest:
    """Write a checkpoint from host memory, a file at a time, and commit it.

    Args:
        arrays: Name, entry, and a function that reads a slice of the array.

    Raises:
        CheckpointError: The folder holds a checkpoint already.
    """
    at = f"{folder}/" if folder else ""
    if any(entry.path == f"{at}{MANIFEST_FILE}" for entry in store.list(folder)):
        raise CheckpointError(f"{store.url}/{folder} holds a checkpoint already; choose another location, or remove it")
    attempt = uuid.uuid4().hex[:8]
    entries: dict[str, ArrayEntry] = {}
    chunks: dict[str, list[Chunk]] = {}
    files: dict[str, int] = {}
    buffers: list[bytes] = []
    size = 0

    def flush() -> None:
        nonlocal size
        if buffers:
            file = f"{attempt}/{len(files):05d}-0000.bin"
            store.write(at + file, buffers)
            files[file] = size
            buffers.clear()
            size = 0

    for name, entry, read in arrays:
        entries[name], chunks[name] = entry, []
        for box in split_slice(full_slice(entry.shape), max(1, CHUNK_BYTES // entry.itemsize)) if entry.nbytes else ():
            data = np.ascontiguousarray(read(box)).tobytes()
            if size + len(data) > FILE_BYTES:
                flush()
            chunks[name].append(Chunk(box, f"{attempt}/{len(files):05d}-0000.bin", size, compute_checksum(data)))
            buffers.append(data)
            size += len(data)
    flush()
    named: dict[str, FileEntry] = {}
    for name, text in (attachments or {}).items():
        data = text.encode()
        store.write(f"{at}{attempt}/{name}", [data])
        files[f"{attempt}/{name}"], named[name] = len(data), FileEntry(f"{attempt}/{name}", compute_checksum(data))
    whole_entries = {name: dataclasses.replace(entry, chunks=tuple(chunks[name])) for name, entry in entries.items()}
    manifest = Manifest(step, whole_entries, files, named, dict(host or {"data": None}), metric, time.time())
    manifest.check_covered()
    store.write(at + MANIFEST_FILE, [manifest.to_json().encode()])
    return manifest


def reject_pickled(folder: Path) -> None:
    """Raise a CheckpointError if a folder holds a PyTorch checkpoint that only unpickling would read."""
    if (folder / ".metadata").is_file() or next(folder.glob("*.distcp"), None) is not None:
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint with a pickled index: reading it runs any code "
            f"that it contains. If you trust it, write it as safetensors with PyTorch: from "
            f"torch.distributed.checkpoint.format_utils import dcp_to_torch_save, then torch.load(..., "
            f"weights_only=True) and safetensors.torch.save_file"
        )
    pickled = next((path for path in sorted(folder.glob("*")) if path.suffix in _PICKLED), None)
    if pickled is not None:
        raise CheckpointError(
            f"{pickled} is pickled: reading it runs whatever code is in it. If you trust it, write it as safetensors where "
            f"PyTorch is: safetensors.torch.save_file(torch.load('{pickled.name}', weights_only=True), '{WEIGHTS_FILE}')"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, ArrayEntry, Reader]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        reject_pickled(folder)
        raise CheckpointError(f"{folder} holds no safetensors; expected {WEIGHTS_FILE}, or several with {INDEX_FILE}")
    reject_symlink_escape(folder, [*paths, folder / INDEX_FILE])
    path_by_name: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in path_by_name:
                        raise CheckpointError(f"{name} is in {path_by_name[name]} and in {path}; remove one")
                    path_by_name[name] = path
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    # Slices of empty arrays, and of scalars, can't be taken.
                    first = (
                        part[tuple(slice(0, 1) for _ in shape)] if math.prod(shape) and shape else file.get_tensor(name)
                    )
                    numpy_dtype(first.dtype.name)
                    entry = ArrayEntry(shape, first.dtype.name)
                    yield name, entry, lambda box, part=part, first=first: part[box.slices] if box.shape else first
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} can't be read: {error}; it is missing or incomplete") from error
    _check_index(folder, path_by_name)


def _check_index(folder: Path, path_by_name: Mapping[str, Path]) -> None:
    if not (folder / INDEX_FILE).is_file():
        return
    try:
        named = json_reader.read(folder / INDEX_FILE)["weight_map"]
        missing = sorted(set(named) - set(path_by_name))
        if not isinstance(named, dict):
            raise TypeError(f"weight_map is {describe_type(named)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} can't be read: {error!r}; expected a weight_map") from error
    if missing:
        raise CheckpointError(f"{folder / INDEX_FILE} names {missing[0]}, in {named[missing[0]]}, which does not exist")


def group_by_bytes(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Yield names in consecutive groups, each of at most `max_bytes` bytes; a larger one is alone.

    >>> list(group_by_bytes({"a": 3, "b": 4, "c": 9, "d": 1}, 8))
    [['a', 'b'], ['c'], ['d']]
    """
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > max_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names
