"""The Mamba-2 mixer beside the one of `transformers`, position by position, and on meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from drawing import drawn
from transformers import Mamba2Config
from transformers.models.mamba2 import modeling_mamba2

from panax.core import Evaluation, LayoutError, Loss, Task, logical_axes, named_leaves
from panax.layers import StateSpace
from panax.mesh import Rules
from panax.mesh.legality import find_problem
from panax.optim import Sgd
from panax.optim.decay import uses_weight_decay
from panax.spmd import local_sequence, sum_over_sequence
from panax.testing import check_task
from panax.train import Program
from panax.train.compilation.mesh_requirements import mesh_requirements

EMBED, HEADS, HEAD_DIM, STATE, TAPS = 16, 8, 4, 6, 4


def drawn_layer(embed: int, **options) -> StateSpace:
    return drawn(lambda key: StateSpace.build(key, embed, **options))


@functools.cache
def layer(groups: int = 2, **options) -> StateSpace:
    """A layer with norms, convolutions and biases unlike their initial values."""
    drawn = drawn_layer(EMBED, heads=HEADS, head_dim=HEAD_DIM, groups=groups, state=STATE, **options)
    generator = np.random.default_rng(0)
    moved = {
        name: getattr(drawn, name) + jnp.asarray(generator.normal(size=getattr(drawn, name).shape) / 4, jnp.float32)
        for name in ("scale", "d", "conv_x", "conv_bias_x", "conv_bias_b", "conv_bias_c")
        if getattr(drawn, name) is not None
    }
    return dataclasses.replace(drawn, **moved)


def rows(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, EMBED)), jnp.float32)


@jax.jit
def mix(layer, x, segment=None):
    return layer(x, jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2]), segment)


# ---- beside transformers


def to_torch(layer: StateSpace) -> dict[str, np.ndarray]:
    """The names and shapes of `Mamba2Mixer`."""
    tree = {name: np.asarray(leaf) for name, leaf in named_leaves(layer).items()}
    flat = {name: leaf.reshape(EMBED, -1) for name, leaf in tree.items() if name.startswith("w_")}
    taps = [tree[f"conv_{name}"].reshape(-1, 1, TAPS) for name in ("x", "b", "c")]
    expressed = {
        "in_proj.weight": np.concatenate([flat[f"w_{name}"] for name in ("z", "x", "b", "c", "dt")], axis=1).T,
        "conv1d.weight": np.concatenate(taps),
        "norm.weight": tree["scale"].ravel(),
        "dt_bias": tree["dt_bias"],
        "A_log": tree["a_log"],
        "D": tree["d"],
        "out_proj.weight": tree["w_o"].reshape(-1, EMBED).T,
    }
    if "conv_bias_x" in tree:
        expressed["conv1d.bias"] = np.concatenate([tree[f"conv_bias_{name}"].ravel() for name in ("x", "b", "c")])
    return expressed


@pytest.mark.parametrize("conv_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_transformers_with_all_gradients(groups, conv_bias):
    config = Mamba2Config(
        hidden_size=EMBED,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=STATE,
        n_groups=groups,
        conv_kernel=TAPS,
        expand=HEADS * HEAD_DIM // EMBED,
        chunk_size=8,
        use_conv_bias=conv_bias,
        num_hidden_layers=1,
    )
    ours = layer(groups=groups, conv_bias=conv_bias, norm_by_group=True, epsilon=config.layer_norm_epsilon)
    theirs = modeling_mamba2.Mamba2Mixer(config, 0)
    state = {name: torch.tensor(value.copy()) for name, value in to_torch(ours).items()}
    theirs.load_state_dict(state)
    x, cotangent = rows(2, 37), rows(2, 37, seed=1)

    tensor = torch.tensor(np.asarray(x), requires_grad=True)
    expected = theirs(tensor)
    expected.backward(torch.tensor(np.asarray(cotangent)))
    result, pull = jax.vjp(mix, ours, x)
    d_ours, d_x = pull(cotangent)

    # Float32 sums in another order: a gradient of a weight adds 74 positions' terms, each of a few roundings of 6e-8.
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
    drawn = drawn_layer(8, heads=4096, head_dim=1, groups=1, state=2)
    steps = np.asarray(jax.nn.softplus(drawn.dt_bias))
    rates = np.exp(np.asarray(drawn.a_log))
    assert 0.00099 < steps.min() < 0.0011 and 0.09 < steps.max() < 0.1001
    # The logarithms of steps, and the rates, are evenly spread: 4 deviations of a mean of 4,096 draws.
    assert abs(np.log(steps).mean() - math.log(0.01)) < 4 * math.log(100) / math.sqrt(12 * 4096)
    assert 1.0 < rates.min() < 1.1 and 15.9 < rates.max() < 16.0
    assert abs(rates.mean() - 8.5) < 4 * 15 / math.sqrt(12 * 4096)
    assert (np.asarray(drawn.d) == 1).all()


def test_matrices_decay_and_the_rest_does_not():
    axes = named_leaves_of_axes(layer())
    assert {name for name, which in axes.items() if uses_weight_decay(which)} == {
        *("w_z", "w_x", "w_b", "w_c", "w_dt", "w_o", "conv_x", "conv_b", "conv_c")
    }


def named_leaves_of_axes(module) -> dict[str, tuple]:
    return {name: getattr(logical_axes(module), name) for name in named_leaves(module)}


# ---- documents and generation


def test_documents_are_mixed_each_by_itself():
    x, mixer = rows(1, 24), layer()
    segment = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 5], jnp.int32)
    whole = mix(mixer, x, segment)
    for where in (slice(0, 9), slice(9, 19)):
        np.testing.assert_allclose(whole[:, where], mix(mixer, x[:, where]), atol=1e-6)


@pytest.mark.parametrize("parts", [(1,) * 12, (7, 1, 4), (2, 10)], ids=str)
def test_extended_is_as_mixed_at_once(parts):
    x, mixer = rows(2, 12), layer()
    cache, result, start = mixer.empty_cache(2, 12, jnp.float32), [], 0
    extend = jax.jit(StateSpace.extend)
    for count in parts:
        at = jnp.arange(start, start + count)
        part, cache = extend(
            mixer, x[:, start : start + count], jnp.broadcast_to(at[None], (2, count)), cache, jnp.full(2, start)
        )
        result.append(part)
        start += count
    # Float32 sums in another order.
    np.testing.assert_allclose(jnp.concatenate(result, axis=1), mix(mixer, x), atol=1e-6)


def test_a_cache_of_stacked_layers_is_stacked():
    one = layer()
    mixers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), one)
    shapes = [leaf.shape for leaf in mixers.empty_cache(5, 100, jnp.bfloat16)]
    assert shapes == [(3, 5, 3, 8, 4), (3, 5, 3, 2, 6), (3, 5, 3, 2, 6), (3, 5, 8, 4, 6)]


# ---- on meshes


class Fit(Task):
    """Fit one mixer to pairs of packed rows."""

    mesh_axes = frozenset({"replica", "fsdp", "expert", "context", "tensor"})
    names_axes = True
    row_order = "contiguous"
    norm_by_group = False

    def init(self, key):
        mixer = StateSpace.build(
            key, EMBED, heads=HEADS, head_dim=HEAD_DIM, groups=2, state=STATE, norm_by_group=self.norm_by_group
        )
        return mixer, {}

    def parameter_axes(self, params):
        return logical_axes(params)

    def loss(self, params, state, batch, key, train):
        error = mix_packed(params, batch) - local_sequence(batch["y"])
        tokens = jnp.float32(math.prod(batch["segment"].shape))
        return Evaluation({"squares": Loss(sum_over_sequence(jnp.sum(error * error)), tokens)}, state, {})


class FitByGroup(Fit):
    norm_by_group = True


class Zigzag(Fit):
    row_order = "any"


def mix_packed(params, batch):
    segment = batch["segment"]
    return params(local_sequence(batch["x"]), jnp.zeros_like(segment), segment)


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


@pytest.mark.parametrize(
    "kind, sizes",
    [
        (Fit, {"fsdp": 2, "context": 2, "tensor": 2}),
        (FitByGroup, {"context": 2, "tensor": 4}),
        (FitByGroup, {"fsdp": 2, "tensor": 2}),
        (Fit, {"context": 8}),
        (Fit, {"expert": 2, "tensor": 4}),
    ],
    ids=["fsdp2·context2·tensor2", "context2·tensor4-groups", "fsdp2·tensor2-groups", "context8", "expert2·tensor4"],
)
def test_trains_like_one_device(kind, sizes):
    """The first parameters bitwise; gradients, losses and parameters of some steps; and no sum over devices is forgotten."""
    report = check_task(kind(), pairs(), axes=AXES, layouts=[sizes])
    assert len(report.compared) == 1, report.left_out


def test_zigzag_rows_are_refused():
    with pytest.raises(LayoutError, match=r'needs contiguous rows over context=2.*row_order = "contiguous"'):
        check_task(Zigzag(), pairs(), axes=AXES, layouts=[{"context": 2}])


def test_parts_shorter_than_the_convolution_are_refused():
    with pytest.raises(LayoutError, match="each device holds 2 positions of a row, and the convolution reads 3"):
        check_task(Fit(), pairs(16), axes=AXES, layouts=[{"context": 8}])


def test_heads_that_do_not_divide_are_refused():
    needs = mesh_requirements(Program.create(Fit(), num_steps=1, optimizer=Sgd()))
    assert "ssm_heads=8 is not divisible by tensor=16" in (find_problem(needs, Rules(), {"tensor": 16}) or "")
