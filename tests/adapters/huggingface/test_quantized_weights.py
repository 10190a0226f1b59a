"""Quantized releases are read as float32, in the bits of the dequantization by hand, on any sharding."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from family_examples import EXAMPLES
from huggingface_examples import abstract, make_example
from safetensors.torch import load_file, save_file
from test_huggingface_save import laid_out_on, same_bits

from panax.adapters.huggingface import config_from, load
from panax.core import CheckpointError, RecipeError
from panax.mesh import MeshShape
from panax.models import DecoderTask

BLOCK = (16, 12)
"""Neither divides all sizes: the last blocks are cut."""

Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]


def of_blocks(name: str, weight: torch.Tensor) -> Quantized:
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, BLOCK, strict=True))
    scale = torch.rand(rows, columns) + 0.5
    wide = scale.repeat_interleave(BLOCK[0], 0)[: weight.shape[0]].repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
    narrow = (weight / wide).to(torch.float8_e4m3fn)
    return {name: narrow, f"{name}_scale_inv": scale}, narrow.float() * wide


def of_rows(name: str, weight: torch.Tensor) -> Quantized:
    scale = (torch.rand(weight.shape[0], 1) + 0.5).bfloat16()
    narrow = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {name: narrow, f"{name}_scale": scale}, narrow.float() * scale.float()


def of_one(name: str, weight: torch.Tensor) -> Quantized:
    scale = torch.tensor([0.37])
    narrow = (weight / scale).to(torch.float8_e4m3fn)
    return {name: narrow, f"{name}_scale": scale}, narrow.float() * scale


def of_nibbles(name: str, weight: torch.Tensor) -> Quantized:
    """Eight values in a word, the first one in its lowest bits."""
    group = 16
    scale = (torch.rand(weight.shape[0], weight.shape[1] // group) * 0.1 + 0.02).bfloat16()
    wide = scale.float().repeat_interleave(group, 1)
    values = (weight / wide).round().clamp(-8, 7).to(torch.int64)
    words = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= (values[:, place::8] + 8) << (4 * place)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {f"{name}_packed": signed, f"{name}_scale": scale, f"{name}_shape": shape}, values.float() * wide


NORMAL = torch.linspace(-1, 1, 16) ** 3
"""Values of 16 codes, as unevenly spaced as those of NF4."""


def of_codes(name: str, weight: torch.Tensor, nested: bool = False) -> Quantized:
    """Two codes in a byte, the first one in its high bits; the last block is cut."""
    block = 56
    flat = weight.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = padded.abs().amax(1)
    parts: dict[str, torch.Tensor] = {}
    more = {}
    if nested:
        codes, offset = torch.linspace(-1, 1, 256), scales.mean()
        outer = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 8)).view(-1, 8).abs().amax(1) + 1e-3
        wide = outer.repeat_interleave(8)[: len(scales)]
        small = (((scales - offset) / wide + 1) * 127.5).round().to(torch.uint8)
        parts = {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": codes}
        more = {"nested_blocksize": 8, "nested_offset": float(offset), "nested_dtype": "float32"}
        scales = codes[small.long()] * wide + torch.tensor(float(offset))
        parts[f"{name}.absmax"] = small
    else:
        parts[f"{name}.absmax"] = scales
    each = scales.repeat_interleave(block)[: len(flat)]
    nearest = ((flat / each)[:, None] - NORMAL).abs().argmin(1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape), **more}
    parts |= {
        name: (nearest[::2] << 4 | nearest[1::2]).to(torch.uint8)[:, None],
        f"{name}.quant_map": NORMAL.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NORMAL[nearest] * each).view(weight.shape)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def in_fp4(weight: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes, two in a byte with the first one in its low bits, and their values."""
    nearest = ((weight / wide)[..., None] - FP4).abs().argmin(-1)
    return (nearest[:, ::2] | nearest[:, 1::2] << 4).to(torch.uint8), FP4[nearest]


def of_mx(name: str, weight: torch.Tensor) -> Quantized:
    """A power of two for each 32 values; a matrix that 32 does not divide stays as it is."""
    if weight.shape[1] % 32:
        return {name: weight}, weight
    exponents = torch.randint(122, 127, (weight.shape[0], weight.shape[1] // 32))
    codes, values = in_fp4(weight, torch.exp2(exponents - 127.0).repeat_interleave(32, 1))
    wide = values * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    return {f"{name}_packed": codes, f"{name}_scale": exponents.to(torch.uint8)}, wide


def of_nv(name: str, weight: torch.Tensor, modelopt: bool = False) -> Quantized:
    """An FP8 scale for each 16 values, and one for all: a divisor, or ModelOpt's factor."""
    scale = (torch.rand(weight.shape[0], weight.shape[1] // 16) * 3 + 0.5).to(torch.float8_e4m3fn)
    one = torch.tensor([0.0371]) if modelopt else torch.tensor([21.7])
    each = scale.float() * one if modelopt else scale.float() / one
    codes, values = in_fp4(weight, each.repeat_interleave(16, 1))
    wide = values * each.repeat_interleave(16, 1)
    base = name.removesuffix(".weight")
    if modelopt:
        parts = {name: codes, f"{name}_scale_2": one, f"{base}.input_scale": torch.tensor([2.0])}
    else:
        parts = {f"{name}_packed": codes, f"{name}_global_scale": one, f"{base}.input_global_scale": one.clone()}
    return {**parts, f"{name}_scale": scale}, wide


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 16}}},
}
ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MX = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
NV = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

SCHEMES: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Quantized]]] = {
    "blocks": (FP8, of_blocks),
    "rows": (ROWS, of_rows),
    "one": (ROWS, of_one),
    "nibbles": (INT4, of_nibbles),
    "codes": (NF4, of_codes),
    "codes with quantized scales": (NF4, functools.partial(of_codes, nested=True)),
    "FP4 with powers of two": (MX, of_mx),
    "FP4 with two scales": (NV, of_nv),
    "FP4 as ModelOpt has it": (MODELOPT, functools.partial(of_nv, modelopt=True)),
}


def written(
    folder: Path, there: Path, settings: dict[str, Any], quantize: Callable[[str, torch.Tensor], Quantized]
) -> None:
    """Write a release in two forms: quantized, and dequantized by hand."""
    torch.manual_seed(0)
    narrow, wide = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            narrow[name] = wide[name] = weight
            continue
        parts, wide[name] = quantize(name, weight)
        narrow |= parts
    raw = json.loads((folder / "config.json").read_text())
    for form, tensors, more in (("narrow", narrow, {"quantization_config": settings}), ("wide", wide, {})):
        (there / form).mkdir()
        save_file({name: value.contiguous() for name, value in tensors.items()}, there / form / "model.safetensors")
        (there / form / "config.json").write_text(json.dumps({**raw, **more}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_they_are_read_in_the_bits_of_the_dequantization(scheme: str, folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("llama", folder_of_examples)
    written(example.folder, tmp_path, *SCHEMES[scheme])
    task = DecoderTask(model=config_from(tmp_path / "narrow"))
    assert task.model == example.task.model
    expected = load(tmp_path / "wide", task, *abstract(task))
    assert same_bits(load(tmp_path / "narrow", task, *abstract(task)), expected)
    split = load(tmp_path / "narrow", task, *laid_out_on(task, MeshShape(fsdp=2, tensor=2, replica=2)))
    assert same_bits(split, expected)
    halves = DecoderTask(model=task.model, parameter_dtype="bfloat16")
    rounded = load(tmp_path / "narrow", halves, *abstract(halves))
    assert same_bits(rounded, (jax.tree.map(lambda leaf: leaf.astype("bfloat16"), expected[0]), expected[1]))


def test_scales_of_another_shape_are_an_error(folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("llama", folder_of_examples)
    written(example.folder, tmp_path, *SCHEMES["blocks"])
    file = tmp_path / "narrow" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"up_proj.weight: its scales have the sizes \[2, 3\]; expected \[3, 3\]"):
        load(file.parent, example.task, *abstract(example.task))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"up_proj.weight holds F8_E4M3; expected one of F64"):
        load(file.parent, example.task, *abstract(example.task))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("absmax", None, "and model.layers.1.mlp.up_proj.weight.absmax is missing"),
        ("quant_map", torch.zeros(15), "expected .* for a matrix"),
        ("absmax", torch.zeros(3), "expected .* for a matrix"),
        ("quant_state.bitsandbytes__nf4", torch.tensor(list(b"{"), dtype=torch.uint8), "quant_state can't be read"),
        ("quant_state.bitsandbytes__nf4", torch.tensor(list(b"[1]"), dtype=torch.uint8), "quant_state can't be read"),
        (
            "quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"shape": [48, -32], "blocksize": 56}'), dtype=torch.uint8),
            "expected rows and columns",
        ),
    ],
)
def test_what_is_broken_beside_codes_is_an_error(
    part: str, value: torch.Tensor | None, message: str, folder_of_examples: Path, tmp_path: Path
) -> None:
    example = make_example("llama", folder_of_examples)
    written(example.folder, tmp_path, *SCHEMES["codes"])
    file = tmp_path / "narrow" / "model.safetensors"
    tensors, name = load_file(file), f"model.layers.1.mlp.up_proj.weight.{part}"
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), file)
    with pytest.raises(CheckpointError, match=message):
        load(file.parent, example.task, *abstract(example.task))


@pytest.mark.parametrize("shape", [None, [32], [0, 48], [32, 48, 1], [31, 48]])
def test_a_packed_matrix_needs_its_shape(shape: list[int] | None, folder_of_examples: Path, tmp_path: Path) -> None:
    example = make_example("llama", folder_of_examples)
    written(example.folder, tmp_path, *SCHEMES["nibbles"])
    file = tmp_path / "narrow" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.weight_shape"
    del tensors[name]
    save_file(tensors | ({} if shape is None else {name: torch.tensor(shape)}), file)
    with pytest.raises(CheckpointError, match=r"down_proj.weight(: its scales| is packed, and its weight_shape)"):
        load(file.parent, example.task, *abstract(example.task))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method='gptq' are not read; dequantize it once, or take the release",
        ),
        ({"quant_method": "awq"}, "quant_method='awq' are not read; dequantize it once"),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            r"load it with transformers, call model.dequantize\(\)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_method='modelopt' are not read; convert it"),
        ({"quant_method": "fp8"}, "quant_method='fp8' are not read; convert it to bfloat16 first"),
        ({"bits": 4}, "quant_method=None are not read"),
        ("int8", "expected an object with a quant_method"),
        (
            {**INT4, "config_groups": {"g": {"weights": {"num_bits": 8, "symmetric": True}}}},
            "if they are symmetric int4",
        ),
        (
            {**INT4, "config_groups": {"g": {"weights": {"num_bits": 4, "symmetric": False}}}},
            "if they are symmetric int4",
        ),
    ],
)
def test_what_is_not_read_is_refused_with_a_way_out(
    settings: Any, message: str, folder_of_examples: Path, tmp_path: Path
) -> None:
    example = make_example("llama", folder_of_examples)
    shutil.copytree(example.folder, tmp_path / "folder")
    raw = json.loads((example.folder / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    with pytest.raises(RecipeError, match=message):
        config_from(tmp_path / "folder")


def packed_experts(folder: Path, there: Path) -> None:
    """Write gpt-oss in MXFP4 as it is released, and in the values that `transformers` makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    narrow, wide = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            narrow[name] = wide[name] = weight
            continue
        experts, inner, outer = weight.shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 126, (experts, outer, inner // 32), dtype=torch.uint8, generator=generator)
        narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32).contiguous()
        assert wide[name].shape == weight.shape
    raw = json.loads((folder / "config.json").read_text())
    for form, tensors, more in (
        ("narrow", narrow, {"quantization_config": {"quant_method": "mxfp4"}}),
        ("wide", wide, {}),
    ):
        (there / form).mkdir()
        save_file(tensors, there / form / "model.safetensors")
        (there / form / "config.json").write_text(json.dumps({**raw, **more}))


@pytest.mark.full
def test_experts_of_gpt_oss_have_the_bits_of_transformers(tmp_path: Path) -> None:
    settings = EXAMPLES["gpt_oss"][1] | {"intermediate_size": 64, "hidden_size": 96}
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))
    theirs.save_pretrained(tmp_path / "made")
    packed_experts(tmp_path / "made", tmp_path)
    task = DecoderTask(model=config_from(tmp_path / "narrow"))
    expected = load(tmp_path / "wide", task, *abstract(task))
    assert same_bits(load(tmp_path / "narrow", task, *abstract(task)), expected)
    split = load(tmp_path / "narrow", task, *laid_out_on(task, MeshShape(expert=2, fsdp=2, tensor=2)))
    assert same_bits(split, expected)
    tensors = load_file(tmp_path / "narrow" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    for change, message in (
        ({f"{name}_scales": tensors[f"{name}_scales"][:, 1:].contiguous()}, "its scales have the sizes"),
        ({f"{name}_blocks": tensors[f"{name}_blocks"][..., 1:].contiguous()}, "expected U8 of 4 dimensions"),
    ):
        save_file({**tensors, **change}, tmp_path / "narrow" / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "narrow", task, *abstract(task))


def test_a_part_that_is_read_is_a_part_of_the_whole(folder_of_examples: Path, tmp_path: Path) -> None:
    from panax.adapters.huggingface.loader import open_tensors
    from panax.adapters.huggingface.quantized import dequantize

    example = make_example("llama", folder_of_examples)
    for scheme, (settings, quantize) in SCHEMES.items():
        (tmp_path / scheme).mkdir()
        written(example.folder, tmp_path / scheme, settings, quantize)
        with open_tensors(tmp_path / scheme / "narrow") as files:
            tensor = dequantize(files, settings)["model.layers.0.mlp.down_proj.weight"]
            full = tensor[...]
            for rows, columns in (((3, 21), (5, 6)), ((0, 32), (17, 40)), ((31, 32), (0, 48)), ((8, 8), (0, 48))):
                part = tensor[slice(*rows), slice(*columns)]
                np.testing.assert_array_equal(part, full[slice(*rows), slice(*columns)])
