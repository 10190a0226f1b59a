"""Errors of a PyTorch trace that are silent without a check: each of these is right, or the module is refused."""

import warnings

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_parity import assert_same, assert_trains_as_pytorch, ours, theirs

import panax
from panax.adapters.torch import task
from panax.core.errors import RecipeError
from panax.mesh import MeshShape
from panax.optim import AdamW, Optax, Schedule

ROWS, WIDTH = 8, 16
ONE = MeshShape(replica=1, fsdp=1)


def vectors(rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, WIDTH, generator=generator)}


def squares(module, batch):
    return (module(batch["x"]) - batch["y"]).square().mean()


def step_of(adapted, batch=None, mesh=ONE, optimizer=None, **settings):
    devices = jax.devices()[:1] if mesh is ONE else None
    optimizer = optimizer or Optax(transformation=optax.sgd(0.1))
    return panax.compile_step(adapted, batch or vectors(), optimizer, mesh=mesh, devices=devices, **settings)


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on twice as large: no derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Everything(nn.Module):
    """`no_grad`, `detach`, a backward, a hook, in-place writes through views, tied weights, a plain tensor as a constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.constant = torch.linspace(0, 1, WIDTH)

    def forward(self, x):
        h = self.first(x) + self.constant
        with torch.no_grad():
            scale = h.abs().mean() + 1
        h = Straight.apply(h * 3) / scale
        h = h + h.detach() * h
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        half = h[:, : WIDTH // 2]
        half *= 2
        h[0].add_(1)
        return self.second(h)


def test_autograd_is_pytorchs_own():
    module = Everything()
    adapted = task(module, squares, vectors())
    assert list(adapted.model.initial[0]) == ["first.weight", "first.bias", "second.bias"]
    assert_trains_as_pytorch(adapted, module, squares, vectors())


def test_tied_weights_stay_tied():
    module = Everything()
    adapted = task(module, squares, vectors())
    step = step_of(adapted)
    state, _ = step(step.init(), vectors())
    before = module.first.weight.detach().clone()
    returned = adapted.trained(state)
    assert returned is module and module.second.weight is module.first.weight
    assert not torch.equal(module.first.weight, before)
    # And a new run begins where the first one began, though the module has moved.
    np.testing.assert_array_equal(np.asarray(step.init().params["first.weight"]), before.numpy())


class Order(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, zebra, apple):
        return (zebra * self.weight - 2 * apple).mean()


def test_leaves_of_one_shape_are_not_mixed_up():
    first, second = vectors().values()
    for batch in ({"zebra": first, "apple": second}, {"apple": second, "zebra": first}):
        module = Order()
        assert_trains_as_pytorch(task(module, None, batch), module, lambda m, b: m(**b), batch)


def test_a_tuple_a_list_and_one_tensor_are_batches_too():
    x, y = vectors().values()
    module = nn.Linear(WIDTH, WIDTH)
    as_pair = ours(task(module, nn.MSELoss(), (x, y)), (x, y))
    as_list = ours(task(module, lambda m, b: F.mse_loss(m(b[0]), b[1]), [x, y]), [x, y])
    assert_same(as_pair, as_list)
    assert_same(as_pair, theirs(module, lambda m, b: F.mse_loss(m(b[0]), b[1]), (x, y)))
    assert_same(ours(task(module, lambda m, x: m(x).sum(), x), x), theirs(module, lambda m, x: m(x).sum(), x))


def test_what_is_frozen_or_unused_stays():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.free, self.fixed, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.fixed.requires_grad_(False)

        def forward(self, x):
            return self.fixed(self.free(x))

    module = Parts()
    adapted = task(module, squares, vectors())
    assert any("spare.weight" in note for note in adapted.notes) and any(
        "requires_grad" in note for note in adapted.notes
    )
    step = step_of(adapted, optimizer=AdamW(schedule=Schedule(peak=0.1, warmup_steps=0), weight_decay=0.5))
    state = step.init()
    before = jax.tree.map(np.array, state.params)
    state, _ = step(state, vectors())
    moved = {name for name, leaf in state.params.items() if not np.array_equal(leaf, before[name])}
    assert moved == {"free.weight", "free.bias"}
    named = {name for name, _ in jax.tree_util.tree_flatten_with_path(state.optimizer_state)[0] if "spare" in str(name)}
    assert not named


def test_a_submodule_in_eval_stays_in_eval_and_a_module_in_eval_is_trained():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.up, self.norm, self.fixed = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.fixed(self.norm(self.up(x)))

    module = Normed()
    module.fixed.eval()
    adapted = task(module, squares, vectors())
    assert_trains_as_pytorch(adapted, module, squares, vectors())
    assert int(module.norm.num_batches_tracked) == 1 and int(module.fixed.num_batches_tracked) == 0
    assert not module.fixed.training and module.norm.training
    judged = Normed().eval()
    adapted = task(judged, squares, vectors())
    assert not judged.training and any("eval()" in note for note in adapted.notes)
    assert_trains_as_pytorch(adapted, judged.train(), squares, vectors())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.reentrant = nn.ModuleList(Block() for _ in range(6)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_activation_checkpointing_takes_less_memory_and_changes_nothing():
    batch = {"x": torch.randn(256, 32, generator=torch.Generator().manual_seed(0))}
    result, peaks = {}, {}
    for reentrant in (None, False, True):
        adapted = task(Deep(reentrant), lambda m, b: m(b["x"]).square().mean(), batch, check=False)
        result[reentrant] = ours(adapted, batch)
        lowered = step_of(adapted, batch).compiled.lower({"x": batch["x"].numpy()})
        peaks[reentrant] = lowered.compile().memory_analysis().temp_size_in_bytes
    for reentrant in (False, True):
        assert_same(result[reentrant], result[None])
        # Six blocks keep two activations of 256 x 128 and masks each; checkpointed, only their inputs, and one block's at a time.
        assert peaks[reentrant] < 0.7 * peaks[None], peaks


def test_mixed_precision_is_autocast():
    module = Deep(None).eval()
    for block in module.blocks:
        block.drop.p = 0.0
    batch = {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(0))}

    def loss(module, batch):
        return module(batch["x"]).float().square().mean()

    adapted = task(module, loss, batch, compute_dtype="bfloat16")
    module.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = theirs(module, loss, batch)
    single = theirs(module, loss, batch)
    actual = ours(adapted, batch)
    apart = max(np.abs(actual[1][n] - g).max() / np.abs(g).max() for n, g in expected[1].items())
    from_single = max(np.abs(actual[1][n] - g).max() / np.abs(g).max() for n, g in single[1].items())
    # Eight bits of mantissa: a few roundings, not many; and not float32.
    assert apart < 2e-2 and from_single > 1e-3
    assert actual[0] == pytest.approx(expected[0], rel=1e-3) and actual[0] != pytest.approx(single[0], rel=1e-6)
    assert all(leaf.dtype == np.float32 for leaf in actual[1].values())


def test_several_losses_with_weights_and_metrics_in_micro_batches():
    """Each term is divided once by its weight in the whole batch, however the batch is cut."""
    module = nn.Linear(WIDTH, WIDTH)
    batch = vectors(16) | {"mask": (torch.arange(16) % 3 == 0).float()}

    def loss(module, batch):
        each = (module(batch["x"]) - batch["y"]).square().sum(1)
        terms = {"all": each.mean(), "masked": ((each * batch["mask"]).sum(), batch["mask"].sum())}
        return terms, {"size": each.mean(), "masked_size": ((each * batch["mask"]).sum(), batch["mask"].sum())}

    adapted = task(module, loss, batch)
    full, parts = (
        step_of(adapted, batch, config=panax.train.StepConfig(micro_batches=n, clip_norm=None)) for n in (1, 4)
    )
    (one, scalars), (four, in_parts) = (step(step.init(), batch) for step in (full, parts))
    each = (module(batch["x"]) - batch["y"]).square().sum(1).detach()
    masked = (each * batch["mask"]).sum() / batch["mask"].sum()
    for seen in (scalars, in_parts):
        assert float(seen["loss/all"]) == pytest.approx(float(each.mean()), rel=1e-5)
        assert float(seen["loss/masked"]) == pytest.approx(float(masked), rel=1e-5) == float(seen["masked_size"])
        assert float(seen["loss"]) == pytest.approx(float(each.mean() + masked), rel=1e-5)
    for name, leaf in one.params.items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(four.params[name]), rtol=1e-5, atol=1e-6)


def test_micro_batches_draw_their_own_masks():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    same = {name: leaf[:1].repeat(ROWS, 1) for name, leaf in vectors().items()}
    adapted = task(module, lambda m, b: m(b["x"]).sum(1).mean(), same)
    step = step_of(adapted, same, config=panax.train.StepConfig(micro_batches=ROWS))
    rows = {}
    for row in range(ROWS):
        key = jax.random.fold_in(step.init().step_key, row)
        rows[row] = ours(adapted, {name: leaf[:1] for name, leaf in same.items()}, key)[0]
    assert len({round(value, 5) for value in rows.values()}) > 1
    _, scalars = step(step.init(), same)
    assert float(scalars["loss"]) == pytest.approx(np.mean(list(rows.values())), rel=1e-5)


def test_modules_on_the_meta_device_are_read_slice_by_slice(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from panax.adapters.torch.state import weights

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    module = LlamaForCausalLM(config)
    save_file({name: p.detach() for name, p in module.named_parameters()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        hollow = LlamaForCausalLM(config)
    ids = torch.arange(64).reshape(8, 8)
    batch = {"input_ids": ids, "labels": ids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = task(hollow, None, batch, weights=str(tmp_path))
    assert "not compared with PyTorch" in str([w.message for w in caught]) and "meta" in " ".join(adapted.notes)
    read: list[tuple[int, ...]] = []
    usual = weights.StoredArray.__getitem__
    monkeypatch.setattr(
        weights.StoredArray, "__getitem__", lambda self, i: (lambda a: read.append(a.shape) or a)(usual(self, i))
    )
    step = step_of(adapted, batch, MeshShape(fsdp=4, tensor=2))
    state = step.init()
    assert max(np.prod(shape) for shape in read) <= 64 * 32 / 8
    for name, p in module.named_parameters():
        np.testing.assert_array_equal(np.asarray(state.params[name]), p.detach().numpy())
    _, scalars = step(state, batch)
    assert float(scalars["loss"]) == pytest.approx(float(module(**batch).loss.detach()), rel=1e-5)
    filled = adapted.trained(step.init())
    assert filled is hollow and torch.equal(filled.lm_head.weight, module.lm_head.weight)


def test_a_hollow_modules_initialization_is_drawn_in_shards():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(32)
            self.scale = nn.Parameter(torch.empty(64))

        def initialize(self):
            nn.init.trunc_normal_(self.embed.weight, std=0.5, a=-1, b=1)
            self.norm.reset_parameters()
            self.scale.data[:32] = 2.0
            self.scale.data[32:] = 3.0

        def forward(self, tokens):
            return self.head(self.norm(self.embed(tokens))) * self.scale

    with torch.device("meta"):
        hollow = Tied()
    batch = (torch.arange(64) % 64, (torch.arange(64) + 1) % 64)
    with pytest.warns(UserWarning, match="was not compared with PyTorch: its parameters are on the meta device"):
        adapted = task(hollow, nn.CrossEntropyLoss(), batch, initialize=Tied.initialize)
    one, sharded = step_of(adapted, batch), step_of(adapted, batch, MeshShape(fsdp=4, tensor=2))
    states = one.init(7), sharded.init(7)
    for a, b in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(states[1].params)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    weight = np.asarray(states[0].params["embed.weight"])
    # A normal of deviation 0.5 cut off at two deviations has 0.4398; 2,048 draws tell it to 0.007.
    assert abs(weight.std() - 0.4398) < 0.03 and np.abs(weight).max() <= 1.0 and abs(weight.mean()) < 0.04
    assert np.asarray(states[0].params["scale"]).tolist() == [2.0] * 32 + [3.0] * 32
    assert np.asarray(states[0].model_state["norm.running_var"]).tolist() == [1.0] * 32
    assert not np.array_equal(weight, np.asarray(one.init(8).params["embed.weight"]))
    state, _ = one(states[0], batch)
    filled = adapted.trained(state)
    assert filled.head.weight is filled.embed.weight and not filled.embed.weight.is_meta
    with torch.device("meta"):
        hollow = Tied()
    with pytest.raises(RecipeError, match="initialize= leaves scale as it is, empty"):
        task(
            hollow,
            nn.CrossEntropyLoss(),
            batch,
            initialize=lambda m: (m.norm.reset_parameters(), m.embed.reset_parameters()),
        )


def test_debugging_runs_the_modules_own_code():
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.linear(x)
            if panax.is_debugging():
                seen.append(float(h.abs().max()))
            return h

    module = Watched()
    adapted = task(module, squares, vectors())
    from panax.train import Program
    from panax.train.debug import DebugStep

    program = Program.create(adapted.debug_variant(), Optax(transformation=optax.sgd(0.1)), num_steps=1)
    debug = DebugStep(program, {"x": ("batch", None), "y": ("batch", None)})
    with torch.no_grad():
        largest = float(module.linear(vectors()["x"]).abs().max())
    _, scalars = debug(debug.init(0), debug.put(vectors()))
    assert seen == [pytest.approx(largest, rel=1e-6)]
    compiled = step_of(adapted)
    assert float(compiled(compiled.init(), vectors())[1]["loss"]) == pytest.approx(float(scalars["loss"]), rel=1e-5)


def test_fit_takes_a_data_loader_and_continues(tmp_path):
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    adapted = task(module, nn.CrossEntropyLoss(), next(iter(loader)))

    def run(num_steps, folder):
        experiment = panax.Experiment(
            task=adapted, data=loader, held_out=loader, num_steps=num_steps, directory=str(tmp_path / folder),
            optimizer=AdamW(schedule=Schedule(peak=3e-2, warmup_steps=0, decay="constant")), mesh=MeshShape(fsdp=4, tensor=2),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return panax.fit(experiment, say=lambda line: None)

    assert panax.Experiment(task=adapted, data=loader).folder == "runs/sequential"
    straight, _, resumed = run(24, "a"), run(12, "b"), run(24, "b")
    assert straight.evaluation["loss"] < 0.5
    for a, b in zip(jax.tree.leaves(straight.state), jax.tree.leaves(resumed.state)):
        np.testing.assert_array_equal(*map(np.asarray, map(_plain, (a, b))))
    trained = adapted.trained(resumed.state).eval()
    assert float(F.cross_entropy(trained(x), data.tensors[1]).detach()) == pytest.approx(
        resumed.evaluation["loss"], rel=1e-4
    )


def _plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
