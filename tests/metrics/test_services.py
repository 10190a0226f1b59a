"""A CSV table, and the calls of the two services, by stand-ins that record the calls."""

import csv
import re
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.core.install_hints import install_command
from panax.metrics import CsvTracker, MlflowTracker, Peak, RunFacts, WandbTracker
from panax.metrics.histogram import compute_histogram, fetch_histogram

FACTS = RunFacts("tiny", "abc123", "", {"type": "Experiment", "seed": 1, "optimizer": {"type": "AdamW", "peak": 0.1}})
PEAK = Peak(1.0, "a guess")


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def begun(tracker, tmp_path, run_id="abc123", first_step=0):
    tracker.about(RunFacts("tiny", run_id, str(tmp_path), {}))
    tracker.begin(first_step, 10, PEAK)
    return tracker


def test_a_table_grows_columns_and_a_resumed_run_replaces_its_own_rows(tmp_path):
    tracker = begun(CsvTracker(), tmp_path)
    tracker.record(1, {"train/loss": 3.0})
    tracker.record(2, {"train/loss": 2.5, 'a,"b': 1.0})
    tracker.record(2, {"evaluation/loss": 2.0})
    table = tmp_path / "metrics.csv"
    assert [(row["step"], row["train/loss"], row["evaluation/loss"], row['a,"b']) for row in rows(table)] == [
        ("1", "3.0", "", ""), ("2", "2.5", "", "1.0"), ("2", "", "2.0", ""),
    ]  # fmt: skip
    begun(CsvTracker(path=str(table)), tmp_path, "other").record(1, {"train/loss": 9.0})
    begun(CsvTracker(path=str(table)), tmp_path, first_step=1).record(2, {"train/loss": float("nan")})
    assert [(row["run"], row["step"], row["train/loss"]) for row in rows(table)] == [
        ("abc123", "1", "3.0"), ("other", "1", "9.0"), ("abc123", "2", "nan"),
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metrics.csv.lock", "metrics.csv"]


def test_somebody_elses_table_is_left_alone(tmp_path):
    table = tmp_path / "prices.csv"
    table.write_text("date,price\n2026-01-01,3\n")
    with pytest.raises(OSError, match=r"not a table of runs: it begins with \['date', 'price'\]; choose another path"):
        begun(CsvTracker(path=str(table)), tmp_path)
    assert table.read_text() == "date,price\n2026-01-01,3\n"


class Recording(types.ModuleType):
    """A module with functions that record their calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def called(self, name, returns=None):
        def call(*arguments, **named):
            self.calls.append((name, arguments, named))
            return returns

        return call


@pytest.fixture
def wandb(monkeypatch):
    module = Recording("wandb")
    module.known = True
    module.login = lambda *, verify=True, prompt=True: not (prompt or verify) and module.known
    run = types.SimpleNamespace(**{name: module.called(name) for name in ("log", "define_metric", "finish")})
    module.init = module.called("init", run)
    for name in ("Settings", "Image", "Html", "Histogram"):
        setattr(module, name, module.called(name, name))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_weights_and_biases_gets_the_settings_the_id_and_every_kind(wandb, tmp_path):
    tracker = WandbTracker(project="p", entity="team")
    tracker.about(FACTS)
    named = next(named for name, _, named in wandb.calls if name == "init")
    assert (named["id"], named["resume"], named["name"]) == ("abc123", "allow", "tiny")
    assert named["config"]["optimizer"] == {"type": "AdamW", "peak": 0.1} and named["mode"] == "online"
    tracker.record(3, {"train/loss": 2.0})
    tracker.text(3, "samples", "<b>")
    tracker.picture(3, "map", np.zeros((2, 2, 3), np.uint8))
    tracker.histogram(3, "weights", fetch_histogram(compute_histogram(jnp.arange(4.0, dtype=jnp.float32))))
    tracker.close()
    logged = [arguments[0] for name, arguments, _ in wandb.calls if name == "log"]
    assert logged == [
        {"step": 3, "train/loss": 2.0}, {"step": 3, "samples": "Html"}, {"step": 3, "map": "Image"},
        {"step": 3, "weights": "Histogram"},
    ]  # fmt: skip
    # A step that is taken again is shown: `step` is a value among others.
    assert ("define_metric", ("*",), {"step_metric": "step"}) in wandb.calls
    assert [name for name, *_ in wandb.calls].count("finish") == 1
    assert next(arguments for name, arguments, _ in wandb.calls if name == "Html") == ("<pre>&lt;b&gt;</pre>",)


def test_an_older_library_has_its_key_elsewhere(wandb):
    wandb.login = lambda *, verify=True: pytest.fail("it would ask")
    wandb.api = types.SimpleNamespace(api_key="")
    with pytest.raises(RecipeError, match="no API key"):
        WandbTracker().about(FACTS)
    wandb.api.api_key = "key"
    WandbTracker().about(FACTS)
    assert any(name == "init" for name, *_ in wandb.calls)


def test_without_a_key_it_does_not_ask_for_one(wandb, monkeypatch):
    wandb.known = False
    with pytest.raises(RecipeError, match=r"no API key; run `wandb login`, or set WandbTracker\(mode='offline'\)"):
        WandbTracker().about(FACTS)
    tracker = WandbTracker(mode="offline")
    tracker.about(FACTS)
    assert any(name == "init" for name, *_ in wandb.calls)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RecipeError, match=r"mode is online and \$WANDB_MODE is offline; change one of them"):
        WandbTracker(mode="online").about(FACTS)
    refused = WandbTracker()
    refused.record(1, {"train/loss": 1.0})
    refused.close()
    with pytest.raises(RecipeError, match="expected online, offline, disabled or nothing"):
        WandbTracker(mode="of")


@pytest.mark.parametrize("known", [False, True])
def test_mlflow_gets_the_settings_the_id_and_names_that_it_takes(monkeypatch, known):
    module = Recording("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    returns = {
        "get_experiment_by_name": None,
        "create_experiment": "7",
        "search_runs": [run] if known else [],
        "create_run": run,
    }
    names = (*returns, "log_batch", "log_text", "update_run", "set_terminated")
    client = types.SimpleNamespace(**{name: module.called(name, returns.get(name)) for name in names})
    module.entities = types.SimpleNamespace(Param=lambda *given: given, Metric=lambda *given: given)
    module.MlflowClient = module.called("MlflowClient", client)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    tracker = MlflowTracker(experiment="e")
    tracker.about(FACTS)
    parameters = [named["params"] for name, _, named in module.calls if name == "log_batch"]
    assert parameters == ([] if known else [[("seed", "1"), ("optimizer", "AdamW"), ("optimizer.peak", "0.1")]])
    tracker.record(4, {"train/loss/cross_entropy": 1.5, "train/loss": float("nan")})
    tracker.text(4, "samples/0 def", "x = 1")
    tracker.close()
    run_id, [(name, value, milliseconds, step)] = [
        arguments for name, arguments, _ in module.calls if name == "log_batch"
    ][-1]
    assert (run_id, name, value, step) == ("r1", "train/loss.cross_entropy", 1.5, 4) and milliseconds > 1.7e12
    assert ("log_text", ("r1", "x = 1", "samples/0 def/00000004.txt"), {}) in module.calls
    assert module.calls[-1] == ("set_terminated", ("r1",), {})
    search = next(arguments for name, arguments, _ in module.calls if name == "search_runs")
    assert search == (["7"], "tags.`panax.run_id` = 'abc123'")


@pytest.mark.parametrize(("tracker", "name"), [(WandbTracker(), "wandb"), (MlflowTracker(), "mlflow")])
def test_the_error_for_a_missing_service_names_its_installation(monkeypatch, tracker, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        RecipeError, match=rf"{name} is not installed; install it with: {re.escape(install_command(name))}"
    ):
        tracker.about(FACTS)
    tracker.record(1, {"train/loss": 1.0})
    tracker.close()
