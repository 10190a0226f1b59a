"""What workers, files and clocks tell is judged: none of it ends the supervisor, nor does silence while nobody listened."""

import io
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from panax.cli.commands.jobs import is_followed
from panax.cluster.job import RestartPolicy
from panax.cluster.node import agent as agent_module
from panax.cluster.node.agent import NodeAgent
from panax.cluster.node.worker_process import MAX_LINES_BYTES, WorkerProcess
from panax.cluster.supervisor import nodes as nodes_module
from panax.cluster.supervisor.attempt import AttemptWorker, JobAttempt
from panax.cluster.supervisor.diagnosis import WorkerExit, diagnose
from panax.cluster.supervisor.job_folder import STATUS
from panax.cluster.supervisor.view import View
from panax.job.heartbeat import Heartbeat
from panax.system.signals import signal_name

POLICY = RestartPolicy(stall_seconds=10.0, start_seconds=100.0, save_seconds=50.0)


def attempt(*phases):
    workers = [AttemptWorker(number, number, "host", 0.0, phase=phase, step=5) for number, phase in enumerate(phases)]
    return JobAttempt(1, workers, time.time())


def test_a_long_save_that_moves_is_no_hang_and_the_others_wait_for_it():
    job = attempt("save", "steps")
    assert job.find_stalled(40.0, POLICY) is None and job.is_saving(40.0, POLICY)
    job.update(0, {"at": 1.0}, 45.0)  # another file is written
    assert job.find_stalled(90.0, POLICY) is None
    assert not job.is_saving(96.0, POLICY)
    hung = job.find_stalled(96.0, POLICY)
    assert hung is not None
    job.update(0, {"at": 1.0, "phase": "steps"}, 96.0)
    assert job.find_stalled(107.0, POLICY) is not None, "a hang after the save"


def test_a_save_that_follows_a_step_at_once_is_seen_as_a_save():
    """The agent reads the step, its values and the phase in one go, and must not send the step last."""
    sent = []
    reading, writing = os.pipe()
    channel = SimpleNamespace(fileno=lambda: reading, send=lambda **message: sent.append(message["beat"]))
    agent = NodeAgent(channel, "secret")
    agent._children[0] = SimpleNamespace(attempt=1)
    for beat in [{"step": 15}, {"step": 16}, {"values": {"train/loss": 2.0}}, {"phase": "save", "step": 16}]:
        agent._beat(0, {"at": 1.0, **beat})
    agent._beat(0, {"at": 1.0, "values": {"train/loss": 1.0}})
    agent._send_merged(0)
    job = attempt("steps")
    for beat in sent:
        job.update(0, beat, 0.0)
    assert [("phase" in beat, beat.get("step")) for beat in sent] == [(False, 16), (True, 16), (False, None)]
    assert job.workers[0].phase == "save" and job.step == 16 and job.values == {"train/loss": 1.0}
    assert job.find_stalled(40.0, POLICY) is None
    os.close(reading)
    os.close(writing)


def test_the_first_step_after_another_phase_is_sent_at_once():
    """Else a worker would be judged by the limits of a start until half a second after its last values."""
    reading, writing = os.pipe()
    beat = Heartbeat(writing)
    for number in (1, 2):
        beat.step(number)
    beat.phase("restore")
    beat.step(3)
    said = [json.loads(line) for line in os.read(reading, 4096).splitlines()]
    assert [(line.get("phase"), line["step"]) for line in said] == [(None, 1), ("restore", 2), (None, 3)]
    os.close(reading)
    os.close(writing)


def test_those_that_waited_for_a_save_do_not_hang_when_it_ends():
    """The process that has saved continues first; the others had been quiet for as long as it saved."""
    job = attempt("save", "steps")
    assert job.find_stalled(39.0, POLICY) is None
    job.update(0, {"at": 1.0, "phase": "steps"}, 40.0)
    assert job.find_stalled(41.0, POLICY) is None and job.find_stalled(48.0, POLICY) is None
    assert job.find_stalled(50.5, POLICY) is not None


def test_silence_while_the_supervisor_was_stopped_is_forgiven():
    job = attempt("steps")
    assert job.find_stalled(41.0, POLICY) is not None
    job.extend_deadlines(40.0)
    assert job.find_stalled(41.0, POLICY) is None and job.find_stalled(51.0, POLICY) is not None


@pytest.mark.parametrize(
    "beat",
    [
        {"facts": {"data_wait": "x"}},
        {"facts": {"data_wait": float("nan")}},
        {"facts": [1]},
        {"phase": "steps", "at": "x"},
        {"step": 3, "at": None},
        {"step": "x", "saved": [], "phase": 7},
        {"error": {"exit_code": "x", "message": 3}},
        {"error": {"exit_code": 10**30}},
        {"error": [1]},
        {"values": {"train/loss": "x"}},
    ],
)
def test_a_beat_that_makes_no_sense_is_no_error(beat, capsys):
    job = attempt("steps")
    job.update(0, {"at": 1.0, **beat}, 1.0)
    job.give_up_on_failed(1e9)
    View(10).status(job, None, "running")
    for ended in job.ends:
        assert 0 < diagnose([ended]).exit_code < 256
    json.dumps(job.workers[0].to_status(2.0))


@pytest.mark.parametrize("number", [1, 9, 35, 64, 77])
def test_any_signal_has_a_name(number):
    assert signal_name(number) and signal_name(number) in diagnose([WorkerExit(0, "a", -number, 1.0)]).message
    assert signal_name(signal.SIGRTMIN + 1) == "SIGRTMIN+1" and signal_name(9) == "SIGKILL"


@pytest.fixture
def child(tmp_path):
    """A child of this program, with a log that the test writes."""
    reading, writing = os.pipe()
    found = WorkerProcess([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}, tmp_path, 0, 1, reading)
    yield found, tmp_path / "logs" / "process_0000.log"
    found.kill()
    found.wait()
    found.close()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"a\nb\nhalf", ["a", "b"]),
        (b"1%\r2%\r3%\rhalf", ["3%"]),
        (b"1%\r2%\nnext\r\nlast\n", ["2%", "next", "last"]),
        (b"x" * (MAX_LINES_BYTES + 5) + b"\nnext\n", ["x" * MAX_LINES_BYTES, "xxxxx", "next"]),
        (b"y\r" * MAX_LINES_BYTES + b"\nnext\n", ["y", "y", "next"]),
        (b"\n\n", ["", ""]),
        (b"\xff\x1b[31m\n", ["�\x1b[31m"]),
    ],
)
def test_lines_of_a_log_come_whatever_they_end_with(said, shown, child):
    found, log = child
    with open(log, "ab") as file:
        file.write(said)
    lines = []
    for _ in range(20):
        lines += found.read_new_lines()
    assert [line for line in lines if line or not shown[0]] == shown or lines == shown


def test_logs_that_are_removed_end_nothing(child):
    found, log = child
    log.unlink()
    log.parent.rmdir()
    assert found.read_new_lines() == [] and "can't be read" in found._tail()[0] and found.read_stacks() == ""


def test_a_disk_that_takes_no_log_ends_nothing(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    reading, writing = os.pipe()
    found = WorkerProcess([sys.executable, "-S", "-c", "print('x' * 100)"], {}, tmp_path, 0, 1, reading)
    assert "can't be written" in found.without_log and "the output of process 0 is lost" in found.without_log
    found.wait()
    assert found.close()["code"] == 0
    os.close(reading)
    os.close(writing)


def test_what_a_full_disk_does_not_take_is_lost_and_is_no_error():
    from panax.cluster.node.worker import _without_errors

    full = os.open("/dev/full", os.O_WRONLY)
    stream = _without_errors(full)
    print("lost", file=stream, flush=True)
    stream.detach()
    os.close(full)


@pytest.mark.parametrize("ahead", [-90_000.0, -30.0, 30.0, 90_000.0])
def test_a_job_whose_hosts_clock_is_another_is_followed_while_its_status_changes(ahead, tmp_path):
    stop = threading.Event()

    def write():
        (tmp_path / "new").write_text(json.dumps({"at": time.time() + ahead, "state": "running"}))
        (tmp_path / "new").rename(tmp_path / STATUS)

    def supervise():
        while not stop.wait(0.1):
            write()

    write()
    status = json.loads((tmp_path / STATUS).read_text())
    assert not is_followed(tmp_path, status, 0.01)
    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        assert is_followed(tmp_path, status, 20.0)
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_saves_does_not_hide_steps_that_stand_still(monkeypatch):
    monkeypatch.setattr("panax.job.heartbeat.SECONDS", 0.0)
    reading, writing = os.pipe()
    beat = Heartbeat(writing)
    beat.phase("steps")
    os.read(reading, 4096)
    os.set_blocking(reading, False)
    beat.report_progress("save")
    with pytest.raises(BlockingIOError):
        os.read(reading, 4096)
    with beat.during("save"):
        beat.report_progress("save")
    said = [json.loads(line) for line in os.read(reading, 4096).splitlines()]
    assert [line.get("phase") for line in said] == ["save", None, "steps"]
    os.close(reading)
    os.close(writing)


def test_the_first_step_is_reported_with_parts_that_make_its_whole():
    """Since the restart, not since the launch an hour ago."""
    out = io.StringIO()
    parts = {"import": 0.25, "join": 0.5, "first step": 4.0}
    attempt = SimpleNamespace(workers=[1, 2], breakdown=lambda: parts)
    View(8, out=out).first_step(attempt)
    assert out.getvalue() == "launch: 2 processes; first step after 4.8 s (import 0.2, join 0.5, first step\n  4.0)\n"


def test_hosts_are_not_lost_while_the_supervisor_itself_was_suspended(monkeypatch):
    """Also between the look at its agents and the decision who is silent."""
    clock = [100.0]
    monkeypatch.setattr(nodes_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reading, writing = os.pipe()
    channel = SimpleNamespace(
        fileno=lambda: reading,
        has_pending=False,
        closed=False,
        receive=lambda: os.read(reading, 10) and [],
        send=lambda **message: None,
        close=lambda: None,
    )
    nodes = nodes_module.Nodes("secret", 1)
    nodes.take(channel)
    nodes._welcome(nodes._coming[0], {"host": "a"})
    assert list(nodes.messages(0.0)) == []
    clock[0] += nodes_module.SILENT_SECONDS + 10.0
    nodes.ping()
    assert nodes.complete and not nodes.departed
    os.write(writing, b"ping")  # what came meanwhile
    assert list(nodes.messages(0.0)) == []
    nodes.ping()
    assert nodes.complete
    clock[0] += nodes_module.SILENT_SECONDS + 1.0
    assert list(nodes.messages(0.0)) == []
    nodes.ping()
    assert not nodes.complete and nodes.departed == [(0, "a")]
    nodes.close()
    os.close(reading)
    os.close(writing)


def test_an_agent_that_was_suspended_does_not_leave_its_supervisor(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reading, writing = os.pipe()
    channel = SimpleNamespace(
        fileno=lambda: reading,
        has_pending=False,
        closed=False,
        is_remote=True,
        receive=list,
        send=lambda **message: None,
    )
    agent = NodeAgent(channel, "secret")
    real_ping = agent._ping

    def suspended(looked_at):
        clock[0] += agent_module.SILENT_SECONDS + 10.0
        real_ping(looked_at)

    agent._ping = suspended
    os.write(writing, b"x")
    agent._poll()
    assert not channel.closed
    agent._ping = real_ping
    agent._poll()  # it reads what came meanwhile
    assert not channel.closed
    os.read(reading, 10)
    clock[0] += agent_module.SILENT_SECONDS + 1.0
    agent._poll()
    assert channel.closed
    os.close(reading)
    os.close(writing)
