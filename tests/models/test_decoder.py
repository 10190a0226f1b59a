"""The decoder: published sizes, causality from gradients, windows, packing, FLOPs, debugging."""

import builtins
import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_recipe
from drawing import drawn

import panax
from panax import fit
from panax.core import RecipeError, scope
from panax.layers import Context, FeedForward, Latent
from panax.models import (
    PRESETS,
    PUBLISHED_ACTIVE,
    PUBLISHED_PARAMETERS,
    Decoder,
    DecoderConfig,
    count_active_parameters,
    count_parameters,
    training_flops_per_token,
)
from panax.optim import AdamW, Schedule


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    assert count_parameters(PRESETS[name]) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_a_token_meets_the_published_number_of_parameters(name):
    config, published = PRESETS[name], PUBLISHED_ACTIVE[name]
    most = count_active_parameters(config)
    least = most - config.vocab_size * config.embed  # the embedding, which is looked up; some papers leave it out
    places = len(published.partition(".")[2])
    assert round(least / 1e9, places) <= float(published) <= round(most / 1e9, places)


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_flops_count_what_a_token_meets(name):
    config = PRESETS[name]
    products = count_active_parameters(config) - (0 if config.tied else config.vocab_size * config.embed)
    width = config.head_size + (config.head_size if config.latent is None else config.latent.value_dim)
    attention = 3 * 2 * config.num_layers * config.heads * width  # one position, which sees itself
    # Norms and biases are all that is met and not multiplied: of gpt-oss, 3 in 10,000 are biases of projections and experts.
    few = 4e-4 if config.attention_bias else 1e-4
    assert (training_flops_per_token(config, 1) - attention) / 6 == pytest.approx(products, rel=few)
    assert training_flops_per_token(config, 1) - attention < 6 * products


@pytest.fixture(scope="module")
def reach():
    """Which inputs each output position depends on, from gradients: [output position, input position]."""
    config = dataclasses.replace(tiny.CONFIG, dropout=0.0, num_layers=2, windows=(4,))
    model = drawn(lambda key: Decoder.build(key, config))
    length = 16
    segment = jnp.where(jnp.arange(length) < 6, 1, 2)[None]
    position = jnp.where(jnp.arange(length) < 6, jnp.arange(length), jnp.arange(length) - 6)[None]

    def output(x, segment):
        context = Context(position, segment)
        for stack in model.stacks:
            x, _ = stack(x, context, "none")
        return x[0].sum(-1)

    x = jax.random.normal(jax.random.key(1), (1, length, config.embed))
    jacobian = jax.jit(jax.jacobian(output))
    return {
        "packed": np.abs(np.asarray(jacobian(x, segment)))[:, 0].sum(-1) > 0,
        "whole": np.abs(np.asarray(jacobian(x, jnp.ones_like(segment))))[:, 0].sum(-1) > 0,
    }


def test_causal_and_no_further_back_than_the_windows_reach(reach):
    i, j = np.indices((16, 16))
    # Two layers of window 4: each reaches three positions further back.
    np.testing.assert_array_equal(reach["whole"], (j <= i) & (i - j <= 6))


def test_packed_documents_do_not_see_each_other(reach):
    i, j = np.indices((16, 16))
    same = (i < 6) == (j < 6)
    np.testing.assert_array_equal(reach["packed"], (j <= i) & (i - j <= 6) & same)


def test_stacks_cover_every_layer_once_in_order():
    config = DecoderConfig(vocab_size=10, num_layers=7, windows=(4, 0, 8), embed=16, heads=2, ffn=32)
    model = jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))
    windows = {}
    for stack in model.stacks:
        for place, block in enumerate(stack.blocks):
            for repeat in range(stack.repeats):
                windows[stack.first + repeat * len(stack.blocks) + place] = block.attention.window
    assert [windows[i] for i in range(7)] == [4, None, 8, 4, None, 8, 4]


def test_flops_count_every_weight_six_times_and_what_the_window_leaves():
    config = dataclasses.replace(PRESETS["gpt2"], windows=(0,))
    weights = PUBLISHED_PARAMETERS["gpt2"] - 1024 * 768  # positions are looked up, not multiplied
    biases = 12 * (9 * 768 + 4 * 768) + 2 * 768 + 12 * 0
    attention = 12 * 2 * 2 * 768 * (1024 + 1) / 2
    assert training_flops_per_token(config, 1024) == pytest.approx(3 * (2 * (weights - biases) + attention), rel=1e-9)
    windowed = dataclasses.replace(config, windows=(1,))
    assert training_flops_per_token(config, 1024) - training_flops_per_token(windowed, 1024) == pytest.approx(
        3 * 12 * 2 * 2 * 768 * ((1024 + 1) / 2 - 1), rel=1e-9
    )


@pytest.mark.parametrize(
    "change, says",
    [
        ({"embed": 30}, "embed=30 is not divisible by heads=4"),
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"dropout": 1.0}, "expected a rate"),
        ({"windows": ()}, "windows"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"head_dim": 7}, "even number"),
        ({"attention_clip": 0.0}, "attention_clip=0.0; expected a positive bound"),
        ({"latent": Latent(), "kv_heads": 2}, "kv_heads=2 has no effect with latent attention; leave it 0"),
        ({"latent": Latent(), "rotary": None}, "rotary=None; latent attention needs rotary positions"),
    ],
)
def test_impossible_configurations_are_refused(change, says):
    with pytest.raises(RecipeError, match=says):
        dataclasses.replace(DecoderConfig(vocab_size=10), **change)


def test_an_error_in_the_model_names_its_part():
    with pytest.raises(ValueError, match="boom") as caught, scope("layers.3"), scope("attention"):
        raise ValueError("boom")
    assert caught.value.__notes__ == ["in model part 'layers.3.attention'"]


@pytest.fixture
def debugged(tmp_path):
    base = tiny_recipe.tiny()
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, cache_dir=str(tmp_path), batch_size=2, sequence_length=16),
        task=dataclasses.replace(base.task, model=dataclasses.replace(base.task.model, windows=(0,))),
        optimizer=AdamW(schedule=Schedule(peak=1e-3, decay="constant")),
        directory=str(tmp_path / "run"),
        evaluate=panax.run.EvaluateConfig(every=0, batches=1),
        num_steps=1,
        debug=True,
    )


@pytest.mark.full
def test_debugging_shows_real_values_stops_at_breakpoints_and_takes_the_same_step(debugged, monkeypatch):
    values, stops = [], []
    original = FeedForward.__call__

    def watched(self, x):
        if panax.is_debugging():
            values.append(float(np.asarray(x).mean()))
        builtins.breakpoint()
        return original(self, x)

    monkeypatch.setattr(FeedForward, "__call__", watched)
    monkeypatch.setattr(sys, "breakpointhook", lambda *args, **kwargs: stops.append(1))
    result = fit(debugged, say=lambda line: None)
    # Two layers, in the step's forward pass and in the evaluation's.
    assert len(values) == len(stops) == 4 and all(map(math.isfinite, values))
    monkeypatch.setattr(FeedForward, "__call__", original)
    jitted = dataclasses.replace(debugged, debug=False, directory=debugged.directory + "-jit")
    compiled = fit(jitted, say=lambda line: None, devices=jax.devices()[:1])
    assert result.evaluation["loss"] == pytest.approx(compiled.evaluation["loss"], rel=1e-5)


@pytest.mark.full
def test_debugging_takes_a_step_of_an_optimizer_in_8_bits(debugged):
    """The constant that marks broken elements raises only if one is broken."""
    optimizer = AdamW(schedule=Schedule(peak=1e-3, decay="constant"), moments="int8")
    wide = dataclasses.replace(debugged.task, model=dataclasses.replace(debugged.task.model, ffn=256))
    result = fit(dataclasses.replace(debugged, task=wide, optimizer=optimizer), say=lambda line: None)
    assert math.isfinite(result.evaluation["loss"])


def test_debugging_raises_at_a_nan_and_names_the_layer(debugged, monkeypatch):
    original = FeedForward.__call__
    monkeypatch.setattr(FeedForward, "__call__", lambda self, x: original(self, jnp.log(-jnp.abs(x) - 1)))
    with pytest.raises(FloatingPointError) as caught:
        fit(debugged, say=lambda line: None)
    assert "in model part 'layers.0.feed_forward'" in caught.value.__notes__
