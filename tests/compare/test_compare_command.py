"""`panax compare` at the command line: refusals, missing columns, and the results after an interruption."""

import dataclasses
import json
from typing import ClassVar

import pytest
from comparing import EAGER, comparison

from panax.cli.main import main
from panax.core.errors import DataError, RecipeError
from panax_compare.columns import COLUMNS, select_columns
from panax_compare.command import parser, read_settings
from panax_compare.measure import measurement
from panax_compare.measure.crew import ColumnError, WorkerGroup
from panax_compare.measure.measurement import measure
from panax_compare.results import read_comparison
from panax_compare.workload.settings import Settings, check_hardware


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("vitt",), "work='vitt' can't be compared; did you mean 'vit'?"),
        (("vit", "--size", "XL"), "size='XL'"),
        (("vit", "--precision", "fp16"), "precision='fp16'"),
        (("vit", "--precision", "tf32"), "no GPU is attached here; use --precision f32"),
        (("vit", "--columns", "torch_eagre"), "unknown column 'torch_eagre'; did you mean 'torch_eager'?"),
        (("vit", "--columns", "panax,panax"), "names one twice"),
        (("vit", "--sequence-length", "8"), "--sequence-length 8 has no effect with 'vit'"),
        (("decoder", "--image-size", "8"), "--image-size 8 has no effect with 'decoder'"),
        (("recipe:quickstart", "--layers", "2"), "--layers 2 has no effect with 'recipe:quickstart'"),
        (("recipe:",), "names no recipe"),
        (("dlrm", "--optimizer", "adamw"), "optimizer='adamw'; tables are updated by sgd or adagrad here"),
        (("dlrm", "--attention", "eager"), "attention='eager' has no effect with 'dlrm'"),
        (("vit", "--optimizer", "adagrad"), "optimizer='adagrad' is of tables, for `panax compare dlrm`"),
        (("moe", "--rounds", "0"), "rounds=0; expected 1 or more"),
        (("decoder", "--as-published"), "--as-published compares a ViT, not"),
        (("vit", "--as-published", "--precision", "bf16"), "--precision has no effect with --as-published"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(capsys, arguments, expected):
    assert main(["compare", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_flags_become_settings():
    options = parser().parse_args(
        ["vit", "--size", "S", "--columns", "panax, torch_eager", "--no-probes", "--steps", "7"]
    )
    settings = read_settings(options)
    assert settings == Settings(work="vit", size="S", columns=("panax", "torch_eager"), probes=False, steps=7)
    assert [column.name for column in select_columns(settings.columns)] == ["torch_eager", "panax"]
    tables = read_settings(parser().parse_args(["dlrm"]))
    assert (tables.optimizer, tables.batch_size, tables.columns) == (
        "adagrad",
        2048,
        ("torch_eager", "panax", "torchrec"),
    )
    assert tables.name == "dlrm-1m-f32-adagrad-batch2048"
    assert Settings(work="recipe:quickstart").name.startswith("recipe-quickstart-f32")


def test_tf32_needs_a_gpu_and_nothing_else_does():
    check_hardware("tf32", has_gpu=True)
    check_hardware("bf16", has_gpu=False)
    with pytest.raises(RecipeError, match="no GPU is attached"):
        check_hardware("tf32", has_gpu=False)


def test_torch_xla_is_absent_here_with_the_command_that_installs_it():
    column = next(column for column in COLUMNS if column.name == "torch_xla")
    assert column.missing() == ["torch_xla"] and "pip install" in column.install


class Played(WorkerGroup):
    """A crew without processes: answers by its column's script."""

    scripts: ClassVar[dict[str, dict]] = {}

    def __init__(self, name, folder, *_, **__):
        self.name, self.started_at, self.tracing_seconds = name, 0.0, 0.5
        self.asked = []

    def ask(self, what, **arguments):
        script = self.scripts.get(self.name, {})
        if what in script:
            result = script[what]
            if isinstance(result, BaseException):
                raise result
            return result
        if what == "make":
            nudged = measurement.Path(arguments["folder"]) / "nudged"
            nudged.mkdir(parents=True)
            (nudged / "work.json").write_text("{}")
            work = comparison(EAGER).work
            files = {**work, "folder": "", "precision": "f32", "attention": "fused", "seed": 0, "flaws": []}
            numbers = {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}
            (measurement.Path(arguments["folder"]) / "work.json").write_text(
                json.dumps({**files, "optimizer": numbers})
            )
            return {}
        return {
            "prepare": {"device": "cpu", "versions": {}, "notes": [], "tracing_seconds": 0.5},
            "losses": {"losses": [2.0, 1.9], "seconds": [3.0, 1.0], "first_at": 9.0},
            "memory": {"device_bytes": None, "resident_bytes": 2**20},
            "product": {"flops_per_second": 1e11, "registers": None},
            "time_steps": {"seconds": 1.0, "cpu_seconds": 1.5, "loss": 1.0},
            "probe": {"another_shape": [{"seconds": 1.0}, {"seconds": 1.0}], "wrong": [{"seconds": 1.0}]},
        }[what]

    def cpu_seconds(self):
        return 0.0

    def close(self):
        pass


SETTINGS = Settings(work="decoder", size="tiny", columns=("torch_eager", "torch_xla", "panax"), rounds=2)


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(measurement, "WorkerGroup", Played)
    monkeypatch.setattr(Played, "scripts", {})
    return Played.scripts


def test_absent_columns_are_shown_and_the_others_measured(played, tmp_path):
    said = []
    result = measure(SETTINGS, tmp_path / "c", "panax compare", said.append)
    assert {name: entry.state for name, entry in result.columns.items()} == {
        "torch_eager": "measured",
        "torch_xla": "absent",
        "panax": "measured",
    }
    assert "run: pip install" in result.columns["torch_xla"].reason
    assert result.complete and len(result.columns["panax"].turns) == 2
    assert result.columns["panax"].compile_seconds == pytest.approx(0.5 + 2.0)
    assert read_comparison(tmp_path / "c") == result


def test_a_column_that_fails_is_shown_with_its_error_and_the_others_continue(played, tmp_path):
    played["torch_eager"] = {"losses": ColumnError("OutOfMemoryError: 3 GiB")}
    found = measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    assert found.columns["torch_eager"].state == "failed"
    assert found.columns["torch_eager"].reason == "OutOfMemoryError: 3 GiB"
    assert found.columns["panax"].state == "measured" and found.reference == "panax"


def test_an_interruption_keeps_what_was_finished_and_the_same_command_continues(played, tmp_path):
    played["panax"] = {"time_steps": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    unfinished = read_comparison(tmp_path / "c")
    assert not unfinished.complete
    assert len(unfinished.columns["torch_eager"].turns) == 1 and unfinished.columns["panax"].losses == [
        2.0,
        1.9,
    ]
    del played["panax"]
    result = measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    assert result.complete and result.sessions == 2
    assert [len(result.columns[name].turns) for name in ("torch_eager", "panax")] == [2, 2]


def test_ctrl_c_writes_the_report_of_what_is_there(played, tmp_path, capsys):
    played["panax"] = {"time_steps": KeyboardInterrupt()}
    arguments = ["compare", "decoder", "--size", "tiny", "--columns", "torch_eager,panax", "--directory", "c"]
    assert main(arguments) == 130
    out = capsys.readouterr()
    assert (
        "the same command resumes from there" in out.err
        and "rounds are missing" in (tmp_path / "c/report.md").read_text()
    )


def test_a_folder_of_other_settings_is_refused(played, tmp_path):
    measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    with pytest.raises(RecipeError, match="batch_size is 8 there, 4 here"):
        measure(dataclasses.replace(SETTINGS, batch_size=4), tmp_path / "c", "", lambda line: None)
    (tmp_path / "c" / "comparison.json").write_text("{")
    with pytest.raises(DataError, match="can't be read"):
        measure(SETTINGS, tmp_path / "c", "", lambda line: None)


def test_more_rounds_continue_with_what_there_is(played, tmp_path):
    measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    again = measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    assert again.sessions == 1
    more = measure(dataclasses.replace(SETTINGS, rounds=3), tmp_path / "c", "", lambda line: None)
    assert len(more.columns["panax"].turns) == 3 and more.complete


def test_columns_are_restarted_if_memory_does_not_suffice(played, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        Played, "of", classmethod(lambda cls, column, folder: started.append(column.name) or cls(column.name, folder))
    )
    played["torch_eager"] = {"memory": {"device_bytes": None, "resident_bytes": 2**60}}
    result = measure(dataclasses.replace(SETTINGS, probes=False), tmp_path / "c", "", lambda line: None)
    assert result.one_at_a_time and result.complete
    # Checked, the reference nudged, and anew for each of two rounds.
    assert started.count("torch_eager") == 4 and started.count("panax") == 3


def test_the_memory_of_devices_is_not_compared_with_the_hosts(played, tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, probes=False)
    monkeypatch.setattr(measurement, "free_bytes", lambda: 8 * 2**30)
    monkeypatch.setattr(measurement, "free_device_bytes", lambda: 80 * 2**30)
    played["torch_eager"] = {"memory": {"device_bytes": 33 * 2**30, "resident_bytes": 2**30}}
    assert not measure(settings, tmp_path / "both", "", lambda line: None).one_at_a_time
    monkeypatch.setattr(measurement, "free_device_bytes", lambda: 40 * 2**30)
    assert measure(settings, tmp_path / "device", "", lambda line: None).one_at_a_time


def test_another_column_begins_each_round(played, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        Played,
        "ask",
        lambda self, what, _ask=Played.ask, **rest: (
            order.append(self.name) if what == "time_steps" else None,
            _ask(self, what, **rest),
        )[1],
    )
    measure(SETTINGS, tmp_path / "c", "", lambda line: None)
    assert order == ["torch_eager", "panax", "panax", "torch_eager"]


def test_a_process_that_is_killed_is_a_column_that_failed(tmp_path):
    with WorkerGroup("make", tmp_path) as crew:
        crew._processes[0].kill()
        with pytest.raises(ColumnError, match="killed"):
            crew.ask("make", settings={}, folder="")
        with pytest.raises(ColumnError, match="killed"):
            crew.ask("make", settings={}, folder="")


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path, monkeypatch):
    """`--directory .` in a folder that has a `work` of its own."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    with pytest.raises(RecipeError, match=r"contains files and was not created by Panax.*--directory"):
        measure(SETTINGS, tmp_path, "panax compare", lambda line: None)
    assert (tmp_path / "work" / "thesis.tex").read_text() == "mine"
