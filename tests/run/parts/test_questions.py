"""Questions during a run: their scores are those of the same state, training is as without them, mistakes are found before it."""

import dataclasses
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax import fit
from panax.core import Evaluation, Loss, named_leaves
from panax.core.errors import DataError, PanaxError, RecipeError
from panax.generate import Sampling, engine, programs
from panax.generate.scoring import score_file
from panax.hooks import EarlyStopping, Hook, TargetReached
from panax.run import QuestionConfig
from panax.run.reporting.generation import TextModel, create_engine

CHOICES = [{"prompt": "def", "choices": [" f", " zzz <b>"], "answer": number % 2} for number in range(4)]
SUMS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "long " * 50, "answer": "2"}]
TEXTS = [{"text": "import os"}, {"text": "def f(): pass"}]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    paths = {}
    for name, records in (("choices", CHOICES), ("sums", SUMS), ("texts", TEXTS)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        paths[name] = str(path)
    return paths


def questions(*files: str, **settings) -> QuestionConfig:
    """Questions to engines of one size, of which the programs are compiled once."""
    return QuestionConfig(files=files, **{"tokens": 4, "rows": 2, "length": 32, **settings})


def values_of(state) -> Mapping[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}


def metrics(folder: str) -> dict[tuple[int, str], float]:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], name): value for row in rows for name, value in row.items()}


class CountsCompilations(Hook):
    """Counts the compilations of the engine's programs up to each scoring."""

    def before_run(self, run) -> None:
        self.counts: list[int] = []

    def after_step(self, run) -> None:
        compiled = programs.run_prompt_chunk, programs.run_decode_step, programs.copy_row
        self.counts.append(sum(each._cache_size() for each in compiled))


@pytest.mark.full
def test_scores_are_those_of_the_state_and_training_is_as_without(experiment, undisturbed, files):
    config = questions(*files.values(), every=10, n=2, temperature=1.0)
    count, lines = CountsCompilations(), []
    seen: list[float] = []

    class Sees(Hook):
        def after_step(self, run) -> None:
            if run.step % 10 == 0 and run.step < 30:
                seen.append(run.values["questions/choices/acc"])

    result = fit(dataclasses.replace(experiment, questions=config, hooks=(count, Sees())), say=lines.append)
    assert values_of(result.state).keys() == values_of(undisturbed[0].state).keys()
    for name, leaf in values_of(undisturbed[0].state).items():
        assert np.array_equal(values_of(result.state)[name], leaf), name
    # Compiled before the first step; a later scoring compiles nothing.
    assert len(count.counts) == 30 and len(set(count.counts)) == 1

    logged = metrics(experiment.directory)
    steps = sorted({step for step, name in logged if name.startswith("questions/")})
    assert steps == [10, 20, 30] and seen == [logged[step, "questions/choices/acc"] for step in (10, 20)]
    prepared = result.prepared
    tokenizer = prepared.data.tokenizer
    model = TextModel(prepared.task, result.state.eval_params, result.state.model_state, tokenizer)
    compared = create_engine(model, rows=2, length=32)
    for name, path in files.items():
        scores = score_file(compared, tokenizer, Path(path), Sampling(tokens=4, n=2, temperature=1.0)).scores
        assert {score: logged[30, f"questions/{name}/{score}"] for score in scores} == {
            score: each.value for score, each in scores.items()
        }
    assert {name.split("/")[-1] for step, name in logged if name.startswith("questions/sums/")} == {
        "exact_match",
        "pass@2",
    }
    said = "\n".join(lines)
    assert "1 of 2 questions of sums can't be asked" in said and "step 30: questions choices: acc 0.5" in said
    record = json.loads(Path(experiment.directory, "questions.json").read_text())
    assert record["step"] == 30 and [file["name"] for file in record["files"]] == ["choices", "sums", "texts"]
    # The command again trains nothing, and asks again.
    again = fit(dataclasses.replace(experiment, questions=config), quiet=True)
    assert again.step == 30 and metrics(experiment.directory)[30, "questions/choices/acc"] == 0.5


def test_scores_are_logged_and_reported(experiment, files):
    few = dataclasses.replace(experiment, num_steps=7, questions=questions(files["choices"], every=4))
    fit(few, quiet=True)
    logged = metrics(experiment.directory)
    assert {step for step, name in logged if name == "questions/choices/acc"} == {4, 7}
    assert logged[7, "questions/choices/acc"] == 0.5
    page = panax.report(experiment.directory).read_text()
    assert "Scores after step 7," in page and " zzz &lt;b&gt;" in page and "zzz <b>" not in page


@pytest.mark.full
def test_hooks_compare_scores(experiment, files):
    config = questions(files["choices"], every=2)
    few = dataclasses.replace(experiment, num_steps=8, questions=config)
    target = TargetReached(metric="questions/choices/acc", target=0.5, mode="max")
    result = fit(dataclasses.replace(few, hooks=(target,)), quiet=True)
    assert result.step == 2 and result.stopped == "TargetReached: questions/choices/acc is 0.5000, the target is 0.5"
    # The run is complete: its last state is asked once.
    assert metrics(experiment.directory)[2, "questions/choices/acc"] == 0.5
    with pytest.raises(PanaxError, match="unknown metric 'questions/choices/ac': did you mean"):
        fit(dataclasses.replace(few, hooks=(EarlyStopping(metric="questions/choices/ac"),)), quiet=True, fresh=True)
    never = dataclasses.replace(few, questions=dataclasses.replace(config, every=0), hooks=(target,))
    with pytest.raises(RecipeError, match="this run asks no questions between its steps"):
        fit(never, quiet=True, fresh=True)


@pytest.mark.full
def test_a_signal_abandons_the_questions_and_the_run_is_saved(experiment, files, monkeypatch):
    real, calls = engine.run_decode_step, []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    lines: list[str] = []
    monkeypatch.setattr(engine, "run_decode_step", interrupted)
    # The first call is that of the check before the first step, the second that of the first scoring's engine.
    result = fit(dataclasses.replace(experiment, questions=questions(files["sums"], every=3)), say=lines.append)
    monkeypatch.undo()
    assert (result.interrupted_by, result.step) == ("SIGINT", 3) and "step_00000003" in result.checkpoint
    assert any("the scoring of questions after step 3 is abandoned: SIGINT received" in line for line in lines)
    assert not any(name.startswith("questions/") for _, name in metrics(experiment.directory))
    # The same command resumes, and other questions are no other run.
    assert fit(dataclasses.replace(experiment, questions=questions(files["choices"])), quiet=True).step == 30


@pytest.mark.parametrize(
    ("settings", "content", "error", "words"),
    [
        ({}, None, DataError, "choices.jsonl"),
        ({}, '{"prompt": "a", "choices": ["x"], "answer": 0}\n', DataError, "expected a list of two or more texts"),
        ({}, "{broken\n", DataError, "choices.jsonl, line 1"),
        ({}, json.dumps(SUMS[1]) + "\n", RecipeError, "no question of choices can be asked; the first: "),
        pytest.param(
            {"length": 999},
            json.dumps(SUMS[0]) + "\n",
            RecipeError,
            "length=999; the model is for at most 64 positions",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"chat": True},
            json.dumps(SUMS[0]) + "\n",
            RecipeError,
            "the tokenizer has no chat template",
            marks=pytest.mark.full,
        ),
    ],
)
def test_mistakes_are_found_before_the_first_step(settings, content, error, words, experiment, tmp_path):
    file = tmp_path / "choices.jsonl"
    if content is not None:
        file.write_text(content)
    asked = questions(str(file), every=500, **settings)
    with pytest.raises(error, match=words):
        fit(dataclasses.replace(experiment, questions=asked, num_steps=1000), quiet=True)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_task_without_text_is_refused(files, tmp_path):
    class Line(panax.Task):
        def init(self, key):
            return {"w": jnp.zeros(4)}, {}

        def parameter_axes(self, params):
            return {"w": ("feature",)}

        def loss(self, params, state, batch, key, train):
            return Evaluation({"w": Loss(jnp.sum(params["w"]), jnp.float32(1.0))}, state, {})

    experiment = panax.Experiment(
        task=Line(),
        data=[{"x": np.zeros((8, 4), np.float32)}],
        directory=str(tmp_path / "run"),
        questions=QuestionConfig(files=(files["choices"],)),
    )
    with pytest.raises(RecipeError, match="Line does not generate"):
        fit(experiment, quiet=True)
    assert not (tmp_path / "run").exists()


def test_settings_without_effect_are_refused():
    for settings, words in (
        ({"every": 5}, "questions.every=5 has no effect without questions.files"),
        ({"files": ("a/sums.jsonl", "b/sums.jsonl.gz")}, "2 files of the name sums"),
        ({"files": ("a",), "pattern": "("}, "is not a regular expression"),
        ({"files": ("a",), "tokens": 0}, "tokens=0; expected 1 or more"),
        ({"files": ("a",), "limit": -1}, "questions.limit=-1; expected 0 or more"),
    ):
        with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
            QuestionConfig(**settings)
    assert QuestionConfig() == QuestionConfig(files=())


@pytest.mark.full
def test_a_dry_run_asks_two_questions_of_each_file(experiment, files):
    lines: list[str] = []
    config = questions(files["choices"])
    fit(dataclasses.replace(experiment, questions=config), fast_dev_run=True, say=lines.append)
    assert sum("questions choices: acc" in line for line in lines) == 2
