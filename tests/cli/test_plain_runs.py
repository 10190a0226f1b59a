"""`panax status`, `logs` and `stop` of a run that no supervisor has started."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from panax.cli.main import main
from panax.system.lock import describe_owner, open_locked, signal_owner

HOLDS = """
import json, signal, socket, sys, time
from pathlib import Path
from panax.system.lock import open_locked, describe_owner
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
lock = open_locked(folder / ".lock")
lock.write(describe_owner().encode())
facts = {"name": "held", "num_steps": 9, "command": ["panax", "train", "x"], "hosts": [socket.gethostname()]}
(folder / "sessions.jsonl").write_text(json.dumps(facts) + "\\n")
(folder / "log.txt").write_text("12:00 first\\n12:01 \\x1b[2Jsecond\\n")
def end(*_):
    with open(folder / "log.txt", "a") as file: file.write("12:02 saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A process that holds a run's folder as one that trains does."""
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", HOLDS, "runs/held"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(20)
    process.stdout.close()


def test_a_training_run_is_reported_and_stopped(holder, capsys):
    assert main(["status", "runs/held"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("held: trains, before the first step\n  panax train x\n")
    assert main(["logs", "runs/held", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "12:01 \\x1b[2Jsecond\n"
    assert main(["stop", "runs/held"]) == 0
    assert "asked it to save and to end" in capsys.readouterr().out and holder.wait(20) == 0
    assert main(["logs", "runs/held", "--lines", "1", "--follow"]) == 0
    assert capsys.readouterr().out == "12:02 saved\n"
    assert main(["stop", "runs/held"]) == 6
    assert "runs/held does not run now" in capsys.readouterr().err


def test_a_run_that_was_killed_has_ended_without_a_word(holder, capsys):
    holder.kill()
    holder.wait(20)
    assert main(["status", "runs/held"]) == 0
    assert "ended without a message (killed, or its host is gone)" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for command in ("status", "logs", "stop"):
        assert main([command, "empty"]) == 6 and "name a run's folder" in capsys.readouterr().err
    (tmp_path / "empty/sessions.jsonl").write_text("{}\n")
    assert main(["logs", "empty"]) == 6 and "which kept no log" in capsys.readouterr().err
    assert main(["logs", "empty", "--process", "1"]) == 6 and "has one log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": "elsewhere"}, "it runs on elsewhere; stop it there"),
        ({"began": 5.0}, "its process has ended"),
        ({"pid": 2**22 + 1}, "its process has ended"),
        ({"pid": "x"}, "does not give its process"),
        (None, "does not give its process"),
    ],
)
def test_no_other_process_is_signalled(changed, said, tmp_path):
    """The number in the file is this test's, which a signal would end."""
    text = "" if changed is None else json.dumps({**json.loads(describe_owner()), **changed})
    (tmp_path / ".lock").write_text(text)
    assert said in signal_owner(tmp_path / ".lock", signal.SIGKILL)


def test_a_file_of_somebody_else_signals_nobody(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text(describe_owner())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert signal_owner(tmp_path / ".lock", signal.SIGKILL) == "the run is another user's"


def test_the_owner_of_a_file_is_signalled(tmp_path):
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with open_locked(tmp_path / ".lock") as lock:
            lock.write(describe_owner().encode())
            assert signal_owner(tmp_path / ".lock", signal.SIGUSR1) == ""
        deadline = time.monotonic() + 20
        while not got and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got and json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
