"""Tensors of a module that a trace can't see, by memory, by objects that hold them, or past the graph, is refused or "
"followed."""

import argparse
import operator
import re

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_parity import assert_trains_as_pytorch

import panax
from panax.adapters.torch import task
from panax.core.errors import RecipeError
from panax.optim import Optax
from panax.train import StepConfig

BATCH = {"x": torch.linspace(-1, 1, 8 * 6).reshape(8, 6).sin(), "y": torch.arange(8) % 3}


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"])


class Net(nn.Module):
    """A linear layer with an output that goes through `forward`, after `setup` has changed the module."""

    def __init__(self, forward=lambda self, h, x: h, setup=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(6, 3), forward
        if setup is not None:
            setup(self)

    def forward(self, x):
        return self.function(self, self.linear(x), x)


def refused(module, loss=cross_entropy, **arguments):
    with pytest.raises(RecipeError) as caught:
        task(module, loss, BATCH, **arguments)
    return str(caught.value)


def trains(module, loss=cross_entropy):
    adapted = task(module, loss, BATCH)
    assert_trains_as_pytorch(adapted, module, loss, BATCH)
    return adapted


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


def test_parameters_that_share_memory_are_refused():
    message = refused(Autoencoder(), lambda m, b: (m(b["x"]) - b["x"]).square().mean())
    assert "encoder.weight and decoder.weight share memory" in message and "second.weight = first.weight" in message
    with torch.device("meta"):
        hollow = Autoencoder()
    message = refused(hollow, lambda m, b: m(b["x"]).mean(), initialize=lambda m: m.apply(_initialize), check=False)
    assert "share memory" in message

    def assigned(self):
        self.head = nn.Linear(6, 3, bias=False)
        self.head.weight.data = self.linear.weight.data

    assert "head.weight share memory" in refused(Net(lambda self, h, x: h + self.head(x), assigned))

    def of_numpy(self):
        values = np.zeros((4, 6), np.float32)
        self.linear.weight = nn.Parameter(torch.from_numpy(values[:3]))
        self.more = nn.Parameter(torch.from_numpy(values[2:]))

    assert "share memory" in refused(Net(lambda self, h, x: h + self.more.sum(), of_numpy))


def _initialize(part):
    if isinstance(part, nn.Linear):
        part.reset_parameters()


def test_buffers_that_share_memory_with_what_moves_are_refused():
    first = Net(
        lambda self, h, x: h + self.row.sum(), lambda self: self.register_buffer("row", self.linear.weight.data[0])
    )
    assert "row and linear.weight share memory" in refused(first)

    def two(self):
        tensor = torch.zeros(3)
        self.register_buffer("whole", tensor)
        self.register_buffer("part", tensor[:2])

    def moving(self, h, x):
        self.whole += h.detach().mean(0)
        return h + self.part.sum()

    assert "share memory" in refused(Net(moving, two))
    trains(Net(lambda self, h, x: h * (1 + self.whole) + self.part.sum(), two))  # constants may


def test_disjoint_views_of_one_tensor_train():
    def one_vector(self):
        vector = torch.randn(21)
        self.linear.weight, self.linear.bias = nn.Parameter(vector[:18].view(3, 6)), nn.Parameter(vector[18:])

    def interleaved(self):
        matrix = torch.randn(3, 7)
        self.linear.weight, self.linear.bias = nn.Parameter(matrix[:, :6]), nn.Parameter(matrix[:, 6])

    for setup in (one_vector, interleaved):
        trains(Net(setup=setup))


def test_an_array_of_a_parameters_memory_is_refused():
    module = Net(lambda self, h, x: h + float(self.array.sum()))
    module.array = module.linear.weight.detach().numpy()[1:]
    assert "holds a view of a parameter or buffer" in refused(module)


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 3))

    def forward(self, outputs, targets):
        return (outputs - self.centers[targets]).square().mean()


def test_parameters_of_a_criterion_are_refused():
    criterion = Centers()
    message = refused(nn.Linear(6, 3), lambda m, b: criterion(m(b["x"]), b["y"]))
    assert "a parameter that is not the module's: function" in message and "'criterion.centers', [3, 3]" in message
    assert "module.criterion = criterion" in message
    with pytest.raises(RecipeError, match="the loss, 'centers'"):
        task(nn.Linear(6, 3), criterion, (BATCH["x"], BATCH["y"]))
    criterion.requires_grad_(False)
    trains(nn.Linear(6, 3), lambda m, b: criterion(m(b["x"]), b["y"]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_parameters_in_objects_of_libraries_are_followed():
    """A prior that is made once of two parameters, and parameters in a namespace."""

    def prior(self):
        self.mean, self.scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        self.prior = torch.distributions.Normal(self.mean, self.scale, validate_args=False)

    loss = lambda m, b: cross_entropy(m, b) - m.prior.log_prob(m(b["x"])).mean()  # noqa: E731
    adapted = trains(Net(setup=prior), loss)
    assert not adapted.frozen_parameters and not adapted.notes

    def computed(self):
        self.mean, self.scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.prior = torch.distributions.Normal(self.mean, self.scale.exp(), validate_args=False)

    assert "a tensor computed from one" in refused(Net(setup=computed), loss)

    def hidden(self):
        """In an object of C's, which nothing can look into."""
        self.scale = nn.Parameter(torch.zeros(3))
        self.scaled = operator.methodcaller("mul", self.scale.exp())

    message = refused(Net(lambda self, h, x: self.scaled(h), hidden))
    assert "the parameter 'scale' by way of a tensor that was computed from it before" in message

    def namespace(self):
        self.scale = nn.Parameter(torch.ones(3))
        self.options = argparse.Namespace(scale=self.scale)

    assert not trains(Net(lambda self, h, x: h * self.options.scale, namespace)).frozen_parameters


def test_tensors_outside_are_noted_and_may_not_move():
    teacher = nn.Linear(6, 3)
    module = nn.Linear(6, 3)
    loss = lambda m, b: F.mse_loss(m(b["x"]), teacher(b["x"]).detach())  # noqa: E731
    adapted = task(module, loss, BATCH)
    assert any("constants of every step, which a loop can't change: 2 of the tensors" in note for note in adapted.notes)
    assert any("'teacher.weight'" in note for note in adapted.notes)
    step = panax.compile_step(adapted, BATCH, Optax(transformation=optax.sgd(0.1)))
    state, _ = step(step.init(), BATCH)
    adapted.trained(state)
    teacher.weight.data.lerp_(module.weight.data, 0.3)
    with pytest.raises(RecipeError, match=r"not the module's \(.*'teacher.weight'\) was changed after"):
        adapted.trained(state)
    unchecked = task(module, loss, BATCH, check=False)
    teacher.bias.data.zero_()
    assert unchecked.trained(state) is module


def sets_data(self, h, x):
    self.linear.weight.data = F.normalize(self.linear.weight.data, dim=1)
    return self.linear(x)


def sets_buffers_data(self, h, x):
    self.kept.data = self.kept + 1
    return h * self.kept


def reads_grad(self, h, x):
    return h if self.linear.weight.grad is None else h * 2


def adds_hooks(self, h, x):
    self.linear.weight.register_hook(lambda gradient: gradient / 2)
    return h


def writes_an_attribute(self, h, x):
    self.plain.data.mul_(0.9)
    return h * self.plain


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (sets_data, "it assigns .data of the parameter 'linear.weight'"),
        (sets_buffers_data, "it assigns .data of a tensor"),
        (reads_grad, "it uses .grad of the parameter 'linear.weight'"),
        (adds_hooks, "it adds a hook to the parameter 'linear.weight' in each forward"),
        (writes_an_attribute, "changes the tensor 'plain' in each forward.*make it a buffer"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_leaves_no_trace_in_a_graph_is_refused_with_its_line(forward, message):
    def setup(self):
        self.register_buffer("kept", torch.ones(3))
        self.plain = torch.ones(3)

    found = refused(Net(forward, setup))
    assert re.search(message, found), found
    assert forward is writes_an_attribute or "test_torch_outside.py:" in found


def test_hooks_on_activations_and_cleared_gradients_are_fine():
    def forward(self, h, x):
        self.linear.weight.grad = None
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return h

    trains(Net(forward))


def test_a_buffer_of_a_criterion_that_moves_is_named():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, outputs, targets):
            loss = F.cross_entropy(outputs - self.center, targets)
            self.center.lerp_(outputs.detach().mean(0), 0.1)
            return loss

    criterion = Centered()
    message = refused(nn.Linear(6, 3), lambda m, b: criterion(m(b["x"]), b["y"]))
    assert "'criterion.center' in each forward, a buffer of a module that is not" in message
    assert "module.criterion = criterion" in message


def test_the_strides_of_the_example_are_kept():
    module = Net(lambda self, h, x: h * (2.0 if x.is_contiguous() else 1.0))
    transposed = {"x": BATCH["x"].t().contiguous().t(), "y": BATCH["y"]}
    adapted = task(module, cross_entropy, transposed)
    assert_trains_as_pytorch(adapted, module, cross_entropy, transposed)
    program = adapted.model.evaluate.__self__.of({"x": (4, 6), "y": (4,)}, train=True)
    assert not any("mul" in str(node.target) and 2.0 in node.args for node in program.forward)
    step = panax.compile_step(
        adapted,
        transposed,
        Optax(transformation=optax.sgd(0.1)),
        config=StepConfig(micro_batches=2, clip_norm=None),
        devices=jax.devices()[:1],
    )
    _, metrics = step(step.init(), transposed)
    assert float(metrics["loss"]) == pytest.approx(float(cross_entropy(module, transposed).detach()), rel=1e-5)
