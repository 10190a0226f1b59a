"""How numbers travel: what a box of them becomes before it is sent, and again when it has arrived."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from ..core.errors import RecipeError
from ..kernels.quantised import (
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
    """A format of what travels: an equal, hashable value, so that it may be static in a compiled program.

    Attributes:
        rounds_by_chance: Whether `encode` takes random bits.
        needs_feedback: Whether training goes wrong where rounding errors are not kept and sent later.
    """

    rounds_by_chance: bool = True
    needs_feedback: bool = False

    @abc.abstractmethod
    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> Any:
        """What travels: a tree of arrays with the leading dimensions of `x`.

        Args:
            bits: Random ones, to round up or down by chance, so that the mean is x; None for the nearest.
        """

    def encode_with_rest(
        self,
        x: Float32[Array, "*rows box"],
        owed: Float32[Array, "*rows box"],
        bits: UInt32[Array, "*rows box"] | None = None,
    ) -> tuple[Any, Float32[Array, "*rows box"]]:
        """What travels of `x + owed`, and what that leaves out."""
        total = x + owed
        sent = self.encode(total, bits)
        return sent, total - self.decode(sent)

    @abc.abstractmethod
    def decode(self, sent: Any) -> Float32[Array, "*rows box"]:
        """The numbers again, of what `encode` gave, possibly with other leading dimensions."""


@dataclasses.dataclass(frozen=True)
class Cast(Wire):
    """Numbers in another float, without scales."""

    dtype: str = "bfloat16"

    @property
    def rounds_by_chance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.dtype == "bfloat16"

    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> jax.Array:
        rounded = x.astype(self.dtype) if bits is None else round_stochastically(x, bits)
        # As whole numbers of as many bits: XLA on CPU would widen a float of 16 bits before it sends it.
        return jax.lax.bitcast_convert_type(rounded, f"uint{8 * jnp.dtype(self.dtype).itemsize}")

    def decode(self, sent: jax.Array) -> Float32[Array, "*rows box"]:
        return jax.lax.bitcast_convert_type(sent, self.dtype).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Coded(Wire):
    """Codes, and a scale in float32 for each box.

    >>> wire = Coded(INT8)
    >>> wire.decode(wire.encode(jnp.array([[1.0, 0.25, -0.5, 0.0]])))[0, 0].item()
    1.0
    """

    format: Format
    rounds_by_chance: bool = True
    needs_feedback: bool = False

    def encode(self, x: Float32[Array, "*rows box"], bits: UInt32[Array, "*rows box"] | None = None) -> QuantizedArray:
        return quantize(x, self.format, x.shape[-1], bits)

    def encode_with_rest(
        self,
        x: Float32[Array, "*rows box"],
        owed: Float32[Array, "*rows box"],
        bits: UInt32[Array, "*rows box"] | None = None,
    ) -> tuple[QuantizedArray, Float32[Array, "*rows box"]]:
        return quantize_with_residual(x, owed, self.format, bits)

    def decode(self, sent: QuantizedArray) -> Float32[Array, "*rows box"]:
        return sent.dequantize(jnp.float32)


WIRES: dict[str, Wire] = {
    "bfloat16": Cast("bfloat16"),
    "int8": Coded(INT8),
    "float8": Coded(FLOAT8),
    "int4": Coded(INT4),
    "sign": Coded(SIGN, rounds_by_chance=False, needs_feedback=True),
}
"""The wires that a setting may name."""


def register_wire(name: str, wire: Wire) -> None:
    """Make a wire known by a name; the same one again changes nothing.

    Raises:
        RecipeError: Another one has that name.
    """
    if WIRES.setdefault(name, wire) != wire:
        raise RecipeError(f"the wire {name!r} is registered already, as {WIRES[name]}; take another name")
