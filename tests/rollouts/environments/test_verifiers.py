"""Environments of verifiers by its protocol, with a stand-in for the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from panax.rollouts import Reward, RewardPool
from panax.rollouts.calls.pool import CalledFunction
from panax.rollouts.environments.text_environment import FunctionReplies
from panax.rollouts.environments.turns import AskedTurn

WORKER = "panax.rollouts.environments.verifiers_worker"
FUNCTION = CalledFunction(f"{WORKER}:reply_verifiers", "environment", 10.0)
SCORE = Reward(function=f"{WORKER}:score_verifiers")
STAND_IN = str(Path(__file__).parent / "stand_in")


def write_records(**settings):
    path = os.pathsep.join([STAND_IN, *sys.path])
    command = [sys.executable, "-m", WORKER, "game", json.dumps(settings)]
    output = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return [json.loads(line) for line in output.stdout.splitlines()]


def play(pool, record, guesses):
    """Return the conversation, the state, and True if it has ended, after these guesses."""
    messages, state, reply = list(record["prompt"]), None, None
    environment = FunctionReplies("game", FUNCTION)
    for turn, guess in enumerate(guesses, start=1):
        messages.append({"role": "assistant", "content": guess})
        asked = AskedTurn(0, "", turn, guess, tuple(messages), record, state)
        (reply,) = environment.reply(pool, [asked], stop_at_failure=False, on_wait=lambda: None)
        state, messages = reply.state, [*messages, *reply.messages]
    return messages, reply


def test_a_game_is_played_and_scored_in_any_process(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    records = write_records(low=5)
    assert len(records) == 3 and records[2]["answer"] == "7" and records[2]["prompt"][0]["content"] == "Guess 2."
    with RewardPool([SCORE], 2, others=[FUNCTION]) as pool:
        messages, reply = play(pool, records[2], ["5", "9", "7"])
        assert [each["content"] for each in messages[1:]] == ["5", "higher", "9", "lower", "7", "found"]
        assert reply.is_over and reply.state == {"found": 1, "secret": 7}
        _, unfinished = play(pool, records[2], ["5", "5", "5", "5"])
        assert unfinished.is_over and unfinished.messages == () and unfinished.state["found"] == 0
        episodes = [{"messages": messages, "state": reply.state}]
        ((verdict,),) = pool.score([("7", records[2])], episodes)
        assert verdict.value == pytest.approx(0.7)


def test_a_state_that_is_not_json_is_named(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    (record, *_) = write_records(low=5, keeps_object=True)
    with RewardPool([], 1, others=[FUNCTION]) as pool:
        _, reply = play(pool, record, ["5"])
    assert "state['game'] of the environment is not JSON" in reply.error


def test_without_the_package_it_is_named():
    record = {"prompt": "a", "verifiers": {"environment": "game", "settings": {}, "row": {}}}
    with RewardPool([], 1, others=[FUNCTION]) as pool:
        _, reply = play(pool, {**record, "prompt": []}, ["5"])
    assert "needs the package verifiers, version 0.1" in reply.error
