"""A process of `test_memory_of_hosts.py`: keeps copies in memory and dies, or continues from them. Each process is a host.

python memory_worker.py ADDRESS PROCESSES INDEX LAYOUT keep|restore FOLDER HOST...
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
from checkpoint_worker import digest, state
from launching import join_job

from panax.checkpoint import MemoryConfig, MemoryTier, restore
from panax.mesh import MeshShape, Placement


def main() -> None:
    layout, what, folder, *hosts = join_job()
    placement = Placement.create(MeshShape(**json.loads(layout)))
    tree = state(placement)
    said: list[str] = []
    directory = Path(folder, hosts[jax.process_index()])
    tier = MemoryTier(MemoryConfig(every=5, directory=str(directory)), "run", said.append)
    if what == "keep":
        for step in (5, 10, 15):
            tier.save(tree, step, {"data": step})
        tier._wait_for_previous()
        print(json.dumps(said), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint = tier.newest()
    report: dict = {"step": None}
    if checkpoint is not None:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        restored = restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, tree))
        report = {"step": checkpoint.manifest.step, "host": checkpoint.manifest.host, "digest": digest(restored)}
    tier.close(forget=False)
    print(json.dumps(report | {"said": said}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
