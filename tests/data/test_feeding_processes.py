"""Two real processes make only the rows their devices hold, and hold between them the batches that one process makes."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import feeding_worker
import numpy as np
import pytest

from panax.parallel.context import zigzag_order

PROCESSES, EACH, SECONDS = 2, 2, 120
MESHES = [
    ({"fsdp": 4}, [0, 1, 2, 3]),
    ({"fsdp": 4}, [0, 2, 3, 1]),  # the rows of a process are not neighbors
    ({"fsdp": 2, "context": 2}, [0, 1, 2, 3]),
    ({"fsdp": 2, "context": 2}, [0, 2, 1, 3]),  # each process holds a half of every row
]
ASKED_BY_FIRST = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 10, 11], [0, 1, 2, 3, 4, 5], list(range(12))]
START, COUNT = 3, 4


def run(folder: Path, settings: dict) -> list:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{opened.getsockname()[1]}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "SLURM_", "OMPI_"))
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={EACH}",
        "PYTHONPATH": os.pathsep.join(str(Path(feeding_worker.__file__).parents[i]) for i in (0, 1)),
    }
    children = []
    try:
        for index in range(PROCESSES):
            command = [
                sys.executable,
                feeding_worker.__file__,
                address,
                str(PROCESSES),
                str(index),
                json.dumps(settings),
            ]
            with open(folder / f"{index}.out", "w") as out, open(folder / f"{index}.err", "w") as err:
                children.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))
        until = time.monotonic() + SECONDS
        while any(child.poll() is None for child in children) and time.monotonic() < until:
            if any(child.poll() for child in children):
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    shown = "\n".join((folder / f"{i}.err").read_text()[-3000:] for i in range(PROCESSES))
    assert [child.returncode for child in children] == [0] * PROCESSES, shown
    return [json.loads((folder / f"{i}.out").read_text().splitlines()[-1]) for i in range(PROCESSES)]


@pytest.fixture(scope="module")
def whole_and_found(tmp_path_factory):
    """What one process draws after a few batches, and what each of two processes held of it, by mesh."""
    from panax.data import TokenWriter

    folder = tmp_path_factory.mktemp("feeding")
    draw = np.random.default_rng(0)
    for name, count in (("a", 40), ("b", 50)):
        with TokenWriter(folder / name, vocab_size=96, end_of_document=95) as writer:
            for length in draw.choice([1, 4, 6, 7, 12, 28], count, p=[0.2, 0.2, 0.2, 0.34, 0.04, 0.02]):
                writer.append(draw.integers(0, 95, length))
    folders, cache = [str(folder / "a"), str(folder / "b")], str(folder / "cache")
    drawn = list(itertools.islice(feeding_worker.source_of(folders, cache).batches(), START + COUNT))
    settings = {
        "meshes": MESHES, "folders": folders, "cache": cache, "position": drawn[START - 1].position, "count": COUNT,
    }  # fmt: skip
    return drawn[START:], run(folder, settings)


@pytest.mark.parametrize("index", range(len(MESHES)), ids=[f"{mesh} over {order}" for mesh, order in MESHES])
def test_processes_hold_the_batches_that_one_process_makes(index, whole_and_found):
    uninterrupted, outputs = whole_and_found
    requests = [process[index]["asked"] for process in outputs]
    assert requests[0] == ASKED_BY_FIRST[index] and set(requests[0]) | set(requests[1]) == set(
        range(feeding_worker.BATCH)
    )
    for number, (batch, _) in enumerate(uninterrupted):
        tokens = batch["tokens"]
        if (parts := MESHES[index][0].get("context", 1)) > 1:
            tokens = np.take(tokens, zigzag_order(tokens.shape[1], parts), axis=1)
        assert all(process[index]["shapes"][number] == list(tokens.shape) for process in outputs)
        covered = np.zeros(tokens.shape, np.bool_)
        for process in outputs:
            for place, values in process[index]["shards"][number]:
                where = tuple(slice(*ends) for ends in place)
                np.testing.assert_array_equal(tokens[where], values)
                covered[where] = True
        assert covered.all()
    assert len({batch["tokens"].shape for batch, _ in uninterrupted}) > 1
    assert all(process[index]["position"] == uninterrupted[-1].position for process in outputs)
