"""Hooks that a user has set: followed as PyTorch calls them, or refused by name."""

import jax
import optax
import pytest
import torch
from torch import nn
from torch_parity import assert_trains_as_pytorch

import panax
from panax.adapters.torch import task
from panax.adapters.torch.optimizers import from_torch
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig

ROWS, WIDTH = 8, 6
BATCH = {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)), "i": torch.arange(ROWS) % 4}
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]


def squares(module, batch):
    return (module(batch["i"]) - batch["x"]).square().mean()


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, i):
        return self.up(self.embed(i))


def trained(module, steps=3, **settings):
    """The module after a few steps, and its twin after as many in PyTorch's own loop."""
    adapted = task(module, squares, BATCH)
    step = panax.compile_step(
        adapted, BATCH, Optax(transformation=optax.sgd(0.5)), mesh=MeshShape(), config=StepConfig(clip_norm=None, **settings),
    )  # fmt: skip
    state = step.init()
    for _ in range(steps):
        state, _ = step(state, BATCH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(steps):
        squares(module, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.tensor(jax.device_get(leaf)) for name, leaf in state.params.items()}, dict(
        module.named_parameters()
    )


def assert_trains_alike(module, **settings):
    ours, theirs = trained(module, **settings)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_hook_on_a_parameter_is_followed():
    """A row of an embedding that a hook freezes stays, in every micro-batch."""
    module = Embedded()
    module.embed.weight.register_hook(lambda gradient: gradient * MASK)
    before = module.embed.weight[0].detach().clone()
    assert_trains_alike(module, micro_batches=1)
    assert torch.equal(module.embed.weight[0], before)


def test_a_hook_on_the_accumulated_gradient_is_followed():
    module = Embedded()

    def scale(parameter):
        parameter.grad *= 0.5
        parameter.grad[1] = 0.0

    module.embed.weight.register_post_accumulate_grad_hook(scale)
    adapted = task(module, squares, BATCH)
    assert module.embed.weight.grad is None
    config = StepConfig(micro_batches=2)
    step = panax.compile_step(adapted, BATCH, mesh=MeshShape(fsdp=4), devices=jax.devices()[:4], config=config)
    with pytest.raises(RecipeError, match=r"embed.weight has a hook on its accumulated gradient.*step.micro_batches=1"):
        step(step.init(), BATCH)
    assert_trains_alike(module)


@pytest.mark.parametrize("kind", ["optimizer", "parameter"])
def test_a_hook_that_steps_is_refused_by_name(kind):
    module = Embedded()
    before = module.embed.weight.detach().clone()

    def step_in_backward(parameter):
        if kind == "parameter":
            parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    module.embed.weight.register_post_accumulate_grad_hook(step_in_backward)
    with pytest.raises(RecipeError, match=r"step_in_backward.*embed.weight (changes|removes)"):
        task(module, squares, BATCH)
    assert torch.equal(module.embed.weight, before) and module.embed.weight.grad is None


def test_a_hook_that_keeps_gradients_is_refused():
    module, kept = Embedded(), []
    module.embed.weight.register_hook(lambda gradient: kept.append(gradient.norm()))
    with pytest.raises(RecipeError, match=r"function .* keeps a tensor in 'kept\[0\]'"):
        task(module, squares, BATCH)
    assert kept == []


def test_hooks_on_modules_are_followed():
    module = Embedded()
    module.up.register_forward_pre_hook(lambda part, inputs: (inputs[0] * 2,))
    module.up.register_forward_hook(lambda part, inputs, output: output + 1)
    module.up.register_full_backward_pre_hook(lambda part, gradients: tuple(g * 3 for g in gradients))
    module.up.register_full_backward_hook(lambda part, inputs, outputs: tuple(g * 0.5 for g in inputs))
    module.register_state_dict_pre_hook(lambda *_: None)
    assert_trains_as_pytorch(task(module, squares, BATCH), module, squares, BATCH)


def test_hooks_of_an_optimizer_are_refused():
    module = Embedded()
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        getattr(optimizer, register)(lambda *_: None)
        with pytest.raises(RecipeError, match=rf"has a hook .*{register}"):
            from_torch(optimizer, module)
