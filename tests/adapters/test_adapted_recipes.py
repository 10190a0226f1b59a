"""A recipe with another library's model is a recipe like any other: inspect, flags, training, going on."""

import warnings

import pytest

from panax.cli.main import main

RECIPE = '''
import torch
import panax
from torch import nn


def tiny() -> panax.Experiment:
    """A network of PyTorch's."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    net[0].bias.requires_grad_(False)
    task = panax.adapters.torch.task(net, nn.CrossEntropyLoss(), next(iter(loader)), sharding={"2.weight": (None, "ffn")})
    return panax.Experiment(name="tiny", task=task, data=loader, num_steps=4)
'''


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(RECIPE)
    return "tiny.py"


def axes_of(out, name):
    lines = out.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith(name)) + 1].strip()


def test_inspect_shows_the_layout(recipe, capsys):
    assert main(["inspect", recipe, "--mesh.fsdp", "4", "--mesh.tensor", "2"]) == 0
    out = capsys.readouterr().out
    assert axes_of(out, "0.weight") == "features 32 (tensor) x width 16 (fsdp)"
    assert axes_of(out, "2.weight") == "- 4 x ffn 32 (tensor)"
    assert "0.bias (frozen)" in out and "all-reduce" in out


def test_train_takes_flags_and_continues(recipe, capsys):
    assert main(["train", recipe, "--optimizer.schedule.peak", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "requires_grad=False and stay as they are" in " ".join(out.split()) and "tiny: 4 steps in runs/tiny" in out
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # a DataLoader can't resume exactly, which is said
        assert main(["train", recipe, "--optimizer.schedule.peak", "0.01", "--num-steps", "6"]) == 0
    assert "resuming from step 4 of 6" in capsys.readouterr().out


@pytest.mark.parametrize("axis", ["stage", "context"])
def test_a_mesh_axis_that_the_model_does_not_know_is_refused(recipe, axis, capsys):
    assert main(["train", recipe, f"--mesh.{axis}", "2"]) == 2
    assert f"mesh.{axis}=2" in capsys.readouterr().err
