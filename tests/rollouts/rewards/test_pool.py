"""`RewardPool`: verdicts in order, processes that end, modules that can't be imported."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import sick_rewards

from panax.core import RecipeError, TrainingError
from panax.rollouts import Reward, RewardPool, Verdict

FOLDER = Path(__file__).parent


def rewards(*functions, **settings) -> list[Reward]:
    return [Reward(function=function, **settings) for function in functions]


def workers(parent: int | None = None) -> list[psutil.Process]:
    return [each for each in psutil.Process(parent).children() if "panax.rollouts.calls.worker" in each.cmdline()]


def test_verdicts_are_in_order_and_the_processes_end():
    pool = RewardPool(rewards(sick_rewards.slow_if_even, sick_rewards.imported, sick_rewards.equals), 2)
    assert len(workers()) == 2
    answers = [(str(number), {"answer": "4", "prompt": "é\u2028"}) for number in range(7)]
    verdicts = pool.score(answers)
    assert verdicts == [[Verdict(float(number)), Verdict(0.0), Verdict(float(number == 4))] for number in range(7)]
    assert pool.score([]) == []
    pool.close()
    assert pool.closed and not workers()
    with pytest.raises(TrainingError, match="is closed"):
        pool.score(answers)


def test_calls_go_to_whichever_process_is_free():
    with RewardPool(rewards(sick_rewards.process_id), 2) as pool:
        ids = {row[0].value for row in pool.score([("", {})] * 8)}
        assert ids == {float(process.pid) for process in workers()}
    assert not workers()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("def rate(answer, record)\n", "SyntaxError"),
        ("1 / 0", r"line 1, in <module>\n.*1 / 0\n(.*\n)?.*ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("import os; os._exit(4)", "it ended with exit code 4 while it imported their modules"),
        ("rat = 1", "has no function 'rate' at its top level"),
        ("rate = 1", "has no function 'rate' at its top level"),
        ("def rate(answer): return 0.0", r"can't be called as f\(answer, record\): too many positional"),
        ("def rate(answer, record, extra): return 0.0", "missing a required argument: 'extra'"),
        ("async def rate(answer, record): return 0.0", "is async"),
        (None, "is not a Python file"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_error(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RecipeError, match=message):
        RewardPool(rewards(f"{file}:rate"), 1)
    assert not workers()


def test_arguments_that_are_refused():
    with pytest.raises(RecipeError, match="processes=0: expected 1 to 64"):
        RewardPool(rewards(sick_rewards.length), 0)
    with pytest.raises(RecipeError, match="2 rewards are called 'length'; give each its own"):
        RewardPool(rewards(sick_rewards.length, sick_rewards.length), 1)


def test_a_process_that_cannot_be_started_again_is_an_error(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef rate(answer, record):\n    return os._exit(1) if answer else 1.0\n")
    with RewardPool(rewards(f"{file}:rate"), 2) as pool:
        assert pool.score([("", {})] * 4) == [[Verdict(1.0)]] * 4
        file.write_text("raise RuntimeError('it was edited')")
        with pytest.raises(TrainingError, match="it was edited"):
            pool.score([("dies", {})] * 4)
    assert not workers()


def test_processes_have_the_environment_that_the_user_set(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    codes = [
        "os.environ['PYTHONPATH'] == '/nowhere'",
        "os.environ['JAX_PLATFORMS'] == 'cpu'",
        "os.getsid(0) == os.getpgid(0) == os.getpid()",
        "int(Path('/proc/self/oom_score_adj').read_text())",
    ]
    with RewardPool(rewards(sick_rewards.environment), 1) as pool:
        values = [row[0].value for row in pool.score([("", {"code": code}) for code in codes])]
    assert values == [1.0, 1.0, 1.0, 1000.0]


PARENT = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.path.insert(0, {str(FOLDER)!r})
from panax.rollouts import Reward, RewardPool
pool = RewardPool([Reward(function="sick_rewards:misbehave", seconds=1000)], 2)
print("ready", flush=True)
try:
    pool.score([("hangs", {{}})] * 4)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(pool.score([("bool", {{}})] * 3), flush=True)
"""


def wait_for(condition) -> bool:
    last = time.monotonic() + 20
    while not condition() and time.monotonic() < last:
        time.sleep(0.02)
    return condition()


def test_the_processes_end_with_their_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        processes = workers(parent.pid)
        assert len(processes) == 2
        time.sleep(0.3)
        parent.kill()
    assert wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes))


def test_ctrl_c_reaches_the_parent_alone_and_the_pool_can_be_used_again():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        assert parent.stdout.readline() == "interrupted\n"
        assert parent.stdout.readline() == f"{[[Verdict(1.0)]] * 3}\n"
        assert parent.wait(20) == 0


def test_a_function_that_always_fails_ends_the_scoring_at_once_by_choice():
    with RewardPool(rewards(sick_rewards.length, sick_rewards.misbehave, seconds=0.3), 2) as pool:
        begin = time.monotonic()
        verdicts = pool.score([("bool", {})] + [("hangs", {})] * 100, stop_at_failure=True)
        assert time.monotonic() - begin < 10
        assert len(verdicts) == 101 and verdicts[0] == [Verdict(4.0), Verdict(1.0)]
        errors = [verdict.error for row in verdicts for verdict in row if verdict.error]
        assert "gave no result within 0.3 seconds" in errors[0]
        assert 190 < sum("was not called, since another call failed" in error for error in errors) < 200
        assert pool.score([("bool", {})] * 3, stop_at_failure=True) == [[Verdict(4.0), Verdict(1.0)]] * 3


def test_threads_take_turns():
    with RewardPool(rewards(sick_rewards.length), 2) as pool:
        results: dict[int, list[list[Verdict]]] = {}

        def score(length: int) -> None:
            results[length] = pool.score([("a" * length, {})] * 20)

        threads = [threading.Thread(target=score, args=(length,)) for length in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {length: [[Verdict(float(length))]] * 20 for length in range(4)}
