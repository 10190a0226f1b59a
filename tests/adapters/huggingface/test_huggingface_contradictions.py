"""A folder with parts that contradict each other: `transformers` is followed, or the folder is rejected with the reason."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import transformers
from family_examples import ROTARY, SCALED, YARN
from huggingface_examples import (
    EAGER,
    abstract,
    apart,
    make_example,
    our_logits,
    positions,
    reloaded,
    their_logits,
    tokens,
)
from safetensors.numpy import load_file, save_file
from test_huggingface_parity import TOLERANCE

from panax.adapters.huggingface import config_from, load, save
from panax.core import RecipeError
from panax.layers import Rotary, RotaryScaling, YarnScaling
from panax.models import DecoderConfig, DecoderTask


def with_head(folder, there, head) -> None:
    shutil.copytree(folder, there)
    tensors = load_file(there / "model.safetensors")
    save_file({**tensors, "lm_head.weight": head(tensors["model.embed_tokens.weight"])}, there / "model.safetensors")


def test_a_tied_model_with_another_head_is_rejected(folder_of_examples, tmp_path) -> None:
    example = make_example("qwen3", folder_of_examples)
    assert example.task.model.tied
    with_head(example.folder, tmp_path / "same", np.copy)
    load(tmp_path / "same", example.task, *abstract(example.task))
    with_head(example.folder, tmp_path / "other", lambda table: np.concatenate([table[:-1], table[:1]]))
    with_head(example.folder, tmp_path / "another", lambda table: table[::-1].copy())
    for name in ("other", "another"):
        with pytest.raises(
            RecipeError, match=r"tie_word_embeddings=True, but lm_head.weight .* differs from model.embed"
        ):
            load(tmp_path / name, example.task, *abstract(example.task))
    # What the message proposes is what `transformers` computes.
    raw = json.loads((tmp_path / "another" / "config.json").read_text())
    theirs = their_logits(reloaded(tmp_path / "another"), tokens())
    (tmp_path / "another" / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    task = DecoderTask(model=config_from(tmp_path / "another"))
    params, state = load(tmp_path / "another", task, *abstract(task))
    assert apart(our_logits(params, state, tokens(), positions(), None), theirs) < TOLERANCE


@pytest.mark.parametrize(("family", "length"), [("llama", 48), ("deepseek_v3", 4000)])
def test_an_outer_original_length_comes_first(family: str, length: int, folder_of_examples, tmp_path) -> None:
    example = make_example(family, folder_of_examples)
    shutil.copytree(example.folder, tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "original_max_position_embeddings": length}))
    task = DecoderTask(model=config_from(path.parent))
    params, state = load(path.parent, task, *abstract(task))
    ours, theirs = our_logits(params, state, tokens(), positions(), None), their_logits(reloaded(path.parent), tokens())
    assert apart(ours, theirs) < TOLERANCE
    assert apart(theirs, their_logits(example.theirs, tokens())) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, "factor=0.5; expected 1 or more"),
        ({"factor": -8.0}, "factor=-8.0; expected 1 or more"),
        ({"factor": float("inf")}, "factor=inf; expected 1 or more"),
        ({"original_length": 0}, "original_length=0; expected the positive length"),
        (
            {"low_frequency_factor": 4.0, "high_frequency_factor": 1.0},
            "low_frequency_factor=4.0, high_frequency_factor=1",
        ),
        ({"low_frequency_factor": 4.0}, "low_frequency_factor=4.0, high_frequency_factor=4.0"),
        ({"low_frequency_factor": -1.0}, "low_frequency_factor=-1.0"),
    ],
)
def test_nonsense_in_llamas_scaling(change: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        RotaryScaling(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fast": 1.0, "slow": 32.0}, "slow=32.0, fast=1.0; expected positive numbers of turns"),
        ({"slow": 0.0}, "slow=0.0, fast=32.0"),
        ({"factor": 0.0}, "factor=0.0; expected 1 or more"),
        ({"mscale": -1.0}, "mscale=-1.0; expected 0 or more"),
        ({"original_length": -4}, "original_length=-4; expected the positive length"),
    ],
)
def test_nonsense_in_yarns_scaling(change: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        YarnScaling(**change)


def test_nonsense_in_positions() -> None:
    for theta in (1.0, 0.0, -10_000.0, float("inf")):
        with pytest.raises(RecipeError, match=f"theta={theta}; expected a number above 1"):
            Rotary(theta=theta)
    # No pair turns more than 32 times: the whole of the head would be taken for one that turns slowly, or for the contrary.
    with pytest.raises(RecipeError, match="the transition would run from pair 14 down to pair 7"):
        DecoderConfig(rotary=Rotary(theta=10.0, scaling=YarnScaling(original_length=2**20)), embed=32, heads=4)
    assert YarnScaling(fast=1.0, slow=1.0).unscaled_fraction(np.ones(32), 50_000.0).shape == (32,)


@pytest.mark.parametrize(
    ("scaling", "change", "message"),
    [
        (SCALED, {"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "low_frequency_factor=4.0"),
        (SCALED, {"factor": 0.25}, "factor=0.25"),
        (YARN, {"beta_fast": 1.0, "beta_slow": 4.0}, "slow=4.0, fast=1.0"),
        (YARN, {"rope_theta": 0.5}, "theta=0.5"),
    ],
)
def test_nonsense_in_a_file_names_the_file(
    scaling: dict, change: dict, message: str, folder_of_examples, tmp_path
) -> None:
    example = make_example("llama" if scaling is SCALED else "deepseek_v3", folder_of_examples)
    raw = json.loads((example.folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**raw, "rope_parameters": {**scaling, **change}}))
    with pytest.raises(RecipeError, match=message) as error:
        config_from(tmp_path)
    assert str(path) in str(error.value) and "rope_parameters=" in str(error.value)


def test_a_gemma2_with_full_attention_everywhere_runs_in_transformers(folder_of_examples, tmp_path) -> None:
    config = transformers.Gemma2Config(
        **ROTARY, num_hidden_layers=1, head_dim=16, query_pre_attn_scalar=16, layer_types=["full_attention"]
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    task = DecoderTask(model=config_from(tmp_path / "theirs"))
    assert task.model.windows == (0,)
    params, state = load(tmp_path / "theirs", task, *abstract(task))
    save(tmp_path / "ours", params, state)
    again = reloaded(tmp_path / "ours")
    assert again.config.layer_types == ["full_attention"] and config_from(tmp_path / "ours") == task.model
    expected = their_logits(theirs, tokens())
    assert np.array_equal(their_logits(again, tokens()), expected)
    assert apart(our_logits(params, state, tokens(), positions(), None), expected) < TOLERANCE


def test_rows_beyond_the_original_length_have_the_long_factors(folder_of_examples, tmp_path) -> None:
    example = make_example("phi3_long", folder_of_examples)
    assert example.task.model.max_length == 32
    shutil.copytree(example.folder, tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    raw = json.loads(path.read_text())
    rope = {**raw["rope_parameters"], "original_max_position_embeddings": 16, "type": "su", "rope_type": "su"}
    path.write_text(json.dumps({**raw, "original_max_position_embeddings": 16, "rope_parameters": rope}))
    config = config_from(path.parent)
    assert config.max_length == 16
    longer = dataclasses.replace(config.rotary.scaling, use="long")
    model = dataclasses.replace(config, rotary=dataclasses.replace(config.rotary, scaling=longer), max_length=64)
    leaves = jax.tree.leaves(example.params)
    params = jax.tree.structure(abstract(DecoderTask(model=model))[0]).unflatten(leaves)
    theirs = their_logits(reloaded(path.parent), tokens())
    assert apart(our_logits(params, example.state, tokens(), positions(), None), theirs) < TOLERANCE
    assert apart(theirs, their_logits(example.theirs, tokens())) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_factor": [1.0]}, "scaling.short has 1 factors; expected 4"),
        ({"long_factor": "none"}, "long_factor is 'none', expected a list of numbers"),
        ({"short_factor": [1.0, 2.0, True, 3.0]}, "expected a list of numbers"),
        ({"attention_factor": "x"}, "expected factor and attention_factor to be numbers"),
    ],
)
def test_nonsense_in_long_factors(change: dict, message: str, folder_of_examples, tmp_path) -> None:
    example = make_example("phi3_long", folder_of_examples)
    raw = json.loads((example.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_parameters": {**raw["rope_parameters"], **change}}))
    with pytest.raises(RecipeError, match=message):
        config_from(tmp_path)
