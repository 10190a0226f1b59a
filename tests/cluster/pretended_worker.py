"""A worker without jax: it reports as a training process does, and ends according to its first argument.

    python pretended_worker.py HOW [FOLDER]

It counts its starts in FOLDER, so that a restarted one can do better.
"""  # fmt: skip

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from panax.cli.failures import report_error
from panax.cluster.node.worker import install_guards
from panax.core.errors import DataError, RecipeError
from panax.job.heartbeat import heartbeat

STEPS = 8


def main() -> int:
    install_guards()
    how, folder = sys.argv[1], Path(sys.argv[2])
    index, attempt = int(os.environ["PANAX_PROCESS"]), int(os.environ["PANAX_ATTEMPT"])
    (folder / f"pid_{attempt}_{index}").write_text(str(os.getpid()))
    (folder / f"arguments_{attempt}_{index}").write_text(" ".join(sys.argv))
    stopped = threading.Event()
    beat = heartbeat()
    if how == "prepares":
        # As a process that imports: it takes no signals yet.
        beat.phase("prepare")
        time.sleep(60)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    failing = index == 1 and (attempt == 1 or how.endswith("always"))
    for phase in ("join", "prepare", "restore", "compile"):
        if how == "early" and attempt == 1 and phase == "restore":
            if failing:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        beat.phase(phase)
    if how == "compiles":
        # As a process of many in a compiler: it answers no signal.
        time.sleep(60)
    if how == "elastic":
        return elastic(folder, stopped)
    print(f"process {index} of {os.environ['PANAX_PROCESSES']} began", flush=True)
    for step in range(1, STEPS + 1):
        time.sleep(0.05)
        beat.step(step)
        if step == 4 and failing:
            fail(how.removesuffix(" always"))
        if how == "waits":
            stopped.wait(60)
        if how == "ignores":
            time.sleep(60)
        if stopped.is_set():
            (folder / f"saved_{index}").write_text(str(step))
            beat.phase("end")
            return 143
    if index == 0:
        beat.values({"train/loss": 1.5, "goodput/fraction": 0.75})
    beat.phase("end")
    return 0


def elastic(folder: Path, stopped: threading.Event) -> int:
    """Steps from where the last start ended, a save every fourth, until the file `finish` is there."""
    index, count, job_size = (os.environ[f"PANAX_{name}"] for name in ("PROCESS", "PROCESSES", "WHOLE"))
    if index == "0" and count == job_size:
        mesh = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1)
        layouts = {n: [{"mesh": {**mesh, "fsdp": n}, "micro_batches": 2}] for n in range(1, int(job_size))}
        (folder / "job/layouts.json").write_text(json.dumps({"processes": int(job_size), "layouts": layouts}))
    if (folder / "too_small").exists() and count != job_size:
        return report_error(RecipeError("heads=12 is not divisible by tensor=8"), with_traceback=False)
    step_file = folder / f"taken_{index}"
    step, number = int(step_file.read_text()) if step_file.exists() else 0, 0
    while not stopped.is_set() and not (folder / "finish").exists():
        time.sleep(0.05)
        step += 1
        heartbeat().step(step)
        probe(step, number := number + 1, folder / "slow_nodes")
        if step % 4 == 0:
            heartbeat().report_saved(step)
    step_file.write_text(str(step))
    return 143 if stopped.is_set() else 0


def probe(step: int, number: int, path: Path) -> None:
    """Report figures as a training process does; slow ones on the nodes that a file lists, from the probe that it names on."""
    node, processes = os.environ["PANAX_NODE"], int(os.environ["PANAX_PROCESSES"])
    begin, *slow = (path.read_text() if path.exists() else "").split() or ["0"]
    slow = slow if number >= int(begin) or processes < int(os.environ["PANAX_WHOLE"]) else []
    factor, axis = 3.0 if node in slow else 1.0, 0.1 if "link" in slow else 0.002
    if number == 1:
        heartbeat().facts(groups={"fsdp": list(range(processes))})
    heartbeat().facts(
        probe={
            "number": number, "step": step, "every": 1, "platform": "cpu", "step_seconds": 0.05, "matrix": 0.01 * factor,
            "matrix_flops": 1e8, "host": 0.0, "host_part": "hooks", "device_wait": 0.04,
            "axes": {"fsdp": [axis, 2**18, "all-gather"]},
        }
    )  # fmt: skip


def fail(how: str) -> None:
    if how in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        if how != "SIGKILL":
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.Signals[how])
    if how == "hang":
        time.sleep(3600)
    if how == "GIL":
        import ctypes

        # Holds Python's lock: no Python of this process runs any more.
        ctypes.PyDLL(None).sleep(3600)
    known = {
        "recipe": RecipeError("heads=12 is not divisible by tensor=8"),
        "data": DataError("record 7 of a.txt is not text"),
        "memory": RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 9 bytes"),
        "device": RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"),
        "program": KeyError("nothing"),
    }
    if how.removesuffix(", stays") in known:
        code = report_error(known[how.removesuffix(", stays")], with_traceback=False)
        if how.endswith(", stays"):
            time.sleep(3600)
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
