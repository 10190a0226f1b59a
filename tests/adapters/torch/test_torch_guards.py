"""An index out of range and an integer that 32 bits can't hold end a run, where PyTorch would raise or compute in 64 bits."""

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panax
from panax.adapters.torch import task
from panax.core.errors import DataError, RecipeError
from panax.mesh import MeshShape
from panax.optim import Optax
from panax.train import StepConfig

ROWS, WIDTH, CLASSES = 8, 4, 6
GOOD = torch.arange(ROWS) % CLASSES


class Addressed(nn.Module):
    """A table of which rows are read in one way or another."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.read = nn.Embedding(CLASSES, WIDTH), read

    def forward(self, i):
        return self.read(self.table.weight, i)


def scattered(w, i):
    return torch.zeros(CLASSES, ROWS).scatter(0, i[None], w.sum() * torch.ones(1, ROWS))


READ = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding_bag": lambda w, i: F.embedding_bag(i[:, None], w),
    "index_select": lambda w, i: w.index_select(0, i),
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, WIDTH)),
    "index": lambda w, i: w[i],
    "index_add": lambda w, i: torch.zeros(CLASSES, WIDTH).index_add(0, i, w.sum() * torch.ones(ROWS, WIDTH)),
    "scatter": scattered,
    "nll_loss": lambda w, i: F.cross_entropy((w.sum() * torch.ones(ROWS, CLASSES)), i, reduction="none"),
    "within": lambda w, i: F.one_hot(i, CLASSES).float() @ w,
    "remainder": lambda w, i: w[(7 % (i + 10)) % CLASSES],
}


def mean(module, batch):
    return module(batch["i"]).square().mean()


def stepping(adapted, batch, mesh=None, **settings):
    devices = None if mesh else jax.devices()[:1]
    return panax.compile_step(
        adapted, batch, Optax(transformation=optax.sgd(0.1)), mesh=mesh or MeshShape(), devices=devices,
        config=StepConfig(**settings),
    )  # fmt: skip


@pytest.mark.parametrize("way", READ)
def test_an_index_out_of_range_ends_the_run(way):
    module = Addressed(READ[way])
    step = stepping(task(module, mean, {"i": GOOD}, check=way == "embedding"), {"i": GOOD})
    state, _ = step(step.init(), {"i": GOOD})
    before = jax.device_get(state.params["table.weight"])
    bad = GOOD.clone()
    bad[5] = -10 if way == "remainder" else CLASSES + 3
    with pytest.raises((IndexError, RuntimeError)):
        module(bad)
    state, metrics = step(state, {"i": bad})
    assert all(np.ndim(value) == 0 for value in metrics.values())
    with pytest.raises(DataError) as caught:
        step.raise_faults()
    assert "the batch of step 2" in str(caught.value) and way in str(caught.value)
    expected = "divides an integer by 0" if way == "remainder" else f"to {CLASSES - 1}, got {CLASSES + 3};"
    assert expected in str(caught.value) and ("module (root) (Addressed)" in str(caught.value) or way == "within")
    np.testing.assert_array_equal(jax.device_get(state.params["table.weight"]), before)
    state, _ = step(state, {"i": GOOD})
    step.raise_faults()


def test_what_is_allowed_passes():
    """Negative indices where PyTorch takes them, ignored labels, and positions that are known to fit, which are not watched."""

    def loss(module, batch):
        w = module.table.weight
        return (
            F.cross_entropy(w.T[:, : CLASSES - 1] + w[batch["i"] - CLASSES].sum(), batch["y"])
            + w[torch.arange(3)].sum()
        )

    batch = {"i": torch.arange(WIDTH), "y": torch.tensor([0, -100, 4, 1])}
    adapted = task(Addressed(READ["index"]), loss, batch)
    step = stepping(adapted, batch)
    _, metrics = step(step.init(), batch)
    step.raise_faults()
    assert int(metrics["skipped"]) == 0
    known, x = torch.arange(3), {"x": torch.ones(4)}
    alone = task(Addressed(READ["index"]), lambda m, b: (m.table.weight[known].sum() * b["x"]).sum(), x)
    step = stepping(alone, x)
    assert "faults" not in step.compiled(step.init(), step.compiled.put({"x": x["x"].numpy()}))[1]


def test_on_a_mesh_in_micro_batches_and_in_evaluation():
    adapted = task(Addressed(READ["embedding"]), mean, {"i": GOOD}, check=False)
    step = stepping(adapted, {"i": GOOD}, MeshShape(fsdp=2, tensor=2, replica=2), micro_batches=1)
    parts = stepping(adapted, {"i": GOOD}, micro_batches=4)
    bad = torch.where(torch.arange(ROWS) == 6, -1, GOOD)
    for each in (step, parts):
        state, _ = each(each.init(), {"i": bad})
        with pytest.raises(DataError, match=r"step 1: an index of torch's embedding .* expected 0 to 5, got -1"):
            each(state, {"i": GOOD})
    with pytest.raises(DataError, match="the held-out data: an index"):
        parts.evaluate(parts.init(), [{"i": GOOD}, {"i": bad}])


def test_a_run_ends_with_the_batch_and_the_place(tmp_path):
    adapted = task(Addressed(READ["embedding"]), mean, {"i": GOOD}, check=False)
    data = [{"i": GOOD}, {"i": GOOD}, {"i": GOOD + 1}, {"i": GOOD}, {"i": GOOD}]
    experiment = panax.Experiment(task=adapted, data=data, num_steps=5, directory=str(tmp_path), mesh=MeshShape())
    with pytest.raises(DataError, match=r"the batch of step 3: an index of torch's embedding in module .* got 6;"):
        panax.fit(experiment, say=lambda line: None, devices=jax.devices()[:1])


LARGE = {
    "mul": lambda w, i: w[(i * 100_000_000) % CLASSES],
    "sum": lambda w, i: w[(i * 100_000).repeat(300).sum()[None] % CLASSES],
    "add": lambda w, i: w[(i * 4_000_000 + 2_000_000_000) % CLASSES],
    "_to_copy": lambda w, i: w[(i.float() * 1e8).long() % CLASSES],
    "__lshift__": lambda w, i: w[((i << 28) ^ i) % CLASSES],
    "bitwise_left_shift": lambda w, i: w[torch.bitwise_left_shift(i, i) % CLASSES],
    "scatter_add": lambda w, i: w[_added(i, lambda x, at, v: x.scatter_add(0, at, v))],
    "scatter_reduce": lambda w, i: w[_added(i, lambda x, at, v: x.scatter_reduce(0, at, v, "sum"))],
    "index_add": lambda w, i: w[_added(i, lambda x, at, v: x.index_add(0, at, v))],
    "index_put": lambda w, i: w[_added(i, lambda x, at, v: x.index_put((at,), v, accumulate=True))],
    "prod": lambda w, i: w[i.prod()[None] % CLASSES],
}


def _added(i, add):
    """Values that are small one by one, added up in one place."""
    values = (i * 12_500_000).clamp(max=500_000_000)
    return add(torch.zeros(2, dtype=torch.int64), torch.zeros_like(i), values)[:1] % CLASSES


@pytest.mark.parametrize("way", LARGE)
def test_an_integer_beyond_32_bits_ends_the_run(way):
    module = Addressed(LARGE[way])
    small, large = torch.ones(ROWS, dtype=torch.int64), torch.full((ROWS,), 40)
    step = stepping(task(module, mean, {"i": small}, check=False), {"i": small})
    state, _ = step(step.init(), {"i": small})
    step(state, {"i": large})
    with pytest.raises(
        DataError, match=rf"{way} in module .* makes an integer of 64 bits .* at most 2147483647, got \d.*e?\+?"
    ):
        step.raise_faults()
    with pytest.raises(DataError, match=r"the example: .* makes an integer of 64 bits"):
        task(module, mean, {"i": large})


def test_bits_of_64_bit_numbers_are_refused():
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(RecipeError, match=r"view\(dtype\) in module .* reads the bits of torch.(int|float)64"):
            task(Addressed(lambda w, i, dtype=dtype: w[i.view(dtype)[:ROWS].long() % CLASSES]), mean, {"i": GOOD})


def test_numbers_and_constants_beyond_32_bits_are_refused():
    with pytest.raises(RecipeError, match=r"mul in module .* uses the number 2654435761, and integers have 32 bits"):
        task(Addressed(lambda w, i: w[(i * 2654435761) % CLASSES]), mean, {"i": GOOD})
    module = Addressed(READ["index"])
    module.register_buffer("offset", torch.tensor(2**40))
    with pytest.raises(RecipeError, match="offset holds 1099511627776, and integers have 32 bits"):
        task(module, mean, {"i": GOOD})
    with pytest.raises(RecipeError, match=r"Addressed\) can't be run on the example, at .*IndexError"):
        task(Addressed(READ["embedding"]), mean, {"i": GOOD + 1})


def test_a_cast_of_infinity_that_is_selected_away_is_no_fault():
    """As T5's buckets of relative positions have: the logarithm of 0 as an integer, to which a small one is added."""

    def bucket(w, i):
        far = 2 + (i.float().log() * 2).long()
        return w[torch.where(i < 2, i, torch.minimum(far, torch.full_like(far, CLASSES - 1)))]

    module = Addressed(bucket)
    step = stepping(task(module, mean, {"i": GOOD}), {"i": GOOD})
    step(step.init(), {"i": GOOD})
    step.raise_faults()


DOUBLES = {
    "leaf": (lambda w, t: w[0] * (t - t[0]).float()[:, None], torch.float64, "batch.'t'. is float64"),
    "integer": (lambda w, t: w[0] * (t.double() - 1.5).float()[:, None], torch.int64, "makes a float64 of an integer"),
}


class Timed(Addressed):
    def forward(self, t):
        return self.read(self.table.weight, t)


@pytest.mark.parametrize("way", DOUBLES)
def test_a_double_that_float32_can_not_distinguish_from_its_neighbours_ends_the_run(way):
    read, dtype, message = DOUBLES[way]
    small = {"t": torch.arange(ROWS).to(dtype)}
    loss = lambda m, b: m(b["t"]).square().mean()  # noqa: E731
    adapted = task(Timed(read), loss, small)
    assert any("float64 is computed in float32" in note for note in adapted.notes)
    step = stepping(adapted, small)
    state, _ = step(step.init(), small)
    step.raise_faults()
    step(state, {"t": small["t"] + 1_700_000_000})
    with pytest.raises(DataError, match=rf"{message}.*computed in float32 here, with exact integers up to 16777216"):
        step.raise_faults()


def test_doubles_that_are_cast_or_small_are_fine():
    seconds = {"t": torch.arange(ROWS, dtype=torch.float64) + 1_700_000_000}
    loss = lambda m, b: m(b["t"]).square().mean()  # noqa: E731
    adapted = task(Timed(lambda w, t: w[0] * t.float()[:, None] * 1e-9), loss, seconds)
    assert not adapted.notes

    class Counting(Timed):
        def __init__(self, first):
            super().__init__(None)
            self.register_buffer("seen", torch.tensor(first, dtype=torch.float64))

        def forward(self, t):
            self.seen += 1
            return self.table.weight[0] * (1 + self.seen).float()

    assert any("seen" in note for note in task(Counting(2.0), loss, seconds).notes)
    with pytest.raises(DataError, match="the buffer seen is float64"):
        task(Counting(2.0**24), loss, seconds)


class Factored(nn.Module):
    """A Gaussian process's way out: more on the diagonal where the factorization fails."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.factor = nn.Linear(WIDTH, 3), factor

    def forward(self, x, k):
        h = self.linear(x)
        return h @ self.factor(h.T @ h + k.mean() * torch.eye(3))


def factors(a):
    try:
        return torch.linalg.cholesky(a)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(a + 5 * torch.eye(3))


def looks(a):
    found, info = torch.linalg.cholesky_ex(a)
    return torch.where((info == 0)[..., None, None], torch.nan_to_num(found), a)


@pytest.mark.parametrize("way", ["cholesky", "inverse", "looked at"])
def test_a_matrix_that_can_not_be_factored_ends_the_run(way):
    good = {"x": torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin(), "k": torch.ones(ROWS)}
    factor = {
        "cholesky": factors,
        "inverse": lambda a: torch.linalg.inv(a - a * (a.diagonal().sum() < -5)),
        "looked at": looks,
    }[way]
    loss = lambda m, b: m(b["x"], b["k"]).square().mean()  # noqa: E731
    step = stepping(task(Factored(factor), loss, good), good)
    state, _ = step(step.init(), good)
    step(state, {**good, "k": torch.full((ROWS,), -30.0)})
    if way == "looked at":
        step.raise_faults()
        return
    what = "positive definite" if way == "cholesky" else "invertible"
    with pytest.raises(DataError, match=rf"is given matrices that are not {what}.*how many of the batch's: 1"):
        step.raise_faults()
