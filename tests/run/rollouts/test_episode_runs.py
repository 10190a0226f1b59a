"""Runs that learn from answers of several turns: the gap, resumption, and environments that fail."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
from letter_runs import Ends, journal_lines, params, run, same
from letters import letters

from panax.core.errors import HookError, TrainingError
from panax.kernels import Kernels
from panax.layers import MoE
from panax.mesh import MeshShape
from panax.models import PolicyGradient
from panax.optim import Schedule, Sgd
from panax.rollouts import PromptFiles, Reward, TextEnvironment
from panax.run.reporting.history import read_history
from panax.train import StepConfig

FUNCTIONS = __file__.replace("test_episode_runs.py", "environment_functions.py")
STOPS = tuple(range(0, 256, 3))
"""A third of the bytes ends a turn, so that many are no longer than a token."""


def episodes(files, folder, function="asks_again", *, data=None, environment=None, model=None, **settings):
    limits = {"tokens": 24, "turns": 4} | (environment or {})
    rewards = (Reward(function=f"{FUNCTIONS}:counts_turns"),)
    of_turns = TextEnvironment(function=f"{FUNCTIONS}:{function}", **limits)
    data = {"environment": of_turns, "rewards": rewards, "stop_ids": STOPS, "held_out": 0.0} | (data or {})
    model = {"max_length": 32} | (model or {})
    return letters(files, data=data, model=model, **{"directory": str(folder), "num_steps": 4} | settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gap_of_several_turns_is_nothing_with_one_policy(files, tmp_path, dtype):
    experiment = episodes(files, tmp_path, kernels=Kernels(exact_policy=True))
    run(dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, compute_dtype=dtype)))
    rows = read_history(tmp_path)
    assert [row["train/gap/largest"] for row in rows] == [0.0] * 4
    # All have a second turn, unless the first one was cut.
    assert all(row["rollout/turns/mean"] + 2.0 * row["rollout/truncated"] > 2.5 for row in rows)
    assert all(row["train/tokens"] == row["rollout/tokens"] for row in rows)


def test_everything_of_episodes_is_logged(files, tmp_path):
    result = run(episodes(files, tmp_path, data={"held_out": 0.25}))
    rows = read_history(tmp_path)
    assert max(row["train/gap/largest"] for row in rows) < 1e-4
    named = {
        "rollout/turns/mean",
        "rollout/turns/at_limit",
        "rollout/seconds/environment",
        "rollout/reward/counts_turns",
    }
    assert named <= rows[-1].keys() and result.evaluation["turns/mean"] > 1.0


def test_a_resumed_run_reads_the_replies_and_asks_for_none_twice(files, tmp_path):
    mark = files / "mark"
    mark.unlink(missing_ok=True)
    undisturbed = run(episodes(files, tmp_path / "one", "any_number"))
    asked = len(mark.read_text())
    turns = [line for line in journal_lines(tmp_path / "one") if "turn" in line]
    assert asked == sum(len(line["replies"]) for line in turns) and {line["turn"] for line in turns} == {1, 2, 3, 4}
    # The last two checkpoints are lost: rollouts 3 and 4 are drawn again, and their replies are random.
    for step in (3, 4):
        shutil.rmtree(tmp_path / "one" / "checkpoints" / f"step_{step:08d}")
    said = []
    again = run(episodes(files, tmp_path / "one", "any_number"), say=said.append)
    assert same(undisturbed, again) and not any("different now" in line for line in said)
    assert len(mark.read_text()) == asked
    # Killed within rollout 4, after its second turn was replied to: only later ones are asked for.
    lines = (tmp_path / "one" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"rollout": 4' not in line or '"turn": 1' in line or '"turn": 2' in line]
    later = sum(len(line["replies"]) for line in turns if line["rollout"] == 4 and line["turn"] > 2)
    (tmp_path / "one" / "rollouts.jsonl").write_text("".join(kept))
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step_00000004")
    run(episodes(files, tmp_path / "one", "any_number"))
    assert asked + later - 4 <= len(mark.read_text()) <= asked + later + 4
    # Each turn is there once, before the rewards of its rollout.
    places = [(line["rollout"], line.get("turn", 99)) for line in journal_lines(tmp_path / "one")]
    assert places == sorted(set(places))


def test_replies_to_other_answers_are_asked_for_again(files, tmp_path):
    experiment = episodes(files, tmp_path, "any_number")
    with pytest.raises(HookError):
        run(dataclasses.replace(experiment, hooks=(Ends(2),)))
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if '"rollout": 2, "step": 1, "turn": 1' in line)
    digest = re.search(r'\["([0-9a-f]{32})"', lines[first])[1]
    lines[first] = lines[first].replace(digest, "0" * 32)
    (tmp_path / "rollouts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
    said = []
    run(experiment, say=said.append)
    assert any("turn 1 of 1 answers is different now" in line for line in said)
    said.clear()
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    other = episodes(files, tmp_path, "any_number", environment={"name": "other"})
    run(other, say=said.append, accept_changes=True)
    assert any("the environment is another than that of rollout 4 before" in line for line in said)


def test_an_environment_that_fails_ends_the_run_or_excludes_its_answers(files, tmp_path):
    (tmp_path / "four.jsonl").write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcd"))
    prompts = PromptFiles(paths=(str(tmp_path / "four.jsonl"),))
    experiment = episodes(files, tmp_path / "one", "fails_on_b", data={"prompts": prompts}, num_steps=2)
    why = r"environment fails_on_b raised ValueError: no b here \(environment_functions.py, line \d+\)\. Prompt: 'b'; "
    with pytest.raises(
        TrainingError, match=f"an answer has no reply: {why}turn 2 of the answer: '.*Mend the environment"
    ):
        run(experiment)
    # Replies before the failure are in the journal, with the failure.
    (first, second) = journal_lines(tmp_path / "one")
    assert first["turn"] == 1 and not any(reply["error"] for _, reply in first["replies"].values())
    assert second["turn"] == 2 and any(reply["error"] for _, reply in second["replies"].values())
    excludes = dataclasses.replace(experiment.data, failed_rewards="exclude")
    said = []
    run(dataclasses.replace(experiment, directory=str(tmp_path / "two"), data=excludes), say=said.append)
    row = read_history(tmp_path / "two")[0]
    failed = round(16 * row["rollout/failed_rewards"])
    assert 1 <= failed <= 4 and row["train/answers"] == 16 - failed
    warnings = [line for line in said if line.startswith(f"warning: {failed} of 16 answers have no reward")]
    assert re.search(f"the first: {why}", warnings[0])


@pytest.mark.full
def test_several_updates_replay_the_experts_of_each_turn(files, tmp_path):
    objective = PolicyGradient(several_updates=True, kl_weight=0.1, replay_experts=True)
    mixture = {"num_layers": 2, "feed_forward": MoE(experts=4, active=2, ffn=16, first_dense=1, balance=0.0)}
    experiment = episodes(
        files, tmp_path, model=mixture, objective=objective, data={"epochs": 2, "minibatches": 2}, num_steps=8
    )
    undisturbed = run(experiment)
    rows = read_history(tmp_path)
    assert max(row["train/gap/largest"] for row in rows) < 1e-4
    assert [row["train/ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows] == [True, False, False, False] * 2
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000008")
    assert same(undisturbed, run(experiment))


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "devices"), [(MeshShape(fsdp=2, context=2), 4), (MeshShape(tensor=2), 2), (MeshShape(fsdp=1, stage=2), 2)]
)
def test_meshes_draw_and_learn_alike(files, tmp_path, shape, devices):
    sgd = Sgd(schedule=Schedule(peak=0.5, warmup_steps=1))
    parts = StepConfig(micro_batches=shape.stage)
    results = [
        run(
            episodes(
                files, tmp_path / str(count), mesh=mesh, num_steps=3, optimizer=sgd, step=parts, model={"num_layers": 2}
            ),
            count,
        )
        for mesh, count in ((MeshShape(), 1), (shape, devices))
    ]
    for first, second in zip(*map(params, results), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)
    histories = [read_history(tmp_path / str(count)) for count in (1, devices)]
    assert histories[0][0]["rollout/turns/mean"] == histories[1][0]["rollout/turns/mean"]
