"""Decoders with state-space layers: refusals, their layers, generation, FLOPs, a run's description."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn, generate_greedily

from panax.core import RecipeError
from panax.layers import Context, Rotary, StateSpace, TransformerBlock
from panax.models import PRESETS, Decoder, DecoderTask, HybridConfig, compute_logits, count_parameters
from panax.run.folder.description import serialize_config

SIZES = {
    "vocab_size": 50,
    "max_length": 32,
    "embed": 16,
    "ssm_heads": 4,
    "ssm_head_dim": 8,
    "ssm_groups": 2,
    "ssm_state": 4,
    "norm_epsilon": 1e-5,
}
PURE = HybridConfig(**SIZES, num_layers=2)
HYBRID = HybridConfig(**SIZES, num_layers=4, attention_layers=(1,), heads=2, ffn=24, rotary=Rotary(fraction=0.5))


def abstract(config: HybridConfig) -> Decoder:
    return jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))


def built(config: HybridConfig) -> Decoder:
    return drawn(lambda key: Decoder.build(key, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2}, r"model.heads=2 has no effect without attention; set model.attention_layers, or leave it 4"),
        ({"rotary": None}, r"model.rotary=None has no effect without attention"),
        ({"activation": "gelu"}, r"model.activation='gelu' has no effect without a feed-forward; set model.ffn"),
        ({"attention_layers": (1,)}, r"model.ffn=0; expected a positive number"),
        (
            {"attention_layers": (4,), "ffn": 8},
            r"attention_layers=\(4,\); expected ascending numbers below num_layers=4",
        ),
        ({"attention_layers": (2, 1), "ffn": 8}, r"attention_layers=\(2, 1\); expected ascending"),
        ({"attention_layers": (0, 1, 2, 3), "ffn": 8}, r"are all layers; use a DecoderConfig"),
        ({"ssm_groups": 3}, r"ssm_heads=8 is not divisible by ssm_groups=3; each group serves an equal number"),
        ({"conv_taps": 0}, r"model.conv_taps=0; expected a positive number"),
        ({"norm": "layer"}, r"model.norm='layer', post_norms=False; expected 'rms' and False"),
        ({"attention_layers": (1,), "ffn": 8, "heads": 3}, r"embed=256 is not divisible by heads=3"),
    ],
)
def test_settings_without_meaning_are_refused(change, message) -> None:
    with pytest.raises(RecipeError, match=message):
        HybridConfig(**change)


def test_layers_are_what_the_settings_say() -> None:
    model = abstract(HYBRID)
    assert [(len(stack.blocks), stack.repeats) for stack in model.stacks] == [(1, 1), (1, 1), (1, 2)]
    assert [isinstance(stack.blocks[0], TransformerBlock) for stack in model.stacks] == [False, True, False]
    assert model.positions is None
    mixer = model.stacks[2].blocks[0].mixer
    assert isinstance(mixer, StateSpace) and mixer.w_x.shape == (2, 16, 4, 8)
    assert abstract(PURE).stacks[0].blocks[0].feed_forward is None
    assert [len(period) for period, _ in PRESETS["bamba_9b"].stacks] == [1] * 7


@pytest.mark.parametrize("config", [PURE, dataclasses.replace(HYBRID, num_layers=2)], ids=["pure", "hybrid"])
def test_generation_takes_what_the_whole_pass_finds_likeliest(config) -> None:
    model = built(config)
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 5)), jnp.int32)
    found = generate_greedily(model, prompt, 6)
    rows = jnp.concatenate([prompt, found], axis=1)
    position = jnp.broadcast_to(jnp.arange(rows.shape[1])[None], rows.shape)
    hidden, _ = jax.jit(lambda m, t: m(t, Context(position), dtype=jnp.float32))(model, rows)
    np.testing.assert_array_equal(jnp.argmax(compute_logits(model, hidden), axis=-1)[:, 4:-1], found)


def test_flops_are_of_all_matrices_and_the_recurrence() -> None:
    matrices = count_parameters(PURE) - 2 * (4 + 4 + 4 + 32 + 16 + 32 + 16) - 16  # without rates, biases and norms
    states = 2 * 2 * 4 * 8 * 4  # two layers; a state's outer product, and its product with a vector
    assert DecoderTask(model=PURE).flops_per_token(32) == 6 * (matrices + states)
    longer = dataclasses.replace(HYBRID, max_length=64)
    more = DecoderTask(model=longer).flops_per_token(64) - DecoderTask(model=HYBRID).flops_per_token(32)
    assert more == 6 * 2 * 16 * 16  # attention alone depends on the length: 16 positions more in the mean


def test_a_checkpoint_names_the_settings() -> None:
    task = DecoderTask(model=HYBRID)
    code = (
        "import sys; from panax.run.folder.description import deserialize_task as read; "
        "print(repr(read(sys.stdin.read(), 'here')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(serialize_config(task)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == repr(task)
