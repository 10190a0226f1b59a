"""What launching and supervising cost: the way to the first step of one process and of several, and the supervisor's own share.

    python benchmarks/launch.py start [--processes 4] [--rounds 3]
    python benchmarks/launch.py supervise [--processes 4] [--seconds 60]

`start` trains three steps of a small decoder alone and launched, in turns: cold (no compiled program is kept) and warm. Wall
seconds are from the command to the first step; CPU seconds are of a worker up to there. `supervise` lets processes pretend to
train at 50 steps a second, and reads what the supervisor and its agent took. Run it on a machine with nothing else to do.
"""  # fmt: skip

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "tests" / "tiny_recipe.py"
FLAGS = ("--num-steps", "3", "--log-every", "1", "--evaluate.every", "0", "--checkpoint.every", "100")

PRETENDED = """
import os, signal, sys, time
from panax.cluster.node.worker import install_guards
from panax.job.heartbeat import heartbeat
install_guards()
beat = heartbeat()
for phase in ("join", "prepare", "restore", "compile"):
    beat.phase(phase)
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
step = 0
while not stop:
    step += 1
    time.sleep(0.02)
    beat.step(step)
    if step % 50 == 0 and os.environ["PANAX_PROCESS"] == "0":
        beat.values(step, {"train/loss": 1.0, "speed/tokens_per_second": 1e5, "speed/mfu": 0.4})
        print(step, "loss 1.0", flush=True)
sys.exit(143)
"""


def environment(cache: Path, devices: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_", "XLA_"))}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "PANAX_CACHE": str(cache),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(RECIPE.parent)]),
    }


def start(processes: int, cache: Path) -> dict[str, float]:
    """Seconds to the first step: wall, and CPU of a worker by the median."""
    with tempfile.TemporaryDirectory() as folder:
        where = ("--directory", folder, "--mesh.fsdp", str(processes))
        # One process alone is launched too, so that both are timed by the same clock and have the same devices.
        command = [sys.executable, "-m", "panax", "launch", str(RECIPE), *FLAGS, *where]
        command += ["--processes", str(processes), "--devices", "1"]
        began = time.time()
        done = subprocess.run(command, env=environment(cache, 1), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        status = json.loads((Path(folder) / "job/status.json").read_text())
        cpu = [one["first_step_cpu_seconds"] for one in status["processes"]]
        wall = max(one["first_step_at"] for one in status["processes"]) - began
        kinds = ("programs_read", "programs_received", "programs_compiled")
        programs = {kind: [one[kind] for one in status["processes"]] for kind in kinds}
        return {"wall": wall, "cpu": statistics.median(cpu), "breakdown": status["breakdown"], **programs}


def starts(processes: int, rounds: int) -> None:
    found: dict[tuple[int, str], list[dict]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
            for kind in ("cold", "warm"):
                for count, cache in ((1, one), (processes, many)):
                    found.setdefault((count, kind), []).append(got := start(count, Path(cache)))
                    print(number, kind, count, json.dumps(got), flush=True)
    for kind in ("cold", "warm"):
        alone, together = found[1, kind], found[processes, kind]
        for what in ("wall", "cpu"):
            a, b = (statistics.median(each[what] for each in side) for side in (alone, together))
            print(
                f"{kind}: {what} seconds to the first step: 1 process {a:.2f}, {processes} processes {b:.2f}, ratio {b / a:.2f}"
            )


def supervise(processes: int, seconds: float) -> None:
    code = (
        "import sys; from pathlib import Path; from panax.cluster import Job, launch\n"
        "program = (sys.executable, '-c', sys.argv[3])\n"
        "job = Job(arguments=(), folder=Path(sys.argv[1]), processes=int(sys.argv[2]), num_steps=10**9, program=program)\n"
        "sys.exit(launch(job))"
    )
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        command = [sys.executable, "-c", code, folder, str(processes), PRETENDED]
        supervisor = subprocess.Popen(command, env=environment(Path(folder), 1), stderr=nothing)
        time.sleep(5)
        watched = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children()]

        def used() -> list[float]:
            return [sum(each.cpu_times()[:2]) for each in watched]

        before, began = used(), time.monotonic()
        time.sleep(seconds)
        passed, after = time.monotonic() - began, used()
        for name, each, a, b in zip(("supervisor", "agent"), watched, before, after, strict=True):
            print(f"{name}: {(b - a) / passed:.3%} of one core, {each.memory_info().rss / 1e6:.0f} MB")
        supervisor.terminate()
        supervisor.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "supervise"))
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    if asked.what == "start":
        starts(asked.processes, asked.rounds)
    else:
        supervise(asked.processes, asked.seconds)


if __name__ == "__main__":
    main()
