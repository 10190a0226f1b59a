"""Decoders with delta nets: refusals, kinds of layers, generation, FLOPs, and the plan of a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawing import drawn, generate_greedily

from panax.core import RecipeError
from panax.layers import Context, DeltaNet, TransformerBlock
from panax.mesh import MeshShape, Placement
from panax.models import Decoder, DecoderTask, DeltaNetConfig, compute_logits, count_parameters
from panax.optim import AdamW
from panax.plan import walk_step
from panax.train import CompiledStep, Program

PURE = DeltaNetConfig(
    vocab_size=50,
    max_length=32,
    embed=16,
    num_layers=2,
    ffn=24,
    delta_heads=4,
    delta_value_dim=8,
    delta_key_heads=2,
    delta_key_dim=6,
)
HYBRID = dataclasses.replace(
    PURE, num_layers=4, attention_layers=(1, 3), heads=2, attention_gate=True, norm_unit_offset=True
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2}, r"model.heads=2 has no effect without attention; set model.attention_layers, or leave it 4"),
        ({"attention_gate": True}, r"model.attention_gate=True has no effect without attention"),
        ({"ffn": 0}, r"model.ffn=0; expected a positive number"),
        ({"delta_key_heads": 3}, r"delta_heads=8 is not divisible by delta_key_heads=3; each key head serves"),
        ({"delta_key_dim": 0}, r"model.delta_key_dim=0; expected a positive number"),
        ({"attention_layers": (0, 1, 2, 3)}, r"are all layers; use a DecoderConfig, or leave some to recurrent mixers"),
        ({"norm": "layer"}, r"model.norm='layer', post_norms=False; expected 'rms' and False"),
    ],
)
def test_settings_without_meaning_are_refused(change, message) -> None:
    with pytest.raises(RecipeError, match=message):
        DeltaNetConfig(**change)


def test_layers_are_what_the_settings_say() -> None:
    model = jax.eval_shape(lambda key: Decoder.build(key, HYBRID), jax.random.key(0))
    (stack,) = model.stacks
    net, attention = stack.blocks
    assert isinstance(net.mixer, DeltaNet) and net.mixer.w_v.shape == (2, 16, 4, 8)
    assert isinstance(attention, TransformerBlock) and attention.attention.w_gate.shape == (2, 16, 2, 8)
    assert model.positions is None


def test_generation_takes_what_the_whole_pass_finds_likeliest() -> None:
    model = drawn(lambda key: Decoder.build(key, HYBRID))
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 5)), jnp.int32)
    found = generate_greedily(model, prompt, 6)
    rows = jnp.concatenate([prompt, found], axis=1)
    position = jnp.broadcast_to(jnp.arange(rows.shape[1])[None], rows.shape)
    hidden, _ = jax.jit(lambda m, t: m(t, Context(position), dtype=jnp.float32))(model, rows)
    np.testing.assert_array_equal(jnp.argmax(compute_logits(model, hidden), axis=-1)[:, 4:-1], found)


def test_flops_are_of_all_matrices_and_the_recurrence() -> None:
    # Without rates, biases of steps and norms; the padded rows of the vocabulary are counted like others.
    matrices = count_parameters(PURE) - 2 * (4 + 4 + 8 + 16 + 16) - 16
    states = 2 * 3 * 4 * 8 * 6  # two layers; a state's products with a key and a query, and an outer product
    assert DecoderTask(model=PURE).flops_per_token(32) == 6 * (matrices + states)


@pytest.mark.full
def test_the_walk_knows_all_that_a_step_does() -> None:
    model = tiny.FEATURES["delta nets, gated attention in every fourth layer"]
    program = Program.create(DecoderTask(model=model), AdamW(), num_steps=1)
    step = CompiledStep(
        program, Placement.create(MeshShape(fsdp=2, context=2, tensor=2), devices=jax.devices()), tiny.AXES
    )
    cost = walk_step(step, tiny.batch(rows=8))
    assert cost.unknown == ()
    flops_without_mixture = DecoderTask(model=model).flops_per_token(tiny.LENGTH) * tiny.batch(rows=8)["tokens"].size
    # Of all devices: the model's own products, and what chunks of tiny states compute besides.
    assert flops_without_mixture < 8 * cost.work.flops < 4 * flops_without_mixture
