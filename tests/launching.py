"""Starting several processes of one JAX job on loopback, and ending all of them."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


NOT_OURS = ("JAX_", "SLURM_", "OMPI_", "PMI_", "PANAX_", "RANK", "WORLD_SIZE", "MASTER_")
"""Variables of whatever started the tests themselves."""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def environment(devices: int, folder: Path) -> dict[str, str]:
    """For a process of so many simulated devices, with its script in `folder`; compiling takes most of its time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), str(TESTS), os.environ.get("PYTHONPATH")])),
    }


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Jobs of several processes wait for each other here: Gloo gives up when its peers are starved."""
    with open(Path(tempfile.gettempdir()) / f"panax-test-jobs-{os.getuid()}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


class Job:
    """The processes of a job: `python SCRIPT ADDRESS PROCESSES INDEX ARGUMENTS...` each; their output is in `folder`.

    One job of several processes runs at a time, whatever tests run beside each other: Gloo gives up when its peers are starved.
    """

    def __init__(
        self, folder: Path, script: str, arguments: Sequence[str], *, processes: int, devices: int, **more: str
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.processes = folder, processes
        self.children: list[subprocess.Popen] = []
        self._turn = open(Path(tempfile.gettempdir()) / f"panax-test-jobs-{os.getuid()}", "w")  # noqa: SIM115
        if processes > 1:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        address = f"127.0.0.1:{free_port()}"
        for index in range(processes):
            with open(folder / f"{index}.out", "w") as out, open(folder / f"{index}.err", "w") as err:
                command = [sys.executable, script, address, str(processes), str(index), *arguments]
                env = environment(devices, Path(script).parent) | more
                self.children.append(subprocess.Popen(command, stdout=out, stderr=err, env=env))

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes: when all have ended, one has failed, or time is up; all are killed then."""
        deadline = time.monotonic() + seconds
        try:
            while any(child.poll() is None for child in self.children):
                if any(child.poll() for child in self.children) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            self.kill()
        return [child.returncode for child in self.children]

    def kill(self) -> None:
        """Kill -9 all that still run."""
        for child in self.children:
            child.kill()
            child.wait()
        self._turn.close()

    def said(self, index: int) -> str:
        return (self.folder / f"{index}.out").read_text()

    def shown(self) -> str:
        return "\n".join(
            f"--- process {i}\n{self.said(i)[-2000:]}\n{(self.folder / f'{i}.err').read_text()[-4000:]}"
            for i in range(self.processes)
        )


def run_job(
    folder: Path,
    script: str,
    arguments: Sequence[str],
    *,
    processes: int,
    devices: int,
    seconds: float = 180,
    **more: str,
) -> list[Any]:
    """What each process printed last, as JSON. All of them are killed as soon as one fails, and shown."""
    job = Job(folder, script, arguments, processes=processes, devices=devices, **more)
    codes = job.wait(seconds)
    assert codes == [0] * processes, f"exit codes {codes}\n{job.shown()}"
    return [json.loads(job.said(i).splitlines()[-1]) for i in range(processes)]


def join_job() -> list[str]:
    """In a process of a job: join the others; the arguments that are left."""
    import jax

    address, processes, index, *arguments = sys.argv[1:]
    if int(processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        port = address.rpartition(":")[2]
        jax.distributed.initialize(
            address, int(processes), int(index), coordinator_bind_address=f"127.0.0.1:{port}", initialization_timeout=60
        )
    assert jax.process_count() == int(processes)
    return arguments
