"""One cell of the fault matrix: a run to which a fault comes, and whether it ends as in the table."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "preflight"))
sys.path.insert(0, str(Path(__file__).parent))

from expected import PHASES, End, expected
from faulty import Hosts

from panax.checkpoint import Checkpointer, open_checkpoint
from panax.cluster.supervisor.diagnosis import Cause
from panax.cluster.supervisor.job_folder import read_incidents
from panax.cluster.supervisor.job_layout import JobLayout

HERE = Path(__file__).parent
RECIPE, STEPS, BASE = str(HERE / "recipe.py"), 24, 10
START_SECONDS = 60.0
SPARES = 0.3
"""The share of cells in which spare workers wait for the restart."""

PHASE_SECONDS, END_SECONDS, STOP_SECONDS = 120.0, 180.0, 60.0
ON_HOSTS = ("partition", "slow link", "lost node")
GATEWAY, SLOW_MEGABITS = "10.213.7.254", 2.0
WHOLE = {4: ("--mesh.replica", "2", "--mesh.fsdp", "2"), 2: ("--mesh.fsdp", "2")}
LATER = ("link", "long save", "stop", "suspended supervisor", "unread output")
SIGNALS = {kind: signal.Signals[kind] for kind in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT")}


class Wrong(Exception):
    """A cell that does not end as in the table."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a cell.

    Attributes:
        wrong: Differences from the table; empty if there are none.
        seconds: From the fault to the job's end.
    """

    kind: str
    phase: str
    node: int
    end: End
    wrong: str
    seconds: float


def cells() -> list[tuple[str, str]]:
    """Every cell of the table, kind by kind."""
    return sorted(expected(), key=lambda cell: (cell[0], PHASES.index(cell[1])))


def sample() -> list[tuple[str, str]]:
    """Cells in which every kind and every phase occurs: each kind in the next phase."""
    # Those that came later are last, so that the others keep their phases.
    kinds = sorted({kind for kind, _ in expected()}, key=lambda kind: (kind in LATER, kind))
    found = []
    for number, kind in enumerate(kinds):
        phases = [phase for phase in PHASES if (kind, phase) in expected()]
        found.append((kind, phases[number % len(phases)]))
    return found


def makes_hosts() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"panax-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


class Matrix:
    """The cells of one seed, on one number of nodes.

    Args:
        folder: For runs and what they share; it is to be empty.
        silent_seconds: Without a word from a host until it counts as lost.
        stall_seconds: Without progress until a process counts as hanging.
    """

    def __init__(self, folder: Path, seed: int, nodes: int, silent_seconds: float, stall_seconds: float):
        self.folder, self.seed, self.nodes = folder, seed, nodes
        self.silent_seconds, self.stall_seconds = silent_seconds, stall_seconds
        self._digests: dict[tuple[int, int], str] = {}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PANAX_", "XLA_"))},
            "JAX_PLATFORMS": "cpu",
            "PANAX_CACHE": str(folder / "cache"),
            "PANAX_TEST_LIBRARY": str(folder),
            "PANAX_TEST_FAULT": str(folder / "fault.json"),
            "PANAX_TEST_LONG_SAVE": str(stall_seconds + 10.0),
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }

    def run(self, kind: str, phase: str) -> Row:
        """Return whether a cell ends as in the table."""
        end = expected()[kind, phase]
        rng = random.Random(f"{self.seed} {kind} {phase}")
        node, call = rng.randrange(self.nodes), rng.randint(2, 6)
        # Batches are drawn ahead: the third one before the first step, after which a job can continue with fewer nodes.
        call += 3 if phase == "data" else 0
        folder = self.folder / "run"
        self._begin(folder, BASE if kind != "corrupted value" else 0)
        seconds, said = float("nan"), ""
        self._inject({"kind": kind, "phase": phase, "process": node, "call": call})
        flags = ("--verify.every", "1") if kind == "corrupted value" else ()
        if kind == "link":
            # So that the run would remove that step.
            flags = ("--checkpoint.keep-last", "1")
            _linked(folder / f"checkpoints/step_{BASE:08d}", self.folder / "elsewhere")
        spares = rng.random() < SPARES
        try:
            with self._hosts(kind) as hosts, _unread() as unread:
                out = unread if kind == "unread output" else None
                job = self._launched(folder, flags, hosts, spares=spares, out=out)
                try:
                    fault_at = self._injected(job, kind, node, hosts)
                    said = self._ended(job, kind, end)
                    seconds = time.monotonic() - fault_at
                finally:
                    pids = _pids(folder)
                    _kill(job)
            self._judge(folder, kind, end, job.returncode, seconds, said)
            if kind == "link":
                _same("what the link leads to", open_checkpoint(str(self.folder / "elsewhere")).verify(), [])
            _check_gone(folder, pids)
        except Wrong as wrong:
            return Row(kind, phase, node, end, str(wrong), seconds)
        return Row(kind, phase, node, end, "", seconds)

    def _begin(self, folder: Path, step: int) -> None:
        """A folder with the run up to a step."""
        self.reference()
        shutil.rmtree(folder, ignore_errors=True)
        if step:
            shutil.copytree(self.folder / "base", folder, ignore=shutil.ignore_patterns("job"))

    def reference(self) -> str:
        """The digest of the undisturbed run."""
        whole = self.folder / "base", self.folder / "whole"
        if (STEPS, self.nodes) not in self._digests:
            self._inject(None)
            _done(self._launched(whole[0], (), None, disturbed=False, stop=BASE))
            shutil.copytree(*whole)
            _done(self._launched(whole[1], (), None, disturbed=False))
            self._digests[STEPS, self.nodes] = digest(whole[1])
        return self._digests[STEPS, self.nodes]

    def planned(self, step: int, layout: Sequence[str], nodes: int) -> str:
        """The digest of a run that was made to continue with fewer nodes from a step."""
        if step == STEPS:
            return self.reference()
        if (step, nodes) not in self._digests:
            folder = self.folder / f"planned-{step}-{nodes}"
            shutil.copytree(self.folder / "whole", folder)
            shutil.rmtree(folder / "job")
            for entry in (folder / "checkpoints").iterdir():
                if entry.name > f"step_{step:08d}":
                    shutil.rmtree(entry)
            self._inject(None)
            _done(self._launched(folder, (), None, disturbed=False, nodes=nodes, layout=layout))
            self._digests[step, nodes] = digest(folder)
        return self._digests[step, nodes]

    def _inject(self, fault: dict[str, Any] | None) -> None:
        # None of these processes has that number.
        fault = fault or {"kind": "", "phase": "", "process": -1, "call": 0}
        for name in ("announce", "go"):
            (self.folder / name).unlink(missing_ok=True)
            fault[name] = str(self.folder / name)
        (self.folder / "fault.json").write_text(json.dumps(fault))

    def _launched(
        self,
        folder: Path,
        flags: Sequence[str],
        hosts: Hosts | None,
        *,
        disturbed: bool = True,
        spares: bool = False,
        stop: int = 0,
        nodes: int = 0,
        layout: Sequence[str] = (),
        out: int | None = None,
    ) -> subprocess.Popen:
        nodes = nodes or self.nodes
        arguments = [RECIPE, "--directory", str(folder), *(layout or WHOLE[nodes]), *flags]
        # Programs are compiled by the runs that nothing disturbs.
        stall, start = (self.stall_seconds, START_SECONDS) if disturbed else (PHASE_SECONDS, PHASE_SECONDS)
        policy = {"stall_seconds": stall, "start_seconds": max(stall, start)}
        environment = self._environment | {"PANAX_TEST_STOP": str(stop)}
        if hosts is None:
            launch_flags = [f"--{name.replace('_', '-')}={value}" for name, value in policy.items()]
            count = ["--nodes", str(nodes), "--processes", str(nodes), "--devices", "1"]
            launch_flags += [] if spares else ["--no-spares"]
            command = [sys.executable, "-m", "panax", "launch", *arguments, *count, *launch_flags]
        else:
            # A host that is cut off is noticed by its silence, before the others count as hanging.
            policy["stall_seconds"] = self.silent_seconds + 3 * self.stall_seconds
            request = {
                "arguments": arguments,
                "folder": str(folder),
                "num_steps": STEPS,
                "prefixes": [hosts.prefix(number) for number in range(nodes)],
                "address": GATEWAY,
                "silent_seconds": self.silent_seconds,
                "spares": spares,
                "policy": policy,
            }
            command = [sys.executable, str(HERE / "launched.py"), json.dumps(request)]
        with open(self.folder / "said", "w") as said:
            to = said if out is None else out
            return subprocess.Popen(command, env=environment, stdout=to, stderr=to, cwd=self.folder)

    @contextlib.contextmanager
    def _hosts(self, kind: str) -> Iterator[Hosts | None]:
        if kind not in ON_HOSTS:
            yield None
            return
        hosts = Hosts(self.folder, self.nodes, {})
        try:
            hosts.start()
            subprocess.run(["ip", "addr", "add", f"{GATEWAY}/24", "dev", hosts.bridge], check=True)
            yield hosts
        finally:
            hosts.stop()

    def _injected(self, job: subprocess.Popen, kind: str, node: int, hosts: Hosts | None) -> float:
        """Have the fault come, once the phase is reached; when it did."""
        deadline, announce = time.monotonic() + PHASE_SECONDS, self.folder / "announce"
        while not announce.exists() or not (text := announce.read_text()):
            if job.poll() is not None or time.monotonic() > deadline:
                raise Wrong(f"the phase was not reached: {self._said()}")
            time.sleep(0.02)
        at, worker = time.monotonic(), int(text)
        if kind in SIGNALS:
            os.kill(worker, SIGNALS[kind])
        elif kind == "stop":
            job.send_signal(signal.SIGTERM)
        elif kind == "suspended supervisor":
            job.send_signal(signal.SIGSTOP)
            # What it slept through goes on meanwhile.
            (self.folder / "go").touch()
            time.sleep(self.stall_seconds + 10.0)
            job.send_signal(signal.SIGCONT)
        elif kind == "lost node":
            os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        elif kind == "partition":
            assert hosts is not None
            subprocess.run(["ip", "link", "set", f"{hosts.name(node)}v", "down"], check=True)
        elif kind == "slow link":
            assert hosts is not None
            hosts.limit(node, SLOW_MEGABITS)
        (self.folder / "go").touch()
        return at

    def _ended(self, job: subprocess.Popen, kind: str, end: End) -> str:
        try:
            job.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Wrong(f"no end within {END_SECONDS:.0f} s: {self._said()}") from error
        return self._said()

    def _said(self) -> str:
        return " / ".join((self.folder / "said").read_text().splitlines()[-4:])[-600:]

    def _judge(self, folder: Path, kind: str, end: End, code: int, seconds: float, said: str) -> None:
        causes = [str(one["cause"]) for one in read_incidents(folder / "job")]
        if end.outcome == "stopped":
            _check_stop(folder, end, code, seconds)
            return
        if end.outcome == "saved":
            if code not in (130, 143):
                raise Wrong(f"exit code {code} where the job should have been saved and ended: {said}")
            # Before a first step, the checkpoints are as they were.
            reached = _status(folder)["step"]
            _same("the newest checkpoint's step", _newest(folder), BASE if reached < 0 else reached)
            job = self._launched(folder, (), None)
            self._ended(job, kind, end)
            code = job.returncode
        if code:
            raise Wrong(f"exit code {code}: {said}")
        if kind == "corrupted value":
            entry = [one for one in _lines(folder / "rollbacks.jsonl") if "silent data corruption" in one["why"]]
            _same("rollbacks by corruption", len(entry), 1)
        elif end.outcome != "saved":
            _same("causes of incidents", causes, [end.cause] if end.cause else [])
        last = _lines(folder / "sessions.jsonl")[-1]
        nodes = self.nodes - (end.outcome == "shrunk")
        _same("processes of the last session", last["processes"], nodes)
        wanted = self.reference()
        if end.outcome == "shrunk":
            ranked = json.loads((folder / "job/layouts.json").read_text())["layouts"][str(nodes)]
            wanted = self.planned(int(last["first_step"]), JobLayout.from_json(ranked[0]).flags, nodes)
        if digest(folder) != wanted:
            raise Wrong("the parameters at the end are other ones")


@contextlib.contextmanager
def _unread() -> Iterator[int]:
    """A pipe that nobody reads, and that is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def _linked(step: Path, elsewhere: Path) -> None:
    """Move a checkpoint elsewhere, and leave a link to it."""
    shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.move(step, elsewhere)
    step.symlink_to(elsewhere)


def digest(folder: Path) -> str:
    """Of all arrays of a run's last checkpoint."""
    checkpoint = open_checkpoint(str(folder / f"checkpoints/step_{STEPS:08d}"))
    found = hashlib.sha256()
    for name in sorted(checkpoint.manifest.arrays):
        found.update(name.encode() + checkpoint.read(name).tobytes())
    return found.hexdigest()


def _check_stop(folder: Path, end: End, code: int, seconds: float) -> None:
    if code == 0:
        raise Wrong("exit code 0 where the job should have stopped")
    if seconds > STOP_SECONDS:
        raise Wrong(f"stopped after {seconds:.0f} s; expected {STOP_SECONDS:.0f}")
    told = _status(folder)["end"]
    _same("the cause", told["cause"], end.cause)
    _same("the advice", bool(told["advice"]), True)
    needs_lines = end.cause not in (Cause.LOST_HOST.value, Cause.MISSING.value)
    if needs_lines and not told["tail"]:
        raise Wrong("the worker's last lines are missing")


def _same(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise Wrong(f"{what}: {found}; expected {wanted}")


def _status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "job/status.json").read_text())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _newest(folder: Path) -> int | None:
    return Checkpointer(folder / "checkpoints", say=lambda line: None).latest()


def _pids(folder: Path) -> set[int]:
    """The processes of a job that its status names."""
    with contextlib.suppress(OSError, ValueError):
        return {one["pid"] for one in _status(folder)["processes"] if one["pid"]}
    return set()


def _check_gone(folder: Path, pids: set[int]) -> None:
    """See that nothing of a job is left: those that were named, and whoever names the folder."""
    end = time.monotonic() + 5.0
    while left := [each for each in psutil.process_iter() if each.pid in pids or _names(each, str(folder))]:
        if time.monotonic() > end:
            raise Wrong(f"processes are left: {left}")
        time.sleep(0.2)


def _names(process: psutil.Process, folder: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and any(folder in part for part in process.cmdline())
    return False


def _done(job: subprocess.Popen) -> None:
    if job.wait(END_SECONDS):
        raise Wrong(f"an undisturbed run ended with exit code {job.returncode}")


def _kill(job: subprocess.Popen) -> None:
    """End a supervisor; its agents and their workers end with it."""
    if job.poll() is None:
        job.kill()
        job.wait()
