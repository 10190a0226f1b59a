"""Host memory while saving and restoring: the state's own, and a constant besides. Each is measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from panax.checkpoint.snapshot import CHUNK_BYTES
from panax.stores import LocalStore

SIZE = 2**28
SLACK = 2**23
"""Stacks of threads, modules that are imported on the way, the allocator's own; measured: 1 MiB. A 32nd of the state."""

# Resident memory as the kernel counts it, its highest value reset before what is measured.
MEASURED = """
import json, sys, tracemalloc
import jax, jax.numpy as jnp, numpy as np
from panax.checkpoint import CheckpointConfig, Checkpointer, restore

def peak_and_now():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return [int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")]

def measured(action):
    tracemalloc.start()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_and_now()[1]
    found = action()
    report = {"resident": peak_and_now()[0] - before, "traced": tracemalloc.get_traced_memory()[1]}
    tracemalloc.stop()
    return found, report

what, folder, devices, spec = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
mesh = jax.make_mesh((devices,), ("fsdp",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*{"rows": ["fsdp"], "columns": [None, "fsdp"]}[spec]))
abstract = {"large": jax.ShapeDtypeStruct((SIZE // 4096, 1024), jnp.int32), "small": jax.ShapeDtypeStruct((8, 8), jnp.int32)}
places = dict.fromkeys(abstract, place)
checkpointer = Checkpointer(folder, CheckpointConfig(keep_last=1))

def first():
    return {n: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + i for i, (n, x) in enumerate(abstract.items())}

if what == "save":
    state = jax.block_until_ready(jax.jit(first, out_shardings=places)())
    def act():
        checkpointer.save(state, 1, {})
        checkpointer.finish()
    _, report = measured(act)
    _, report["again"] = measured(lambda: (checkpointer.save(state, 1, {}), checkpointer.finish()))
else:
    restore(checkpointer.open(1), {"small": abstract["small"]}, {"small": place}, part=True)
    found, report = measured(lambda: jax.block_until_ready(restore(checkpointer.open(1), abstract, places)))
    for i, name in enumerate(abstract):
        array = np.asarray(found[name])
        assert (array.ravel() == np.arange(i, array.size + i, dtype=np.int32)).all(), name
print(json.dumps(report))
""".replace("SIZE", str(SIZE))


def measure(what: str, folder: Path, devices: int, spec: str = "rows") -> dict[str, Any]:
    """Most memory taken beyond what was there before: resident, and as Python and NumPy count it."""
    environment = dict(os.environ, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
    command = [sys.executable, "-c", MEASURED, what, str(folder), str(devices), spec]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of 256 MiB, written from eight devices, and what that took."""
    folder = tmp_path_factory.mktemp("large")
    return folder, measure("save", folder, 8)


def test_saving_takes_one_copy_of_the_state_and_takes_it_once(saved):
    """The snapshot's pages, and nothing that grows with the state besides; the next save uses the same."""
    _, found = saved
    assert SIZE <= found["resident"] <= SIZE + SLACK
    assert found["traced"] <= SLACK, "the snapshot is no Python memory"
    assert found["again"]["resident"] <= SLACK


@pytest.mark.parametrize("devices, spec", [(1, "rows"), (8, "rows"), (8, "columns")])
def test_restoring_takes_the_shards_and_a_chunk_for_each_reader(saved, devices, spec):
    """On the CPU the shards are the devices' memory too; columns of what was written as rows go through chunks."""
    folder, _ = saved
    found = measure("restore", folder, devices, spec)
    most = SIZE + LocalStore.readers * CHUNK_BYTES + SLACK
    assert SIZE <= found["traced"] <= most
    assert SIZE <= found["resident"] <= most
