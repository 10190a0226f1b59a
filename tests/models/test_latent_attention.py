"""Latent attention and what came with it: causality, its cache, YaRN, clipped projections, norms without bias."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.core import RecipeError
from panax.layers import Attention, Latent, LatentAttention, Norm, Rotary, YarnScaling
from panax.models import Decoder, DecoderConfig

LATENT = Latent(q_rank=16, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)
EMBED, HEADS, LENGTH = 32, 4, 12


def build(**options) -> LatentAttention:
    return drawn(lambda key: LatentAttention.build(key, EMBED, HEADS, LATENT, rotary=Rotary(), **options))


def inputs() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, EMBED))
    return x, jnp.broadcast_to(jnp.arange(LENGTH)[None], (2, LENGTH))


@pytest.mark.parametrize("window", [None, 3])
def test_sees_what_is_before_in_its_document(window):
    attention, (x, position) = build(window=window), inputs()
    segment = jnp.where(jnp.arange(LENGTH) < 5, 1, 2)[None]
    jacobian = jax.jit(jax.jacobian(lambda x: attention(x, position[:1], segment)[0].sum(-1)))(x[:1])
    reach = np.abs(np.asarray(jacobian))[:, 0].sum(-1) > 0
    i, j = np.indices((LENGTH, LENGTH))
    np.testing.assert_array_equal(reach, (j <= i) & (i - j < (window or LENGTH)) & ((i < 5) == (j < 5)))


@pytest.mark.parametrize("options", [{}, {"window": 3, "soft_cap": 2.0}], ids=["plain", "window"])
def test_the_cache_holds_latents_alone_and_gives_the_whole_pass(options):
    attention, (x, position) = build(**options), inputs()
    cache = attention.empty_cache(2, 16, jnp.float32)
    assert {leaf.shape for leaf in cache} == {(2, 16, LATENT.kv_rank), (2, 16, LATENT.rope_dim)}
    extend, parts, start = jax.jit(lambda *given: attention.extend(*given)), [], 0
    for count in (7, 1):
        stop = start + count
        out, cache = extend(x[:, start:stop], position[:, start:stop], cache, jnp.full(2, start))
        parts.append(out)
        start = stop
    full_pass = jax.jit(lambda x: attention(x, position, None))(x)[:, :start]
    # The same sums of at most 32 float32 terms, in another order.
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full_pass, rtol=1e-4, atol=1e-5)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    yarn = YarnScaling(factor=8.0, original_length=64, fast=8.0, slow=1.0, mscale=1.0, mscale_all_dim=0.5)
    plain = Rotary(theta=100.0).frequencies(32)
    scaled = Rotary(theta=100.0, scaling=yarn).frequencies(32)
    turns = 64 * plain / (2 * np.pi)
    assert (turns > 8).any() and (turns < 1).any()
    np.testing.assert_allclose(scaled[turns > 8], plain[turns > 8], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    middle = (turns < 7) & (turns > 1.3)
    assert (scaled[middle] < plain[middle]).all() and (scaled[middle] > plain[middle] / 8).all()
    growth = 0.1 * np.log(8.0)
    assert yarn.amplitude == pytest.approx((growth + 1) / (0.5 * growth + 1))
    assert yarn.score_gain == pytest.approx((0.5 * growth + 1) ** 2)


@pytest.mark.parametrize("latent", [None, LATENT], ids=["heads", "latent"])
def test_yarn_enlarges_scores_of_every_attention(latent):
    yarn = YarnScaling(mscale_all_dim=0.5)
    config = DecoderConfig(vocab_size=10, latent=latent, rotary=Rotary(scaling=yarn))
    model = jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))
    scale = model.stacks[0].blocks[0].attention.scale
    assert yarn.score_gain > 1.3 and scale == pytest.approx(config.head_size**-0.5 * yarn.score_gain)


def test_interleaved_pairs_are_the_others_in_another_order():
    x, position = jax.random.normal(jax.random.key(0), (1, 5, 2, 8)), jnp.arange(5)[None]
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(Rotary(interleaved=True)(x, position), Rotary()(x[..., order], position))


def test_clipped_projections():
    sizes = {"embed": EMBED, "heads": HEADS, "kv_heads": 2, "head_dim": 8, "norm": EMBED}
    absent = dict.fromkeys(("q_norm", "k_norm", "b_q", "b_k", "b_v", "b_o", "rotary", "window", "soft_cap", "scale"))
    free = Attention.create(jax.random.key(0), sizes, clip=None, **absent)
    clipped = dataclasses.replace(free, clip=0.5)
    x, position = inputs()
    # Queries, keys and values; the gate is absent.
    both = jax.jit(lambda x: (free._project(x, position)[:3], clipped._project(x, position)[:3]))(x)
    for before, after in zip(*both):
        assert float(jnp.abs(before).max()) > 0.5
        np.testing.assert_array_equal(after, jnp.clip(before, -0.5, 0.5))


def test_a_layer_norm_without_bias():
    norm = Norm.build(jax.random.key(0), EMBED, kind="layer_unbiased")
    with_bias = Norm.build(jax.random.key(0), EMBED, kind="layer")
    x, _ = inputs()
    assert norm.bias is None and with_bias.bias is not None
    np.testing.assert_array_equal(norm(x + 3.0), with_bias(x + 3.0))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"kv_rank": 0}, "kv_rank=0; expected 1 or more"),
        ({"rope_dim": 5}, "rope_dim=5 is odd"),
        ({"value_dim": 13}, "value_dim=13 is more than a key's width, nope_dim \\+ rope_dim = 12"),
    ],
)
def test_impossible_widths_are_refused(change, says):
    with pytest.raises(RecipeError, match=says):
        dataclasses.replace(LATENT, **change)
