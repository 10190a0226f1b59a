"""A child process can't hold this one up, whatever it does with its pipes, and what it has started ends with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from panax.system.children import PipedProcess, end_process, has_ended, run_command

ECHO = "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line)\n    sys.stdout.buffer.flush()\n"


@pytest.fixture
def child():
    started: list[PipedProcess] = []

    def start(code: str) -> PipedProcess:
        started.append(PipedProcess([sys.executable, "-S", "-c", code], os.environ))
        return started[-1]

    yield start
    for each in started:
        each.end(0.0)


def test_lines_and_bytes_come_back_and_it_ends_by_itself(child):
    echo = child(ECHO)
    large = os.urandom(300_000).replace(b"\n", b"-") + b"\n"
    echo.write([b"one\n", memoryview(b"two\n")], 10)
    assert echo.read_line(100, 10) == b"one\n" and echo.read_exactly(4, 10) == b"two\n"
    echo.write([large], 10)  # more than a pipe holds
    assert echo.read_line(1 << 20, 10) == large
    assert echo.end(10) == 0 and echo.has_ended


def test_silence_a_pipe_that_is_full_and_a_long_line_have_an_end(child):
    silent = child("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        silent.read_line(100, 0.1)
    with pytest.raises(TimeoutError):
        silent.write([bytes(1 << 20)], 0.1)
    assert silent.end(0.0) == -signal.SIGKILL
    endless = child("import os\nwhile True: os.write(1, bytes(65536))")
    with pytest.raises(ValueError, match="longer than 1,000 bytes"):
        endless.read_line(1000, 10)


def test_its_end_is_seen_though_a_process_that_it_forked_holds_the_pipe(child):
    dies = child("import os, time\nif os.fork(): os.write(1, b'last words\\n'); os._exit(3)\ntime.sleep(600)")
    assert dies.read_line(100, 10) == b"last words\n"
    with pytest.raises(EOFError):
        dies.read_line(100, 60)
    assert dies.end(1.0) == 3
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(dies.pid, 0)
            time.sleep(0.01)
    with pytest.raises(EOFError):
        child("import os, time; os.close(0); os.close(1); time.sleep(600)").read_line(100, 60)


def test_silence_is_not_counted_while_this_process_was_stopped(child, monkeypatch):
    late = child("import time; time.sleep(1.5); print('here', flush=True)")
    usual, shift = time.monotonic, [0.0]

    def monotonic() -> float:
        shift[0] += 100.0  # stopped for so long between two looks
        return usual() + shift[0]

    monkeypatch.setattr("panax.system.children.time.monotonic", monotonic)
    assert late.read_line(100, 30.0) == b"here\n"


def test_a_command_that_runs_has_an_end_and_so_has_what_it_started():
    completed = run_command(["sh", "-c", "cat; echo wrong >&2; exit 3"], 10, input_text="given")
    assert completed == (3, "given", "wrong\n")
    # What it forked holds its outputs, and is not waited for.
    assert (
        run_command(
            [sys.executable, "-S", "-c", "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(600)"], 60
        ).code
        == 0
    )
    with pytest.raises(TimeoutError, match=r"sh did not end within 0\.2 seconds"):
        run_command(["sh", "-c", "sleep 600 & sleep 600"], 0.2)
    with pytest.raises(FileNotFoundError):
        run_command(["no such command"], 1)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    "code, options, expected",
    [
        ("print(flush=True)", {}, 0),
        ("import time; print(flush=True); time.sleep(600)", {}, -signal.SIGKILL),
        ("import time; print(flush=True); time.sleep(600)", {"grace": 30.0}, -signal.SIGTERM),
        (STUBBORN, {"grace": 0.1}, -signal.SIGKILL),
        (STUBBORN, {"grace": 0.1, "group": True}, -signal.SIGKILL),
    ],
    ids=["by itself", "killed", "asked", "asked in vain", "its group"],
)
def test_a_process_is_ended_as_gently_as_it_allows(code, options, expected):
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    patience = 30.0 if expected == 0 else 0.1
    assert end_process(process, patience, **options) == expected and has_ended(process)
    process.stdout.close()


def test_a_process_that_has_ended_keeps_its_number_until_it_is_waited_for():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.exit(3)"])
    while not has_ended(process):
        time.sleep(0.01)
    assert process.returncode is None and os.getpgid(process.pid) and process.wait() == 3
