"""Quantized releases, read as float32: FP8, FP4, int4, and bitsandbytes' NF4 and FP4. Only the slice that is read is
dequantized, and nothing is cached."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..json_values import RefuseFn
from .float4 import read_float4, read_mxfp4
from .float8 import block_sizes, read_float8
from .integers import read_codes, read_int4
from .slices import FLOAT8, DequantizedSlice, TensorSlice, float8_slices, is_stored_in

__all__ = ["FLOAT8", "KEY", "check_quantization", "dequantize", "float8_slices", "is_nf4", "is_stored_in"]

KEY = "quantization_config"
"""Key of config.json with the method and its settings."""

WAYS_OUT = {
    "gptq": "dequantize it once, or take the release that it was made from",
    "awq": "dequantize it once, or take the release that it was made from",
    "bitsandbytes": "4 bits are read, and 8 are not: load it with transformers, call model.dequantize(), and save_pretrained",
}
"""Methods that are not read, and what to do instead."""

PACKED = ("float-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Formats of compressed-tensors that are read."""

ReadFn = Callable[[str, dict[str, TensorSlice], Mapping[str, Any]], tuple[str, DequantizedSlice] | None]
"""(a tensor's name, all tensors left, settings) to the name of the dequantized tensor and itself, taken out of the tensors."""

READERS: tuple[ReadFn, ...] = (read_float8, read_mxfp4, read_float4, read_int4, read_codes)

_OF_ACTIVATIONS = re.compile(r"\.(input_scale|input_global_scale|k_scale|v_scale)$")
"""Scales of a quantized release's activations and caches, which nothing here quantizes."""


def check_quantization(raw: Mapping[str, Any], refuse: RefuseFn) -> None:
    """Reject the quantization that config.json declares if its weights can't be read."""
    settings = raw.get(KEY)
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        refuse(KEY, "expected an object with a quant_method")
    method = settings.get("quant_method")
    if method == "fp8" and block_sizes(settings) is not None:
        return
    if method == "bitsandbytes" and settings.get("load_in_4bit") is True:
        return
    if method == "mxfp4" or (method == "modelopt" and settings.get("quant_algo") == "NVFP4"):
        return
    if method == "compressed-tensors" and settings.get("format") in PACKED:
        if settings["format"] == "pack-quantized" and not all(_is_int4(group) for group in _groups(settings)):
            refuse(KEY, "packed weights are read if they are symmetric int4 with scales of groups or rows")
        return
    way = WAYS_OUT.get(str(method), "convert it to bfloat16 first")
    refuse(KEY, f"weights of quant_method={method!r} are not read; {way}")


def is_nf4(raw: Mapping[str, Any]) -> bool:
    """Return True if config.json declares weights in bitsandbytes' NF4."""
    settings = raw.get(KEY)
    return isinstance(settings, Mapping) and (
        settings.get("quant_method") == "bitsandbytes"
        and settings.get("load_in_4bit") is True
        and settings.get("bnb_4bit_quant_type") == "nf4"
    )


def dequantize(tensors: Mapping[str, TensorSlice], settings: Any) -> dict[str, TensorSlice]:
    """Return tensors, the quantized ones read as float32, without their scales.

    Args:
        settings: The value of `quantization_config`; None without quantization.

    Raises:
        CheckpointError: Scales don't belong to their weights.
    """
    if not isinstance(settings, Mapping):
        return dict(tensors)
    remaining = {name: tensor for name, tensor in tensors.items() if not _OF_ACTIVATIONS.search(name)}
    wide: dict[str, TensorSlice] = {}
    for name in tensors:
        for read in READERS if name in remaining else ():
            if (dequantized := read(name, remaining, settings)) is not None:
                wide[dequantized[0]] = dequantized[1]
                break
    return remaining | wide


def _groups(settings: Mapping[str, Any]) -> list[Any]:
    groups = settings.get("config_groups")
    return [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else [None]


def _is_int4(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("num_bits") == 4 and weights.get("symmetric") is True
