"""Models that were written for PyTorch train here, unmodified, as they do there: dropout masks, statistics, experts and all."""

import jax
import numpy as np
import optax
import pytest
import torch
import zoo

import panax
from panax.adapters.torch import task
from panax.adapters.torch.state.random_ops import ReplayDrawsMode
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig

STEPS, RATE = 5, 0.05
# The float32 rounding of one loss and its gradients (1e-5, see tests/contracts/test_tasks.py), once for each step.
TOLERANCE = STEPS * 1e-5

QUICK = ("gpt2", "plain_resnet")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.MODELS]
)
def test_five_steps_are_pytorchs(name):
    module, loss, batch = zoo.build(name, "tiny")
    adapted = task(module, loss, batch)
    step = panax.compile_step(
        adapted,
        batch,
        Optax(transformation=optax.sgd(RATE)),
        mesh=MeshShape(replica=1, fsdp=1),
        devices=jax.devices()[:1],
        config=StepConfig(clip_norm=None),
    )
    state = step.init()
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for _ in range(STEPS):
        key = jax.random.fold_in(state.step_key, 0)
        state, scalars = step(state, batch)
        with ReplayDrawsMode(key):
            value = zoo.loss_of(loss)(module, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert float(scalars["loss"]) == pytest.approx(float(value.detach()), rel=TOLERANCE)
    buffers = {name: buffer.detach().numpy() for name, buffer in module.named_buffers()}
    for name, leaf in state.model_state.items():
        np.testing.assert_allclose(np.asarray(leaf), buffers[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "swin", "unet", "lstm"])
def test_sharded_is_unsharded(name):
    """Dropout included: its bits don't depend on the mesh."""
    module, loss, batch = zoo.build(name, "tiny")
    adapted = task(module, loss, batch)
    losses = {}
    for mesh in (MeshShape(replica=1, fsdp=1), MeshShape(fsdp=2, tensor=2), MeshShape(fsdp=1, replica=2, expert=2)):
        devices = jax.devices()[: max(1, mesh.fsdp) * mesh.replica * mesh.tensor * mesh.expert]
        step = panax.compile_step(
            adapted,
            batch,
            Optax(transformation=optax.sgd(RATE)),
            mesh=mesh,
            devices=devices,
            config=StepConfig(clip_norm=None),
        )
        state = step.init()
        seen = []
        for _ in range(3):
            state, scalars = step(state, batch)
            seen.append(float(scalars["loss"]))
        losses[str(mesh)] = seen
    first, *others = losses.values()
    for other in others:
        assert other == pytest.approx(first, rel=TOLERANCE)
