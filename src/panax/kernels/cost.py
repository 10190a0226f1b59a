"""Cost of custom calls: the FLOPs of a kernel's matrix multiplications, which the program does not show.

A kernel that is not listed here is reported as unknown when a step's FLOPs are counted, and the count is then
"at least".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Shaped(Protocol):
    """An operand or a result of a kernel."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Flops = Callable[[Sequence[Shaped], Sequence[Shaped], Mapping[str, Any]], float]
"""Function of (operands, results, parameters of the call) that returns an upper bound of the FLOPs; blocks
skipped by masks are not considered."""

_COSTS: dict[str, Flops] = {}


def register_cost(name: str, flops: Flops) -> None:
    """Register the cost of a kernel.

    Args:
        name: Name of the foreign function that is called, or of the primitive.

    >>> register_cost("my_product", lambda operands, results, _: 2.0 * math.prod(operands[0].shape) * results[0].shape[-1])
    """
    _COSTS[name] = flops


def lookup_cost(name: str) -> Flops | None:
    """Return the cost function registered for a name, or None."""
    return _COSTS.get(name)


def _product(transposed: tuple[bool, bool]) -> Flops:
    def flops(operands: Sequence[Shaped], results: Sequence[Shaped], _: Mapping[str, Any]) -> float:
        return 2.0 * math.prod(results[0].shape) * operands[0].shape[0 if transposed[0] else 1]

    return flops


def _convolution(operands: Sequence[Shaped], results: Sequence[Shaped], _: Mapping[str, Any]) -> float:
    """Count each tap at most once for each output position, and for each input position."""
    places = min(math.prod(operands[0].shape[2:]), math.prod(results[0].shape[2:]))
    return 2.0 * operands[0].shape[0] * places * math.prod(operands[1].shape)


def _convolution_by_weights(operands: Sequence[Shaped], results: Sequence[Shaped], _: Mapping[str, Any]) -> float:
    """Count two FLOPs for each weight and each position that is summed over."""
    images, _channels, *places = operands[1].shape
    return 2.0 * math.prod(results[0].shape) * images * math.prod(places)


def _grouped(operands: Sequence[Shaped], results: Sequence[Shaped], _: Mapping[str, Any]) -> float:
    """Count all rows of the buffer: the number of rows in groups is only known at run time."""
    return 2.0 * math.prod(operands[0].shape) * results[0].shape[-1]


def _attention(products: int) -> Flops:
    """Count `products` matrix multiplications of the size of queries times keys; halved if the mask is
    causal."""

    def flops(operands: Sequence[Shaped], _: Sequence[Shaped], parameters: Mapping[str, Any]) -> float:
        q, k = (dict(zip("bshd", x.shape)) for x in operands[:2])
        visible_share = 0.5 if _is_causal(parameters) and q["s"] == k["s"] else 1.0
        return visible_share * products * 2.0 * q["b"] * q["h"] * q["s"] * k["s"] * q["d"]

    return flops


def _is_causal(parameters: Mapping[str, Any]) -> bool:
    attributes = dict(parameters.get("attributes") or ())
    return bool(getattr(attributes.get("causal", 0), "value", attributes.get("causal", 0))) or "CAUSAL" in str(
        parameters.get("mask_type", "")
    )


for _first in "nt":
    for _second in "nt":
        register_cost(f"panax_product_{_first}{_second}", _product((_first == "t", _second == "t")))
register_cost("panax_convolution", _convolution)
register_cost("panax_convolution_by_weights", _convolution_by_weights)
for _name in ("panax_grouped_product", "panax_grouped_outer"):
    register_cost(_name, _grouped)
register_cost("panax_wall", lambda *_: 0.0)
for _forward, _backward in (
    ("panax_attention_forward", "panax_attention_backward"),
    ("dot_product_attention_fwd", "dot_product_attention_bwd"),
):
    register_cost(_forward, _attention(2))
    register_cost(_backward, _attention(5))
