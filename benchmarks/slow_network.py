"""What compression and local steps are worth on a slow network: two hosts, a shaped link, steps of each kind in turn.

    sudo python benchmarks/slow_network.py [--megabits 100] [--milliseconds 20] [--rounds 3]

Two network namespaces are joined by a bridge; each host sends at most so many megabits a second (tbf), and one of them answers so
late that a message takes half of the round trip (a relay in user space, since not every kernel has netem). Each host runs one
process with one device, a replica of a decoder. First all kinds take steps on a link of full rate, then on the shaped one; it is
late in both. What the rate costs a step is the difference, and the table sets it beside the bytes that the step sends.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"compress": "bfloat16"},
    "int8": {"compress": "int8"},
    "int4": {"compress": "int4"},
    "sign": {"compress": "sign"},
    "float32 after 25 local steps": {"local_steps": 25},
    "int4 after 25 local steps": {"local_steps": 25, "compress": "int4"},
}
"""Settings of `Comms`."""

LOCAL = 25


def work(address: str, index: int, rounds: int) -> None:
    """One host's process: milliseconds of a step, and bytes that it sends, by kind; told by process 0."""
    import panax

    panax.join(address, processes=2, index=index)

    import jax
    import numpy as np

    from panax.comms import Comms
    from panax.mesh import MeshShape, Placement
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW
    from panax.plan import walk_step
    from panax.plan.walk.walk import walk_agreement
    from panax.train import CompiledStep, Program

    model = DecoderConfig(vocab_size=1024, max_length=64, embed=256, num_layers=2, heads=4, ffn=704)
    placement = Placement.create(MeshShape(replica=2, fsdp=1))
    axes = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
    tokens = np.random.default_rng(0).integers(0, 1024, (4, 65)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((4, 64), np.float32)}
    steps, states, sent = {}, {}, {}
    for kind, settings in KINDS.items():
        program = Program.create(DecoderTask(model=model), AdamW(), num_steps=10**6, comms=Comms(**settings))
        step = steps[kind] = CompiledStep(program, placement, axes)
        states[kind] = step.init(0)
        # Both programs are compiled before anything is timed.
        for _ in range(settings.get("local_steps", 1)):
            states[kind], _ = jax.block_until_ready(step(states[kind], step.put(batch)))
        cost, agreement = walk_step(step, batch), walk_agreement(step)
        sent[kind] = sum(one.wire_bytes for one in cost.traffic)
        if agreement is not None:
            sent[kind] += sum(one.wire_bytes for one in agreement.traffic) / settings["local_steps"]
    print(json.dumps({"ready": sent}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            return
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, step in steps.items():
                count = LOCAL if "local" in kind else 4
                given = step.put(batch)
                began = time.perf_counter()
                for _ in range(count):
                    states[kind], _ = jax.block_until_ready(step(states[kind], given))
                found[kind].append((time.perf_counter() - began) / count * 1e3)
        print(json.dumps({kind: statistics.median(each) for kind, each in found.items()}), flush=True)


def table(free: dict[str, float], shaped: dict[str, float], sent: dict[str, float], megabits: float) -> str:
    """Markdown."""
    plain = "float32"
    lines = [
        "| gradients travel as | kB sent a step | these at the link's rate, ms | ms of a step at full rate | shaped | the "
        "difference, ms | of float32's | of its bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        cost, usual = shaped[kind] - free[kind], shaped[plain] - free[plain]
        floor = sent[kind] * 8 / megabits / 1e3
        lines.append(
            f"| {kind} | {sent[kind] / 1e3:,.1f} | {floor:,.1f} | {free[kind]:,.1f} | {shaped[kind]:,.1f} | {cost:,.1f} | "
            f"{cost / usual:.3f} | {sent[kind] / sent[plain]:.3f} |"
        )
    return "\n".join(lines)


def _next_line(worker: Any) -> dict[str, Any]:
    """What a process says next; libraries in C write lines of their own between."""
    while line := worker.stdout.readline():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit("a process ended early; its errors stand above")


def measure(megabits: float, milliseconds: float, rounds: int) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "preflight")]
    from faulty import hosts

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        late = {1: milliseconds / 2e3} if milliseconds else {}
        cluster = stack.enter_context(hosts(folder, 2, late))
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            port = free_port.getsockname()[1]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        command = [sys.executable, __file__, "--work", f"{cluster.addresses[0]}:{port}", "--rounds", str(rounds)]
        workers = []
        for index in range(2):
            worker = subprocess.Popen(
                [*cluster.prefix(index), *command, "--index", str(index)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if index == 0 else subprocess.DEVNULL,
                env=env,
                text=True,
            )
            stack.callback(worker.kill)
            workers.append(worker)

        def told() -> dict[str, Any]:
            first, _ = (_next_line(worker) for worker in workers)
            return first

        def measured() -> dict[str, float]:
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            return told()

        sent = told()["ready"]
        free = measured()
        for index in range(2):
            cluster.limit(index, megabits)
        shaped = measured()
        print(table(free, shaped, sent, megabits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=100, help="a second, of each host (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=20, help="of a round trip; 0 for none (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all kinds (%(default)s)")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.megabits <= 0 or asked.milliseconds < 0 or asked.rounds < 1:
        parser.error("expected more than 0 megabits, 0 milliseconds or more, and 1 round or more")
    if asked.work:
        work(asked.work, asked.index, asked.rounds)
        return
    if os.geteuid() != 0:
        parser.error("network namespaces take root: run it with sudo")
    measure(asked.megabits, asked.milliseconds, asked.rounds)


if __name__ == "__main__":
    main()
