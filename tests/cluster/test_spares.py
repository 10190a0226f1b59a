"""Workers that wait for a restart: they become the job's processes, and none is left behind."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from test_supervisor import gone

HERE = Path(__file__).parent
WORKER, SPARE = (sys.executable, "-m", "pretended_worker"), (sys.executable, "-m", "pretended_spare")


@pytest.fixture
def spares(launched, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PANAX_TEST_SPARES", str(launched.folder))
    return launched.folder


def pids(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("spare_")) for path in folder.glob("spare_*")}


def after_spares(folder: Path, count: int, then) -> threading.Thread:
    """Do something once so many spare workers have been there."""

    def wait() -> None:
        end = time.monotonic() + 30
        while len(pids(folder)) < count and time.monotonic() < end:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_restart_takes_them(launched, spares):
    def kill() -> None:
        os.kill(int((spares / "pid_1_1").read_text()), signal.SIGKILL)
        while not (spares / "pid_2_1").exists():
            time.sleep(0.02)
        (spares / "finish").touch()

    thread = after_spares(spares, 2, kill)
    assert launched.run("elastic", program=WORKER, spare=SPARE) == 0
    thread.join(30)
    again = {int((spares / f"pid_2_{index}").read_text()) for index in (0, 1)}
    assert again <= pids(spares), "they were there before"
    log = (spares / "job/logs/process_0001.log").read_text()
    assert log.count("== attempt") == 2
    arguments = (spares / "arguments_2_1").read_text().split()
    assert arguments[1:] == ["elastic", str(spares)]
    assert gone([*launched.pids(), *pids(spares)])


def test_a_process_that_has_died_is_restarted(launched, spares):
    def kill() -> None:
        for pid in pids(spares):
            os.kill(pid, signal.SIGKILL)
        os.kill(int((spares / "pid_1_0").read_text()), signal.SIGKILL)
        while not (spares / "pid_2_1").exists():
            time.sleep(0.02)
        (spares / "finish").touch()

    dead: set[int] = set()
    thread = after_spares(spares, 2, lambda: (dead.update(pids(spares)), kill()))
    assert launched.run("elastic", program=WORKER, spare=SPARE) == 0
    thread.join(30)
    again = {int((spares / f"pid_2_{index}").read_text()) for index in (0, 1)}
    assert len(dead) == 2 and not again & dead
    assert gone([*launched.pids(), *pids(spares)])


def test_none_outlives_an_agent_that_is_killed(launched, spares):
    def kill() -> None:
        [agent] = [each for each in psutil.Process().children() if "panax.cluster.node.agent" in each.cmdline()]
        before = pids(spares)
        agent.kill()
        assert gone(before)
        while not (spares / "pid_2_1").exists():
            time.sleep(0.02)
        (spares / "finish").touch()

    thread = after_spares(spares, 2, kill)
    assert launched.run("elastic", program=WORKER, spare=SPARE) == 0
    thread.join(30)
    assert gone([*launched.pids(), *pids(spares)])
