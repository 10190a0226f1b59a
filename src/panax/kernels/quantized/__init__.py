"""Quantized arrays: codes and scales as one array type, its formats, and rounding."""

from .array import QuantizedArray, quantize
from .code_table import NF4, CodeTable
from .dynamic_map import DynamicMap
from .formats import FLOAT8, INT4, INT8, SIGN, Float8, Format, Linear, Sign
from .packing import pack, unpack
from .residual import quantize_with_residual
from .rounding import round_stochastically

DYNAMIC = DynamicMap(signed=True)
"""8-bit dynamic map of signed values, such as first moments."""
DYNAMIC_UNSIGNED = DynamicMap(signed=False)
"""8-bit dynamic map of values that are not negative, such as second moments."""

__all__ = [
    "DYNAMIC", "DYNAMIC_UNSIGNED", "FLOAT8", "INT4", "INT8", "NF4", "SIGN", "CodeTable", "DynamicMap", "Float8", "Format",
    "Linear", "QuantizedArray", "Sign", "pack", "quantize", "quantize_with_residual", "round_stochastically", "unpack",
]  # fmt: skip
