"""Collectives between processes of one core each: how long one takes by each way of scheduling their threads.

    python benchmarks/collectives.py --processes 2 --rounds 5

Gloo carries them over loopback. In each round every process takes the same collectives under Linux's usual policy and under the
batch one (`panax.core.scheduling`), in turns. Figures are of the first process: the median of all times of a way, and CPU time.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "permute")
KIBIBYTES = (4, 64, 1024, 4096)
WAYS = ("usual", "batch")
CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--index", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.index is not None:
        work(given.index, given.processes, given.rounds, given.port)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, __file__, "--processes", str(given.processes), "--rounds", str(given.rounds)]
    children = [
        subprocess.Popen(
            [*command, "--port", str(port), "--index", str(index)], stdout=None if index == 0 else subprocess.DEVNULL
        )
        for index in range(given.processes)
    ]
    sys.exit(max(abs(child.wait()) for child in children))


def work(index: int, processes: int, rounds: int, port: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    import panax
    from panax.core.scheduling import run_in_batches
    from panax.mesh import MeshShape, Placement

    panax.join(f"127.0.0.1:{port}", processes=processes, index=index)
    mesh = Placement.create(MeshShape(replica=-1, fsdp=1)).mesh
    axis, spec = "replica", PartitionSpec("replica")
    ring = [(n, (n + 1) % processes) for n in range(processes)]
    functions = {
        "all_reduce": lambda x: jax.lax.psum(x, axis),
        "all_gather": lambda x: jax.lax.all_gather(x, axis, tiled=True),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, axis, tiled=True),
        "permute": lambda x: jax.lax.ppermute(x, axis, ring),
    }
    cases = {}
    for kibibytes in KIBIBYTES:
        n = kibibytes * 256
        ones = np.ones(n, np.float32)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.make_array_from_callback((processes * n,), sharding, lambda _, ones=ones: ones)
        for kind in KINDS:
            f = jax.jit(jax.shard_map(functions[kind], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
            f(x).block_until_ready()
            cases[kind, kibibytes] = (f, x)
    seconds = {(case, way): [] for case in cases for way in WAYS}
    cpu = dict.fromkeys(seconds, 0.0)
    for _ in range(rounds):
        for way in WAYS:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
            if way == "batch":
                run_in_batches()
            for case, (f, x) in cases.items():
                f(x).block_until_ready()
                before = cpu_seconds()
                for _ in range(CALLS):
                    start = time.perf_counter()
                    f(x).block_until_ready()
                    seconds[case, way].append(time.perf_counter() - start)
                cpu[case, way] += cpu_seconds() - before
    if index == 0:
        print("| collective | KiB of each | usual | batch | batch by usual | CPU time, usual | batch |")
        print("|---|---|---|---|---|---|---|")
        for kind, kibibytes in cases:
            usual, batch = (statistics.median(seconds[(kind, kibibytes), way]) for way in WAYS)
            spent = [cpu[(kind, kibibytes), way] / (rounds * CALLS) for way in WAYS]
            print(
                f"| {kind} | {kibibytes} | {usual * 1e3:.2f} ms | {batch * 1e3:.2f} ms | **{batch / usual:.2f}** | "
                f"{spent[0] * 1e3:.2f} ms | {spent[1] * 1e3:.2f} ms |"
            )
        print(json.dumps({"processes": processes, "rounds": rounds, "calls": CALLS}))


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
