"""From released weights through sharded training steps and back to `transformers`."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from family_examples import VOCABULARY
from huggingface_examples import EAGER, LENGTH, OTHERS, Example, make_example

from panax.adapters.huggingface import load, save
from panax.mesh import MeshShape, Placement
from panax.optim import Schedule, Sgd
from panax.train import CompiledStep, Program, StepConfig

ROWS, RATE = 8, 0.1
LEAVES = ("tokens", "targets", "loss_mask")


def test_trains_on_from_their_weights_as_they_would(folder_of_examples: Path, tmp_path: Path) -> None:
    check_training(make_example("qwen3", folder_of_examples), jax.device_count(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_families_train_as_they_would(name: str, folder_of_examples: Path, tmp_path: Path) -> None:
    check_training(make_example(name, folder_of_examples), 1, tmp_path)


def check_training(example: Example, devices: int, folder: Path) -> None:
    """Take three steps here and with PyTorch, and compare losses and the weights that are exported."""
    task, moe = example.task, example.task.model.feed_forward
    if moe is not None:
        # Theirs has no losses of its routers, and no biases that move.
        model = dataclasses.replace(task.model, feed_forward=dataclasses.replace(moe, balance=0.0, bias_rate=0.0))
        task = dataclasses.replace(task, model=model)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) for name in LEAVES[:2]}
    batch["loss_mask"] = np.ones((ROWS, LENGTH), np.float32)
    optimizer = Sgd(schedule=Schedule(peak=RATE, decay="constant"))
    program = Program.create(task, optimizer, num_steps=10, config=StepConfig(clip_norm=None))
    placement = Placement.create(MeshShape(fsdp=devices), devices=jax.devices()[:devices])
    step = CompiledStep(program, placement, dict.fromkeys(LEAVES, ("batch", "seq")))
    state = step.init(0)
    params, model_state = load(example.folder, task, state.params, state.model_state)
    state = dataclasses.replace(state, params=params, model_state=model_state)
    losses = []
    for _ in range(3):
        state, scalars = step(state, step.put(batch))
        losses.append(float(scalars["loss"]))
    save(folder, state.params, state.model_state, model_type=example.family)

    model = transformers.AutoModelForCausalLM.from_pretrained(example.folder, **EAGER).eval()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    tokens, targets = (torch.from_numpy(batch[name]).long() for name in LEAVES[:2])
    for loss in losses:
        sgd.zero_grad()
        theirs = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
        theirs.backward()
        sgd.step()
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    # Logits that are divided by 5 learn more slowly.
    assert losses[0] - losses[-1] > 0.005
    for name, value in model.state_dict().items():
        assert torch.linalg.norm(saved[name] - value) <= 1e-5 * torch.linalg.norm(value), name
    assert jax.device_count() == ROWS
