"""A hybrid of state-space and attention layers trains on text over a mesh, resumes bitwise, and its checkpoint generates."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from panax import fit
from panax.cli.main import main
from panax.core import named_leaves
from panax.layers import Rotary
from panax.mesh import MeshShape
from panax.metrics import Tracker
from panax.models import DecoderTask, HybridConfig

MODEL = HybridConfig(
    max_length=64,
    embed=32,
    num_layers=2,
    attention_layers=(1,),
    heads=2,
    ffn=64,
    ssm_heads=4,
    ssm_head_dim=16,
    ssm_state=16,
    rotary=Rotary(fraction=0.5),
    dropout=0.1,
)


class StopAt(Tracker):
    """Sends this process a signal when a step is reported."""

    def __init__(self, step: int):
        self.step = step

    def record(self, step, values):
        if step == self.step and "train/loss" in values:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_continues_bitwise_on_a_mesh_and_generates(experiment, tmp_path, capsys) -> None:
    run = dataclasses.replace(
        experiment, task=DecoderTask(model=MODEL), mesh=MeshShape(fsdp=2, context=2, tensor=2), num_steps=20
    )
    uninterrupted = fit(dataclasses.replace(run, directory=str(tmp_path / "whole")), say=str)
    first = fit(run, say=str, trackers=(StopAt(10),))
    assert first.interrupted_by == "SIGTERM" and 10 <= first.step < 20
    resumed, undisturbed = (named_leaves(finished.state.params) for finished in (fit(run, say=str), uninterrupted))
    for name in undisturbed:
        np.testing.assert_array_equal(np.asarray(resumed[name]), np.asarray(undisturbed[name]), err_msg=name)
    losses = [
        json.loads(line).get("train/loss") for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0] - 0.2
    capsys.readouterr()
    assert main(["generate", run.folder, "--prompt", "def ", "--tokens", "8", "--temperature", "0"]) == 0
    assert "def " in capsys.readouterr().out
