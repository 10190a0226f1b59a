"""Restore of a checkpoint onto devices, in any layout: each byte is read once by one process, and replicas
receive it from there.

Arrays that several processes hold are assembled over the device network. The holders take turns to read
chunks, provide zeros for the others, and their bits are added as integers; a large array that divides is read
in as many pieces as there are holders, which takes no extra memory, and reads only chunks at the borders
twice.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..core.errors import CheckpointError, DamagedError, PanaxError
from ..core.params.axes import named_leaves
from ..job.agreement import gather_texts
from .chunk_reader import Checkpoint, allocate_aligned
from .manifest import ArrayEntry, compute_checksum, numpy_dtype
from .slices import ArraySlice, Device, slice_devices, slice_of_shard
from .snapshot import CHUNK_BYTES, is_key

GROUP_BYTES = 2**28
"""Approximate size of the groups in which arrays are read; after each the processes agree that all went
well."""

_SPLIT_FROM_CHUNKS = 8
"""Number of chunks per piece from which on an array is read in pieces: at most an eighth is then read
twice."""


def restore(checkpoint: Checkpoint, abstract: Any, shardings: Any, *, part: bool = False) -> Any:
    """Read a checkpoint, or a part of it, onto the layout of `shardings`. Every process of the job calls it.

    Args:
        abstract: A tree of `jax.ShapeDtypeStruct`; its names, shapes and dtypes must be the checkpoint's.
        part: True if the checkpoint may hold more than `abstract` names; only these are read.

    Raises:
        CheckpointError: The checkpoint is that of another model (the message names the first differences), or the
            store can't be read.
        DamagedError: The checkpoint's bytes have changed since they were written; the message names the file and
            the bytes. If one process raises, all do.
    """
    expected, shardings_by_name = named_leaves(abstract), named_leaves(shardings)
    check_arrays_match(checkpoint, expected, part)
    files = compute_checksum(repr(sorted(checkpoint.manifest.files.items())).encode())
    descriptions = gather_texts(f"step {checkpoint.manifest.step} of files {files}")
    if len({*descriptions}) > 1:
        raise CheckpointError(
            f"the processes would restore different checkpoints: {'; '.join(dict.fromkeys(descriptions))}"
        )
    with raise_on_all_processes():
        checkpoint.check_sizes(list(expected))
    leaves: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(checkpoint.store.readers, "panax-read") as readers:
        for group in _groups(checkpoint, expected):
            # A random key is stored as its words, which are as replicated as the key.
            stored_shardings = {name: _words_sharding(shardings_by_name[name], expected[name]) for name in group}
            leaves |= _read_group(checkpoint, stored_shardings, readers)
    restored_leaves = [_wrapped(checkpoint, name, leaves[name], shardings_by_name[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(abstract), restored_leaves)


def _groups(checkpoint: Checkpoint, names: Mapping[str, Any]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = checkpoint.manifest.arrays[name].nbytes
        if groups[-1] and size + nbytes > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return groups


def _read_group(
    checkpoint: Checkpoint, stored_shardings: Mapping[str, Sharding], readers: ThreadPoolExecutor
) -> dict[str, jax.Array]:
    plans = {name: _plan(checkpoint.manifest.arrays[name], sharding) for name, sharding in stored_shardings.items()}
    arrays: dict[str, jax.Array] = {}
    with raise_on_all_processes():
        started = {name: plan.begin(name, checkpoint, readers) for name, (plan, _) in plans.items()}
        for name, jobs in started.items():
            for job in jobs:
                job.result()
            arrays[name] = plans[name][0].place()
    return _assemble_arrays(arrays, {name: plan for name, (plan, shared) in plans.items() if shared}, stored_shardings)


_DAMAGED, _OTHER = "damaged ", "other "


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raise an error of one process in the block in every process; every process of the job enters it.

    Raises:
        DamagedError: A process raised it, and no process raised another error.
        CheckpointError: A process of several raised another error; with one process, the original error is
            raised.
    """
    failure = None
    try:
        yield
    except PanaxError as error:
        failure = error
    kind = _DAMAGED if isinstance(failure, DamagedError) else _OTHER
    failures = [
        (process, text) for process, text in enumerate(gather_texts(f"{kind}{failure}" if failure else "")) if text
    ]
    if failures and failure is not None and jax.process_count() == 1:
        raise failure
    if failures:
        # An unreachable store is no reason to fall back to an older checkpoint, whatever else was found.
        process, text = min(failures, key=lambda each: each[1].startswith(_DAMAGED))
        error = DamagedError if text.startswith(_DAMAGED) else CheckpointError
        raise error(f"process {process}: {text.removeprefix(_DAMAGED).removeprefix(_OTHER)}")


class _ShardedReads:
    """An array of which this process reads its devices' shards in `sharding`, each distinct shard once."""

    def __init__(self, entry: ArrayEntry, sharding: Sharding) -> None:
        self._shape, self._dtype, self._sharding = entry.shape, numpy_dtype(entry.dtype), sharding
        self._boxes = {
            device: slice_of_shard(index or (), entry.shape)
            for device, index in sharding.addressable_devices_indices_map(entry.shape).items()
        }
        self._values: dict[ArraySlice, np.ndarray] = {}

    def begin(self, name: str, checkpoint: Checkpoint, readers: ThreadPoolExecutor) -> list[Future[None]]:
        """Allocate host memory for this process's reads, and start them."""
        self._values = {box: allocate_aligned(box.shape, self._dtype) for box in self._boxes.values()}
        return checkpoint.fill(name, self._values, readers)

    def place(self) -> jax.Array:
        """Place the values on the devices, and release the host memory."""
        shards = [jax.device_put(self._values[box], device) for device, box in self._boxes.items()]
        self._values = {}
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)

    def assemble(self, array: jax.Array) -> jax.Array:
        return array


class _AlternatingReads:
    """An array with replicas that take turns to read chunks; `assemble` adds the bits of each replica's chunks
    to the zeros of the others.

    The array has one dimension more than its values, in front, which is sharded over the axes of the
    replicas.
    """

    def __init__(self, entry: ArrayEntry, sharding: NamedSharding, across: tuple[str, ...]) -> None:
        self._dtype = numpy_dtype(entry.dtype)
        self._bits = np.dtype(f"u{self._dtype.itemsize}")
        self._replicas = _size(sharding, across)
        self._shape = (self._replicas, *entry.shape)
        self._sharding = NamedSharding(sharding.mesh, PartitionSpec(across, *sharding.spec))
        self._boxes: dict[Device, ArraySlice] = {}
        self._turns: dict[ArraySlice, dict[int, Device]] = {}
        for device, index in self._sharding.addressable_devices_indices_map(self._shape).items():
            box = slice_of_shard(index or (), self._shape)
            inner = self._boxes[device] = ArraySlice(box.start[1:], box.shape[1:])
            self._turns.setdefault(inner, {})[box.start[0]] = device
        self._values: dict[ArraySlice, np.ndarray] = {}

    def begin(self, name: str, checkpoint: Checkpoint, readers: ThreadPoolExecutor) -> list[Future[None]]:
        """Allocate host memory, and start reading the chunks that are assigned to devices of this process."""
        self._values = {box: np.zeros(box.shape, self._dtype) for box in self._turns}
        return checkpoint.fill(
            name, self._values, readers, lambda box, number: number % self._replicas in self._turns[box]
        )

    def place(self) -> jax.Array:
        """Place each shard's values on one of this process's devices with the shard, and zeros on the others."""
        shards = []
        for device, box in self._boxes.items():
            first = self._turns[box][min(self._turns[box])] == device
            values = self._values[box].view(self._bits) if first else np.zeros(box.shape, self._bits)
            shards.append(jax.device_put(values[None], device))
        self._values = {}
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)

    def assemble(self, array: jax.Array) -> jax.Array:
        total = jnp.sum(array, axis=0, dtype=array.dtype)
        return total.astype(bool) if self._dtype == np.bool_ else jax.lax.bitcast_convert_type(total, self._dtype)


def _plan(entry: ArrayEntry, sharding: Sharding) -> tuple[_ShardedReads | _AlternatingReads, bool]:
    """Return how this process reads an array, and True if the processes then assemble it."""
    if not isinstance(sharding, NamedSharding) or not _shared_by_processes(sharding, entry.shape):
        return _ShardedReads(entry, sharding), False
    axes = _axes_by_dim(sharding, len(entry.shape))
    used = {axis for each in axes for axis in each}
    across = tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)
    replicas = _size(sharding, across)
    dim = next((d for d, n in enumerate(entry.shape) if n and n % (_size(sharding, axes[d]) * replicas) == 0), None)
    size = math.prod(sharding.shard_shape(entry.shape)) * entry.itemsize
    if dim is None or size < _SPLIT_FROM_CHUNKS * replicas * CHUNK_BYTES:
        return _AlternatingReads(entry, sharding, across), True
    axes[dim] = (*axes[dim], *across)
    return _ShardedReads(entry, NamedSharding(sharding.mesh, PartitionSpec(*axes))), True


def _assemble_arrays(
    arrays: dict[str, jax.Array],
    plans: Mapping[str, _ShardedReads | _AlternatingReads],
    stored_shardings: Mapping[str, Sharding],
) -> dict[str, jax.Array]:
    """Assemble arrays that several processes have read parts of, in one program."""
    if not plans:
        return arrays
    shared = {name: arrays.pop(name) for name in plans}
    program = jax.jit(
        lambda parts: {name: plans[name].assemble(part) for name, part in parts.items()},
        out_shardings={name: stored_shardings[name] for name in plans},
    )
    return arrays | program(shared)


def _shared_by_processes(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    if jax.process_count() == 1:
        return False
    return any(len({d.process_index for d in devices}) > 1 for devices in slice_devices(sharding, shape).values())


def _axes_by_dim(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    spec = [*sharding.spec, *(None,) * (rank - len(sharding.spec))]
    return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]


def _size(sharding: NamedSharding, axes: Sequence[str]) -> int:
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def _words_sharding(sharding: Sharding, leaf: Any) -> Sharding:
    return (
        sharding
        if not (is_key(leaf) and isinstance(sharding, NamedSharding))
        else NamedSharding(sharding.mesh, sharding.spec)
    )


def _wrapped(checkpoint: Checkpoint, name: str, leaf: jax.Array, sharding: Sharding) -> jax.Array:
    impl = checkpoint.manifest.arrays[name].key_impl
    if impl is None:
        return leaf
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)(leaf)


def check_arrays_match(checkpoint: Checkpoint, expected: Mapping[str, Any], part: bool) -> None:
    """Raise a CheckpointError unless the checkpoint has these arrays."""
    stored_arrays = checkpoint.manifest.arrays
    problems = [] if part else [f"it also has {name}" for name in stored_arrays if name not in expected]
    for name, leaf in expected.items():
        entry = stored_arrays.get(name)
        if entry is None:
            problems.append(f"it has no {name}")
        elif is_key(leaf):
            if not _is_key_like(entry, leaf):
                kind = (
                    "not a random key"
                    if entry.key_impl is None
                    else f"a random key of {entry.key_impl}{list(entry.shape)}"
                )
                problems.append(f"{name} is {kind} there and {leaf.dtype}{list(leaf.shape)} here")
        elif entry.shape != leaf.shape or entry.dtype != leaf.dtype.name:
            problems.append(
                f"{name} is {entry.dtype}{list(entry.shape)} there and {leaf.dtype.name}{list(leaf.shape)} here"
            )
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.url} is a checkpoint of another model or optimizer: {'; '.join(problems[:3])}{more}. Use the recipe "
            f"and options it was saved with, or another folder for this run"
        )


def _is_key_like(entry: ArrayEntry, leaf: Any) -> bool:
    """Return True if an array holds the words of random keys of this shape and kind."""
    if entry.key_impl is None or entry.dtype != "uint32":
        return False
    words = jax.ShapeDtypeStruct(entry.shape, jnp.uint32)
    try:
        keys = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=entry.key_impl), words)
    except (ValueError, TypeError):  # no such kind, or it has other words
        return False
    return keys.shape == leaf.shape and keys.dtype == leaf.dtype
