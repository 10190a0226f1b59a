"""Mistakes planted in families' tables are found by the comparison that every family goes through: an error when the files
are read, or logits that are apart."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_examples import abstract, apart, make_example, our_logits, positions, their_logits, tokens
from test_huggingface_parity import TOLERANCE

from panax.adapters.huggingface import config, config_from, families, load
from panax.adapters.huggingface.family import Family, TensorSource
from panax.adapters.huggingface.layer_rotary import Listed
from panax.adapters.huggingface.pattern import Pattern
from panax.core import CheckpointError, RecipeError
from panax.models import DecoderTask

pytestmark = pytest.mark.full


def reads(parameter: str, **change: Any) -> Callable[[Family], Family]:
    """A parameter read from another tensor, or in another pattern or part."""

    def plant(family: Family) -> Family:
        source = family.weights[parameter]._replace(**change)
        return dataclasses.replace(family, weights={**family.weights, parameter: source})

    return plant


def takes(name: str, other: str) -> Callable[[Family], Family]:
    """A parameter read where another one is."""
    return lambda family: dataclasses.replace(family, weights={**family.weights, name: family.weights[other]})


def with_fields(**change: Any) -> Callable[[Family], Family]:
    return lambda family: dataclasses.replace(family, fields={**family.fields, **change})


def with_rotary(**change: Any) -> Callable[[Family], Family]:
    def plant(family: Family) -> Family:
        assert family.rotary is not None
        return dataclasses.replace(family, rotary=dataclasses.replace(family.rotary, **change))

    return plant


def with_mixture(**change: Any) -> Callable[[Family], Family]:
    def plant(family: Family) -> Family:
        assert family.mixture is not None
        return dataclasses.replace(family, mixture=dataclasses.replace(family.mixture, **change))

    return plant


def fixed(field: str, value: Any) -> Callable[[Family], Family]:
    """A field that is taken for the same in all members, though a key says it."""

    def plant(family: Family) -> Family:
        keys = {name: key for name, key in family.keys.items() if name != field}
        return dataclasses.replace(family, keys=keys, fields={**family.fields, field: value})

    return plant


def without_tensor(name: str) -> Callable[[Family], Family]:
    """A bias that is not looked for: its tensor is left over."""
    return fixed(name, False)


Z_LAST = Pattern(
    "(delta_key_heads delta_key_dim|delta_key_heads delta_key_dim|delta_heads delta_value_dim|delta_heads delta_value_dim) embed"
)

MISTAKES: dict[str, tuple[str, Callable[[Family], Family]]] = {
    "a wrong prefix": ("qwen2", reads("layers.attention.w_q", name="layers.{layer}.self_attn.q_proj.weight")),
    "a transposed weight": ("mistral", reads("layers.attention.w_o", pattern=Pattern("(heads head_dim) embed"))),
    "a square weight transposed": ("olmo2", reads("layers.attention.w_o", pattern=Pattern("(heads head_dim) embed"))),
    "a missing bias": ("granite", without_tensor("attention_bias")),
    "a bias that there is not": ("mistral", with_fields(attention_bias=True)),
    "a wrong epsilon": ("llama", fixed("norm_epsilon", 1e-2)),
    "trap: mscale of scores": ("ministral3", with_rotary(scores=True)),
    "trap: queries that grow": ("ministral3", with_rotary(grows=False)),
    "trap: adjacent features": ("glm4", with_rotary(interleaved=False)),
    "halves for adjacent features": ("llama", with_rotary(interleaved=True)),
    "a fraction that is not rotated": ("nemotron", with_rotary(fraction=None)),
    "gate for up": ("phi3", takes("layers.feed_forward.w_gate", "layers.feed_forward.w_up")),
    "gate and up exchanged": ("glm", lambda family: exchanged(family, "w_gate", "w_up")),
    "keys for values": ("gpt_bigcode", takes("layers.attention.w_v", "layers.attention.w_k")),
    "the norms of another place": (
        "gemma3_text",
        takes("layers.attention_norm.scale", "layers.feed_forward_norm.scale"),
    ),
    "norms before for norms after": ("exaone4", with_fields(pre_norms=True, post_norms=False)),
    "heads normalized each for all together": ("olmoe", with_fields(qk_norm_scope="own_head")),
    "branches one after the other": ("cohere", with_fields(parallel_residual=False, shared_norm=False)),
    "positions in every layer": ("smollm3", with_rotary(layers=None)),
    "weights of experts as they are": ("granitemoe", with_mixture(always={"ffn": 0, "normalize_topk": False})),
    "sigmoids for a softmax": ("ernie4_5_moe", with_mixture(always={"scores": "sigmoid", "selection_bias": True})),
    "the shared expert without its gate": ("qwen2_moe", with_mixture(always={})),
    "sinks left out": ("gpt_oss", with_fields(attention_sinks=False)),
    "gate and up in halves": (
        "gpt_oss",
        reads("layers.feed_forward.experts.w_up", pattern=Pattern("expert embed (2 expert_ffn)")),
    ),
    "the gate's bias for the other": (
        "gpt_oss",
        takes("layers.feed_forward.experts.b_up", "layers.feed_forward.experts.b_gate"),
    ),
    "gates without bounds": ("gpt_oss", lambda family: dataclasses.replace(family, read=None)),
    "a router without its bias": ("gpt_oss", with_mixture(always={"ffn": 0, "expert_biases": True})),
    "rows of key heads one after the other": ("qwen3_next", reads("layers.mixer.w_z", pattern=Z_LAST, part=3)),
    "values for gates": ("qwen3_next", takes("layers.mixer.w_z", "layers.mixer.w_v")),
    "beta and decay exchanged": ("qwen3_next", reads("layers.mixer.w_beta", part=1)),
    "queries for keys": ("qwen3_next", takes("layers.mixer.w_q", "layers.mixer.w_k")),
    "a norm without its offset": ("qwen3_next", with_fields(norm_unit_offset=False)),
    "the gate for the query": ("qwen3_next", takes("layers.attention.w_q", "layers.attention.w_gate")),
    "attention without its gate": ("qwen3_next", with_fields(attention_gate=False)),
    "steps without their floor": ("nemotron_h", fixed("ssm_step_floor", 0.0)),
    "embeddings without their norm": ("bloom", with_fields(embed_norm=False)),
    "values for keys": ("bloom", takes("layers.attention.w_k", "layers.attention.w_v")),
    "a multiplier of keys left out": ("falcon_h1", fixed("key_multiplier", 1.0)),
    "chunks for sliding windows": ("llama4_text", with_fields(window_kind="sliding")),
    "weights on the output of experts": (
        "llama4_text",
        with_mixture(always={"scores": "sigmoid", "normalize_topk": False}),
    ),
    "no growth in layers without positions": ("llama4_text", with_rotary(layers=Listed())),
    "gates of a convolution exchanged": ("lfm2", takes("layers.mixer.w_b", "layers.mixer.w_c")),
    "values of a convolution for its gates": ("lfm2", takes("layers.mixer.w_x", "layers.mixer.w_b")),
    "positions from the first row on": ("opt", with_fields(position_offset=0)),
    "logits divided for multiplied": ("hyperclovax", fixed("logit_multiplier", 0.2)),
}


def exchanged(family: Family, one: str, other: str) -> Family:
    names = [f"layers.feed_forward.{name}" for name in (one, other)]
    sources: dict[str, TensorSource] = dict(zip(names, [family.weights[name] for name in reversed(names)], strict=True))
    return dataclasses.replace(family, weights={**family.weights, **sources})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_found(mistake: str, folder_of_examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = MISTAKES[mistake]
    example = make_example(name, folder_of_examples)
    planted = plant(families.FAMILIES[name])
    monkeypatch.setattr(config, "FAMILIES", {**families.FAMILIES, name: planted})
    try:
        task = DecoderTask(model=config_from(example.folder))
        params, state = load(example.folder, task, *abstract(task))
    except (RecipeError, CheckpointError, KeyError):
        return
    ours = our_logits(params, state, tokens(), positions(), None)
    assert apart(ours, their_logits(example.theirs, tokens())) > 10 * TOLERANCE
