"""What is saved here is read by `transformers` and by ourselves, with the same bits."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from huggingface_examples import MIXTURES, Example, abstract, make_example, reloaded, their_logits, tokens

from panax.adapters.huggingface import config_from, load, parameter_reader, save
from panax.adapters.huggingface.families import FAMILIES
from panax.adapters.huggingface.family_choice import resolve_defaults, to_config_json
from panax.adapters.huggingface.tensor_map import ParameterMatch
from panax.adapters.huggingface.tensor_names import ROTARY_ABSENT
from panax.core import CheckpointError, RecipeError
from panax.core.params.axes import named_leaves
from panax.layers import Latent, Rotary, YarnScaling
from panax.layers.moe.moe_config import MoE
from panax.mesh import MeshShape, Placement
from panax.models import PRESETS, Decoder, DecoderConfig, DecoderTask


def same_bits(a: tuple[Decoder, dict], b: tuple[Decoder, dict]) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) and x.dtype == y.dtype for x, y in pairs)


def laid_out_on(task: DecoderTask, shape: MeshShape) -> tuple[Decoder, dict]:
    """The task's abstract parameters and state, sharded over a mesh of this shape."""
    placement, both = Placement.create(shape), abstract(task)
    axes = task.parameter_axes(both[0]), task.state_axes(both[1])
    shardings = placement.storage_shardings(both, axes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), both, shardings)


def test_transformers_loads_the_same_model(any_example: Example, tmp_path) -> None:
    example = any_example
    save(tmp_path, example.params, example.state, model_type=example.family)
    again = reloaded(tmp_path)
    weights, expected = again.state_dict(), example.theirs.state_dict()
    assert type(again) is type(example.theirs)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert np.array_equal(their_logits(again, tokens()), their_logits(example.theirs, tokens()))
    assert config_from(tmp_path) == example.task.model


@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "dbrx"])  # whose experts share a tensor
def test_each_device_reads_its_own_experts_only(family: str, folder_of_examples, monkeypatch) -> None:
    example = make_example(family, folder_of_examples)
    laid_out = laid_out_on(example.task, MeshShape(expert=4, fsdp=2))
    read, place, tensor = set(), parameter_reader._read_to_devices, ParameterMatch.tensor

    def of_last_device(*args: Any) -> list[list[jax.Array]]:
        *_, devices = args
        with monkeypatch.context() as patch:
            if jax.devices()[-1] in devices:
                patch.setattr(ParameterMatch, "tensor", lambda self, at: read.add(tensor(self, at)) or tensor(self, at))
            return place(*args)

    monkeypatch.setattr(parameter_reader, "_read_to_devices", of_last_device)
    load(example.folder, example.task, *laid_out)
    moe = example.task.model.feed_forward
    experts = {int(match[1]) for name in read if (match := re.search(r"experts\.(\d+)\.", name))}
    assert experts == set(range(moe.experts * 3 // 4, moe.experts))
    layers = {int(match[1]) for name in read if (match := re.search(r"layers\.(\d+)\..*experts\.\d", name))}
    assert layers == set(example.task.model.mixture_layers)


@pytest.mark.parametrize("shape", [MeshShape(fsdp=8), MeshShape(replica=2, fsdp=2, tensor=2)], ids=["fsdp", "mixed"])
def test_loads_into_any_sharding_and_saves_from_it(example: Example, tmp_path, shape: MeshShape) -> None:
    check_sharded(example, tmp_path, shape)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_delta_nets_load_into_a_sharding_by_heads(name: str, folder_of_examples, tmp_path) -> None:
    """Rows of several projections are in one tensor, of Qwen3-Next in turns by key head."""
    check_sharded(make_example(name, folder_of_examples), tmp_path, MeshShape(replica=2, fsdp=2, tensor=2))


def check_sharded(example: Example, tmp_path, shape: MeshShape) -> None:
    laid_out = laid_out_on(example.task, shape)
    loaded = load(example.folder, example.task, *laid_out)
    for name, leaf in named_leaves(loaded).items():
        assert leaf.sharding == named_leaves(laid_out)[name].sharding, name
    assert not loaded[0].embedding.table.sharding.is_fully_replicated
    assert same_bits(loaded, (example.params, example.state))
    save(tmp_path, *loaded, max_shard_bytes=20_000)
    assert same_bits(load(tmp_path, example.task, *abstract(example.task)), (example.params, example.state))


@pytest.mark.parametrize("shape", [None, MeshShape(replica=2, fsdp=2, tensor=2)], ids=["one device", "mixed"])
@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_large_parameters_are_read_in_pieces(
    name: str, shape: MeshShape | None, folder_of_examples, monkeypatch
) -> None:
    example = make_example(name, folder_of_examples)
    given = abstract(example.task) if shape is None else laid_out_on(example.task, shape)
    largest, read = [0], parameter_reader._read

    def measured(*region: Any) -> np.ndarray:
        part = read(*region)
        largest[0] = max(largest[0], part.nbytes)
        return part

    monkeypatch.setattr(parameter_reader, "PIECE_BYTES", 1000)
    monkeypatch.setattr(parameter_reader, "_read", measured)
    loaded = load(example.folder, example.task, *given)
    assert same_bits(loaded, (example.params, example.state)) and 500 < largest[0] <= 1000
    for name, leaf in named_leaves(loaded).items():
        assert shape is None or leaf.sharding == named_leaves(given)[name].sharding, name


def test_an_update_of_loaded_parameters_leaves_no_trace_elsewhere(example: Example) -> None:
    """Replicas that were placed from one array in host memory are not one array when they are donated."""
    laid_out = laid_out_on(example.task, MeshShape(fsdp=8))
    params, _ = load(example.folder, example.task, *laid_out)
    updated = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    for x, y in zip(jax.tree.leaves(updated), jax.tree.leaves(example.params)):
        for shard in x.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), np.asarray(y)[shard.index] + 1)


def test_large_models_are_split_over_files(example: Example, tmp_path) -> None:
    save(tmp_path, example.params, example.state, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    # Without the rows that pad the vocabulary.
    biases = sum(bias.size * 4 for bias in example.state.values())
    assert index["metadata"]["total_size"] == sum(x.numel() * 4 for x in example.theirs.parameters()) + biases
    again = reloaded(tmp_path)
    assert np.array_equal(their_logits(again, tokens()), their_logits(example.theirs, tokens()))
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_weights_keep_their_bits(example: Example, tmp_path) -> None:
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), example.params)
    save(tmp_path, halved, example.state)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    loaded = load(tmp_path, example.task, *abstract(example.task))
    assert same_bits(loaded, (jax.tree.map(lambda x: x.astype(jnp.float32), halved), example.state))


def test_token_ids_are_the_callers_own(example: Example, tmp_path) -> None:
    save(tmp_path, example.params, example.state, token_ids={"eos_token_id": 7})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 7, None)


def test_refuses_to_mix_with_other_weights(example: Example, tmp_path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match="holds weights already"):
        save(tmp_path, example.params, example.state)
    assert not (tmp_path / "config.json").exists()


def test_a_folder_that_cannot_be_made(example: Example, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't write to .*file"):
        save(tmp_path / "file", example.params, example.state)
    with pytest.raises(RecipeError, match="max_shard_bytes=0; expected a positive number"):
        save(tmp_path / "new", example.params, example.state, max_shard_bytes=0)


def test_tables_name_fields_that_there_are() -> None:
    for family in FAMILIES.values():
        fields = {field.name for field in dataclasses.fields(family.config)}
        assert {*family.fields, *family.keys, *family.computed} <= fields, family.model_type
        assert not family.fields.keys() & {*family.keys, *family.computed}, family.model_type
        assert family.absent.keys() <= {*family.keys.values(), *ROTARY_ABSENT} | family.extra_keys, family.model_type
        if family.mixture is not None:
            of_mixture = {field.name for field in dataclasses.fields(MoE)}
            assert {*family.mixture.always, *family.mixture.keys} <= of_mixture, family.model_type


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"dbrx", "glam_64b_64e"}))
def test_every_preset_has_a_family_that_expresses_it(name: str, tmp_path) -> None:
    family, raw = to_config_json(PRESETS[name], None)
    # Megatron's are GPT-2's architecture, made larger; Kimi K2 is DeepSeek-V3's.
    others = {"megatron_1t": "gpt2", "mt_nlg_530b": "gpt2", "kimi_k2": "deepseek_v3"}
    others |= {"qwen3_30b_a3b": "qwen3_moe", "qwen3_235b_a22b": "qwen3_moe"}
    assert others.get(name) == family.model_type or (name not in others and name.startswith(family.model_type))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert resolve_defaults(config_from(tmp_path)) == resolve_defaults(PRESETS[name])
    transformers.AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_unit_offset": True}, "nearest is llama: model.norm_unit_offset=True, expected False"),
        ({"windows": (8, 4)}, r"nearest is llama: model.windows=\[4, 8\], expected no sliding windows"),
        ({"qk_norm": True, "windows": (8, 4)}, r"nearest is qwen3: model.windows=\[4, 8\], expected one length"),
        (
            {"attention_output_bias": True, "qk_norm": True, "windows": (8,)},
            "nearest is qwen3: model.attention_output_bias=True, but other fields require attention_bias=False",
        ),
        (
            {"head_dim": 16, "embed": 42, "post_norms": True, "norm_unit_offset": True, "embed_scale": True},
            "nearest is gemma2: model.embed=42, expected a multiple of heads=4",
        ),
        ({"query_scale": 5.5, "qk_norm": True}, "nearest is qwen3: model.query_scale=5.5, expected 64.0"),
        ({"rotary": None}, "nearest is llama: model.rotary=None, expected rotary positions"),
        (
            {"rotary": Rotary(interleaved=True), "qk_norm": True},
            "nearest is .*: model.rotary.interleaved=True, expected False",
        ),
        (
            {"rotary": Rotary(scaling=YarnScaling(mscale=2.0))},
            "nearest is llama: model.rotary.scaling.mscale=2.0, expected 1.0",
        ),
        ({"rotaries": (Rotary(), Rotary(theta=5.0))}, "nearest is .*: model.rotaries, expected"),
        ({"attention_clip": 8.0}, "nearest is llama: model.attention_clip=8.0, expected None"),
        (
            {"feed_forward": MoE(choice="expert", ffn=64)},
            "model.feed_forward.choice='expert', expected 'token'",
        ),
        ({"feed_forward": MoE(capacity=1.0)}, "nearest is mixtral: model.feed_forward.capacity=1.0, expected None"),
        ({"feed_forward": MoE(every=2, groups=2)}, "model.feed_forward.groups=2, expected 1"),
        (
            {"feed_forward": MoE(ffn=64, shared=96, scores="sigmoid", selection_bias=True), "latent": Latent()},
            "nearest is deepseek_v3: model.feed_forward.shared=96, expected a multiple of an expert's 64",
        ),
    ],
)
def test_what_no_family_expresses_is_named(change: dict, message: str, tmp_path) -> None:
    config = DecoderConfig(vocab_size=96, **change)
    model = jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))
    with pytest.raises(RecipeError, match=message):
        save(tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_selection_biases_are_asked_for(folder_of_examples, tmp_path) -> None:
    example = make_example("deepseek_v3", folder_of_examples)
    with pytest.raises(RecipeError, match="select by a bias, which is model state; pass the task's state"):
        save(tmp_path, example.params)


def test_a_family_that_is_asked_for_must_fit(example: Example, tmp_path) -> None:
    other = "llama" if example.family != "llama" else "qwen3"
    with pytest.raises(RecipeError, match=f"no {other} .*express"):
        save(tmp_path, example.params, example.state, model_type=other)
    with pytest.raises(RecipeError, match="did you mean 'gemma2'"):
        save(tmp_path, example.params, example.state, model_type="gema2")
