"""A model as a GGUF file that llama.cpp runs: weights in F16 or Q8_0, with its tokenizer, template and end tokens."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....core.errors import CheckpointError, RecipeError
from ....layers import RotaryScaling
from ...extras import import_extra
from ..quantized.slices import DequantizedSlice
from ..rotary_positions import LLAMA3_KEYS
from .architectures import ARCHITECTURES, OUTSIDE, Architecture
from .file import GgufFile
from .reader import ROPE_FACTORS, llama3_factors, read_config_json
from .vocabulary import read_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

KINDS = {"F16": 1, "Q8_0": 7}
"""Types of matrices that are written, and llama.cpp's numbers of such files."""

_Q8_BLOCK = 32


class TensorPlan(NamedTuple):
    """A tensor to write: its shape, known before it is read, and the function that reads it in float32 or less."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def write_gguf(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, TensorPlan],
    kind: str,
    *,
    tokenizer: Path | None,
    difference: Callable[[dict[str, Any]], str | None],
) -> None:
    """Write a file, tensor by tensor.

    Args:
        raw: The model's config.json.
        tensors: Tensors by Hugging Face's names.
        kind: A key of `KINDS`.
        tokenizer: Folder of the tokenizer's files; None if the model has none.
        difference: Describes how a config.json differs from the model's, None if it does not; called with the config.json as
            which the file will be read.

    Raises:
        RecipeError: No architecture of GGUF expresses the model, or the tokenizer is of another kind.
        CheckpointError: The file can't be written, or a weight is out of F16's range.
    """
    gguf = import_extra("gguf", "gguf")
    architecture = _architecture(raw)
    metadata = _metadata(architecture, raw)
    plans = dict(_renamed(tensors, architecture, raw))
    # Only shapes are read here, and the factors of positions.
    shapes = {
        name: DequantizedSlice(list(plan.shape), lambda *ranges, plan=plan: plan.read()) for name, plan in plans.items()
    }
    read_back = read_config_json(GgufFile(metadata, shapes), path)
    if (differs := difference(read_back)) is not None:
        raise RecipeError(
            f"a GGUF file can't express this {raw['model_type']} model: it would be read with {differs}; export without --gguf"
        )
    entries = {} if tokenizer is None else read_vocabulary(tokenizer, raw["vocab_size"])
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(partial, architecture.name)
        try:
            for key, value in {**metadata, "general.file_type": KINDS[kind], **entries}.items():
                _add(writer, key, value)
            _write_tensors(writer, plans, kind)
        finally:
            writer.close()
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_tensors(writer: "GGUFWriter", plans: Mapping[str, TensorPlan], kind: str) -> None:
    """Write the header and the entries, then the tensors one by one."""
    gguf = import_extra("gguf", "gguf")
    types = {name: gguf.GGMLQuantizationType[_type(name, plan.shape, kind)] for name, plan in plans.items()}
    dtypes = {"F32": np.float32, "F16": np.float16, "Q8_0": np.uint8}
    for name, plan in plans.items():
        quantized = types[name].name == "Q8_0"
        shape = gguf.quant_shape_to_byte_shape(plan.shape, types[name]) if quantized else plan.shape
        dtype = np.dtype(dtypes[types[name].name])
        writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, plan in plans.items():
        writer.write_tensor_data(_encoded(name, plan.read(), types[name].name))


def _add(writer: "GGUFWriter", key: str, value: Any) -> None:
    """Add a value by its type; a list by the type of its items."""
    if key == "general.architecture":
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    for each in ARCHITECTURES:
        if each.model_type == raw["model_type"]:
            return each
    known = ", ".join(each.model_type for each in ARCHITECTURES)
    raise RecipeError(
        f"{raw['model_type']} models are not written as GGUF files; expected one of {known}. Export without --gguf, and "
        f"convert the folder by llama.cpp"
    )


def _metadata(architecture: Architecture, raw: Mapping[str, Any]) -> dict[str, Any]:
    name, width = architecture.name, raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    metadata: dict[str, Any] = {"general.architecture": name, "general.name": raw["model_type"]}
    for theirs, ours in architecture.keys.items():
        if raw.get(ours) is not None:
            metadata[f"{name}.{theirs}"] = raw[ours]
    metadata |= {f"{name}.{key}": width for key in ("attention.key_length", "attention.value_length")}
    metadata |= {f"{name}.rope.dimension_count": width, f"{name}.vocab_size": raw["vocab_size"]}
    positions = _positions(raw)
    metadata[f"{name}.rope.freq_base"] = positions["rope_theta"]
    if (scaling := positions["scaling"]).get("rope_type") == "linear":
        metadata |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": float(scaling["factor"])}
    return metadata


def _positions(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the scaling of rotary positions; for Gemma 3, those of layers without a window."""
    by_kind = raw.get("rope_parameters") or {}
    full = by_kind.get("full_attention")
    if full is not None:
        return {"rope_theta": full["rope_theta"], "scaling": full}
    return {"rope_theta": raw.get("rope_theta", 10_000.0), "scaling": raw.get("rope_scaling") or {}}


def _renamed(
    tensors: Mapping[str, TensorPlan], architecture: Architecture, raw: Mapping[str, Any]
) -> list[tuple[str, TensorPlan]]:
    """Return the tensors under GGUF's names, in its layout and in order."""
    outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
    inside = {ours: theirs for theirs, ours in architecture.inside.items()}
    renamed: list[tuple[str, TensorPlan]] = []
    positions = _positions(raw)
    if (scaling := positions["scaling"]).get("rope_type") == "llama3":
        width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        fields = RotaryScaling(**{ours: scaling[theirs] for ours, theirs in LLAMA3_KEYS.items()})
        factors = llama3_factors(width, positions["rope_theta"], fields)
        renamed.append((ROPE_FACTORS, TensorPlan(factors.shape, lambda: factors)))
    experts: dict[str, list[TensorPlan]] = {}
    for name, plan in tensors.items():
        if name in outside:
            renamed.append((outside[name], _with_offset(plan, outside[name], architecture)))
            continue
        layer, inner = name.removeprefix("model.layers.").split(".", 1)
        if inner in inside:
            theirs = inside[inner]
            renamed.append(
                (
                    f"blk.{layer}.{theirs}",
                    _with_offset(_by_turns(plan, theirs, architecture, raw), theirs, architecture),
                )
            )
        else:
            stacked = _expert_name(inner, architecture)
            experts.setdefault(f"blk.{layer}.{stacked}", []).append(plan)
    for name, plans in experts.items():
        single = name.endswith("ffn_gate_inp.weight")
        renamed.append((name, plans[0] if single else _stacked(plans)))
    return renamed


def _expert_name(inner: str, architecture: Architecture) -> str:
    """Return GGUF's name of a mixture's tensor, which holds all experts of a layer."""
    if architecture.experts is not None:
        if inner == architecture.experts.router:
            return "ffn_gate_inp.weight"
        for part in ("gate", "up", "down"):
            start, end = getattr(architecture.experts, part).split("{expert}")
            if inner.startswith(start) and inner.endswith(end):
                return f"ffn_{part}_exps.weight"
    raise RecipeError(
        f"a GGUF file of the architecture {architecture.name} has no place for {inner}; export without --gguf"
    )


def _stacked(plans: list[TensorPlan]) -> TensorPlan:
    return TensorPlan((len(plans), *plans[0].shape), lambda: np.stack([plan.read() for plan in plans]))


def _with_offset(plan: TensorPlan, name: str, architecture: Architecture) -> TensorPlan:
    if not architecture.norm_offset or not name.endswith("norm.weight"):
        return plan
    return TensorPlan(plan.shape, lambda: plan.read().astype(np.float32) + np.float32(architecture.norm_offset))


def _by_turns(plan: TensorPlan, name: str, architecture: Architecture, raw: Mapping[str, Any]) -> TensorPlan:
    """Interleave the halves of each head's features, as Llama's files have them."""
    if not architecture.interleaved or not name.startswith(("attn_q.", "attn_k.")):
        return plan
    heads = raw["num_attention_heads"] if name.startswith("attn_q.") else raw["num_key_value_heads"]

    def read() -> np.ndarray:
        array = plan.read()
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)

    return TensorPlan(plan.shape, read)


def _type(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type in which a tensor is written: vectors and routers are exact."""
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % _Q8_BLOCK else kind


def _encoded(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    gguf = import_extra("gguf.quants", "gguf")
    wide = np.ascontiguousarray(array, np.float32)
    largest = float(np.abs(wide).max(initial=0.0))
    if not np.isfinite(largest) or (kind == "F16" and largest > float(np.finfo(np.float16).max)):
        raise CheckpointError(f"{name} holds {largest}, which {kind} can't; choose Q8_0, or mend the weights")
    return gguf.quantize(wide, gguf.GGMLQuantizationType[kind])
