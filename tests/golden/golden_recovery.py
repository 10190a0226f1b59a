"""Golden runs that go back, check steps on other devices, or resume: after a stop, and after kill -9."""

import signal
import subprocess
import sys
from pathlib import Path

import rollback_run
from killed_run import StopAfter, experiment
from rows import Row, rows_of_fit
from sick import LineWithState

from panax.mesh import MeshShape
from panax.run import VerifyConfig


def run(name: str, folder: Path) -> list[Row]:
    return {"rollback": rollback, "verify": verify, "resume": resume, "resume_after_kill": resume_after_kill}[name](
        folder
    )


def rollback(folder: Path) -> list[Row]:
    """Two rollbacks, from batches that are not numbers and from batches that make a spike."""
    rows = rows_of_fit(rollback_run.experiment(folder, bad=(7, 8), huge=(13, 14), steps=16, every=4))
    if not (folder / "rollbacks.jsonl").exists():
        raise ValueError("the run went back from no step; expected two rollbacks")
    return rows


def verify(folder: Path) -> list[Row]:
    settings = {"task": LineWithState(), "verify": VerifyConfig(every=3), "mesh": MeshShape(fsdp=-1)}
    return rows_of_fit(rollback_run.experiment(folder, steps=8, every=2, **settings), devices=8)


def resume(folder: Path) -> list[Row]:
    """A run that is stopped between two checkpoints and resumed."""
    rows_of_fit(experiment(folder, StopAfter(5)))
    return rows_of_fit(experiment(folder))


def resume_after_kill(folder: Path) -> list[Row]:
    """A child process is killed after its first checkpoint; this process resumes its run."""
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_run.py"), folder], capture_output=True, text=True, timeout=300
    )
    if child.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the child ended with {child.returncode} instead of being killed:\n{child.stderr[-2000:]}")
    return rows_of_fit(experiment(folder))
