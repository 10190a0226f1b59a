"""What can't be right is refused when it is adapted, and a wrong call gets one message with the fix."""

import itertools
import os
import warnings

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import panax
from panax.adapters.torch import task
from panax.core.errors import DataError, RecipeError, TrainingError
from panax.mesh import MeshShape
from panax.optim import Optax

WIDTH = 8
ONE = MeshShape(replica=1, fsdp=1)
BATCH = {"x": torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)}


class Within(nn.Module):
    """A module with an inner part that runs `function(part, h)`."""

    def __init__(self, function):
        super().__init__()

        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

            def forward(self, x):
                return function(self, self.linear(x))

        self.inner = nn.Sequential(nn.ReLU(), Part())

    def forward(self, x):
        return self.inner(x)


def mean(module, batch):
    return module(batch["x"]).mean()


def refused(function):
    with pytest.raises(RecipeError) as caught:
        task(Within(function), mean, BATCH)
    return str(caught.value)


def test_control_flow_on_values_names_module_and_line():
    def branches(part, h):
        if h.sum() > 0:
            return h
        return -h

    message = refused(branches)
    assert "inner.1 (Part)" in message and "test_torch_rejections.py:" in message and "`if h.sum() > 0:`" in message
    assert "torch.where" in message


def test_a_selection_by_a_mask_is_refused():
    message = refused(lambda part, h: h[h > 0])
    assert "inner.1 (Part)" in message and "fixed shapes" in message


def test_a_value_as_a_number_is_refused():
    assert "one program for all values" in refused(lambda part, h: h * float(h.detach().abs().max()))


def test_an_operation_without_a_lowering_is_refused_by_name():
    message = refused(lambda part, h: torch.linalg.eigvalsh(h.T @ h))
    assert "linalg_eigh" in message and "panax.adapters.torch.register_lowering" in message


def test_a_tensor_kept_on_the_module_is_refused():
    def keeps(part, h):
        part.last = h
        return h

    message = refused(keeps)
    assert "inner.1" in message and "'last'" in message and "register_buffer" in message


def test_a_number_that_counts_forwards_is_refused():
    def counts(part, h):
        part.calls += 1
        return h * part.calls

    message = refused(counts)
    assert "inner.1" in message and "'calls'" in message and "register_buffer" in message


def test_a_number_that_is_set_once_is_a_cache_and_no_count():
    def caches(part, h):
        part.calls = h.shape[1]
        return h * part.calls

    assert task(Within(caches), mean, BATCH).name == "within"


def test_a_parameter_changed_in_place_is_refused():
    def clips(part, h):
        with torch.no_grad():
            part.linear.weight.clamp_(-0.1, 0.1)
        return h

    assert "inner.1.linear.weight" in refused(clips)


def test_what_differs_from_call_to_call_is_found_by_the_check(monkeypatch):
    draws = itertools.cycle((1, 2, 4, 8, 16))
    monkeypatch.setattr(os, "getppid", lambda: next(draws))
    message = refused(lambda part, h: h * os.getppid())
    assert "in PyTorch and" in message and "check=False" in message


def test_what_autograd_can_not_do_is_reported_with_the_line():
    def impossible(part, h):
        y = torch.sigmoid(h)
        y.add_(1)
        return y

    message = refused(impossible)
    assert "modified by an inplace operation" in message


def test_a_loss_that_is_no_scalar():
    with pytest.raises(RecipeError, match=r"float32\[4, 8\], which is not a scalar.*take its mean"):
        task(nn.Linear(WIDTH, WIDTH), lambda m, b: m(b["x"]), BATCH)
    with pytest.raises(RecipeError, match="is a str; expected a scalar"):
        task(nn.Linear(WIDTH, WIDTH), lambda m, b: "low", BATCH)
    with pytest.raises(RecipeError, match="without a loss, and no loss= is given"):
        task(nn.Linear(WIDTH, WIDTH), None, (BATCH["x"],))


def test_a_loss_without_gradient():
    with pytest.raises(RecipeError, match="does not depend on any trained parameter"):
        task(nn.Linear(WIDTH, WIDTH), lambda m, b: m(b["x"]).detach().mean(), BATCH)
    with pytest.raises(RecipeError, match="requires_grad=False; there is nothing to train"):
        task(nn.Linear(WIDTH, WIDTH).requires_grad_(False), mean, BATCH)


def test_a_criterion_on_three_leaves():
    with pytest.raises(RecipeError, match=r"criterion\(module\(inputs\), targets\), and the example has 3 leaves"):
        task(nn.Linear(WIDTH, WIDTH), nn.MSELoss(), (BATCH["x"],) * 3)


def test_modules_that_can_not_be_used():
    with pytest.raises(RecipeError, match=r"module is a type; expected a torch.nn.Module instance: call Linear\(...\)"):
        task(nn.Linear, mean, BATCH)
    with pytest.raises(RecipeError, match=r"weight is not initialized yet .a lazy module.; run the module once"):
        task(nn.LazyLinear(4), mean, BATCH)
    with FakeTensorMode():
        on_gpu = nn.Linear(WIDTH, WIDTH)
        on_gpu.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="cuda"))
    with pytest.raises(RecipeError, match=r"weight is on cuda:0; adapt it on the CPU \(module.cpu\(\)\)"):
        task(on_gpu, mean, BATCH)
    with pytest.raises(
        RecipeError, match="weight is on the meta device, which holds no values; pass initialize=, or weights="
    ):
        task(nn.Linear(WIDTH, WIDTH, device="meta"), mean, BATCH)
    with pytest.raises(RecipeError, match="weights= has no effect"):
        task(nn.Linear(WIDTH, WIDTH), mean, BATCH, weights="model.safetensors")
    with pytest.raises(RecipeError, match="did you mean 'bfloat16'"):
        task(nn.Linear(WIDTH, WIDTH), mean, BATCH, compute_dtype="bfloat")


def test_examples_that_can_not_be_used():
    module = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(RecipeError, match="example=None; pass a batch"):
        task(module, mean)
    with pytest.raises(RecipeError, match="is a scalar"):
        task(module, mean, {"x": torch.tensor(1.0)})
    with pytest.raises(RecipeError, match="differ in their first dimension"):
        task(module, mean, {"x": BATCH["x"], "y": torch.zeros(3)})
    with pytest.raises(RecipeError, match="leaf 'x' of the example is a str"):
        task(module, mean, {"x": "text"})


def test_batches_unlike_the_example():
    adapted = task(nn.Linear(WIDTH, WIDTH), mean, BATCH)

    def step(batch):
        step = panax.compile_step(
            adapted, batch, Optax(transformation=optax.sgd(0.1)), mesh=ONE, devices=jax.devices()[:1]
        )
        return step, step(step.init(), batch)[0]

    with pytest.raises(RecipeError, match=r"leaves \['x', 'y'\], the module was adapted to \['x'\]"):
        step({"x": BATCH["x"], "y": BATCH["x"]})
    with pytest.raises(RecipeError, match=r"batch\['x'\] is int32, the example's was float32"):
        step({"x": torch.zeros(4, WIDTH, dtype=torch.int64)})
    with pytest.raises(RecipeError, match=r"module \(root\) \(Linear\) can't be traced.*reduction dim, but got"):
        step({"x": torch.zeros(4, WIDTH + 1)})
    running, state = step(BATCH)
    with pytest.raises(TrainingError, match=r"batch\['x'\] was float32\[4, 8\] and is now float32\[8, 8\]"):
        running(state, {"x": torch.zeros(8, WIDTH)})


def test_a_loader_that_ends_early(tmp_path):
    adapted = task(nn.Linear(WIDTH, WIDTH), mean, BATCH)
    experiment = panax.Experiment(task=adapted, data=iter([BATCH] * 3), num_steps=5, directory=str(tmp_path), mesh=ONE)
    with warnings.catch_warnings(), pytest.raises(DataError, match=r"ended after 3 batches.*can't begin again"):
        warnings.simplefilter("ignore")
        panax.fit(experiment, say=lambda line: None, devices=jax.devices()[:1])


def test_patterns_of_sharding_that_match_nothing():
    with pytest.raises(RecipeError, match="matches no parameter"):
        task(nn.Linear(WIDTH, WIDTH), mean, BATCH, sharding={"*.wieght": ("embed", "ffn")})
    with pytest.raises(RecipeError, match="names the axis 'fnn'; did you mean 'ffn'"):
        task(nn.Linear(WIDTH, WIDTH), mean, BATCH, sharding={"weight": ("embed", "fnn")})


def test_where_a_check_can_not_be_made_it_is_reported(monkeypatch):
    from panax.adapters.torch import gradient_check

    monkeypatch.setattr(gradient_check, "free_bytes", lambda: 100)
    with pytest.warns(UserWarning, match="Linear was not compared with PyTorch: a check takes about"):
        adapted = task(nn.Linear(WIDTH, WIDTH), mean, BATCH)
    assert any("not compared" in note for note in adapted.notes)


def test_a_wrong_lowering_is_found_by_the_check(monkeypatch):
    """The check that every adaptation makes is one that can fail."""
    from panax.adapters.torch.lowering import LOWERINGS

    operation = torch.ops.aten.gelu_backward.default
    monkeypatch.setitem(LOWERINGS, operation, lambda out, g, x, **kwargs: g * 0.99)
    with pytest.raises(
        RecipeError, match=r"the norm of the gradient of (weight|bias) is .* in PyTorch and .* as traced"
    ):
        task(nn.Linear(WIDTH, WIDTH), lambda m, b: F.gelu(m(b["x"])).sum(), BATCH)


def test_a_model_that_amplifies_rounding_is_compared_with_itself(monkeypatch):
    """Halves of a loop that doubles every difference: both sides are right, and apart by more than the tolerance."""
    from panax.adapters.torch import gradient_check

    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = torch.sigmoid(self.linear(x))
            for _ in range(13):
                h = 3.99 * h * (1 - h)
            return h

    monkeypatch.setattr(gradient_check, "TOLERANCE", {None: 1e-5})
    monkeypatch.setattr(gradient_check, "LOSS_TOLERANCE", {None: 1e-2})
    assert task(Chaotic(), mean, BATCH).name == "chaotic"
    monkeypatch.setattr(gradient_check, "ROUNDING_MARGIN", 1e-9)
    with pytest.raises(RecipeError, match="the norm of the gradient of"):
        task(Chaotic(), mean, BATCH)


class Kinked(nn.Module):
    """A ReLU of which one unit is at zero exactly, whatever a nudge of the weights' last bits does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.up.weight[3] = 0.0
            self.up.bias[3] = 0.0

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def test_a_unit_that_rounding_flips_is_no_disagreement(monkeypatch):
    """A right model is accepted; one that is off by more than rounding, or has a wrong derivative elsewhere, is not."""
    from panax.adapters.torch.lowering import LOWERINGS

    addmm, slope = torch.ops.aten.addmm.default, torch.ops.aten.threshold_backward.default
    usual, usual_slope = LOWERINGS[addmm], LOWERINGS[slope]

    def rounding(by):
        return lambda out, *args, **kwargs: usual(out, *args, **kwargs) + (by if out.shape[-1] == WIDTH else 0.0)

    monkeypatch.setitem(LOWERINGS, addmm, rounding(1e-7))
    assert task(Kinked(), mean, BATCH).name == "kinked"
    monkeypatch.setitem(LOWERINGS, slope, lambda out, *args: usual_slope(out, *args) * 0.99)
    with pytest.raises(RecipeError, match="the norm of the gradient of"):
        task(Kinked(), mean, BATCH)
    monkeypatch.setitem(LOWERINGS, slope, usual_slope)
    monkeypatch.setitem(LOWERINGS, addmm, rounding(1e-4))
    with pytest.raises(RecipeError, match="the norm of the gradient of"):
        task(Kinked(), mean, BATCH)

    class Unseen(Kinked):
        """A value that the trace does not see is found beside a flip, too."""

        def forward(self, x):
            scale = 1.0 if torch.compiler.is_compiling() or type(x) is not torch.Tensor else 1.01
            return super().forward(x) + (scale - 1.0) * (self.up.weight - self.up.weight.detach()).sum()

    monkeypatch.setitem(LOWERINGS, addmm, rounding(1e-7))
    with pytest.raises(RecipeError, match="the norm of the gradient of"):
        task(Unseen(), mean, BATCH)


def test_arrays_of_numpy_are_examples_too():
    assert task(nn.Linear(WIDTH, WIDTH), mean, {"x": np.zeros((4, WIDTH), np.float32)}).name == "linear"
