"""`Reward`: the location of a function for another process, and the settings that are refused."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import sick_rewards

from panax.core import RecipeError
from panax.rollouts import Reward, RewardPool, Verdict
from panax.rollouts.rewards.reward import weigh_verdicts
from panax.run.folder.description import serialize_config

LENGTH = "sick_rewards:length"


def test_a_function_is_stored_as_text():
    reward = Reward(function=sick_rewards.length, weight=2)
    assert (reward.function, reward.name) == (LENGTH, "length")
    described = json.loads(json.dumps(serialize_config(reward)))
    assert described.pop("type") == "Reward"
    assert Reward(**described) == reward == Reward(function=LENGTH, weight=2.0)


def test_a_function_of_a_file_that_no_name_imports_is_found_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "json.py").write_text("def rate(answer, record):\n    return 4.0\n")
    spec = importlib.util.spec_from_file_location("panax_recipe_json", tmp_path / "mine" / "json.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "panax_recipe_json", module)
    spec.loader.exec_module(module)
    assert Reward(function=module.rate).function == f"{tmp_path}/mine/json.py:rate"
    monkeypatch.chdir(tmp_path)
    reward = Reward(function=module.rate)
    assert reward.function == "mine/json.py:rate"
    with RewardPool([reward], 1) as pool:
        assert pool.score([("", {})]) == [[Verdict(4.0)]]
    # The same name, of another file.
    monkeypatch.setitem(sys.modules, "sick_rewards", module)
    monkeypatch.setattr(module, "__name__", "sick_rewards")
    monkeypatch.setattr(module.rate, "__module__", "sick_rewards")
    assert Reward(function=module.rate).function == "mine/json.py:rate"


@pytest.mark.parametrize(
    "function",
    [
        sick_rewards.nothing,
        sick_rewards.outer(),
        sick_rewards.Rewards().method,
        sick_rewards.Rewards.method,
        sick_rewards.partial,
        "".startswith,
    ],
    ids=["lambda", "nested", "method", "function of a class", "partial", "method in C"],
)
def test_what_another_process_cannot_import_is_refused(function):
    with pytest.raises(RecipeError, match="at the top level of a module or a script: move it there"):
        Reward(function=function)


def test_a_function_of_an_interactive_session_is_refused(monkeypatch):
    def cell(answer, record):
        return 0.0

    main = type(sys)("__main__")
    cell.__module__, cell.__qualname__ = "__main__", "cell"
    main.cell = cell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(RecipeError, match="another process can't import an interactive session"):
        Reward(function=cell)


def test_a_replaced_function_is_refused(monkeypatch):
    original = sick_rewards.length
    monkeypatch.setattr(sick_rewards, "length", sick_rewards.equals)
    with pytest.raises(RecipeError, match=r"sick_rewards\.length is another object"):
        Reward(function=original)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "length"}, "expected 'module:function'"),
        ({"function": ".py:length"}, "expected 'module:function'"),
        ({"function": "a b:length"}, "expected 'module:function'"),
        ({"function": "a:b.c"}, "expected 'module:function'"),
        ({"function": LENGTH, "seconds": 0}, "expected a positive number"),
        ({"function": LENGTH, "weight": float("nan")}, "not NaN"),
        ({"function": LENGTH, "name": "a/b"}, "since metrics have this name"),
        ({"function": 3}, "expected a function"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Reward(**settings)


def test_the_sum_of_an_answer_has_its_weights_and_needs_every_reward():
    rewards = [Reward(function=LENGTH, weight=0.5), Reward(function=sick_rewards.equals, weight=-2)]
    assert weigh_verdicts(rewards, [Verdict(3.0), Verdict(1.0)]) == -0.5
    assert weigh_verdicts(rewards, [Verdict(3.0), Verdict(None, "reward equals raised KeyError")]) is None


def test_the_functions_of_a_script_are_found_by_the_processes_and_its_main_part_does_not_run(tmp_path):
    import subprocess

    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("VALUE = 6.0\n")
    script.write_text(
        "import beside\n"
        "from panax.rollouts import Reward, RewardPool\n"
        "def rate(answer, record):\n"
        "    return beside.VALUE\n"
        "if __name__ == '__main__':\n"
        "    with RewardPool([Reward(function=rate)], 1) as pool:\n"
        "        print(pool.rewards[0].function, pool.score([('', {})]))\n"
        "print('imported')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "script.py:rate [[Verdict(value=6.0, error='')]]\nimported\n"
    assert "imported" in done.stderr  # the process's output
    done = subprocess.run(
        [sys.executable, Path("..") / tmp_path.name / "script.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("script.py:rate [[Verdict(value=6.0")


def test_a_script_that_runs_when_it_is_imported_is_refused(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from panax.rollouts import Reward, RewardPool\n"
        "def rate(answer, record):\n"
        "    return 1.0\n"
        f"RewardPool([Reward(function='{script}:rate')], 1)\n"
    )
    with pytest.raises(RecipeError, match="move the code that runs it under"):
        RewardPool([Reward(function=f"{script}:rate")], 1)
