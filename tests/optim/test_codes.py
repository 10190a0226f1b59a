"""Moments in 8 bits: torchao's, the same on every mesh, as small as declared, and saved as they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchao.optim
from optimized import axes_of, run
from test_in_the_step import BATCH_AXES, Stacked, numbers
from test_on_shards import MESHES, OPTIMIZERS

from panax.checkpoint import Checkpointer, restore
from panax.core import LayoutError, RecipeError, named_leaves
from panax.kernels.quantized import DynamicMap, Format, QuantizedArray
from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Schedule, Sgd
from panax.optim.sharded.codes import block_shape
from panax.optim.sharded.shard import ParameterShard
from panax.train import CompiledStep, Program, StepConfig

STEADY = Schedule(peak=0.05, decay="constant")
AXES = {
    "up": ("layer", "embed", "ffn"), "out": ("layer", "heads", "head_dim", "embed"), "table": ("vocab", "embed"),
    "bias": ("layer", "norm"), "latent": ("embed", "kv_latent"), "long": ("norm",),
}  # fmt: skip
SHAPES = {
    "up": (4, 64, 128),
    "out": (4, 8, 16, 64),
    "table": (96, 128),
    "bias": (4, 64),
    "latent": (16, 512),
    "long": (8192,),
}
IN_CODES = ("up", "out", "table", "latent", "long")


def arrays(seed, names=SHAPES):
    """Of which some numbers are far smaller than others of their block."""
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            random.standard_normal(SHAPES[name]) * 10.0 ** random.uniform(-3, 0, SHAPES[name]), jnp.float32
        )
        for name in names
    }


BESIDE = ("left", "right", "left_root", "right_root", "left_basis", "right_basis")
"""Arrays kept in float32 beside a matrix."""


def in_codes(name, **changes):
    return dataclasses.replace(OPTIMIZERS[name], moments="int8", **changes)


def boxes(x, block):
    """The numbers of each block in one row."""
    parts = [size for pair in zip((n // b for n, b in zip(x.shape, block)), block) for size in pair]
    order = [*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2)]
    return np.ascontiguousarray(np.asarray(x).reshape(parts).transpose(order).reshape(-1, 256))


@pytest.mark.slow
def test_fifty_steps_are_torchao_s(monkeypatch):
    # torchao rounds to the nearest code, which never falls where a moment decays slowly, and has no code for a block's largest
    # number where it is negative: all else is its own.
    monkeypatch.setattr(ParameterShard, "random_bits", lambda self, kind, count: None)
    monkeypatch.setattr(DynamicMap, "compute_scale", Format.compute_scale)
    # torchao's blocks are 256 numbers in storage. AdamW's steps know no neighbors, so it is given our blocks one after the
    # other. Those of `latent` and `long` lie so already.
    optimizer = AdamW(schedule=STEADY, b2=0.99, weight_decay=0.1, decay_multipliers={"*": 1.0}, moments="int8")
    params, count = arrays(0), 50
    steps = [arrays(seed) for seed in range(1, count + 1)]
    actual, state = run(optimizer, params, steps, axes=AXES, num_steps=count)
    blocks = {name: block_shape(SHAPES[name], AXES[name]) for name in SHAPES}
    assert [name for name, block in blocks.items() if block] == list(IN_CODES)
    assert (blocks["latent"], blocks["long"]) == ((1, 256), (256,))

    def laid(tree):
        return {name: boxes(x, blocks[name]) if blocks[name] else np.array(x) for name, x in tree.items()}

    weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in laid(params).items()}
    reference = torchao.optim.AdamW8bit(weights.values(), lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for gradient in steps:
            for name, value in laid(gradient).items():
                weights[name].grad = torch.tensor(value)
            reference.step()
    before, after = laid(params), laid(actual)
    for name, weight in weights.items():
        stored = reference.state[weight]
        error = np.abs(after[name] - weight.detach().numpy())
        moved = np.abs(weight.detach().numpy() - before[name]).mean()
        # Where rounding puts a number on the other side of a code's edge, its moment is another code's from then on.
        assert error.mean() <= 1e-4 * moved and error.max() <= 0.05 * moved, name
        if not blocks[name]:
            continue
        for kind, theirs in (("mean", stored["exp_avg"]), ("square", stored["exp_avg_sq"])):
            ours = state[kind][name]
            np.testing.assert_allclose(np.ravel(ours.scales), theirs.scale.numpy(), rtol=1e-5, err_msg=f"{kind} {name}")
            differing = (boxes(ours.codes, blocks[name]) != theirs.codes.numpy()).mean()
            assert differing <= 1e-3, f"{kind} of {name}: {differing:.1e} of the codes differ"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name,
            mesh,
            marks=() if (name, mesh) == ("adamw", "stage_tensor") else pytest.mark.slow,
        )
        for name in OPTIMIZERS
        for mesh in MESHES
        if mesh != "expert_tensor"
    ],
)
def test_codes_are_the_same_on_every_mesh(name, mesh):
    names = ("up", "out", "bias") if name == "adamw" else ("up", "out", "table", "bias")
    optimizer = in_codes(name, **({"minimum_factored": 1024} if name == "adafactor" else {}))
    steps = [arrays(seed, names) for seed in (1, 2)]
    one, stored = run(optimizer, arrays(0, names), steps, axes={n: AXES[n] for n in names})
    params, state = run(optimizer, arrays(0, names), steps, mesh=MESHES[mesh], axes={n: AXES[n] for n in names})
    assert any(
        isinstance(leaf, QuantizedArray)
        for kind, leaves in state.items()
        if kind != "count"
        for leaf in leaves.values()
    )
    for leaf, value in named_leaves((one, stored)).items():
        other = np.asarray(named_leaves((params, state))[leaf])
        if leaf.endswith("codes"):
            # Sums in another order put few on the other side of an edge; Muon's momentum and AdamW's moments have none.
            assert (other != np.asarray(value)).mean() <= 1e-3, leaf
        elif name != "muon":
            np.testing.assert_allclose(other, value, rtol=2e-3, atol=2e-3 * np.abs(value).max(), err_msg=leaf)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_layers_have_the_codes_of_separate_ones(name, monkeypatch):
    # The bits of rounding by chance are of a parameter's name, and a stack has one.
    monkeypatch.setattr(ParameterShard, "random_bits", lambda self, kind, count: None)
    names = ("up", "bias")
    optimizer = in_codes(name, **({"minimum_factored": 1024} if name == "adafactor" else {}))
    apart = {f"{n}.{i}": AXES[n][1:] for n in names for i in range(4)}

    def separate(tree):
        return {f"{n}.{i}": tree[n][i] for n in names for i in range(4)}

    steps = [arrays(seed, names) for seed in (1, 2)]
    _, stored = run(optimizer, arrays(0, names), steps, axes={n: AXES[n] for n in names})
    _, state = run(optimizer, separate(arrays(0, names)), [separate(g) for g in steps], axes=apart)
    for kind in stored:
        # What is no moment; and what Muon keeps of norms and biases alone.
        if kind in ("count", "weight", *BESIDE) or "up" not in stored[kind]:
            continue
        for i in range(4):
            stacked, alone = stored[kind]["up"], state[kind][f"up.{i}"]
            assert (np.asarray(stacked.codes[i]) != np.asarray(alone.codes)).mean() <= 1e-3
            np.testing.assert_allclose(stacked.scales[i], alone.scales, rtol=1e-4)
            assert not isinstance(stored[kind]["bias"], QuantizedArray)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_it_has_the_bytes_that_are_declared(rounding):
    axes = {n: AXES[n] for n in SHAPES}
    state = jax.eval_shape(AdamW(moments="int8", rounding=rounding).build(axes, 10).init, arrays(0))
    for kind, signed in (("mean", True), ("square", False)):
        for name, leaf in state[kind].items():
            numbers_of = int(np.prod(SHAPES[name]))
            if name in IN_CODES:
                assert leaf.nbytes == numbers_of + numbers_of // 256 * 4 and leaf.format.signed is signed
                assert (leaf.codes.dtype, leaf.scales.dtype) == (jnp.uint8, jnp.float32)
            else:
                assert leaf.shape == SHAPES[name] and leaf.dtype == jnp.float32


@pytest.mark.slow
def test_chance_rounds_codes_alike_on_every_mesh_and_keeps_small_moments(monkeypatch):
    names = ("up",)
    axes = {"up": AXES["up"]}
    optimizer = AdamW(schedule=STEADY, moments="int8", rounding="stochastic")
    steps = [arrays(seed, names) for seed in (1, 2)]
    _, stored = run(optimizer, arrays(0, names), steps, axes=axes)
    _, state = run(optimizer, arrays(0, names), steps, mesh={"stage": 2, "tensor": 2, "fsdp": 2}, axes=axes)
    for kind in ("mean", "square"):
        assert (np.asarray(stored[kind]["up"].codes) != np.asarray(state[kind]["up"].codes)).mean() <= 1e-3
    monkeypatch.setattr(ParameterShard, "random_bits", lambda self, kind, count: None)
    _, other = run(optimizer, arrays(0, names), steps, axes=axes)
    assert (np.asarray(other["mean"]["up"].codes) != np.asarray(stored["mean"]["up"].codes)).mean() > 0.2


WIDEST = {"tensor": 8, "fsdp": 1}


class Wide(Stacked):
    """With matrices that are large enough for codes."""

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (2, 64, 128)) / 8, "down": jax.random.normal(down, (2, 128, 64)) / 8,
            "scale": jnp.ones((2, 64)), "bias": jnp.zeros((64,)),
        }, {}  # fmt: skip


def batch(seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((16, 64), np.float32) for name in ("x", "y")}


def made(optimizer, mesh):
    program = Program.create(Wide(), optimizer, num_steps=10, config=StepConfig(), frozen=("layers.0", "bias"))
    devices = jax.devices() if mesh else jax.devices()[:1]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), BATCH_AXES)


def test_steps_are_saved_resumed_elsewhere_and_not_taken_with_bad_batches(tmp_path):
    optimizer = AdamW(schedule=STEADY, moments="int8", rounding="stochastic")
    spread, one = made(optimizer, {"replica": 2, "fsdp": 4}), made(optimizer, {})
    first = numbers(spread.init(0).params)
    state, _ = spread(spread.init(0), spread.put(batch(1)))
    saved = numbers((state.params, state.optimizer_state))
    codes = saved["1.mean.up.codes"]
    assert codes.dtype == np.uint8 and len(np.unique(codes[1])) > 100 and (codes[0] == codes[0, 0, 0]).all()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    checkpointer.wait()
    bad, scalars = spread(state, spread.put({**batch(2), "y": np.full((16, 64), np.nan, np.float32)}))
    assert int(scalars["skipped"]) == 1
    after = numbers((bad.params, bad.optimizer_state))
    assert all((after[key] == value).all() for key, value in saved.items())
    together, _ = spread(bad, spread.put(batch(3)))
    again = restore(checkpointer.open(1), spread.program.abstract, spread.shardings)
    elsewhere = restore(checkpointer.open(1), one.program.abstract, one.shardings)
    for restored in (again, elsewhere):
        stored = numbers((restored.params, restored.optimizer_state))
        assert all((stored[key] == value).all() for key, value in saved.items())
    again, _ = spread(again, spread.put(batch(3)))
    wanted = numbers((together.params, together.optimizer_state))
    assert all((value == wanted[key]).all() for key, value in numbers((again.params, again.optimizer_state)).items())
    elsewhere, _ = one(elsewhere, one.put(batch(3)))
    for name, value in numbers(elsewhere.params).items():
        np.testing.assert_allclose(value, numbers(together.params)[name], atol=2e-3, err_msg=name)
    assert (numbers(together.params)["up"][0] == first["up"][0]).all()
    assert len(spread._train) == len(one._train) == 1


def test_no_block_lies_on_two_devices_or_the_mesh_is_refused():
    optimizer = AdamW(moments="int8")
    axes = {"up": AXES["up"]}
    with pytest.raises(LayoutError, match=r"mean\.up\.scales: ffn=2 is not divisible by tensor=8; use tensor in"):
        run(optimizer, {"up": jnp.ones((1, 64, 64))}, [], axes=axes, mesh=WIDEST)
    adapted = {"w": ("features", "width")}
    with pytest.raises(RecipeError, match=r"mean of w is sharded over tensor along features=512.*fewer devices"):
        run(optimizer, {"w": jnp.ones((512, 72))}, [{"w": jnp.ones((512, 72))}], axes=adapted, mesh=WIDEST)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            AdamW(moments="int8"),
            r'moments="int8" has no effect: no state has 4,096 elements.*whole blocks of 256',
        ),
        (Sgd(moments="int8"), r'moments="int8" has no effect: Sgd with these settings has no state'),
        (Sgd(moments="bfloat16"), r'moments="bfloat16" has no effect: Sgd with these settings has no state'),
    ],
)
def test_codes_of_nothing_are_refused(optimizer, message):
    with pytest.raises(RecipeError, match=message):
        optimizer.build(axes_of(("up",)), 10).init({"up": jnp.ones((4, 8, 16))})
