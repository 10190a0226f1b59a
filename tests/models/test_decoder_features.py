"""Features of open models: refusals, and a cache that gives the results of the whole pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn, generate_greedily
from tiny import FEATURES

from panax.core import RecipeError
from panax.layers import Context, DynamicScaling, LinearScaling, Rotary, YarnScaling
from panax.layers.attention.attention import normalize_heads
from panax.layers.attention.latent_attention import Latent
from panax.layers.moe.moe_config import MoE
from panax.models import Decoder, DecoderConfig, HeadSizes, compute_logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_norms": False}, "pre_norms=False and post_norms=False leave a layer without norms"),
        (
            {"parallel_residual": True, "post_norms": True},
            "parallel_residual=True with pre_norms=True, post_norms=True",
        ),
        ({"shared_norm": True}, "shared_norm=True has no effect without parallel_residual"),
        ({"norm": "rms_unscaled", "norm_unit_offset": True}, "norm='rms_unscaled' has no scale"),
        ({"qk_norm_scope": "all_heads"}, "qk_norm_scope='all_heads' has no effect without qk_norm"),
        ({"qk_norm_after_rotary": True}, "qk_norm_after_rotary=True has no effect without qk_norm"),
        ({"qk_norm": True, "qk_norm_scope": "heads"}, "qk_norm_scope='heads'"),
        ({"residual_multiplier": 0.0}, "residual_multiplier=0.0; expected a positive factor"),
        ({"logit_multiplier": float("nan")}, "logit_multiplier=nan: expected a number"),
        ({"rotaries": (Rotary(),), "rotary": None}, "rotary=None has no effect with rotaries"),
        ({"rotaries": (Rotary(fraction=0.01),)}, "expected an even number"),
        ({"head_sizes": (HeadSizes(head_dim=7),)}, "expected an even number"),
        ({"head_sizes": (HeadSizes(), HeadSizes(heads=6, kv_heads=4))}, "heads=6 is not divisible by kv_heads=4"),
        ({"head_sizes": (HeadSizes(heads=-2),)}, r"heads=-2.*expected numbers above 0"),
        ({"head_sizes": (HeadSizes(),), "latent": Latent()}, "head_sizes=.* has no effect with latent"),
    ],
)
def test_settings_without_meaning_are_refused(change: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        DecoderConfig(**change)


def test_heads_of_a_layer_are_those_of_its_place_in_the_cycle() -> None:
    config = FEATURES["heads of two widths and numbers"]
    model = jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))
    (stack,) = model.stacks
    local, full = stack.blocks
    assert local.attention.w_q.shape == (2, 32, 4, 8) and local.attention.w_k.shape == (2, 32, 4, 8)
    assert full.attention.w_q.shape == (2, 32, 8, 12) and full.attention.w_k.shape == (2, 32, 4, 12)
    assert full.attention.w_o.shape == (2, 8, 12, 32) and full.attention.q_norm.scale.shape == (2, 12)
    longer = dataclasses.replace(config, num_layers=5)
    assert [kind.heads.head_dim for kind in longer.kinds] == [8, 12, 8, 12, 8]


def test_a_gate_needs_something_to_gate() -> None:
    with pytest.raises(RecipeError, match="shared_gate=True has no effect without a shared expert"):
        MoE(shared_gate=True)


def test_nonsense_in_positions_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"query_growth=0.1, query_length=0; expected both positive, or both 0"):
        Rotary(query_growth=0.1)
    for scaling in (LinearScaling, DynamicScaling):
        with pytest.raises(RecipeError, match=r"factor=0.5; expected 1 or more"):
            scaling(factor=0.5)


def test_scalings_by_hand() -> None:
    plain = Rotary().frequencies(8)
    np.testing.assert_array_equal(Rotary(scaling=LinearScaling(factor=4.0)).frequencies(8), plain / 4)
    np.testing.assert_array_equal(Rotary(scaling=DynamicScaling(factor=4.0)).frequencies(8), plain)
    # Between pairs 0.55 and 2.37 the fraction that is kept falls; rounded outwards, between 0 and 3.
    yarn = {"factor": 2.0, "original_length": 64, "fast": 6.0, "slow": 0.2}
    exact = YarnScaling(**yarn, truncate=False).unscaled_fraction(plain, 10_000.0)
    rounded = YarnScaling(**yarn).unscaled_fraction(plain, 10_000.0)
    assert np.all(np.diff(exact) < np.diff(rounded)) and rounded[0] == 1.0 and exact[0] > 1.0
    assert YarnScaling(attention_factor=1.7).amplitude == 1.7


def test_norms_of_heads_by_hand() -> None:
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 3, 4, 8)).astype(np.float32), rng.normal(size=(4, 8)).astype(np.float32)
    complete = x / np.sqrt((x**2).mean(axis=(-2, -1), keepdims=True) + 1e-6) * scale
    normalized = normalize_heads(jnp.asarray(x), jnp.asarray(scale), "heads", "rms", 1e-6, "all_heads")
    np.testing.assert_allclose(normalized, complete, rtol=1e-5)
    centered = x - x.mean(axis=-1, keepdims=True)
    each = centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
    normalized = normalize_heads(jnp.asarray(x), jnp.asarray(scale), "heads", "layer", 1e-6, "own_head")
    np.testing.assert_allclose(normalized, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if place else []) for place, name in enumerate(FEATURES)]
)
def test_generation_takes_what_the_whole_pass_finds_likeliest(name: str) -> None:
    config = FEATURES[name]
    model = drawn(lambda key: Decoder.build(key, config))
    # Weights as drawn repeat the last token: larger ones tell the positions apart.
    model = jax.tree.map(lambda x: x * 3.0 if x.ndim > 2 else x, model)
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 9)), jnp.int32)
    sampled = generate_greedily(model, prompt, 8)
    complete = jnp.concatenate([prompt, sampled], axis=1)
    position = jnp.broadcast_to(jnp.arange(complete.shape[1]), complete.shape)
    hidden, _ = jax.jit(lambda model, tokens: model(tokens, Context(position), dtype=jnp.float32))(model, complete)
    logits = compute_logits(model, hidden)
    np.testing.assert_array_equal(sampled, logits.argmax(-1)[:, 8:-1])
    assert len(np.unique(sampled)) > 2
