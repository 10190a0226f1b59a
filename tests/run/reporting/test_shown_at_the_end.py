"""The output of a run that is done and saved never decides whether it succeeded."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import panax.cli.commands.train as command
from panax.core import RecipeError


@pytest.mark.parametrize(
    ("error", "words"),
    [(RecipeError("its layer ConvBlock has no cache"), "ConvBlock"), (TypeError("float64"), "TypeError: float64")],
)
def test_a_sample_that_fails_is_one_warning(monkeypatch, error, words):
    def fails(result):
        raise error

    monkeypatch.setattr(command, "_sample", fails)
    settings = SimpleNamespace(checkpoint=SimpleNamespace(directory=""), folder="runs/x")
    prepared = SimpleNamespace(experiment=settings, data=SimpleNamespace(unigram_entropy=None))
    result = SimpleNamespace(prepared=prepared, evaluation={"loss": 1.0}, checkpoint="runs/x/checkpoints/step_1")
    out = io.StringIO()
    command.show(result, Console(file=out, width=200), has_files=True)  # pyright: ignore[reportArgumentType]
    shown = out.getvalue()
    assert shown.count("warning: no sample") == 1 and words in shown
    assert "held-out loss 1.0000" in shown and "runs/x/checkpoints/step_1" in shown
