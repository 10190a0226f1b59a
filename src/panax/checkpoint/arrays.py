"""Sharded arrays in files: each shard is one chunk of a Zarr array with its own checksum.

Zarr version 3 through TensorStore, with the crc32c codec: a flipped bit is an error when the chunk is read, where Orbax's default
loads it silently. A chunk is a shard, so every device's part is written and read by itself, and another layout reads the
chunks that it needs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class HostArray:
    """One array's shards, copied to host memory.

    Attributes:
        shards: (start of the shard in each dimension, its values), each part of the array once.
        key_impl: The generator's name if this is a random key, whose words are stored.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], np.ndarray], ...]
    key_impl: str | None = None


def is_key(leaf: Any) -> bool:
    """Whether a (possibly abstract) leaf is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def copy_to_host(tree: Mapping[str, jax.Array]) -> dict[str, HostArray]:
    """Copy every array's shards; when it returns, the devices' buffers may be donated."""
    words = {name: (jax.random.key_data(leaf) if is_key(leaf) else leaf) for name, leaf in tree.items()}
    for leaf in words.values():
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()
    result = {}
    for name, leaf in words.items():
        # On CPU, NumPy would look into the device's own buffer, which the next step overwrites: copy.
        shards = tuple(
            (tuple(part.start or 0 for part in shard.index), np.array(shard.data, copy=True))
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        )
        impl = str(jax.random.key_impl(tree[name])) if is_key(tree[name]) else None
        result[name] = HostArray(leaf.shape, leaf.dtype.name, leaf.sharding.shard_shape(leaf.shape), shards, impl)
    return result


def _spec(path: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        # By default a chunk of zeros is not written, and a lost chunk is read as zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def write_arrays(directory: Path, arrays: Mapping[str, HostArray]) -> None:
    """Write every array to `directory/name`, flushed to the disk.

    Raises:
        CheckpointError: The file system refused; with its own words.
    """
    import tensorstore as ts

    pending = []
    try:
        for name, array in arrays.items():
            metadata = {
                "shape": list(array.shape),
                "data_type": array.dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in array.chunk]}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            }
            store = ts.open(
                {**_spec(directory / name), "metadata": metadata}, create=True, delete_existing=True
            ).result()
            for start, values in array.shards:
                region = tuple(slice(s, s + n) for s, n in zip(start, values.shape))
                # The shard is this checkpoint's own copy already; TensorStore may read from it as it is.
                pending.append(store[region].write(values, can_reference_source_data_indefinitely=True))
        for write in pending:
            write.result()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"could not write {directory}: {_first_line(error)}") from error


def read_array(
    path: Path, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding, key_impl: str | None
) -> jax.Array:
    """Read an array, each device its own part, onto whatever layout `sharding` is.

    Raises:
        CheckpointError: A file is missing, too short, or its checksum does not hold.
    """
    import tensorstore as ts

    try:
        store = ts.open(_spec(path), open=True).result()
        if key_impl is not None:
            words = store.read().result()
            return jax.device_put(jax.random.wrap_key_data(jnp.asarray(words), impl=key_impl), sharding)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: store[index].read().result())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"could not read {path}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split(" [source locations")[0]
