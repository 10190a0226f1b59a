"""One of the processes of `test_feeding_processes.py`: feeds itself from a mixture, and prints what its devices hold.

python feeding_worker.py ADDRESS PROCESSES INDEX SETTINGS
"""

import contextlib
import json
import sys

import jax
import numpy as np
import tiny
from jax.sharding import AxisType, Mesh

from panax.data import Mixture, MixtureComponent, RowSource, TextData, TokenFile
from panax.mesh import Placement
from panax.mesh.rules import MESH_AXES
from panax.run.feed import prefetch_to_device
from panax.train import CompiledStep, Program

BATCH, LENGTH = 12, tiny.LENGTH


def source_of(folders: list[str], cache: str) -> RowSource:
    parts = tuple(
        MixtureComponent(name=f"part{i}", corpus=TokenFile(path=folder), weight=1.0 + i)
        for i, folder in enumerate(folders)
    )
    data = TextData(
        corpus=Mixture(parts=parts),
        tokenizer=None,
        sequence_length=LENGTH,
        batch_size=BATCH,
        held_out=0,
        packing=False,
        buckets=(8, 16),
        cache_dir=cache,
    )
    return data.open().train


class Watched:
    """Reports which rows are requested."""

    def __init__(self, source: RowSource) -> None:
        self._source, self.asked = source, []
        self.axes, self.resume, self.batch_size = source.axes, source.resume, source.batch_size

    def batches(self, position=None):
        raise AssertionError("only the rows that are held should be made")

    def batches_of(self, rows, position=None):
        self.asked = np.asarray(rows).tolist()
        return self._source.batches_of(rows, position)


def main() -> None:
    address, processes, index, settings = sys.argv[1:]
    options = json.loads(settings)
    port = address.rpartition(":")[2]
    jax.distributed.initialize(
        address, int(processes), int(index), coordinator_bind_address=f"127.0.0.1:{port}", initialization_timeout=30
    )
    program = Program.create(tiny.task(), tiny.ADAMW, num_steps=1)
    results = []
    for mesh, order in options["meshes"]:
        sizes = dict.fromkeys(MESH_AXES, 1) | mesh
        grid = np.array(jax.devices())[order].reshape([sizes[axis] for axis in MESH_AXES])
        placement = Placement(Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)))
        step = CompiledStep(program, placement, tiny.AXES, shapes_allowed=3)
        source = Watched(source_of(options["folders"], options["cache"]))
        with contextlib.closing(
            prefetch_to_device(source, step, options["position"], max_batches=options["count"])
        ) as batches:
            fed = list(batches)
        shards = [
            [
                ([(part.start or 0, part.stop) for part in shard.index], np.asarray(shard.data).tolist())
                for shard in batch["tokens"].addressable_shards
            ]
            for batch, *_ in fed
        ]
        shapes = [list(batch["tokens"].shape) for batch, *_ in fed]
        results.append({"asked": source.asked, "shards": shards, "shapes": shapes, "position": fed[-1].position})
    print(json.dumps(results), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
