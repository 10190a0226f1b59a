"""A job of processes that pretend to train: what the supervisor does about each way in which one of them ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from panax.cluster.job import Job, RestartPolicy, filter_environment
from panax.cluster.launcher import launch
from panax.cluster.node.channel import HandshakeRefusedError, accept_agent, connect_to_supervisor
from panax.cluster.supervisor.diagnosis import Cause, WorkerExit, diagnose, diagnose_hang
from panax.cluster.supervisor.view import View
from panax.core.errors import LaunchError


def gone(pids, seconds: float = 10.0) -> bool:
    """Whether none of the processes is left, some seconds later at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_job_that_goes_well(launched):
    assert launched.run("well", processes=3) == 0
    assert launched.status["state"] == "ended" and launched.status["end"] == {"exit_code": 0, "message": "done"}
    assert [one["step"] for one in launched.status["processes"]] == [8, 8, 8]
    assert (
        launched.status["values"] == {"train/loss": 1.5, "goodput/fraction": 0.75}
        and launched.status["goodput"] == 0.75
    )
    assert set(launched.status["breakdown"]) == {"import", "join", "prepare", "restore", "compile"}
    assert "process 0 of 3 began" in launched.out.getvalue()
    assert (launched.folder / "job/logs/process_0002.log").read_text().endswith("process 2 of 3 began\n")
    assert not launched.incidents and len(launched.pids()) == 3 and gone(launched.pids())


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGKILL", "killed"),
        ("SIGSEGV", "crashed"),
        ("SIGABRT", "crashed"),
        ("device", "device error"),
        ("hang", "hang"),
    ],
)
def test_what_may_go_better_is_started_again(launched, how, cause):
    assert launched.run(how) == 0
    assert launched.status["restarts"] == 1 and launched.status["attempt"] == 2
    [incident] = launched.incidents
    assert incident["cause"] == cause and incident["process"] == 1 and incident["step"] >= 1
    for part in ("detect", "teardown", "restart", "restore", "first_step"):
        assert incident[part] is not None and 0 <= incident[part] < 8, part
    if how == "hang":
        assert any("pretended_worker.py" in line for line in incident["tail"]), "its stacks"
    assert gone(launched.pids())


def test_a_process_that_holds_the_lock_of_python_shows_its_stacks(launched):
    assert launched.run("GIL") == 0
    [incident] = launched.incidents
    assert incident["cause"] == "hang" and any("in fail" in line for line in incident["tail"])


@pytest.mark.parametrize(
    ("how", "cause", "code", "message"),
    [
        ("recipe", "user error", 2, "heads=12 is not divisible by tensor=8"),
        ("data", "data error", 3, "record 7 of a.txt is not text"),
        ("memory", "out of device memory", 1, "RESOURCE_EXHAUSTED"),
        ("program", "exception", 1, "KeyError"),
        ("data, stays", "data error", 3, "record 7 of a.txt is not text"),
    ],
)
def test_what_would_come_again_is_not_tried_again(launched, how, cause, code, message):
    assert launched.run(how) == code
    end = launched.status["end"]
    assert launched.status["restarts"] == 0 and len(launched.pids()) == 2
    assert end["cause"] == cause and message in end["message"] and "process 1 on" in end["message"] and end["advice"]
    assert gone(launched.pids())


def test_a_job_that_does_not_get_on_is_given_up(launched):
    assert launched.run("SIGKILL always", policy={"max_without_progress": 2}) == 6
    assert launched.status["restarts"] == 2 and len(launched.pids()) == 6
    assert launched.status["end"]["message"].startswith("given up: 2 starts in a row have not come beyond step")


def test_restarts_are_counted(launched):
    assert launched.run("SIGKILL always", policy={"max_restarts": 0}) == 6
    assert launched.status["end"]["message"].startswith("given up after 0 restarts: process 1 on")


def test_a_fresh_start_is_fresh_once(launched):
    """Started again after a failure, by the supervisor or by the engine, a run resumes from its own checkpoints."""

    def commands():
        return [path.read_text() for path in sorted(launched.folder.glob("arguments_*_0"))]

    assert launched.run("SIGKILL", more=("--fresh",), submission="one") == 0
    assert ["--fresh" in each for each in commands()] == [True, False]
    assert launched.run("SIGKILL", more=("--fresh",), submission="one") == 0
    assert ["--fresh" in each for each in commands()] == [False, False]
    assert launched.run("SIGKILL", more=("--fresh",), submission="another") == 0
    assert ["--fresh" in each for each in commands()] == [True, False]
    assert launched.run("early", more=("--fresh",), submission="third") == 0
    assert ["--fresh" in each for each in commands()] == [True, True]


def started(launched, how: str, phase: str = "steps") -> subprocess.Popen:
    """A supervisor in a process of its own, once its workers take steps, or are in another phase."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from conftest import Launched, WORKER\n"
        "from panax.cluster.launcher import launch\n"
        "from panax.cluster.supervisor.view import View\n"
        "made = Launched.__new__(Launched); made.folder = pathlib.Path(sys.argv[2])\n"
        "job = made.job(sys.argv[3], policy={'stall_seconds': 100.0}); sys.exit(launch(job, view=View(8)))"
    )
    here = os.path.dirname(__file__)
    said = launched.folder / "supervisor.err"
    with open(said, "w") as file:
        process = subprocess.Popen([sys.executable, "-c", code, here, str(launched.folder), how], stderr=file)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (launched.folder / "job/status.json").exists():
            workers = launched.status["processes"]
            if workers and all(one["phase"] == phase for one in workers):
                return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"no {phase}: {said.read_text()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_in_all_processes_and_ends(launched, number):
    supervisor = started(launched, "waits")
    supervisor.send_signal(number)
    assert supervisor.wait(15) == 128 + number
    assert {path.name for path in launched.folder.glob("saved_*")} == {"saved_0", "saved_1"}
    assert launched.status["end"]["message"].startswith(f"stopped by {number.name} after step")


def test_a_signal_before_the_first_step_loses_nothing_and_is_no_failure(launched):
    supervisor = started(launched, "prepares", phase="prepare")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(15) == 143
    assert launched.status["end"]["message"] == "stopped by SIGTERM before a first step; checkpoints are as they were"
    assert not launched.incidents and gone(launched.pids())


def test_a_second_job_of_one_folder_is_refused_and_stop_ends_the_first(launched, capsys):
    from panax.cli.main import main

    supervisor = started(launched, "waits")
    assert main(["status", str(launched.folder)]) == 0
    assert "pretended: running, step" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="another `panax launch` is at work in"):
        launched.run("well")
    assert main(["stop", str(launched.folder)]) == 0
    assert supervisor.wait(15) == 143
    assert main(["stop", str(launched.folder)]) == 6
    assert "has ended already" in capsys.readouterr().err
    assert main(["logs", str(launched.folder), "--process", "1"]) == 0
    assert "process 1 of 2 began" in capsys.readouterr().out
    assert main(["logs", str(launched.folder), "--process", "2"]) == 6
    assert main(["status", str(launched.folder / "nothing")]) == 6


@pytest.mark.parametrize("whom", ["supervisor", "agent"])
def test_no_process_outlives_a_supervisor_or_an_agent_that_is_killed(launched, whom):
    supervisor = started(launched, "waits")
    agents = psutil.Process(supervisor.pid).children()
    workers = launched.pids()
    assert len(agents) == 1 and len(workers) == 2
    (supervisor if whom == "supervisor" else agents[0]).kill()
    assert gone(workers, 10.0)
    if whom == "supervisor":
        supervisor.wait()
        assert gone([agent.pid for agent in agents], 10.0)
        return
    # A lost agent is a lost host: another one is started, and its workers with it.
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and len(launched.pids()) < 4:
        time.sleep(0.1)
    assert len(launched.pids()) == 4 and launched.incidents[0]["cause"] == "lost host"
    supervisor.terminate()
    assert supervisor.wait(15) == 143
    assert gone(launched.pids())


def test_what_a_worker_has_started_ends_with_it(launched):
    worker = launched.folder / "parent.py"
    worker.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "open(os.path.join(sys.argv[2], f'pid_child_{os.getpid()}'), 'w').write(str(child.pid))\n"
    )
    job = Job(
        arguments=("x", str(launched.folder)),
        folder=launched.folder,
        program=(sys.executable, str(worker)),
        processes=2,
    )
    assert launch(job, view=View(1, quiet=True)) == 0
    assert len(launched.pids()) == 2 and gone(launched.pids(), 5)


def test_nothing_secret_is_written(launched, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert launched.run("well") == 0
    for path in launched.folder.rglob("*"):
        assert not path.is_file() or "very-secret" not in path.read_text(), path
    environment = json.loads((launched.folder / "job/job.json").read_text())["environment"]
    assert environment["JAX_PLATFORMS"] == "cpu" and "AWS_SECRET_ACCESS_KEY" not in environment
    assert "PANAX_SECRET" not in filter_environment({"PANAX_SECRET": "x", "PATH": "/bin"})


@pytest.mark.parametrize("known", [True, False])
def test_a_connection_needs_the_secret(known):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        diagnosis = []

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                diagnosis.append(accept_agent(connection, "right"))
            except HandshakeRefusedError as error:
                diagnosis.append(error)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        if known:
            channel = connect_to_supervisor(address, "right", 5.0)
            thread.join()
            channel.send(hello={"host": "a"})
            time.sleep(0.1)
            assert diagnosis[0].receive() == [{"hello": {"host": "a"}}]
            channel.close()
            diagnosis[0].close()
        else:
            with pytest.raises((HandshakeRefusedError, OSError)):
                connect_to_supervisor(address, "wrong", 5.0)
            thread.join()
            assert isinstance(diagnosis[0], HandshakeRefusedError)


def test_the_first_cause_is_named():
    peer = WorkerExit(
        0, "a", 1, 1.0, {"kinds": ["JaxRuntimeError"], "message": "Gloo: Connection reset by peer", "exit_code": 1}
    )
    aborted = WorkerExit(2, "b", -6, 1.1, None, ["JAX distributed service detected fatal errors"])
    raised = WorkerExit(1, "b", 3, 1.2, {"kinds": ["DataError", "PanaxError"], "message": "bad", "exit_code": 3})
    assert diagnose([peer, aborted, raised]).cause is Cause.DATA
    assert diagnose([peer, aborted]).cause is Cause.PEER
    # A hook that calls JAX over all devices in one process: another peer ends because of it.
    words = (
        "pair.cc:459] op.preamble.length <= op.nbytes. 8 vs 2. Is there a distributed collective mismatch in your code?"
    )
    diagnosis = diagnose([peer, WorkerExit(3, "a", -6, 1.3, None, ["[enforce fail at external/gloo/" + words])])
    assert (
        diagnosis.cause is Cause.MISMATCH
        and not diagnosis.cause.is_retried
        and "another collective" in diagnosis.message
    )
    assert "jax.process_index() == 0" in diagnosis.advice
    odd = {"kinds": ["CheckError", "PanaxError"], "message": "the check has 1 finding", "exit_code": 6}
    diagnosis = diagnose([peer, WorkerExit(1, "b", 6, 2.0, odd)])
    assert diagnosis.cause is Cause.CHECK and not diagnosis.cause.is_retried and diagnosis.exit_code == 6
    assert diagnose([peer, WorkerExit(1, "b", None, 2.0)]).message == "b is gone, and process 1 with it"
    assert diagnose([WorkerExit(1, "b", -9, 2.0, out_of_memory=True)]).cause is Cause.HOST_MEMORY
    # What the transport writes while all goes well says nothing of an error that was told.
    noise = ["[Gloo] Rank 1 is connected to 3 peer ranks"]
    wrong = {"kinds": ["AttributeError"], "message": "no attribute", "exit_code": 1}
    assert diagnose([WorkerExit(1, "b", 1, 2.0, wrong, noise)]).cause is Cause.EXCEPTION
    assert diagnose([WorkerExit(1, "b", -11, 2.0, None, noise)]).cause is Cause.CRASHED
    hook = {"kinds": ["HookError", "TrainingError"], "message": "hook Broken raised", "exit_code": 5}
    assert diagnose([WorkerExit(1, "b", 5, 2.0, hook, noise)]).cause is Cause.EXCEPTION


def test_stacks_report_who_holds_up_the_others():
    # Where a loop waits for a batch.
    from panax.data.loading import prefetch

    def stack(file):
        return f'Current thread 0x1 (most recent call first):\n  File "{file}", line 1 in f\n'

    waits, data, waits_here = (
        stack("/x/jax/_src/array.py"),
        stack("/x/queue.py") + f'  File "{prefetch.__file__}", line 2 in g\n',
        stack("/m.py"),
    )
    assert diagnose_hang(0, "a", 9.0, "steps", {0: waits, 1: waits}, ()).cause is Cause.COLLECTIVE
    diagnosis = diagnose_hang(0, "a", 9.0, "steps", {0: waits, 1: data}, ())
    assert diagnosis.cause is Cause.STALLED_DATA and diagnosis.process == 1
    assert diagnose_hang(0, "a", 9.0, "steps", {0: waits, 1: waits_here}, ()).process == 1
    # One that is held by another thread while it traces waits for nobody.
    traces = (
        stack("/x/jax/_src/core.py") + '  File "/x/jax/_src/interpreters/partial_eval.py", line 2 in trace_to_jaxpr\n'
    )
    diagnosis = diagnose_hang(0, "a", 9.0, "compile", {0: waits, 1: traces}, ())
    assert diagnosis.cause is Cause.HANG and diagnosis.process == 1
    assert "does not show its stacks" in diagnose_hang(0, "a", 9.0, "steps", {0: ""}, ()).message


@pytest.mark.parametrize("settings", [{"processes": 3, "nodes": 2}, {"processes": 0}, {"devices": 0}])
def test_wrong_numbers_are_refused(launched, settings):
    with pytest.raises(LaunchError, match=r"expected at least 1|not divisible"):
        launched.job("well", **settings)


def test_a_policy_is_checked():
    with pytest.raises(LaunchError, match=r"policy.stall_seconds=-1.0; expected a number of at least 0"):
        RestartPolicy(stall_seconds=-1.0)


def test_more_processes_than_processors_can_bear(launched):
    from panax.cluster.node.agent import count_usable_cpus

    with pytest.raises(LaunchError, match="they would starve each other"):
        launched.run("well", processes=2 * count_usable_cpus() + 2)
    assert launched.status["end"]["exit_code"] == 6


def test_a_second_ctrl_c_ends_at_once(launched):
    supervisor = started(launched, "ignores")
    supervisor.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(15) == 130
    assert "ended at once: by a second signal" in launched.status["end"]["message"]
    assert gone(launched.pids())


def test_processes_that_compile_are_ended_soon_since_nothing_is_new(launched):
    supervisor = started(launched, "compiles", "compile")
    began = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait(20) == 143
    assert time.monotonic() - began < 13  # eight seconds, and what the ending takes
    assert "stopped by SIGTERM before a first step" in launched.status["end"]["message"]
    assert gone(launched.pids())


def test_under_nohup_a_closed_terminal_changes_nothing(launched):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = started(launched, "waits")
    finally:
        signal.signal(signal.SIGHUP, before)
    supervisor.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert supervisor.poll() is None
    supervisor.terminate()
    assert supervisor.wait(15) == 143
