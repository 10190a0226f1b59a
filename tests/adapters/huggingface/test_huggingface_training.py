"""From released weights through sharded training steps and back to `transformers`."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from huggingface_examples import LENGTH, VOCABULARY, make_example

from panax.adapters.huggingface import load, save
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig

ROWS, RATE = 8, 0.1
LEAVES = ("tokens", "targets", "loss_mask")


def test_trains_on_from_their_weights_as_they_would(folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("qwen3", folder_of_examples)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) for name in LEAVES[:2]}
    batch["loss_mask"] = np.ones((ROWS, LENGTH), np.float32)
    optimizer = Sgd(schedule=Schedule(peak=RATE, decay="constant"))
    program = Program.create(example.task, optimizer, num_steps=10, config=StepConfig(clip_norm=None))
    step = CompiledStep(program, Placement.create(MeshShape(fsdp=8)), dict.fromkeys(LEAVES, ("batch", "seq")))
    state = step.init(0)
    params, model_state = load(example.folder, example.task, state.params, state.model_state)
    state = dataclasses.replace(state, params=params, model_state=model_state)
    losses = []
    for _ in range(3):
        state, scalars = step(state, step.put(batch))
        losses.append(float(scalars["loss"]))
    save(tmp_path, state.params, state.model_state)

    model = transformers.AutoModelForCausalLM.from_pretrained(example.folder, attn_implementation="eager").eval()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    tokens, targets = (torch.from_numpy(batch[name]).long() for name in LEAVES[:2])
    for loss in losses:
        sgd.zero_grad()
        theirs = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
        theirs.backward()
        sgd.step()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert losses[0] - losses[-1] > 0.01
    for name, value in model.state_dict().items():
        assert torch.linalg.norm(saved[name] - value) <= 1e-5 * torch.linalg.norm(value), name
    assert jax.device_count() == ROWS
