"""The delta-net mixer beside the one of `transformers`, position by position, and on meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from drawing import drawn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from panax.core import Evaluation, LayoutError, Loss, Task, logical_axes, named_leaves
from panax.layers import DeltaNet
from panax.mesh import Rules
from panax.mesh.legality import find_problem
from panax.optim import Sgd
from panax.optim.decay import uses_weight_decay
from panax.spmd import local_sequence, sum_over_sequence
from panax.testing import check_task
from panax.train import Program
from panax.train.compilation.mesh_requirements import mesh_requirements

EMBED, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS = 16, 2, 8, 6, 4, 4
SIZES = {"key_heads": KEY_HEADS, "heads": HEADS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM}


@functools.cache
def layer(**sizes: int) -> DeltaNet:
    """A layer with norms, convolutions and rates other than the initial ones."""
    built = drawn(lambda key: DeltaNet.build(key, EMBED, **SIZES | sizes))
    generator = np.random.default_rng(0)
    moved = {
        name: getattr(built, name) + jnp.asarray(generator.normal(size=getattr(built, name).shape) / 4, jnp.float32)
        for name in ("scale", "conv_q", "conv_k", "conv_v", "dt_bias", "a_log")
    }
    return dataclasses.replace(built, **moved)


def rows(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, EMBED)), jnp.float32)


@jax.jit
def mix(layer, x, segment=None):
    return layer(x, jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2]), segment)


# ---- beside transformers


def to_torch(layer: DeltaNet) -> dict[str, np.ndarray]:
    """The names and shapes of `Qwen3_5GatedDeltaNet`."""
    tree = {name: np.asarray(leaf) for name, leaf in named_leaves(layer).items()}
    flat = {name: leaf.reshape(EMBED, -1).T for name, leaf in tree.items() if name.startswith("w_")}
    return {
        "in_proj_qkv.weight": np.concatenate([flat[f"w_{name}"] for name in "qkv"]),
        "in_proj_z.weight": flat["w_z"],
        "in_proj_b.weight": flat["w_beta"],
        "in_proj_a.weight": flat["w_dt"],
        "conv1d.weight": np.concatenate([tree[f"conv_{name}"].reshape(-1, 1, TAPS) for name in "qkv"]),
        "norm.weight": tree["scale"],
        "dt_bias": tree["dt_bias"],
        "A_log": tree["a_log"],
        "out_proj.weight": tree["w_o"].reshape(-1, EMBED).T,
    }


@pytest.mark.parametrize(
    "key_heads, key_dim",
    [(2, 6), pytest.param(8, 4, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full)],
)
def test_equals_transformers_with_all_gradients(key_heads, key_dim):
    config = Qwen3_5TextConfig(
        hidden_size=EMBED,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        num_hidden_layers=1,
        rms_norm_eps=1e-4,
    )
    ours = dataclasses.replace(layer(key_heads=key_heads, key_dim=key_dim), epsilon=config.rms_norm_eps)
    theirs = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    theirs.load_state_dict({name: torch.tensor(value.copy()) for name, value in to_torch(ours).items()})
    x, cotangent = rows(2, 75), rows(2, 75, seed=1)

    tensor = torch.tensor(np.asarray(x), requires_grad=True)
    expected = theirs(tensor)
    expected.backward(torch.tensor(np.asarray(cotangent)))
    result, pull = jax.vjp(mix, ours, x)
    d_ours, d_x = pull(cotangent)

    # Float32 sums in another order: a gradient of a weight adds 150 positions' terms, each of some roundings of 6e-8.
    def assert_near(actual, wanted, name):
        wanted = wanted.detach().numpy()
        assert np.linalg.norm(np.asarray(actual) - wanted) < 5e-6 * np.linalg.norm(wanted), name

    assert_near(result, expected, "y")
    assert_near(d_x, tensor.grad, "x")
    gradients = to_torch(d_ours)
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert_near(gradients[name], parameter.grad, name)


# ---- initial values


def test_begins_as_published():
    built = drawn(lambda key: DeltaNet.build(key, 8, key_heads=1, heads=4096, key_dim=1, value_dim=1))
    steps = np.asarray(jax.nn.softplus(built.dt_bias))
    rates = np.exp(np.asarray(built.a_log))
    assert 0.00099 < steps.min() < 0.0011 and 0.09 < steps.max() < 0.1001
    assert 0.0 < rates.min() < 0.1 and 15.9 < rates.max() < 16.0
    # 4 deviations of a mean of 4,096 draws.
    assert abs(rates.mean() - 8.0) < 4 * 16 / math.sqrt(12 * 4096)


def test_matrices_decay_and_the_rest_does_not():
    axes = logical_axes(layer())
    decaying = {name for name in named_leaves(layer()) if uses_weight_decay(getattr(axes, name))}
    assert decaying == {"w_q", "w_k", "w_v", "w_z", "w_beta", "w_dt", "w_o", "conv_q", "conv_k", "conv_v"}


# ---- documents and generation


def test_documents_are_mixed_each_by_itself():
    x, mixer = rows(1, 24), layer()
    segment = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 5], jnp.int32)
    whole = mix(mixer, x, segment)
    for where in (slice(0, 9), slice(9, 19)):
        np.testing.assert_allclose(whole[:, where], mix(mixer, x[:, where]), atol=2e-6)


@pytest.mark.parametrize("parts", [(7, 1, 4), pytest.param((1,) * 12, marks=pytest.mark.full)], ids=str)
def test_extended_is_as_mixed_at_once(parts):
    x, mixer = rows(2, 12), layer()
    cache, result, start = mixer.empty_cache(2, 12, jnp.float32), [], 0
    extend = jax.jit(DeltaNet.extend)
    for count in parts:
        at = jnp.broadcast_to(jnp.arange(start, start + count)[None], (2, count))
        part, cache = extend(mixer, x[:, start : start + count], at, cache, jnp.full(2, start))
        result.append(part)
        start += count
    # Float32 sums in another order.
    np.testing.assert_allclose(jnp.concatenate(result, axis=1), mix(mixer, x), atol=2e-6)


def test_a_cache_of_stacked_layers_is_stacked():
    mixers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), layer())
    shapes = [leaf.shape for leaf in mixers.empty_cache(5, 100, jnp.bfloat16)]
    assert shapes == [(3, 5, 3, 2, 6), (3, 5, 3, 2, 6), (3, 5, 3, 8, 4), (3, 5, 8, 6, 4)]


# ---- on meshes


class Fit(Task):
    """Fit one mixer to pairs of packed rows."""

    mesh_axes = frozenset({"replica", "fsdp", "expert", "context", "tensor"})
    names_axes = True
    row_order = "contiguous"

    def init(self, key):
        return DeltaNet.build(key, EMBED, **SIZES), {}

    def parameter_axes(self, params):
        return logical_axes(params)

    def loss(self, params, state, batch, key, train):
        segment = batch["segment"]
        mixed = params(local_sequence(batch["x"]), jnp.zeros_like(segment), segment)
        error = mixed - local_sequence(batch["y"])
        tokens = jnp.float32(math.prod(segment.shape))
        return Evaluation({"squares": Loss(sum_over_sequence(jnp.sum(error * error)), tokens)}, state, {})


class Zigzag(Fit):
    row_order = "any"


def pairs(length: int = 32) -> dict[str, np.ndarray]:
    """Documents that begin and end anywhere: also on the edges of devices, and some longer than two devices' parts."""
    generator = np.random.default_rng(5)
    cuts = np.sort(generator.integers(0, length, (8, 2)), axis=1)
    cuts[0], cuts[1], cuts[2] = (8, 16), (30, 31), (3, 31)
    place = np.arange(length)[None]
    segment = 1 + (place >= cuts[:, :1]) + (place >= cuts[:, 1:])
    segment[3:5][segment[3:5] == 3] = 0
    return {
        "x": np.asarray(rows(8, length)),
        "y": np.asarray(rows(8, length, seed=1)),
        "segment": segment.astype(np.int32),
    }


AXES = {"x": ("batch", "seq", None), "y": ("batch", "seq", None), "segment": ("batch", "seq")}


def layout(*marks, **sizes: int):
    return pytest.param(sizes, marks=marks, id="·".join(f"{axis}{size}" for axis, size in sizes.items()))


@pytest.mark.parametrize(
    "sizes",
    [
        layout(fsdp=2, context=2, tensor=2),
        layout(pytest.mark.full, context=2, tensor=4),
        layout(pytest.mark.full, context=8),
        layout(pytest.mark.full, expert=2, tensor=4),
        layout(pytest.mark.full, replica=2, fsdp=2),
    ],
)
def test_trains_like_one_device(sizes):
    """The first parameters bitwise; gradients, losses and parameters of some steps; and no sum over devices is forgotten."""
    report = check_task(Fit(), pairs(), axes=AXES, layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


def test_zigzag_rows_are_refused():
    with pytest.raises(LayoutError, match=r'needs contiguous rows over context=2.*row_order = "contiguous"'):
        check_task(Zigzag(), pairs(), axes=AXES, layouts=[{"context": 2}])


def test_heads_that_do_not_divide_are_refused():
    needs = mesh_requirements(Program.create(Fit(), num_steps=1, optimizer=Sgd()))
    assert "delta_heads=8 is not divisible by tensor=16" in (find_problem(needs, Rules(), {"tensor": 16}) or "")
