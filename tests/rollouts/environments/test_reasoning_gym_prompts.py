"""`ReasoningGym`: the same prompts in every process, and their scores, with a stand-in for the package."""

import json
from pathlib import Path

import pytest

from panax.core import DataError, RecipeError
from panax.rollouts import ReasoningGym, Reward, RewardPool, Verdict
from panax.rollouts.environments import reasoning_gym_prompts

SCORE = Reward(function="panax.rollouts.environments.reasoning_gym_worker:score_reasoning")


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))


def test_prompts_are_the_same_in_every_process_and_can_be_scored(stand_in, monkeypatch):
    monkeypatch.setattr(reasoning_gym_prompts, "_AT_ONCE", 4)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    prompts = ReasoningGym(name="sums", size=6, seed=2, settings={"operators": ["-", "+"], "max_terms": 2})
    assert prompts.settings == (("max_terms", 2), ("operators", ("-", "+")))
    records = list(prompts)
    assert len(records) == len(prompts) == 6 and len({record["prompt"] for record in records}) == 6
    assert records[5] == prompts[5] == json.loads(json.dumps(records[5]))
    assert "-" in records[0]["prompt"]
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    again = ReasoningGym(name="sums", size=6, seed=2, settings=prompts.settings)
    assert again == prompts and list(again) == records
    assert ReasoningGym(name="sums", size=1, seed=3)[0]["prompt"] != records[0]["prompt"]
    with RewardPool([SCORE], 2) as pool:
        answers = [(record["answer"], record) for record in records]
        answers += [
            (f"<answer>3</answer> or <answer> {records[0]['answer']}\n</answer> .", records[0]),
            ("", records[0]),
        ]
        assert pool.score(answers) == [[Verdict(1.0)]] * 7 + [[Verdict(0.01)]]


def test_a_record_of_another_version_fails(stand_in, monkeypatch):
    record = ReasoningGym(name="sums", size=1)[0]
    monkeypatch.setenv("STAND_IN_VERSION", "2")
    with RewardPool([SCORE], 1) as pool:
        ((changed,), (foreign,)) = pool.score([("5", record), ("5", {"prompt": "a"})])
    assert "take the version of reasoning-gym that generated the prompts" in changed.error
    assert "has no field 'reasoning_gym'" in foreign.error


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"name": "sms"}, RecipeError, "has no task 'sms'; did you mean 'sums'"),
        ({"name": "sums", "settings": {"terms": 1}}, RecipeError, "refuses the settings: TypeError: .*'terms'"),
        (
            {"name": "sums", "settings": {"max_terms": 1}},
            RecipeError,
            "refuses the settings: AssertionError: max_terms must",
        ),
        (
            {"name": "broken"},
            DataError,
            "prompts of broken ended with exit code 1: RuntimeError: the generator is broken",
        ),
    ],
)
def test_what_the_library_refuses_is_one_error(stand_in, settings, error, message):
    with pytest.raises(error, match=message):
        ReasoningGym(**settings)[0]


def test_settings_and_a_missing_library(monkeypatch):
    with pytest.raises(RecipeError, match="size=0: expected at least 1"):
        ReasoningGym(name="sums", size=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"needs reasoning-gym, which is not installed; run: .*rl"):
        ReasoningGym(name="sums")[0]


def test_generation_has_a_time_limit(stand_in, monkeypatch):
    monkeypatch.setattr(reasoning_gym_prompts, "_SECONDS", 0.01)
    with pytest.raises(DataError, match=r"within 0\.01 seconds"):
        ReasoningGym(name="sums")[0]
