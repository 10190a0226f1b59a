import io
import json
import sys
import threading
from pathlib import Path

import pytest

from panax.cluster.job import Job, RestartPolicy
from panax.cluster.launcher import launch
from panax.cluster.supervisor.job_folder import read_incidents
from panax.cluster.supervisor.view import View

WORKER = Path(__file__).with_name("pretended_worker.py")


class Launched:
    """A job of pretended workers, run to its end."""

    def __init__(self, folder: Path):
        self.folder = folder / "run"
        self.folder.mkdir()

    def job(self, how: str, **settings) -> Job:
        policy = RestartPolicy(**{"stall_seconds": 2.0, "backoff_seconds": 0.05, **settings.pop("policy", {})})
        program = (sys.executable, str(WORKER))
        settings = {"processes": 2, "num_steps": 8, "name": "pretended", "program": program, **settings}
        return Job(
            arguments=(how, str(self.folder), *settings.pop("more", ())),
            folder=self.folder,
            policy=policy,
            **settings,
        )

    def run(self, how: str, **settings) -> int:
        self.out = io.StringIO()
        job = self.job(how, **settings)
        return launch(job, view=View(job.num_steps, out=self.out))

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "job" / "status.json").read_text())

    @property
    def incidents(self) -> list[dict]:
        return read_incidents(self.folder / "job")

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("pid_*")]


@pytest.fixture
def launched(tmp_path):
    assert threading.current_thread() is threading.main_thread()
    return Launched(tmp_path)
