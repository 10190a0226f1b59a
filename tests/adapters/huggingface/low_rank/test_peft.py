"""Adapters in PEFT's files: computed there to the same logits, read back in their bits; keys that change a model are refused."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from huggingface_examples import abstract, apart, make_example, our_logits, positions, reloaded, their_logits, tokens
from safetensors.numpy import load_file, save_file

from panax.adapters.huggingface import load
from panax.adapters.huggingface.low_rank.peft import load_adapter, read_adapter_config, save_adapter
from panax.core import CheckpointError, RecipeError, named_leaves
from panax.models import DecoderTask, LoRA
from panax.models.lora import name_in_layer
from panax.spmd.composite.low_rank import base_weights, low_rank_mask, with_base_weights

ADAPTER = LoRA(rank=3, alpha=5.0, rank_stabilized=True)
NORMED = LoRA(rank=3, alpha=5.0, dora=True)
SIZED = LoRA(rank=3, alpha=5.0, ranks={"attention": 5, "feed_forward.w_up": 2}, alphas={"attention.w_q": 2.0})


ADAPTED: dict[str, Any] = {}


def adapted(name: str, folder: Path, lora: LoRA = ADAPTER) -> tuple[Any, DecoderTask, Any]:
    """An example, its task with adapters, and parameters with adapters that are not zero; made once for this file."""
    key = f"{name} {lora}"
    if key not in ADAPTED:
        ADAPTED[key] = make_adapted(name, folder, lora)
    return ADAPTED[key]


def make_adapted(name: str, folder: Path, lora: LoRA) -> tuple[Any, DecoderTask, Any]:
    example = make_example(name, folder)
    task = DecoderTask(model=example.task.model, adapter=lora)
    params, state = jax.jit(task.init)(jax.random.key(0))

    def moved(leaf: jax.Array, trained: bool) -> jax.Array:
        return leaf + 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape) if trained else leaf

    params = jax.tree.map(moved, params, low_rank_mask(params))
    params = load(example.folder, task, params, state)[0]
    # Magnitudes begin as the norms of the weights that were read.
    return example, task, jax.tree.map_with_path(lambda path, x: x * 1.3 if "magnitude" in str(path[-1]) else x, params)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param("llama", ADAPTER, id="llama"),
        pytest.param("llama", NORMED, id="llama, norms"),
        pytest.param("llama", SIZED, id="llama, sizes"),
        pytest.param("qwen3", ADAPTER, id="qwen3", marks=pytest.mark.full),
        pytest.param("gemma2", ADAPTER, id="gemma2", marks=pytest.mark.full),
        pytest.param("gemma2", NORMED, id="gemma2, norms", marks=pytest.mark.full),
    ],
)
def test_peft_computes_the_same(name: str, lora: LoRA, folder_of_examples: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    example, task, params = adapted(name, folder_of_examples, lora)
    save_adapter(tmp_path, params, lora, base="a/model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(reloaded(example.folder), str(tmp_path)).eval()
    expected = their_logits(theirs, tokens())
    assert apart(expected, their_logits(example.theirs, tokens())) > 0.05
    assert apart(our_logits(params, example.state, tokens(), positions(), None), expected) < 1e-5
    # Read back, its bits; into a model that has other adapters.
    assert sizes(read_adapter_config(tmp_path, task.model), params) == sizes(lora, params)
    again = load_adapter(tmp_path, jax.jit(task.init)(jax.random.key(9))[0])
    trained = jax.tree.leaves(low_rank_mask(params))
    for ours, read, one in zip(jax.tree.leaves(params), jax.tree.leaves(again), trained, strict=True):
        assert not one or np.array_equal(ours, read)
    # What PEFT itself writes is read too.
    with warnings.catch_warnings():
        # It looks for the base, to see whether its vocabulary was changed.
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(tmp_path / "theirs", again)
    for ours, read, one in zip(jax.tree.leaves(params), jax.tree.leaves(again), trained, strict=True):
        assert not one or np.array_equal(ours, read)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"), ("fan_in_fan_out", True), ("layers_to_transform", [0]), ("a_key_of_tomorrow", 3), ("peft_type", "LOHA"),
    ],
)  # fmt: skip
def test_keys_that_change_the_model_are_refused(key: str, value: Any, folder_of_examples: Path, tmp_path: Path) -> None:
    _, _, params = adapted("llama", folder_of_examples)
    save_adapter(tmp_path, params, ADAPTER)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, key: value}))
    with pytest.raises(RecipeError, match=key):
        read_adapter_config(tmp_path)


def sizes(lora: LoRA, params: Any) -> dict[str, Any]:
    """The size of each matrix's adapter."""
    adapted = (name for name, one in named_leaves(low_rank_mask(params)).items() if one)
    return {name: lora.size_of(name_in_layer(name)) for name in adapted}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"q_proj": 8}, {"attention.w_q": 8}),
        ({"self_attn.q_proj": 8, "q_proj": 9}, {"attention.w_q": 8}),
        ({r"model.layers.\d+.self_attn.(q|k)_proj": 8}, r"has the pattern 'model.*name the modules"),
        ({r"^model\.layers\.\d+\.mlp\.up_proj": 8}, {"feed_forward.w_up": 8}),
        ({".*_proj": 8, "gate_proj": 4}, None),
        ({"model.layers.0.self_attn.q_proj": 8}, "and other layers have different ranks"),
        ({"no_proj": 8}, "'no_proj' matches no module of this model"),
        ({"(a+)+": 8}, "has the pattern"),
        ({".*.*.*.*x": 8}, "has the pattern"),
        ({"q" * 300: 8}, "has the pattern"),
        ({"q_proj": "8"}, "expected at most 10000 patterns with a number each"),
        ([1], "expected at most 10000 patterns"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_patterns_are_matched_as_peft_matches_them(
    patterns: Any, expected: Any, folder_of_examples: Path, tmp_path: Path
) -> None:
    example, _, params = adapted("llama", folder_of_examples)
    save_adapter(tmp_path, params, ADAPTER)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, "rank_pattern": patterns}))
    if isinstance(expected, str):
        with pytest.raises(RecipeError, match=expected):
            read_adapter_config(tmp_path, example.task.model)
        return
    with pytest.raises(RecipeError, match="pass the base's settings as config="):
        read_adapter_config(tmp_path)
    ranks = read_adapter_config(tmp_path, example.task.model).ranks
    assert set(ranks.values()) == {8} and len(ranks) == 7 if expected is None else ranks == expected


def test_every_key_of_peft_is_known() -> None:
    """A key that is neither read nor known to be without effect must be neutral in a new config."""
    peft = pytest.importorskip("peft")
    from panax.adapters.huggingface.low_rank.peft import NEUTRAL, READ, WITHOUT_EFFECT

    for field in dataclasses.fields(peft.LoraConfig):
        if field.name in (*READ, *WITHOUT_EFFECT):
            continue
        default = getattr(peft.LoraConfig(), field.name)
        assert default == NEUTRAL[field.name] if field.name in NEUTRAL else not default, field.name


def test_files_that_do_not_fit_are_one_error(folder_of_examples: Path, tmp_path: Path) -> None:
    _, task, params = adapted("llama", folder_of_examples)
    save_adapter(tmp_path, params, ADAPTER)
    with pytest.raises(CheckpointError, match="holds an adapter already"):
        save_adapter(tmp_path, params, ADAPTER)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    for change, message in (
        ({name: tensors[name][:, :-1].copy()}, "has the shape"),
        ({name.replace("layers.0", "layers.99"): tensors[name]}, "holds adapters that the model has no place for"),
    ):
        save_file({**tensors, **change}, weights)
        with pytest.raises(CheckpointError, match=message):
            load_adapter(tmp_path, params)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="can't be read"):
        load_adapter(tmp_path, params)
    with pytest.raises(CheckpointError, match=r"adapter_config.json can't be read"):
        read_adapter_config(tmp_path / "nowhere")
    plain = DecoderTask(model=task.model)
    with pytest.raises(RecipeError, match="the model has no adapters"):
        save_adapter(tmp_path / "plain", abstract(plain)[0], ADAPTER)


def test_magnitudes_are_not_made_up(folder_of_examples: Path, tmp_path: Path) -> None:
    _, _, params = adapted("llama", folder_of_examples, NORMED)
    save_adapter(tmp_path, params, NORMED)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(weights).items() if "magnitude" not in name}
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match="was trained without magnitudes"):
        load_adapter(tmp_path, params)
    # Matrices without an adapter have the norms of their bases.
    weights.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if "layers.99" in name}, weights)
    loaded = load_adapter(tmp_path, params)
    start = with_base_weights(params, base_weights(params))
    for ours, expected in zip(magnitudes(loaded), magnitudes(start), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def magnitudes(params: Any) -> list[Any]:
    return [leaf for path, leaf in jax.tree.leaves_with_path(params) if "magnitude" in str(path[-1])]


def test_fused_matrices_have_no_place(folder_of_examples: Path, tmp_path: Path) -> None:
    _, _, params = adapted("gpt2", folder_of_examples)
    with pytest.raises(RecipeError, match=r"is a part of .*, or stored transposed"):
        save_adapter(tmp_path, params, ADAPTER)
