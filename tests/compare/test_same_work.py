"""Every column that is installed, for real: the same losses, and figures."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from panax.adapters.huggingface import config_from
from panax.core import pair_axes
from panax.models import DecoderTask, VitConfig, VitTask
from panax.optim import uses_weight_decay as decays_by_axes
from panax_compare.columns import select_columns
from panax_compare.measure import measurement
from panax_compare.measure.worker import PreparedColumn
from panax_compare.published_study import Published, measure_published
from panax_compare.results import read_comparison
from panax_compare.verdict import compute_rows
from panax_compare.workload.compared_work import read_work, use_weight_decay
from panax_compare.workload.fixtures import make_work
from panax_compare.workload.settings import Settings

COLUMNS = ("torch_eager", "torch_compile", "plain_jax", "flax", "adapted", "panax")


@pytest.fixture
def made(tmp_path):
    def make(work: str, **settings):
        return make_work(Settings(work=work, size="tiny", **settings), tmp_path / "work", lambda name: None)

    return make


@pytest.mark.parametrize("kind", ["vit", "moe"])
def test_a_work_is_read_as_it_was_made_and_the_same_parameters_decay_here_and_there(made, kind):
    """Panax decides by logical axes, the other columns by Hugging Face's names: counted in numbers that decay."""
    work = made(kind)
    assert read_work(work.folder) == work
    batches, again = work.batches(), read_work(work.folder).batches()
    assert len(batches) == 4 and all(np.array_equal(a[name], b[name]) for a, b in zip(batches, again) for name in a)
    assert not np.array_equal(next(iter(batches[0].values())), next(iter(batches[1].values())))
    moved, original = work.nudged_tensors().tensors(), work.tensors()
    for name, tensor in original.items():
        apart = np.abs(moved[name] - tensor)
        # By two roundings, and the product's own.
        assert np.all(apart <= 3.01 * 2**-24 * np.abs(tensor)) and (not tensor.any() or apart.any()), name
    config = config_from(work.folder)
    task = VitTask(model=config) if isinstance(config, VitConfig) else DecoderTask(model=config)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    here = sum(leaf.size for _, leaf, axes in pair_axes(params, task.parameter_axes(params)) if decays_by_axes(axes))
    there = sum(tensor.size for name, tensor in original.items() if use_weight_decay(name))
    assert here == there > 0


def test_every_command_to_a_worker_is_one_of_its_methods():
    """Commands are words in a pipe, which no type checker follows when a method is renamed."""
    sources = Path(measurement.__file__).parent.glob("*.py")
    asked = {word for source in sources for word in re.findall(r'\.ask\(\s*"(\w+)"', source.read_text("utf-8"))}
    assert {"losses", "memory", "prepare"} <= asked
    assert asked <= {"make", "prepare", "published"} | set(vars(PreparedColumn))


def test_columns_take_turns(tmp_path):
    settings = Settings(
        work="decoder", size="tiny", columns=("plain_jax", "panax"), rounds=1, steps=1, checked_steps=2, probes=False
    )
    comparison = measurement.measure(settings, tmp_path, "", lambda line: None)
    assert [row.state for row in compute_rows(comparison)] == ["measured", "measured"]
    assert all(len(column.turns) == 1 and column.turns[0]["seconds"] > 0 for column in comparison.columns.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("vit", {}),
        ("vit", {"attention": "eager", "precision": "bf16-mixed"}),
        ("decoder", {}),
        ("decoder", {"attention": "eager", "precision": "bf16", "optimizer": "sgd"}),
        ("moe", {}),
    ],
)
def test_every_column_does_the_same_work(tmp_path, kind, more):
    columns = tuple(name for name in COLUMNS if name != "torch_compile" or not more)
    settings = Settings(work=kind, size="tiny", columns=columns, rounds=1, steps=1, checked_steps=3, **more)
    comparison = measurement.measure(settings, tmp_path, "", print)
    for row in compute_rows(comparison):
        if row.state == "impossible":
            assert (kind, row.name) == ("moe", "flax")
            continue
        assert row.state == "measured" and row.compared and row.seconds, (row.name, row.remark)
    assert comparison.complete and all(entry.probe for entry in comparison.columns.values() if entry.losses)
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_the_published_comparison_shows_its_flaws(tmp_path):
    settings = Settings(work="vit", size="tiny", batch_size=4, optimizer="sgd", learning_rate=1e-3)
    found: Published = measure_published(settings, tmp_path, "", 2, 2, print)
    honest, labels = found.losses("corrected", "jax"), found.losses("labels", "jax")
    np.testing.assert_allclose(honest, found.losses("corrected", "torch"), rtol=1e-5)
    assert abs(labels[0] / honest[0] - 1) > 1
    assert found.losses("scales", "jax")[0] != pytest.approx(honest[0], rel=1e-3)
    assert all(found.ratio(name) for name in ("corrected", "clock", "data", "published"))


@pytest.mark.slow
def test_the_command_writes_a_report(tmp_path):
    command = [
        sys.executable,
        "-m",
        "panax.cli.main",
        "compare",
        "decoder",
        "--size",
        "tiny",
        "--rounds",
        "1",
        "--steps",
        "1",
    ]
    command += ["--columns", "torch_eager,torch_xla,panax", "--directory", str(tmp_path / "c")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert "| Panax |" in run.stdout and (tmp_path / "c/report.html").is_file()
    comparison = read_comparison(tmp_path / "c")
    assert comparison is not None and [column.name for column in select_columns(())][2] == "torch_xla"
    assert comparison.columns["torch_xla"].state == "absent"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_tables_lose_here_as_in_pytorch(tmp_path, optimizer):
    settings = Settings(
        work="dlrm", size="tiny", batch_size=64, optimizer=optimizer, columns=("torch_eager", "panax"), rounds=1, steps=2,
        checked_steps=50, probes=False,
    )  # fmt: skip
    comparison = measurement.measure(settings, tmp_path / "comparison", "panax compare dlrm", lambda line: None)
    theirs, ours = (comparison.columns[name] for name in ("torch_eager", "panax"))
    assert theirs.state == ours.state == "measured", ours.reason
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    assert max(theirs.losses) - min(theirs.losses) > 1e-3
