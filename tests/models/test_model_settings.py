"""Whatever settings are drawn: they are rejected when they are built, or the model has a loss and gradients."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.layers import Latent, Rotary, RotaryScaling, YarnScaling
from panax.layers.moe.moe_config import MoE
from panax.models import DecoderConfig, DecoderTask, DeltaNetConfig, HybridConfig

LENGTH = 8


def mixture(draw: random.Random) -> MoE:
    experts = draw.choice([1, 2, 4, 6])
    fields: dict[str, Any] = {
        "ffn": draw.choice([0, 16]),
        "gated": draw.choice([None, True, False]),
        "shared": draw.choice([0, 5]),
        "every": draw.choice([1, 2, 5]),
        "first_dense": draw.choice([0, 1, 9]),
        "choice": draw.choice(["token", "expert"]),
        "scores": draw.choice(["softmax", "sigmoid"]),
        "groups": draw.choice([1, 1, 2]),
        "group_score": draw.choice(["best", "best_two"]),
        "selection_bias": draw.random() < 0.5,
        "jitter": draw.choice([0.0, 0.3]),
        "balance_scope": draw.choice(["sequence", "batch", "global"]),
        "z_loss": draw.choice([0.0, 0.1]),
        "capacity": draw.choice([None, 0.01, 3.0]),
    }
    some = {name: value for name, value in fields.items() if draw.random() < 0.4}
    return MoE(experts=experts, active=draw.randint(1, experts), **some)


def decoder(draw: random.Random) -> DecoderConfig:
    fields: dict[str, Any] = {
        "kv_heads": draw.choice([-2, 1, 2]),
        "head_dim": draw.choice([-4, 1, 2, 6]),
        "feed_forward": None if draw.random() < 0.3 else mixture(draw),
        "gated": False,
        "norm": draw.choice(["layer", "layer_unbiased"]),
        "qk_norm": True,
        "attention_bias": True,
        "rotary": draw.choice(
            [None, Rotary(interleaved=True), Rotary(scaling=RotaryScaling()), Rotary(scaling=YarnScaling())]
        ),
        "windows": draw.choice([(1,), (4, 0), (100,)]),
        "attention_clip": draw.choice([0.5, -1.0]),
        "attention_soft_cap": draw.choice([2.0, 0.0]),
        "logit_soft_cap": draw.choice([3.0, 0.0]),
        "query_scale": draw.choice([7.0, -1.0]),
        "tied": False,
        "dropout": 0.2,
        "latent": Latent(q_rank=draw.choice([0, 8]), kv_rank=4, nope_dim=4, rope_dim=2, value_dim=4),
        "norm_epsilon": draw.choice([1e-5, -1.0]),
        "attention_gate": True,
    }
    some = {name: value for name, value in fields.items() if draw.random() < (0.7 if name == "feed_forward" else 0.15)}
    layers = draw.choice([1, 3])
    sizes: dict[str, Any] = {}
    if draw.random() < 0.3:
        attending = tuple(layer for layer in range(1, layers) if draw.random() < 0.5)
        sizes = {
            "attention_layers": attending,
            "ssm_heads": 4,
            "ssm_head_dim": 2,
            "ssm_groups": draw.choice([1, 2, 4, 2, 3]),
        }
        some = {name: value for name, value in some.items() if attending or name in ("feed_forward", "dropout")}
        some["norm"] = "rms"
    kind = HybridConfig if sizes else DecoderConfig
    if sizes and draw.random() < 0.5:
        kind, sizes = DeltaNetConfig, {"attention_layers": attending, "delta_key_heads": draw.choice([1, 2, 3])}
    return kind(
        vocab_size=draw.choice([1, 50]),
        vocab_multiple=draw.choice([1, 7]),
        max_length=LENGTH,
        embed=8,
        num_layers=layers,
        heads=draw.choice([1, 2]) if not sizes or attending else 4,
        ffn=24,
        **some,
        **sizes,
    )


def trained(task: DecoderTask, key: jax.Array) -> tuple[jax.Array, Any, Any]:
    """The loss, the gradients and the next model state of a step on one packed micro-batch."""
    segment = jnp.asarray([[1] * 5 + [2] * 3, [1] * 7 + [0]], jnp.int32)
    batch = {
        "tokens": jnp.arange(2 * LENGTH, dtype=jnp.int32).reshape(2, LENGTH) % task.model.vocab_size,
        "targets": jnp.zeros((2, LENGTH), jnp.int32),
        "loss_mask": (segment > 0).astype(jnp.float32),
        "row": jnp.arange(2, dtype=jnp.int32),
        "segment": segment,
        "position": jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1)),
    }
    params, state = task.init(key)
    micro_batches = jax.tree.map(lambda leaf: leaf[None], batch)
    gradients = task.gradients(params, state, micro_batches, key, jax.tree.map(lambda leaf: True, params))
    return task.loss(params, state, batch, key, True).losses["cross_entropy"].mean, gradients.gradients, gradients.state


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 80), marks=pytest.mark.slow)], ids=["few", "many"])
def test_drawn_settings_are_rejected_or_traced(seeds: range) -> None:
    built = 0
    for seed in seeds:
        draw = random.Random(seed)
        try:
            task = DecoderTask(model=decoder(draw))
        except RecipeError:
            continue
        built += 1
        jax.eval_shape(lambda key, task=task: trained(task, key), jax.random.key(0))
    assert len(seeds) // 4 <= built < len(seeds)


def test_a_mixture_that_no_layer_is() -> None:
    """A bias of routers that there are none of."""
    moe = MoE(first_dense=1, selection_bias=True, balance=0.1)
    task = DecoderTask(model=DecoderConfig(vocab_size=20, embed=8, num_layers=1, heads=1, ffn=8, feed_forward=moe))
    assert task.model.mixture_layers == ()
    loss, _, state = jax.eval_shape(lambda key: trained(task, key), jax.random.key(0))
    assert state == {} and loss.shape == ()
    assert np.isfinite(jax.jit(lambda key: trained(task, key)[0])(jax.random.key(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": -2}, "model.kv_heads=-2; expected 0 or more"),
        ({"head_dim": -4}, "model.head_dim=-4; expected 0 or more"),
        ({"norm_epsilon": -1.0}, "model.norm_epsilon=-1.0"),
        ({"query_scale": -1.0}, "model.query_scale=-1.0; expected a positive number, or 0 for head_dim"),
        ({"attention_soft_cap": 0.0}, "model.attention_soft_cap=0.0; expected a positive bound, or None"),
        ({"logit_soft_cap": float("inf")}, "model.logit_soft_cap=inf"),
        ({"attention_clip": -1.0}, "model.attention_clip=-1.0; expected a positive bound, or None"),
    ],
)
def test_numbers_that_mean_nothing(change: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        DecoderConfig(**change)


@pytest.mark.parametrize(
    "change", [{"scale": 0.0}, {"scale": -1.0}, {"balance": float("inf")}, {"buffer": float("inf")}]
)
def test_numbers_of_a_mixture_that_mean_nothing(change: dict) -> None:
    with pytest.raises(RecipeError, match=f"model.feed_forward.{next(iter(change))}="):
        MoE(**change)
