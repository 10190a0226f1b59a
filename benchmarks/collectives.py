"""What a collective between processes of one core each costs, by the policy of their threads, alone and beside another program.

    python benchmarks/collectives.py [PROCESSES]

Every process has a core of its own. The policies take turns within one run, ten turns each; the median and the range of turns are
printed: alone, and with another program on every core. Needs Linux.
"""  # fmt: skip

import os
import statistics
import subprocess
import sys
import time

from panax_compare.measure.job import find_free_port

TURNS = 10
SIZES = {"4 KiB": 1 << 10, "4 MiB": 1 << 20}


def main() -> None:
    if len(sys.argv) == 4:
        return worker(*map(int, sys.argv[1:]))
    processes, port = int((sys.argv[1:] or ["2"])[0]), find_free_port()
    for busy in (False, True):
        print(f"\n{'beside another program on each core' if busy else 'alone'}, ms: median (least to most)", flush=True)
        others = [burner(core) for core in sorted(os.sched_getaffinity(0))[:processes]] if busy else []
        try:
            commands = [[sys.executable, __file__, str(processes), str(index), str(port)] for index in range(processes)]
            job = [subprocess.Popen(command) for command in commands]
            codes = [process.wait() for process in job]
            if any(codes):
                raise SystemExit("a process failed")
        finally:
            for other in others:
                other.kill()
                other.wait()


def burner(core: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])


def worker(processes: int, index: int, port: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[index % len(cores)]])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from panax.job.cpu_scheduling import set_batch_policy

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, processes, index, coordinator_bind_address=address)
    mesh = jax.make_mesh((processes,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kinds = {
        "sum": (lambda x: jax.lax.psum(x, "data"), P()),
        "gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), P()),
        "scattered sum": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), P("data")),
    }
    for size, count in SIZES.items():
        for kind, (collective, out) in kinds.items():
            whole = kind != "gather"
            function = jax.jit(
                jax.shard_map(
                    collective, mesh=mesh, in_specs=P() if whole else P("data"), out_specs=out, check_vma=False
                )
            )
            x = jax.device_put(
                jnp.ones(count, jnp.float32), jax.sharding.NamedSharding(mesh, P() if whole else P("data"))
            )
            function(x).block_until_ready()
            found: dict[str, list[float]] = {"usual": [], "batch": []}
            # As many in a turn in every process, for each waits for the others.
            number = 4 if count > 1 << 16 else 32
            for turn in range(2 * TURNS):
                policy = ("usual", "batch")[turn % 2]
                set_batch_policy(batch=policy == "batch")
                began = time.perf_counter()
                for _ in range(number):
                    function(x).block_until_ready()
                found[policy].append((time.perf_counter() - began) / number * 1e3)
            if index == 0:
                shown = "; ".join(
                    f"{policy} {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
                    for policy, times in found.items()
                )
                print(f"{kind} of {size}: {shown}", flush=True)


if __name__ == "__main__":
    main()
