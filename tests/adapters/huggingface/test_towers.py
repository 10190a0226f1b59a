"""Models with towers in addition to the text's: the text is loaded and trained, the rest comes out byte for byte."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from family_examples import EXAMPLES, THREE
from huggingface_examples import (
    EAGER,
    Example,
    abstract,
    apart,
    make_example,
    our_logits,
    positions,
    their_logits,
    tokens,
)
from safetensors.numpy import load_file, save_file
from test_huggingface_parity import TOLERANCE

from panax.adapters.huggingface import config_from, load, save
from panax.core import RecipeError
from panax.models import DecoderTask

IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": list(sizes)}}


def text(name: str) -> dict[str, Any]:
    model_type, settings = EXAMPLES[name]
    return {**settings, "model_type": model_type}


TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": text("gemma3_text") | {"final_logit_softcapping": None},
        "vision_config": {**IMAGES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": text("mistral"),
        "vision_config": {**IMAGES, "model_type": "pixtral", "head_dim": 8},
    },
    "qwen2_5_vl": {"text_config": {**THREE, **sections(1, 1, 2)}, "vision_config": PATCHES},
    "qwen3_vl": {
        "text_config": {**THREE, "head_dim": 16, **sections(4, 2, 2)},
        "vision_config": {**PATCHES, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": text("qwen3_5_text"), "vision_config": PATCHES},
    "qwen3_5_moe": {"text_config": text("qwen3_5_moe_text"), "vision_config": PATCHES},
    "llava": {"text_config": text("llama"), "vision_config": {**IMAGES, "model_type": "clip_vision_model"}},
}
"""The layouts of names: the text's under "language_model." or "model.language_model.", or as if it were alone."""


def theirs_of(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, **EAGER).eval()


@functools.cache
def made(name: str, parent: Path) -> Example:
    torch.manual_seed(0)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name](**TOWERS[name])
    theirs = transformers.AutoModelForImageTextToText.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.15 * torch.randn_like(value))
    folder = parent / f"tower-{name}"
    theirs.save_pretrained(folder)
    task = DecoderTask(model=config_from(folder))
    return Example(name, name, theirs, folder, task, *load(folder, task, *abstract(task)))


DEFAULT = "gemma3"


@pytest.fixture(
    scope="module",
    params=[DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in TOWERS if name != DEFAULT)],
)
def tower(request: pytest.FixtureRequest, folder_of_examples: Path) -> Example:
    return made(request.param, folder_of_examples)


def test_logits_of_text(tower: Example) -> None:
    ours = our_logits(tower.params, tower.state, tokens(), positions(), None)
    assert apart(ours, their_logits(tower.theirs, tokens())) < TOLERANCE


def test_the_other_towers_come_out_as_they_went_in(tower: Example, tmp_path: Path) -> None:
    like = json.loads((tower.folder / "config.json").read_text())
    moved = jax.tree.map(lambda leaf: leaf * 1.5, tower.params)
    save(tmp_path / "out", moved, tower.state, like=like, towers=tower.folder, max_shard_bytes=30_000)
    came = load_file(tower.folder / "model.safetensors")
    went: dict[str, np.ndarray] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        went |= load_file(file)
    assert went.keys() == came.keys()
    same = {name for name in came if np.array_equal(went[name], came[name]) and went[name].dtype == came[name].dtype}
    changed = came.keys() - same
    assert same and all("vision" in name or "visual" in name or "projector" in name for name in same)
    assert all("vision" not in name and "visual" not in name for name in changed)
    again = theirs_of(tmp_path / "out")
    assert type(again) is type(tower.theirs)
    ours = our_logits(moved, tower.state, tokens(), positions(), None)
    assert apart(ours, their_logits(again, tokens())) < TOLERANCE
    assert config_from(tmp_path / "out") == tower.task.model


def test_a_setting_that_the_whole_model_ignores_is_refused(folder_of_examples: Path, tmp_path: Path) -> None:
    raw = json.loads((made("gemma3", folder_of_examples).folder / "config.json").read_text())
    raw["text_config"]["final_logit_softcapping"] = 3.0
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(RecipeError, match=r"final_logit_softcapping=3.0 .* does not compute it in a gemma3 model"):
        config_from(tmp_path)


def test_without_the_release_the_message_states_what_is_needed(tower: Example, tmp_path: Path) -> None:
    like = json.loads((tower.folder / "config.json").read_text())
    with pytest.raises(RecipeError, match="has other towers in addition to the text's; pass its folder"):
        save(tmp_path / "out", tower.params, tower.state, like=like)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "tower"])
def test_layers_that_predict_further_come_out_as_they_went_in(
    wrapped: bool, folder_of_examples: Path, tmp_path: Path
) -> None:
    example = made("qwen3_5", folder_of_examples) if wrapped else make_example("qwen3_next", folder_of_examples)
    base = shutil.copytree(example.folder, tmp_path / "base")
    further = {"mtp.fc.weight": np.ones((2, 3), np.float32), "mtp.layers.0.mlp.up_proj.weight": np.ones(4, np.float32)}
    save_file(load_file(base / "model.safetensors") | further, base / "model.safetensors")
    params, state = load(base, example.task, *abstract(example.task))
    like = json.loads((base / "config.json").read_text())
    save(tmp_path / "out", params, state, like=like, towers=base)
    came, went = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert went.keys() == came.keys()
    assert all(np.array_equal(went[name], came[name]) for name in came)
