"""A GGUF file as config.json and tensors under Hugging Face's names."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....core.errors import CheckpointError, RecipeError
from ....layers import Rotary, RotaryScaling
from ..quantized.slices import DequantizedSlice, TensorSlice
from ..rotary_positions import LLAMA3_KEYS
from .architectures import ARCHITECTURES, OUTSIDE, Architecture
from .file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the factors by which wavelengths are stretched (Llama 3.1)."""

LLAMA3 = RotaryScaling(low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
"""Llama 3.1's scaling: files have its effect, and not its settings."""

_LOCAL = {"gemma2": 2, "gemma3": 6}
"""Every n-th layer attends to all positions, the others within the window."""

_LARGE = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B members, in which scores are scaled by the model's width for each head."""


def find_architecture(file: GgufFile, where: Path) -> Architecture:
    """Return the architecture of a file.

    Raises:
        RecipeError: The architecture is unknown.
    """
    name = file.metadata.get("general.architecture")
    mixture = bool(file.metadata.get(f"{name}.expert_count"))
    for each in ARCHITECTURES:
        if each.name == name and mixture == (each.experts is not None):
            return each
    known = ", ".join(sorted({each.name for each in ARCHITECTURES}))
    raise RecipeError(
        f"{where}: GGUF files of the architecture {name!r}{' with experts' if mixture else ''} are not read; expected one of "
        f"{known}. Take the release that the file was made from"
    )


def read_config_json(file: GgufFile, where: Path) -> dict[str, Any]:
    """Return the config.json that corresponds to a file's metadata and tensors.

    Raises:
        RecipeError: The architecture is unknown, or positions are scaled in an unknown way.
        CheckpointError: A key is missing.
    """
    architecture = find_architecture(file, where)
    name, metadata = architecture.name, file.metadata
    raw: dict[str, Any] = {"model_type": architecture.model_type}
    for theirs, ours in architecture.keys.items():
        if f"{name}.{theirs}" in metadata:
            raw[ours] = _shortest(metadata[f"{name}.{theirs}"])
    missing = {"hidden_size", "num_hidden_layers", "num_attention_heads"} - raw.keys()
    if missing or "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{where} has no {', '.join(sorted(missing)) or 'token_embd.weight'}; the file holds a part of a model"
        )
    raw["vocab_size"] = file.tensors["token_embd.weight"].get_shape()[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    if name == "qwen3moe":
        # llama.cpp always divides the weights of a token's experts by their sum.
        raw["norm_topk_prob"] = True
    if name == "llama" and "head_dim" not in raw and f"{name}.rope.dimension_count" in metadata:
        raw["head_dim"] = metadata[f"{name}.rope.dimension_count"]
    if name in ("llama", "qwen3", "qwen3moe"):
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    raw |= _positions(file, architecture, raw, where)
    return raw | (_gemma(raw, name) if name in _LOCAL else {})


def _shortest(value: Any) -> Any:
    """Return the shortest decimal number that rounds to the file's float32: 1e-6, not 9.99999997e-7."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _gemma(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    width = raw["hidden_size"] // raw["num_attention_heads"]
    large = raw["num_hidden_layers"] == _LARGE[name]
    more = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if large else raw.get("head_dim", width),
    }
    kinds = [
        "sliding_attention" if (layer + 1) % _LOCAL[name] else "full_attention"
        for layer in range(raw["num_hidden_layers"])
    ]
    return {**more, "layer_types": kinds}


def _positions(file: GgufFile, architecture: Architecture, raw: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the scaling of rotary positions."""
    prefix = f"{architecture.name}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    factor = _shortest(file.metadata.get(f"{prefix}.factor"))
    theta = raw.get("rope_theta", 10_000.0)
    if ROPE_FACTORS in file.tensors:
        scaling = _llama3_scaling(file.tensors[ROPE_FACTORS][...], theta, where)
        settings = {theirs: getattr(scaling, ours) for ours, theirs in LLAMA3_KEYS.items()}
        return {"rope_scaling": {"rope_type": "llama3", **settings}}
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return {}
    if kind == "linear" and factor is not None and factor > 1:
        return {"rope_scaling": {"rope_type": "linear", "factor": float(factor)}}
    raise RecipeError(
        f"{where}: positions are scaled by {kind!r} with factor={factor}, which is not read from GGUF files; take the release "
        f"that the file was made from"
    )


def llama3_factors(width: int, theta: float, scaling: RotaryScaling) -> np.ndarray:
    """Compute the factors of Llama 3.1's wavelengths: float32, one for each pair of a head's features."""
    return Rotary(theta=theta).frequencies(width) / Rotary(theta=theta, scaling=scaling).frequencies(width)


def _llama3_scaling(factors: np.ndarray, theta: float, where: Path) -> RotaryScaling:
    """Return the Llama 3.1 scaling that yields these wavelength factors."""
    factor = float(np.round(factors.max(), 4)) if factors.size else 0.0
    scaling = dataclasses.replace(LLAMA3, factor=max(factor, 1.0))
    if factors.size < 2 or not np.allclose(factors, llama3_factors(2 * factors.size, theta, scaling), rtol=1e-3):
        raise RecipeError(
            f"{where}: {ROPE_FACTORS} is not Llama 3.1's scaling ({LLAMA3}); take the release that the file was made from"
        )
    return scaling


def read_tensors(file: GgufFile, raw: Mapping[str, Any], where: Path) -> dict[str, TensorSlice]:
    """Return a file's tensors under Hugging Face's names, in its layout."""
    architecture = find_architecture(file, where)
    return dict(_renamed(file.tensors, architecture, raw))


def _renamed(
    tensors: Mapping[str, TensorSlice], architecture: Architecture, raw: Mapping[str, Any]
) -> Iterator[tuple[str, TensorSlice]]:
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name in OUTSIDE:
            yield OUTSIDE[name], _without_offset(tensor, architecture) if name == "output_norm.weight" else tensor
            continue
        _, layer, inner = (*name.split(".", 2), "", "")[:3]
        start = f"model.layers.{layer}."
        if inner in architecture.inside:
            if architecture.interleaved and inner.startswith(("attn_q.", "attn_k.")):
                tensor = _in_halves(tensor, heads if inner.startswith("attn_q.") else kv_heads)
            yield (
                start + architecture.inside[inner],
                (_without_offset(tensor, architecture) if inner.endswith("norm.weight") else tensor),
            )
        elif architecture.experts is not None and inner.startswith("ffn_") and inner.endswith(".weight"):
            yield from _experts(start, inner, tensor, architecture)
        else:
            # Under its own name, so that the loader names what no model has.
            yield name, tensor


def _experts(
    start: str, inner: str, tensor: TensorSlice, architecture: Architecture
) -> Iterator[tuple[str, TensorSlice]]:
    names = architecture.experts
    assert names is not None
    if inner == "ffn_gate_inp.weight":
        yield start + names.router, tensor
        return
    of_part = {"ffn_gate_exps.weight": names.gate, "ffn_up_exps.weight": names.up, "ffn_down_exps.weight": names.down}
    if inner not in of_part or len(tensor.get_shape()) != 3:
        yield start + inner, tensor
        return
    experts, *shape = tensor.get_shape()
    for expert in range(experts):

        def read(rows: range, columns: range, expert: int = expert) -> np.ndarray:
            return tensor[expert : expert + 1, rows.start : rows.stop, columns.start : columns.stop][0]

        yield start + of_part[inner].format(expert=expert), DequantizedSlice(shape, read)


def _without_offset(tensor: TensorSlice, architecture: Architecture) -> TensorSlice:
    if not architecture.norm_offset:
        return tensor
    offset = np.float32(architecture.norm_offset)
    return DequantizedSlice(tensor.get_shape(), lambda part: tensor[part.start : part.stop] - offset)


def _in_halves(tensor: TensorSlice, heads: int) -> TensorSlice:
    """Return a tensor with the rows of each head in two halves, which the file interleaves."""
    shape = tensor.get_shape()
    if not heads or shape[0] % (2 * heads):
        return tensor
    width = shape[0] // heads

    def read(rows: range, *others: range) -> np.ndarray:
        head, inner = np.divmod(np.arange(rows.start, rows.stop), width)
        source = head * width + 2 * (inner % (width // 2)) + inner // (width // 2)
        first, last = (int(source.min()), int(source.max()) + 1) if len(source) else (0, 0)
        block = tensor[(slice(first, last), *(slice(part.start, part.stop) for part in others))]
        return block[source - first]

    return DequantizedSlice(shape, read)
