"""A process of `test_checkpoints_of_many.py`: restores a state from one folder and saves it to another.

python checkpoint_worker.py ADDRESS PROCESSES INDEX LAYOUT FROM TO
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from launching import join_job

from panax.checkpoint import CheckpointConfig, Checkpointer, restore
from panax.core import PanaxError
from panax.mesh import MeshShape, Placement

SPECS = {
    "whole": PartitionSpec(),
    "rows": PartitionSpec("fsdp"),
    "both": PartitionSpec("fsdp", "tensor"),
    "odd": PartitionSpec(None, "tensor"),
    "bits": PartitionSpec(),
    "flag": PartitionSpec(),
    "key": PartitionSpec(),
}


def values() -> dict[str, np.ndarray]:
    """Arrays with every value that a copy by arithmetic would change: -0.0, NaN with a payload, subnormal numbers."""
    rng = np.random.default_rng(0)
    odd = rng.standard_normal((5, 4, 3)).astype(np.float32)
    odd[0, 0] = [-0.0, np.nan, 1e-42]
    odd.view(np.uint32)[0, 1, 0] = 0x7FC12345
    return {
        "whole": rng.standard_normal((24, 12)).astype(np.float32),
        "rows": rng.standard_normal((48, 7)).astype(jnp.bfloat16),
        "both": rng.standard_normal((24, 4)).astype(np.float32),
        "odd": odd,
        "bits": np.arange(7, dtype=np.int8) - 3,
        "flag": np.array([True, False, True]),
        "key": np.asarray(jax.random.key_data(jax.random.key(3))),
    }


def state(placement: Placement) -> dict[str, jax.Array]:
    found = {}
    for name, value in values().items():
        sharding = jax.sharding.NamedSharding(placement.devices, SPECS[name])
        found[name] = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    found["key"] = jax.jit(jax.random.wrap_key_data, out_shardings=found["key"].sharding)(found["key"])
    return found


def digest(tree: dict[str, jax.Array]) -> str:
    """Of all values in all processes, bit by bit."""
    found = hashlib.sha256()
    for name, leaf in sorted(tree.items()):
        leaf = jax.random.key_data(leaf) if name == "key" else leaf
        whole = multihost_utils.process_allgather(leaf, tiled=True) if jax.process_count() > 1 else leaf
        found.update(np.asarray(whole).tobytes())
    return found.hexdigest()


def expected() -> str:
    return hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(values().items()))).hexdigest()


def main() -> None:
    layout, source, target = join_job()
    placement = Placement.create(MeshShape(**json.loads(layout)))
    report: dict[str, Any] = {}
    fresh = state(placement)
    said: list[str] = []
    if source != "-":
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)
        checkpoint = next(Checkpointer(source, say=said.append).newest_first())
        try:
            fresh = restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, fresh))
        except PanaxError as error:
            print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
            return
        report = {"read": checkpoint.bytes_read, "held": checkpoint.manifest.nbytes}
    report["digest"] = digest(fresh)
    if target != "-":
        checkpointer = Checkpointer(target, CheckpointConfig(commit_seconds=30), {"note.txt": "hello"}, say=said.append)
        checkpointer.sweep()
        for step in (1, 2):
            checkpointer.save(fresh, step, {"data": None})
        checkpointer.finish()
    print(json.dumps(report | {"said": said}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
