"""Columns that train to a held-out loss: which continue, what counts, which results stay, and their batches."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_compare_command import Played

import panax
from panax.cli.main import main
from panax.core.errors import DataError, RecipeError
from panax_compare.measure import measurement
from panax_compare.measure.crew import ColumnError, link_packages
from panax_compare.measure.loss_race import REACHED, Race, StopCondition, format_race_table
from panax_compare.measure.stream import HELD_OUT, TRAIN, Stream, make_stream
from panax_compare.workload.settings import Settings

SETTINGS = Settings(work="decoder", size="tiny", columns=("torch_eager", "plain_jax", "panax"), checked_steps=2)


class Falling(Played):
    """A crew without processes, with a held-out loss that falls by its column's rate a step."""

    rates = {"torch_eager": 0.1, "plain_jax": 0.1, "panax": 0.2}  # noqa: RUF012

    def ask(self, what, **arguments):
        if what == "losses":
            self.steps = arguments["steps"]
        if what == "advance" and what not in self.scripts.get(self.name, {}):
            self.steps += arguments["steps"]
            return {"seconds": float(arguments["steps"]), "cpu_seconds": 1.0, "loss": 1.0}
        if what == "held_out":
            return {"held_out": 4.0 - self.rates[self.name] * self.steps, "seconds": 0.5}
        return super().ask(what, **arguments)


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(measurement, "WorkerGroup", Falling)
    monkeypatch.setattr(Played, "scripts", {})
    return Played.scripts


def race(folder, until, said=None):
    return Race(SETTINGS, until, folder, "panax compare", (said if said is not None else []).append)


def test_each_column_trains_until_it_is_there(played, tmp_path):
    until = StopCondition(loss=2.05, every=5, steps=60)
    entries = {each.name: each for each in race(tmp_path / "c", until).run_to_loss()}
    assert [each.steps for each in entries.values()] == [20, 20, 10]
    assert entries["panax"].losses == pytest.approx({5: 3.0, 10: 2.0}) and entries["panax"].reached
    # From the process's start to its first loss at 9 s; the second checked step took 1 s, 8 more followed.
    assert (entries["panax"].start_seconds, entries["panax"].train_seconds) == (9.0, 9.0)
    assert entries["panax"].seconds == 9.0 + 9.0 + 2 * 0.5
    said = format_race_table(list(entries.values()), until, "tokens", 100, 3600.0, "EUR")
    assert said.splitlines()[0].split() == [
        "column",
        "steps",
        "to",
        "2.05",
        "tokens",
        "start",
        "training",
        "evaluations",
        "in",
        "all",
        "cost",
        "loss",
    ]
    assert "Panax" in said and "1,000" in said and "19.00 EUR" in said
    # The same command again trains nothing, and other settings are refused.
    played["panax"] = played["torch_eager"] = {"advance": ColumnError("trained again")}
    assert {each.name: each for each in race(tmp_path / "c", until).run_to_loss()} == entries
    with pytest.raises(RecipeError, match="holds a comparison with other settings"):
        race(tmp_path / "c", StopCondition(loss=1.0, every=5, steps=60))


def test_who_does_not_come_there_reports_it(played, tmp_path):
    played["plain_jax"] = {"advance": ColumnError("OutOfMemoryError: 3 GiB")}
    entries = {
        each.name: each for each in race(tmp_path / "c", StopCondition(loss=0.0, every=5, steps=12)).run_to_loss()
    }
    assert entries["torch_eager"].reason == "not reached in 12 steps: 2.8000 at best"
    assert entries["plain_jax"].reason == "OutOfMemoryError: 3 GiB" and not entries["plain_jax"].reached
    assert [each["name"] for each in json.loads((tmp_path / "c" / REACHED).read_text())] == list(
        dict.fromkeys(["plain_jax", "torch_eager", "panax"])
    )
    shown = format_race_table(
        list(entries.values()), StopCondition(loss=0.0, every=5, steps=12), "tokens", 100, None, "USD"
    )
    assert "Plain JAX: OutOfMemoryError" in shown and "cost" not in shown


def test_a_column_that_does_other_work_does_not_begin(played, tmp_path):
    played["panax"] = {"losses": {"losses": [2.5, 1.9], "seconds": [3.0, 1.0], "first_at": 9.0}}
    said = []
    found = race(tmp_path / "c", StopCondition(loss=3.0, every=5, steps=60), said).run_to_loss()
    assert [each.name for each in found] == ["torch_eager", "plain_jax"]
    assert any(
        line.startswith("Panax is left out, since its computation differs: the loss of step 1 is 2.5") for line in said
    )


class Opened:
    """What `open_data` gives, of batches that are given."""

    def __init__(self, train, held_out):
        self.train, self.held_out = self.source(train), held_out and self.source(held_out)

    def source(self, batches):
        class Source:
            def batches(self):
                return iter([type("Drawn", (), {"batch": batch}) for batch in batches])

        return Source()


def text(*rows):
    tokens = np.array(rows, np.int32)
    return {"tokens": tokens, "segment": (tokens > 0).astype(np.int32)}


def test_text_is_cut_in_full_rows_and_loses_no_token(tmp_path):
    train = [text([1, 2, 3, 0], [4, 5, 6, 7]), text([8, 9, 10, 11], [12, 13, 0, 0])]
    make_stream("w", Opened(train, train), tmp_path, batch_size=2, length=3, steps=2)  # pyright: ignore
    stream = Stream(tmp_path, TRAIN)
    assert stream.length == 2
    assert [stream[n]["tokens"].tolist() for n in (0, 1, 2)] == [
        [[1, 2, 3], [4, 5, 6]],
        [[7, 8, 9], [10, 11, 12]],
        [[1, 2, 3], [4, 5, 6]],
    ]
    assert stream[1]["targets"].tolist() == [[8, 9, 10], [11, 12, 13]]


def test_images_come_as_floats_and_what_other_columns_do_not_take_is_refused(tmp_path):
    images = [{"image": np.full((2, 4, 4, 1), 255, np.uint8), "label": np.array([1, 2])}]
    make_stream("w", Opened(images, images), tmp_path, batch_size=2, length=1, steps=1)  # pyright: ignore
    batch = Stream(tmp_path, HELD_OUT)[0]
    assert batch["image"].dtype == np.float32 and batch["image"].max() == 1.0 and batch["label"].dtype == np.int32
    mixed = [{**images[0], "label_mixed": np.array([0, 0])}]
    for train, held_out, error in (
        (mixed, mixed, "images that are not mixed"),
        ([{"x": np.zeros((2, 3))}], images, "has batches of x"),
        (images, None, "has no held-out data"),
        (images, [{name: leaf[:1] for name, leaf in images[0].items()}], "fewer than a batch of 2"),
        ([], images, "has no row for train"),
    ):
        with pytest.raises((RecipeError, DataError), match=error):
            make_stream("w", Opened(train, held_out), tmp_path, batch_size=2, length=1, steps=1)  # pyright: ignore
    with pytest.raises(DataError, match="holds no batches to train on"):
        Stream(tmp_path / "nowhere", TRAIN)


@pytest.mark.slow
def test_columns_reach_a_loss_by_the_same_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    columns = "torch_eager,plain_jax,flax,adapted,panax"
    arguments = ["--size", "tiny", "--batch-size", "16", "--learning-rate", "3e-3", "--columns", columns]
    until = ["--until-loss", "5.4", "--evaluate-every", "20", "--max-steps", "100", "--price-per-hour", "2"]
    assert main(["compare", "decoder", *arguments, *until]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 5 and len({row.split()[-1] for row in rows}) == 1
    assert all(" 80  " in row and "40,960" in row for row in rows)


def test_another_interpreter_finds_this_panax_and_nothing_else(tmp_path):
    """As that of FBGEMM, with Panax not installed in its environment."""
    place = link_packages(tmp_path)
    # Isolated from this environment: neither its site-packages nor its variables.
    told = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(place)!r}); import panax; print(panax.__file__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(told.stdout.strip()).resolve() == Path(panax.__file__).resolve()
    assert sorted(path.name for path in place.iterdir()) == ["panax", "panax_compare"]
    # A second comparison in the same folder finds it again.
    assert link_packages(tmp_path) == place
