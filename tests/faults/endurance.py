"""A launched run that is watched while it is killed: its processes, and what its supervisor and agents hold."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from panax.checkpoint import open_checkpoint

TESTS = Path(__file__).parents[1]
NODES = 4
LOCKS = (".lock", ".checkpoints.lock")
"""Empty files, there as long as the run's folder is."""


class Sample(NamedTuple):
    """What a process of the launch holds at one moment of a running attempt."""

    who: str
    attempt: int
    descriptors: int
    resident: int


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_PROC", "XLA_"))}
    paths = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}


def arguments(steps: int, *more: str, every: int = 10) -> list[str]:
    """A launch of the tests' tiny decoder: four nodes of one process of one device."""
    where = [
        "--nodes",
        str(NODES),
        "--processes",
        str(NODES),
        "--devices",
        "1",
        "--mesh.replica",
        "2",
        "--mesh.fsdp",
        "2",
    ]
    saves = ["--num-steps", str(steps), "--checkpoint.every", str(every), "--log-every", "10", "--evaluate.every", "0"]
    return [str(TESTS / "tiny_recipe.py"), *where, *saves, *more]


class Launched:
    """A launch that is followed from outside."""

    PANAX = (sys.executable, "-m", "panax")

    def __init__(self, folder: Path, *flags: str):
        self.folder = folder
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._began, self.began = time.monotonic(), time.time()
        self._process = subprocess.Popen(
            [*self.PANAX, "launch", *flags, "--directory", str(folder)], env=environment(), stderr=self._said
        )
        self._supervisor = psutil.Process(self._process.pid)
        self._seen: dict[tuple[int, float], psutil.Process] = {}
        self._samples: list[Sample] = []
        self._ends = threading.Event()
        self._watch = threading.Thread(target=self._watching)
        self._watch.start()
        self.seconds = 0.0

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._watch.join()
        self._process.kill()
        self._process.wait()
        self._said.close()

    def said(self) -> str:
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace")

    def terminate(self) -> None:
        self._process.terminate()

    def done(self, code: int = 0) -> str:
        """Wait until it has ended so; return its output."""
        assert self._process.wait(1800) == code, self.said()[-4000:]
        self.seconds = time.monotonic() - self._began
        return self.said()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self._goes_on()

    def until(self, found: Callable, seconds: float, every: float = 0.05):
        """What it finds, as soon as that is true."""
        deadline = time.monotonic() + seconds
        while not (value := found()):
            self._goes_on()
            assert time.monotonic() < deadline, self.said()[-4000:]
            time.sleep(every)
        return value

    def status(self) -> dict:
        try:
            return json.loads((self.folder / "job/status.json").read_text())
        except (OSError, ValueError):
            return {"state": "", "attempt": 0, "step": -1, "processes": []}

    def pids(self) -> list[int]:
        return [one["pid"] for one in self.status()["processes"]]

    def agents(self) -> list[psutil.Process]:
        """Children that live long; the supervisor's first child tells of the recipe and ends."""
        return [each for each in _children(self._supervisor) if "panax.cluster.node.agent" in " ".join(_line(each))]

    def seen(self) -> list[psutil.Process]:
        return list(self._seen.values())

    def samples(self) -> list[Sample]:
        return self._samples

    def _goes_on(self) -> None:
        assert self._process.poll() is None, f"ended with {self._process.returncode}\n{self.said()[-4000:]}"

    def _watching(self) -> None:
        agents: list[psutil.Process] = []
        while not self._ends.wait(0.5):
            for each in _children(self._supervisor, recursive=True):
                self._seen.setdefault((each.pid, each.create_time()), each)
            status = self.status()
            agents = agents if len(agents) == NODES else self.agents()
            # A restart opens what it needs; what counts is what is held when all run.
            if status["state"] != "running" or status["step"] < 0:
                continue
            for who, process in (("supervisor", self._supervisor), *((f"agent {n}", a) for n, a in enumerate(agents))):
                try:
                    self._samples.append(Sample(who, status["attempt"], process.num_fds(), process.memory_info().rss))
                except psutil.Error:
                    continue


def workers(job: Launched) -> list[psutil.Process]:
    """The workers that are there now, by their logs: a spare one has none."""
    measured = []
    for agent in job.agents():
        for each in _children(agent):
            try:
                if "/job/logs/process_" in os.readlink(f"/proc/{each.pid}/fd/1"):
                    measured.append(each)
            except OSError:
                continue
    return measured


def committed(folder: Path) -> int:
    """The last step of which a checkpoint is committed; 0 before."""
    found = [int(each.parent.name.removeprefix("step_")) for each in folder.glob("checkpoints/step_*/manifest.json")]
    return max(found, default=0)


def partial(folder: Path) -> list[str]:
    """Checkpoints without a commit, and files that are half written."""
    torn = [each for each in folder.glob("checkpoints/step_*") if not (each / "manifest.json").exists()]
    half = [
        each
        for each in folder.rglob("*")
        if (each.name.startswith(".") or ".tmp" in each.name) and each.name not in LOCKS
    ]
    return [str(each.relative_to(folder)) for each in (*torn, *half)]


def finished(folder: Path, step: int) -> str:
    """A digest of the arrays of the last checkpoint."""
    checkpoint = open_checkpoint(str(folder / f"checkpoints/step_{step:08d}"))
    found = hashlib.sha256()
    for name in sorted(checkpoint.manifest.arrays):
        found.update(name.encode() + checkpoint.read(name).tobytes())
    return found.hexdigest()


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.Error:
        return []


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
