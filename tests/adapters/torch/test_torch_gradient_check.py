"""The check at adaptation has no holes: NaN, state that a nudge would explain, gradients of what the trace calls unused."""

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_parity import assert_trains_as_pytorch

import panax
from panax.adapters.torch import gradient_check, task
from panax.core.errors import RecipeError
from panax.optim import Optax
from panax.train import StepConfig

BATCH = {"x": torch.linspace(-1, 1, 8 * 6).reshape(8, 6).sin(), "y": torch.arange(8) % 3}


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"])


class Unseen(nn.Module):
    """A factor of the gradient that changes with each forward, and that no state of Python's shows: a file's position."""

    def __init__(self, file, first, factor, nan=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(3) if nan else torch.ones(3))
        self.linear, self.file, self.scale = nn.Linear(6, 3), file, lambda place: first * factor**place

    def forward(self, x):
        self.file.read(1)
        h = self.linear(x)
        h = h + (h - h.detach()) * self.scale(self.file.tell())
        return h + torch.where(self.first > 0, self.first.sqrt(), 0.0 * self.first)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "read").write_bytes(bytes(100))
    with (tmp_path / "read").open("rb", buffering=0) as opened:
        yield opened


@pytest.mark.parametrize("nan", [False, True])
def test_a_gradient_that_is_nan_hides_no_other(nan, file):
    with pytest.raises(RecipeError, match="gradient of first is NaN" if nan else "the norm of the gradient of"):
        task(Unseen(file, 1.0, 50.0, nan), cross_entropy, BATCH)


def test_places_of_nan_are_compared(monkeypatch):
    """A wrong gradient is found beside one that is NaN in the same places, and one that is NaN elsewhere is refused."""
    nan, one = np.float32([np.nan, 1, np.inf]), np.float32([np.nan, 2, np.inf])
    assert gradient_check._distances({"a": nan}, {"a": nan}) == {"a": 0.0}
    assert gradient_check._distances({"a": one, "b": nan}, {"a": nan, "b": nan})["a"] == pytest.approx(1.0)
    assert not gradient_check._distances({"a": np.float32([1, 1, np.inf])}, {"a": nan})["a"] <= 1.0

    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.first = nn.Linear(6, 3), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.linear(x) + self.first.sqrt() * (self.first > 0)

    with pytest.raises(
        RecipeError, match="PyTorch's own gradient of first is NaN or infinite on the example, in 3 places"
    ):
        task(Rooted(), cross_entropy, BATCH)
    adapted = task(Rooted(), cross_entropy, BATCH, check=False)
    step = panax.compile_step(adapted, BATCH, Optax(transformation=optax.sgd(0.1)))
    assert float(step(step.init(), BATCH)[1]["skipped"]) == 1


def test_a_state_is_not_taken_for_amplified_rounding(file):
    """Its gradient triples with each forward: a nudged run differs as well, and PyTorch differs from itself without a nudge."""
    with pytest.raises(RecipeError, match="the norm of the gradient of"):
        task(Unseen(file, 1e-3, 3.0), cross_entropy, BATCH)


def test_what_the_trace_calls_unused_is_compared(monkeypatch):
    """If a trace would lose a parameter, PyTorch's gradient of it shows that."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            fake = type(x) is not torch.Tensor
            return self.linear(x) * (self.scale.detach() if fake else self.scale)

    with pytest.raises(RecipeError, match="the loss depends on scale in PyTorch and not as traced"):
        task(Hidden(), cross_entropy, BATCH)


def test_equal_values_in_topk_are_named(monkeypatch):
    """Of equal values PyTorch's choice is its own: here another one is planted."""
    from panax.adapters.torch.lowering import LOWERINGS

    operation = torch.ops.aten.topk.default
    usual = LOWERINGS[operation]
    monkeypatch.setitem(
        LOWERINGS, operation, lambda *args, **kwargs: [each[:, ::-1] for each in usual(*args, **kwargs)]
    )

    def loss(module, batch):
        best = module(batch["x"]).topk(2)[0]
        return (best * torch.tensor([1.0, 3.0])).mean()

    with pytest.raises(RecipeError, match=r"or it uses torch\.topk on equal values"):
        task(nn.Linear(6, 3), loss, BATCH)


def test_regions_of_a_profiler_compute_nothing():
    class Profiled(nn.Linear):
        def forward(self, x):
            with torch.profiler.record_function("linear"):
                return super().forward(x)

    module = Profiled(6, 3)
    assert_trains_as_pytorch(task(module, cross_entropy, BATCH), module, cross_entropy, BATCH)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", ["lstm", "projected", "gru", "rnn", "under two names"])
def test_recurrent_layers_are_adapted(kind):
    """They list their weights again when these have changed, as stand-ins are."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layer = {"gru": nn.GRU, "rnn": nn.RNN}.get(kind, nn.LSTM)
            more = {"proj_size": 2} if kind == "projected" else {}
            self.layer = layer(3, 4, batch_first=True, **more)
            self.again = self.layer if kind == "under two names" else None
            self.head = nn.Linear(more.get("proj_size", 4), 3)

        def forward(self, x):
            return self.head((self.again or self.layer)(x.view(-1, 2, 3))[0].mean(1))

    module = Recurrent()
    weights = list(module.layer._flat_weights)
    adapted = task(module, cross_entropy, BATCH)
    assert all(a is b for a, b in zip(weights, module.layer._flat_weights, strict=True))
    assert not adapted.frozen_parameters
    assert_trains_as_pytorch(adapted, module, cross_entropy, BATCH)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_module_is_left_as_it_was():
    torch.manual_seed(0)
    module = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
    before = module(BATCH["x"])
    adapted = task(module, cross_entropy, BATCH)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert type(module(BATCH["x"])) is torch.Tensor and torch.equal(module(BATCH["x"]), before)
    assert_trains_as_pytorch(adapted, module, cross_entropy, BATCH)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_failed_adaptation_leaves_a_scripted_part_as_it_was():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.jit.script(nn.Linear(6, 3))

        def forward(self, x):
            h = self.part(x)
            return h if h.sum() > 0 else -h

    module = Whole()
    with pytest.raises(RecipeError, match=r"torch.where"):
        task(module, cross_entropy, BATCH)
    assert [type(p) for p in module.parameters()] == [nn.Parameter] * 2
    assert type(module(BATCH["x"])) is torch.Tensor


def test_sparse_products_in_the_loss_are_refused_in_words():
    with pytest.raises(RecipeError, match=r"the loss can't be traced.*Sparse"):
        task(
            nn.Linear(6, 3),
            lambda m, b: F.cross_entropy(torch.sparse.mm(torch.eye(8).to_sparse(), m(b["x"])), b["y"]),
            BATCH,
        )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(2, 2, 4, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(2, 3)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 3, dtype=torch.bool)
        hidden[:3, 2] = True
        return self.head(self.encoder(x.view(-1, 3, 2), src_key_padding_mask=hidden)[:, 0])


class Cumulative(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part = torch.compile(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), backend="eager")

    def forward(self, x):
        return self.part(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [Encoder, Cumulative, Compiled], ids=lambda kind: kind.__name__)
def test_fast_paths_of_pytorchs_are_left_and_evaluation_is_the_same(kind):
    module = kind()
    adapted = task(module, cross_entropy, BATCH)
    step = panax.compile_step(
        adapted,
        BATCH,
        Optax(transformation=optax.sgd(0.1)),
        config=StepConfig(clip_norm=None),
        devices=jax.devices()[:1],
    )
    state = step.init()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        state, _ = step(state, BATCH)
        module.train()
        optimizer.zero_grad()
        cross_entropy(module, BATCH).backward()
        optimizer.step()
    theirs = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        expected = float(cross_entropy(module, BATCH))
    actual = step.evaluate(state, [BATCH])["loss"]
    assert actual == pytest.approx(expected, rel=1e-5)
    for name, tensor in adapted.trained(state).state_dict().items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert torch.backends.mha.get_fastpath_enabled()


def test_both_parts_of_a_complex_gradient_are_compared(monkeypatch):
    from panax.adapters.torch.lowering import LOWERINGS

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=3)

    module = Spectral()
    assert_trains_as_pytorch(task(module, cross_entropy, BATCH), module, cross_entropy, BATCH)
    operation = torch.ops.aten._fft_r2c.default
    usual = LOWERINGS[operation]
    # What is real stays right: the check must see the other part.
    monkeypatch.setitem(LOWERINGS, operation, lambda *args, **kwargs: usual(*args, **kwargs).conj())
    with pytest.raises(RecipeError, match="in PyTorch and"):
        task(module, lambda m, b: m(b["x"]).square().mean() * 1e-3 + cross_entropy(m, b), BATCH)
