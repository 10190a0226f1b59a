"""A folder that does not hold the task's weights is refused, with what is wrong and what to do."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_examples import Example, abstract, make_example
from safetensors.numpy import load_file, save_file

from panax.adapters.huggingface import load
from panax.core import CheckpointError, RecipeError
from panax.models import DecoderTask

WEIGHTS = "model.safetensors"


@pytest.fixture
def llama(folder_of_examples: Path) -> Example:
    return make_example("llama", folder_of_examples)


@pytest.fixture
def folder(llama: Example, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(llama.folder, tmp_path / "copy"))


def change(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS)


def refused(folder: Path, example: Example, message: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=message):
        load(folder, example.task, *abstract(example.task))


def test_no_folder(llama: Example, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", llama, "nowhere is not a folder")


def test_no_weights(folder: Path, llama: Example) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, llama, r"holds neither model\.safetensors nor model\.safetensors\.index\.json")


def test_pickled_weights_are_never_read(folder: Path, llama: Example) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, llama, "pickled weights .*unpickling runs whatever code.*save_pretrained")


@pytest.mark.parametrize("keep_bytes", [0, 4, 1000, -1])
def test_incomplete_file(folder: Path, llama: Example, keep_bytes: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep_bytes])
    refused(folder, llama, r"model\.safetensors can't be read: .*fetch or save it again")


def test_other_shape(folder: Path, llama: Example) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    change(folder, {name: np.zeros((32, 16), np.float32)})
    refused(folder, llama, rf"{name} has the shape \(32, 16\); stacks\.0\.blocks\.0\.attention\.w_k needs \(16, 32\)")


def test_integers(folder: Path, llama: Example) -> None:
    change(folder, {"model.norm.weight": np.zeros(32, np.int8)})
    refused(folder, llama, "model.norm.weight holds I8; expected one of F64, F32")


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_names_of_a_wrapper(wrapper: str, folder: Path, llama: Example) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({wrapper + name: value for name, value in tensors.items()}, folder / WEIGHTS)
    refused(folder, llama, rf"names in the files hold '{wrapper}' \({wrapper}.*as those of a module in a wrapper do")


def test_names_of_compiled_layers(folder: Path, llama: Example) -> None:
    tensors = load_file(folder / WEIGHTS)
    inside = {name.replace("layers.1.", "layers.1._orig_mod."): value for name, value in tensors.items()}
    save_file(inside, folder / WEIGHTS)
    refused(folder, llama, r"names in the files hold '_orig_mod.' \(model\.layers\.1\._orig_mod\.")


def test_missing_weight(folder: Path, llama: Example) -> None:
    change(folder, {"model.layers.2.mlp.up_proj.weight": None, "lm_head.weight": None})
    refused(folder, llama, r"lacks weights that its llama model has: lm_head.weight, model\.layers\.2\.mlp\.up_proj")


def test_weight_left_over(folder: Path, llama: Example) -> None:
    change(folder, {f"model.layers.{layer}.extra": np.zeros(1, np.float32) for layer in range(7)})
    refused(folder, llama, r"no llama model has: model\.layers\.0\.extra, .* and 2 more")


def test_known_buffers_are_passed_over(folder: Path, llama: Example) -> None:
    change(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    load(folder, llama.task, *abstract(llama.task))


def test_gpt2_as_it_was_released(folder_of_examples: Path, tmp_path: Path) -> None:
    """Without the names' first part, with the causal mask as a buffer, and with the tied head."""
    gpt2 = make_example("gpt2", folder_of_examples)
    folder = Path(shutil.copytree(gpt2.folder, tmp_path / "copy"))
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(folder / WEIGHTS).items()}
    tensors |= {"h.0.attn.bias": np.zeros((1, 1, 64, 64), np.float32), "lm_head.weight": tensors["wte.weight"]}
    save_file(tensors, folder / WEIGHTS)
    loaded, _ = load(folder, gpt2.task, *abstract(gpt2.task))
    w_k = np.asarray(loaded.stacks[0].blocks[0].attention.w_k)
    assert np.array_equal(w_k, np.asarray(gpt2.params.stacks[0].blocks[0].attention.w_k))
    (folder / WEIGHTS).unlink()
    save_file({**tensors, "h.4.attn.c_attn.bias": np.zeros(96, np.float32)}, folder / WEIGHTS)
    refused(folder, gpt2, r"no gpt2 model has: transformer\.h\.4\.attn\.c_attn\.bias")


def test_other_family_and_other_sizes(folder: Path, llama: Example, folder_of_examples: Path) -> None:
    gemma2 = make_example("gemma2", folder_of_examples)
    refused(folder, gemma2, "num_layers is 4 there, 3 here; .*post_norms is False there, True here", RecipeError)
    for field, value, shown in (("vocab_size", 64, "96 there, 64 here"), ("ffn", 64, "48 there, 64 here")):
        task = DecoderTask(model=dataclasses.replace(llama.task.model, **{field: value}))
        with pytest.raises(RecipeError, match=f"is not the task's: {field} is {shown}. Set task.model"):
            load(folder, task, *abstract(task))


def test_dropout_and_longest_sequence_are_the_tasks_own(folder: Path, llama: Example) -> None:
    model = dataclasses.replace(llama.task.model, dropout=0.1, max_length=128)
    load(folder, DecoderTask(model=model), *abstract(DecoderTask(model=model)))


def test_what_concerns_training_alone_is_the_tasks_own(folder_of_examples: Path) -> None:
    example = make_example("deepseek_v3", folder_of_examples)
    moe = example.task.model.feed_forward
    other = dataclasses.replace(moe, balance=0.5, z_loss=0.1, jitter=0.1, capacity=2.0, bias_rate=0.1)
    task = DecoderTask(model=dataclasses.replace(example.task.model, feed_forward=other))
    load(example.folder, task, *abstract(task))
    for field, value, shown in (("scale", 1.0, "2.5 there, 1.0 here"), ("shared", 16, "32 there, 16 here")):
        model = dataclasses.replace(example.task.model, feed_forward=dataclasses.replace(moe, **{field: value}))
        with pytest.raises(RecipeError, match=f"is not the task's: feed_forward.{field} is {shown}"):
            load(example.folder, DecoderTask(model=model), *abstract(DecoderTask(model=model)))


def test_layers_that_predict_further_tokens_are_passed_over(folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("deepseek_v3", folder_of_examples)
    folder = Path(shutil.copytree(example.folder, tmp_path / "copy"))
    change(folder, {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)})
    load(folder, example.task, *abstract(example.task))
    change(folder, {"model.layers.2.eh_proj.weight": np.zeros((32, 64), np.float32)})
    refused(folder, example, r"no deepseek_v3 model has: model\.layers\.2\.eh_proj\.weight")


def test_an_expert_that_is_missing(folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("mixtral", folder_of_examples)
    folder = Path(shutil.copytree(example.folder, tmp_path / "copy"))
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    change(folder, {name: None})
    refused(folder, example, f"lacks weights that its mixtral model has: {name}")


def test_no_decoder(folder: Path, llama: Example) -> None:
    with pytest.raises(RecipeError, match="or a task with a head on a decoder, not an object"):
        load(folder, object(), *abstract(llama.task))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"index\.json can't be read"),
        ({}, r"index\.json can't be read: .*expected a weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, r"points outside of its folder: '\.\./model"),
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "00002.safetensors can't be read: .*missing"),
    ],
)
def test_bad_index(folder: Path, llama: Example, index, message: str) -> None:
    (folder / WEIGHTS).rename(folder / "moved.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, llama, message)
