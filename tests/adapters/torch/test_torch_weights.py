"""Weights from files: those that don't fit the module are refused by every door, with what is in the file."""

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import panax
from panax.adapters.torch import task
from panax.adapters.wrappers import find_wrapper
from panax.core.errors import RecipeError

BATCH = (torch.arange(8) % 8, torch.arange(8) % 8)


class Tied(nn.Module):
    """An embedding that is its own head."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens):
        return self.head(self.emb(tokens))


EMBEDDING = torch.arange(32.0).reshape(8, 4)
STEPS = {"steps": torch.arange(2)}


def adapted(tensors, folder):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with torch.device("meta"):
        module = Tied()
    return task(module, nn.CrossEntropyLoss(), BATCH, weights=str(folder), check=False)


def refused(tensors, folder, message):
    with pytest.raises(RecipeError, match=message):
        adapted(tensors, folder)


def test_codes_are_no_weights(tmp_path):
    codes = {"emb.weight": (EMBEDDING * 4).to(torch.int8), "emb.weight_scale": torch.ones(8, 1), **STEPS}
    refused(codes, tmp_path, "emb.weight holds I8, and is float32 in the module; codes of quantized weights")
    refused({"emb.weight": EMBEDDING.to(torch.float8_e4m3fn), **STEPS}, tmp_path, "emb.weight holds F8_E4M3")
    refused(
        {"emb.weight": EMBEDDING, "steps": torch.zeros(2)}, tmp_path, "steps holds F32, and is int64.*expected integers"
    )
    refused({"emb.weight": EMBEDDING[:4], **STEPS}, tmp_path, r"emb.weight is \[8, 4\] in the module and \[4, 4\]")


def test_a_tied_weight_may_have_either_name_and_one_value(tmp_path):
    refused(
        {"emb.weight": EMBEDDING, "head.weight": EMBEDDING + 1, **STEPS},
        tmp_path,
        "emb.weight and head.weight are one.*differ",
    )
    for name in ("emb.weight", "head.weight", "both"):
        names = ("emb.weight", "head.weight") if name == "both" else (name,)
        made = adapted({**{each: EMBEDDING.clone().to(torch.float16) for each in names}, **STEPS}, tmp_path)
        state = panax.compile_step(made, BATCH, devices=jax.devices()[:1]).init(seed=0)
        np.testing.assert_array_equal(state.params["emb.weight"], EMBEDDING)
        assert not made.notes[1:] and "not compared" in made.notes[0]


def test_files_that_contradict_or_are_damaged(tmp_path):
    save_file({"emb.weight": EMBEDDING}, tmp_path / "other.safetensors")
    refused(
        {"emb.weight": EMBEDDING, **STEPS},
        tmp_path,
        "emb.weight is in model.safetensors and in other.safetensors; pass one file",
    )
    (tmp_path / "other.safetensors").write_bytes(b"no tensors")
    refused({"emb.weight": EMBEDDING, **STEPS}, tmp_path, "other.safetensors can't be read: .*fetch or save it again")


def test_what_is_left_over_in_the_file_is_reported(tmp_path):
    made = adapted({"emb.weight": EMBEDDING, "extra.bias": torch.zeros(3), **STEPS}, tmp_path)
    assert any(
        note.startswith("not of the module, in") and note.endswith(": extra.bias (1 in all)") for note in made.notes
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_names_of_a_wrapper_are_named(prefix, tmp_path):
    tensors = {prefix + name: tensor for name, tensor in {"emb.weight": EMBEDDING, **STEPS}.items()}
    refused(tensors, tmp_path, rf"the names in it hold '[a-z_.]+' \({prefix}emb.weight\).*in a wrapper.*rename")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_names_inside_of_a_wrapped_module(tmp_path):
    save_file({"0.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = torch.compile(nn.Sequential(nn.Linear(3, 2, bias=False)))
    with pytest.raises(RecipeError, match=r"module's names hold '_orig_mod.' .*adapt the module inside"):
        task(module, lambda m, b: m(b["x"]).mean(), {"x": torch.ones(4, 3)}, weights=str(tmp_path), check=False)


def test_a_wrapper_is_known_by_its_names():
    assert find_wrapper({"module.a", "module.b.c"}) == "module."
    assert find_wrapper({"layers.0._orig_mod.w", "head"}) == "_orig_mod."
    assert find_wrapper({"module.a", "b"}) is None and find_wrapper(set()) is None
