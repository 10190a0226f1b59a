"""Attention on the CPU: against its definition, against PyTorch and Hugging Face, its memory, its places of use."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_cases import CASES, Case, assert_close, outputs_and_gradients, reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transformers import masking_utils

from panax.core import Target
from panax.core.layout.target import _TRAITS
from panax.kernels import attention, use_kernels
from panax.kernels.attention.blockwise import blockwise_attention
from panax.kernels.attention.layout import choose_blocks
from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.operands import ScoreRule


def blockwise(q, k, v, segments, *, scores, block_size=16, **sinks):
    blocks = choose_blocks(q, k, window=scores.mask.window, target=Target("cpu"), block_size=block_size)
    return blockwise_attention(q, k, v, segments, scores=scores, blocks=blocks, **sinks)


blockwise_by_default = functools.partial(blockwise, block_size=None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blockwise_equals_its_definition(case, library):
    assert_close(outputs_and_gradients(blockwise, case), reference(case))
    q, k, v, _ = case.inputs()
    program = jax.jit(lambda q, k, v: blockwise(q, k, v, case.segments, **case.options)).lower(q, k, v).as_text()
    assert ("panax_attention_forward" in program) == (library != "xla")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_their_usual_size(causal, dtype, library):
    """Longer than a block, and no multiple of one."""
    case = Case(name="long", query_seq=600, causal=causal, heads=2, kv_heads=1)
    found = outputs_and_gradients(blockwise_by_default, case, dtype)
    # As `assert_close` has it, with 1,200 products instead of 80.
    for left, right in zip(found, reference(case, dtype)):
        allowed = (4 * 1200**0.5 if dtype == jnp.float32 else 4) * float(jnp.finfo(dtype).eps) * np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=0, atol=allowed)


def test_weights_below_the_normal_numbers(library):
    """Scores that are hundreds apart: nearly all weights are 0, and nothing else is."""
    q, k, v, d_out = Case(name="apart").inputs()
    scores = ScoreRule(mask=MaskRule(causal=True, window=None), scale=100.0, soft_cap=None)
    attend = functools.partial(blockwise, segments=None, scores=scores)
    out, pull = jax.vjp(attend, q, k, v)
    expected = attention(q, k, v, target=Target("cpu"), implementation="reference", scale=100.0)
    # A weight is off by its score's rounding, of 100 times 8 products of up to 3 by 3; an output by two such, of values up to 4.
    rounding = 100 * 8 * 3 * 3 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2 * rounding * 4)
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in pull(d_out))


@pytest.mark.parametrize("name", ["causal_grouped", "packed_everything"])
def test_blockwise_in_bfloat16(name, library):
    case = next(case for case in CASES if case.name == name)
    assert_close(outputs_and_gradients(blockwise, case, jnp.bfloat16), reference(case, jnp.bfloat16), jnp.bfloat16)


def test_blockwise_over_chunks_of_rows_and_in_one_block(monkeypatch):
    case = CASES[3]
    whole = outputs_and_gradients(blockwise_by_default, case)
    assert_close(whole, reference(case))
    small = dataclasses.replace(Target("cpu").traits, scores_in_cache=600)
    monkeypatch.setitem(_TRAITS, "cpu", small)
    q, k, *_ = case.inputs()
    assert choose_blocks(q, k, window=None, target=Target("cpu"), block_size=16).kv_heads == 1
    assert_close(outputs_and_gradients(blockwise, case), reference(case))


def test_padding_and_unseen_queries_give_zeros(library):
    case = CASES[3]
    for attend in (blockwise, lambda *a, **o: attention_of(*a, **o)):
        out, d_q, d_k, d_v = outputs_and_gradients(attend, case)
        padding = np.asarray(case.segments) == 0
        for array in (out, d_q, d_k, d_v):
            assert np.isfinite(array).all()
            assert not array[padding].any()
            assert array[~padding].any()
    # Keys that end before the window begins: no padding, and yet nothing to see.
    case = Case(name="late_queries", query_seq=40, key_seq=24, window=4)
    assert not outputs_and_gradients(blockwise, case)[0][:, 27:].any()
    assert_close(outputs_and_gradients(blockwise, case), reference(case))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_lost(library, value):
    """A NaN score must not become a weight of zero: every query that sees that key gets NaN, and no other."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 40, 2, 16)) for i in range(3))
    k = k.at[0, 20, 1, 3].set(value)
    attend = functools.partial(attention, causal=True, target=Target("cpu"), implementation="blockwise")
    out = np.asarray(jax.jit(attend)(q, k, v))
    assert np.isfinite(out[:, :, 0]).all() and np.isfinite(out[:, :20, 1]).all()
    seen = np.isnan(out[0, 20:, 1]).all(-1)
    # An infinite score is the softmax's only one where it is positive, and none where it is negative.
    assert seen.all() if np.isnan(value) else seen.any()


def attention_of(q, k, v, segments, *, scores):
    options = {"causal": scores.mask.causal, "window": scores.mask.window, "soft_cap": scores.soft_cap}
    options |= {"scale": scores.scale, "target": Target("cpu"), "implementation": "reference"}
    return attention(q, k, v, segments=segments, **options)


def test_equals_pytorch(library):
    q, k, v, _ = Case(name="torch").inputs()
    ours = attention(q, k, v, target=Target("cpu"))
    q, k, v = (torch.tensor(np.asarray(x)).transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close((np.asarray(ours),), (theirs.transpose(1, 2).numpy(),))


@pytest.mark.parametrize("causal", [True, False])
def test_window_means_what_hugging_face_means(causal):
    function = (
        masking_utils.sliding_window_causal_mask_function
        if causal
        else masking_utils.sliding_window_bidirectional_mask_function
    )(3)
    theirs = np.array([[function(0, 0, torch.tensor(i), torch.tensor(j)).item() for j in range(9)] for i in range(9)])
    ours = MaskRule(causal=causal, window=3).allows(jnp.arange(9)[:, None], jnp.arange(9)[None, :])
    np.testing.assert_array_equal(ours, theirs)


def test_block_pairs_are_those_with_a_visible_key():
    for causal in (True, False):
        for window in (None, 1, 5, 8):
            rule = MaskRule(causal=causal, window=window)
            visible = np.asarray(rule.allows(jnp.arange(29)[:, None], jnp.arange(21)[None, :])) | np.zeros(
                (29, 21), bool
            )
            expected = [
                (i, j) for i in range(8) for j in range(3) if visible[4 * i : 4 * i + 4, 7 * j : 7 * j + 7].any()
            ]
            assert rule.block_pairs(29, 21, 4, 7) == expected, rule


def test_memory_is_linear_in_the_length():
    def temporary_bytes(implementation, seq):
        def loss(q, k, v):
            return attention(q, k, v, target=Target("cpu"), implementation=implementation, **block).sum()

        block = {"block_size": 128} if implementation == "blockwise" else {}
        x = jax.ShapeDtypeStruct((1, seq, 2, 16), jnp.float32)
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, twice, four_times = (temporary_bytes("blockwise", seq) for seq in (1024, 2048, 4096))
    assert twice < 2.1 * small
    assert four_times < 2.1 * twice
    quadratic, whole_twice = (temporary_bytes("reference", seq) for seq in (1024, 2048))
    assert whole_twice > 3.5 * quadratic
    assert twice < whole_twice / 8


def test_a_window_costs_time_linear_in_the_length():
    def steps(seq, window):
        x = jax.ShapeDtypeStruct((1, seq, 1, 8), jnp.float32)
        # A fixed block: with it the number of steps is the number of products.
        call = lambda q, k, v: attention(  # noqa: E731
            q, k, v, window=window, target=Target("cpu"), implementation="blockwise", block_size=64
        )
        with use_kernels({"partial attention": "blockwise"}):
            jaxpr = jax.make_jaxpr(call)(x, x, x)
        return sum(int(length) for length in re.findall(r"length=(\d+)", str(jaxpr)))

    assert [steps(seq, 64) for seq in (512, 1024, 2048)] == [15, 31, 63]
    assert [steps(seq, None) for seq in (512, 1024)] == [36, 136]


def test_eager_equals_compiled():
    q, k, v, _ = CASES[3].inputs()
    call = lambda q, k, v: attention(  # noqa: E731
        q, k, v, segments=CASES[3].segments, target=Target("cpu"), implementation="blockwise", block_size=16
    )
    assert_close((np.asarray(call(q, k, v)),), (np.asarray(jax.jit(call)(q, k, v)),))


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_inside_a_checked_shard_map_over_batch_and_heads(kv_heads):
    """Through a scan over layers and `jax.checkpoint`; a lone key-value head is the same along the tensor axis."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    heads, keys = P("data", None, "tensor"), P("data", None, "tensor" if kv_heads > 1 else None)
    generator = np.random.default_rng(0)
    q = jnp.asarray(generator.normal(size=(4, 24, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(generator.normal(size=(4, 24, kv_heads, 8)), jnp.float32) for _ in range(2))
    segments = jnp.asarray([[1] * 10 + [2] * 11 + [0] * 3] * 4, jnp.int32)

    def attend(q, k, v, segments):
        return attention(q, k, v, segments=segments, target=Target("cpu"), implementation="blockwise", block_size=8)

    def loss(attend, q, k, v, segments):
        layer = jax.checkpoint(lambda x: x + attend(x, k, v, segments))
        out, _ = jax.lax.scan(lambda x, _: (layer(x), None), q, length=2)
        return (out * out).sum()

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    expected = gradient(attend, q, k, v, segments)
    specs = (heads, keys, keys, P("data"))
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=True)
        actual = gradient(sharded, *(jax.device_put(x, s) for x, s in zip((q, k, v, segments), specs)))
    assert_close(tuple(map(np.asarray, actual)), tuple(map(np.asarray, expected)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 8, 3, 8), "v": (2, 8, 3, 8)}, "heads=4 must be a multiple of kv_heads=3"),
        ({"k": (3, 8, 2, 8), "v": (3, 8, 2, 8)}, "don't fit|batch"),
        ({"k": (2, 8, 2, 4), "v": (2, 8, 2, 4)}, "don't fit|head_dim"),
        ({"segments": (2, 9)}, "segments need one length"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"soft_cap": -1.0}, "must be positive"),
        ({"implementation": "blokwise"}, "did you mean 'blockwise'"),
        ({"block_size": 8, "implementation": "reference"}, "has no effect"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    shapes = {"q": (2, 8, 4, 8), "k": (2, 8, 2, 8), "v": (2, 8, 2, 8)} | change
    arrays = {
        name: jnp.zeros(shape, jnp.int32 if name == "segments" else jnp.float32)
        for name, shape in shapes.items()
        if isinstance(shape, tuple)
    }
    options = {"target": Target("cpu")} | {
        name: value for name, value in change.items() if not isinstance(value, tuple)
    }
    # A shape that the annotations already refuse is refused by their check in tests.
    with pytest.raises(Exception, match=message):
        attention(**arrays, **options)
