"""Wire formats: encoding of quantization blocks before they are sent, and decoding afterwards."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from ..core.errors import RecipeError
from ..kernels.quantized import (
    FLOAT8,
    INT4,
    INT8,
    SIGN,
    Format,
    QuantizedArray,
    quantize,
    quantize_with_residual,
    round_stochastically,
)


class Wire(abc.ABC):
    """A wire format: a hashable value that compares by content, so that it can be static in a compiled
    program.

    Attributes:
        rounds_by_chance: True if `encode` can use random bits.
        needs_feedback: True if training suffers when rounding errors are not stored and sent later.
    """

    rounds_by_chance: bool = True
    needs_feedback: bool = False

    @abc.abstractmethod
    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> Any:
        """Encode blocks as a tree of arrays with the leading dimensions of `x`.

        Args:
            bits: Random bits for stochastic rounding, with mean x; None to round to nearest.
        """

    def encode_with_residual(
        self,
        x: Float32[Array, "*rows box"],
        owed: Float32[Array, "*rows box"],
        bits: UInt32[Array, "*rows box"] | None = None,
    ) -> tuple[Any, Float32[Array, "*rows box"]]:
        """Encode `x + owed`; also return the rounding error."""
        total = x + owed
        sent = self.encode(total, bits)
        return sent, total - self.decode(sent)

    @abc.abstractmethod
    def decode(self, sent: Any) -> Float32[Array, "*rows box"]:
        """Decode the result of `encode`, possibly with other leading dimensions."""


@dataclasses.dataclass(frozen=True)
class CastWire(Wire):
    """Values cast to another float dtype, without scales."""

    dtype: str = "bfloat16"

    @property
    def rounds_by_chance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.dtype == "bfloat16"

    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> jax.Array:
        rounded = x.astype(self.dtype) if bits is None else round_stochastically(x, bits)
        # Sent as integers of the same width: XLA on CPU would widen a 16-bit float before sending it.
        return jax.lax.bitcast_convert_type(rounded, f"uint{8 * jnp.dtype(self.dtype).itemsize}")

    def decode(self, sent: jax.Array) -> Float32[Array, "*rows box"]:
        return jax.lax.bitcast_convert_type(sent, self.dtype).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class QuantizedWire(Wire):
    """Codes with a float32 scale per block.

    >>> wire = QuantizedWire(INT8)
    >>> wire.decode(wire.encode(jnp.array([[1.0, 0.25, -0.5, 0.0]])))[0, 0].item()
    1.0
    """

    format: Format
    rounds_by_chance: bool = True
    needs_feedback: bool = False

    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> QuantizedArray:
        return quantize(x, self.format, x.shape[-1], bits)

    def encode_with_residual(
        self,
        x: Float32[Array, "*rows box"],
        owed: Float32[Array, "*rows box"],
        bits: UInt32[Array, "*rows box"] | None = None,
    ) -> tuple[QuantizedArray, Float32[Array, "*rows box"]]:
        return quantize_with_residual(x, owed, self.format, bits)

    def decode(self, sent: QuantizedArray) -> Float32[Array, "*rows box"]:
        return sent.dequantize(jnp.float32)


WIRES: dict[str, Wire] = {
    "bfloat16": CastWire("bfloat16"),
    "int8": QuantizedWire(INT8),
    "float8": QuantizedWire(FLOAT8),
    "int4": QuantizedWire(INT4),
    "sign": QuantizedWire(SIGN, rounds_by_chance=False, needs_feedback=True),
}
"""Wire formats that a setting may name."""


def register_wire(name: str, wire: Wire) -> None:
    """Register a wire format by name; registering the same one again has no effect.

    Raises:
        RecipeError: Another wire format has that name.
    """
    if WIRES.setdefault(name, wire) != wire:
        raise RecipeError(f"the wire {name!r} is registered already, as {WIRES[name]}; choose another name")
