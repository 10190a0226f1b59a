"""Rewards that misbehave: each fails for its answer alone, is named, and leaves nothing behind."""

import os
import re
from pathlib import Path

import psutil
import pytest
import sick_rewards

from panax.rollouts import Reward, RewardPool, Verdict

LIMIT = "gave no result within 2 seconds; its process was killed, and another takes its place"
FAILURES = {
    "raises": r"raised ValueError: no number in it \(sick_rewards\.py, line \d+\)",
    "raises without a message": r"raised KeyError \(",
    "raises the unprintable": r"raised _Unprintable: \(its message can't be shown: RuntimeError\)",
    "raises an interrupt": "raised KeyboardInterrupt",
    "raises a base exception": "raised _Base: base",
    "raises at length": r"raised ValueError: (long )+\.\.\. \(sick_rewards",
    "recurses": "raised RecursionError",
    "exits": "raised SystemExit: enough",
    "NaN": "returned nan; expected a finite number",
    "infinity": "returned -inf; expected a finite number",
    "beyond float64": "returned an int that can't be a float64: OverflowError",
    "None": "returned None; expected a number",
    "text": "returned a str; expected a number",
    "list": "returned a list; expected a number",
    "complex": "returned a complex; expected a number",
    "array": "returned an ndarray; expected a number",
    "array of no number": "returned an ndarray; expected a number",
    "dies when read": "ended its process with exit code 9; another takes its place",
    "exits at once": "ended its process with exit code 3",
    "dies by a signal": "ended its process by SIGTERM",
    "segfaults": "ended its process by SIGSEGV",
    "writes everywhere": "wrote into the pipes of its process",
    "closes everything": "ended its process with exit code",
    "allocates": "raised MemoryError",
    "hangs": LIMIT,
    "hangs in C": LIMIT,
    "ignores signals": LIMIT,
    "prints without end": LIMIT,
}
VALUES = {
    "float32": 0.5,
    "int8": 3.0,
    "bool": 1.0,
    "NumPy's bool": 1.0,
    "zero-dimensional": 2.5,
    "forks and returns": 2.0,
    "prints": 1.0,
    "prints to the descriptor": 1.0,
    "reads stdin": 0.0,
    "leaves the folder": 1.0,
    "the folder": 1.0,
    "changes the record": 1.0,
}


@pytest.fixture(scope="module")
def pool():
    with RewardPool(
        [Reward(function=sick_rewards.misbehave, seconds=2.0), Reward(function=sick_rewards.length)],
        2,
        memory_bytes=1 << 28,
    ) as pool:
        yield pool


def test_each_fails_for_its_answer_alone(pool):
    record = {"folder": os.getcwd()}
    # In one call, so that the answers between the failures are rated by processes that just died.
    names = [name for pair in zip(FAILURES, [*VALUES] * 3) for name in pair]
    assert set(names) == {*FAILURES, *VALUES}
    for name, (verdict, length) in zip(names, pool.score([(name, record) for name in names])):
        assert length == Verdict(float(len(name))), name
        if name in VALUES:
            assert verdict == Verdict(VALUES[name]), name
        else:
            assert verdict.value is None
            assert verdict.error.startswith("reward misbehave ") and len(verdict.error) < 800
            assert re.search(FAILURES[name], verdict.error), (name, verdict.error)


def test_a_fork_bomb_is_killed_before_its_time_is_up():
    with RewardPool([Reward(function=sick_rewards.misbehave, seconds=60.0)], 1) as pool:
        ((verdict,),) = pool.score([("forks without end", {})])
        assert "started more than 256 processes; all were killed" in verdict.error
        assert len(psutil.Process().children(recursive=True)) < 10
        assert pool.score([("bool", {})]) == [[Verdict(1.0)]]


def test_everything_that_a_hanging_reward_started_is_killed(pool, tmp_path):
    file = tmp_path / "pids"
    ((verdict, _),) = pool.score([("forks and hangs", {"file": str(file)})])
    assert LIMIT in verdict.error
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 3
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_output_is_forwarded_to_stderr_up_to_an_amount(capfd):
    with RewardPool([Reward(function=sick_rewards.misbehave, seconds=1.5)], 1) as pool:
        assert pool.score([("prints", {})])[0][0].value == 1.0
        pool.score([("prints without end", {})])
    captured = capfd.readouterr()
    assert not captured.out
    assert '"value": 9' in captured.err and "bytes of functions' output dropped" in captured.err
    assert len(captured.err) < 100_000


@pytest.mark.parametrize(
    ("answer", "record", "message"),
    [
        ("\ud800", {}, "was not called: .*half of a surrogate pair"),
        ("a", {"path": Path("a")}, "was not called: its record, or another argument, is not JSON: Object of type"),
        ("a", {"large": 10**50}, "was not called: .*at most 40 are read"),
    ],
)
def test_a_record_that_cannot_be_sent_fails_alone(pool, answer, record, message):
    (first, second) = pool.score([(answer, record), ("bool", {})])
    assert second == [Verdict(1.0), Verdict(4.0)]
    for verdict in first:
        assert verdict.value is None and re.search(message, verdict.error), verdict


def test_not_a_number_in_a_record_arrives(pool):
    assert pool.score([("bool", {"value": float("nan")})]) == [[Verdict(1.0), Verdict(4.0)]]
