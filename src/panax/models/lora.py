"""LoRA: trained corrections of low rank beside a decoder's frozen matrices."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..core import Axes, logical_axes, normal, pair_axes
from ..core.errors import RecipeError
from ..core.params.logical import Role, lookup_axis
from ..core.params.module import name_key
from ..core.params.selection import matches_param
from ..core.validation import Validated
from ..kernels.quantized import NF4
from ..spmd.composite.low_rank import RANK, LowRankWeight, column_norms
from ..spmd.composite.quantized_weight import QuantizedWeight, quantize_weight

NF4_BLOCK = 64
"""Inputs with one scale, as in bitsandbytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(Validated):
    """Adapters of a decoder's layers: each chosen matrix W is frozen, and W + gain * A B computed.

    A begins random and B at zero, so that training begins from the model as it is. All other parameters are frozen too.

    Sources: LoRA (arXiv:2106.09685); rank-stabilized: arXiv:2312.03732; DoRA: arXiv:2402.09353.

    Attributes:
        rank: Columns of A and rows of B.
        alpha: The gain is `alpha / rank`.
        rank_stabilized: The gain is `alpha / sqrt(rank)` instead.
        targets: Matrices by their names in a layer, prefixes of names, or patterns with `*`: "attention",
            "feed_forward.w_up". (): all matrices of all layers, without routers.
        base: How the frozen matrices of the layers are kept, those without adapters too: "same" in the task's dtype, "nf4" in
            4 bits, with a scale for each 64 inputs (QLoRA, arXiv:2305.14314). A release that bitsandbytes has stored so keeps
            its bits.
        dora: Scale each column of W + A B to a norm of its own, which is trained, beginning with that of W (DoRA).
    """

    rank: int = 16
    alpha: float = 32.0
    rank_stabilized: bool = False
    targets: tuple[str, ...] = ()
    base: Literal["same", "nf4"] = "same"
    dora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RecipeError(f"adapter.rank={self.rank}; expected at least 1")
        if not 0.0 < self.alpha < math.inf:
            raise RecipeError(f"adapter.alpha={self.alpha}; expected a positive number")

    @classmethod
    def of_rank(cls, rank: int) -> "LoRA":
        """Return adapters of a rank, with a gain of 2, of all matrices of the layers."""
        return cls(rank=rank, alpha=2.0 * rank)

    @property
    def gain(self) -> float:
        """Factor of the correction.

        >>> LoRA(rank=16, alpha=32.0).gain, LoRA(rank=16, alpha=32.0, rank_stabilized=True).gain
        (2.0, 8.0)
        """
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def add_adapters(key: jax.Array, model: Any, lora: LoRA) -> Any:
    """Return a model with adapters beside the chosen matrices of its stacks; trained parts are float32.

    Raises:
        RecipeError: A target matches no matrix, or a matrix can't be kept in 4 bits.
    """
    matrices = dict(_matrices(model))
    chosen = _choose(matrices, lora.targets)

    def one(name: str, leaf: Any, axes: Axes) -> Any:
        if name not in matrices:
            return leaf
        num_inputs, num_outputs = matrices[name]
        base = leaf if lora.base == "same" else _quantized(name, leaf, num_inputs, num_outputs)
        if name not in chosen:
            return base
        return _adapted(name_key(key, f"adapter.{name}"), base, axes, num_inputs, num_outputs, lora)

    return jax.tree.structure(model).unflatten(one(*leaf) for leaf in pair_axes(model, logical_axes(model)))


def _quantized(name: str, w: Any, num_inputs: int, num_outputs: int) -> QuantizedWeight:
    try:
        return quantize_weight(w, num_inputs=num_inputs, num_outputs=num_outputs, format=NF4, block=NF4_BLOCK)
    except ValueError as error:
        raise RecipeError(f'adapter.base="nf4": {name}: {error}; leave adapter.base "same"') from error


def _adapted(key: jax.Array, base: Any, axes: Axes, num_inputs: int, num_outputs: int, lora: LoRA) -> LowRankWeight:
    last = len(axes) - num_outputs
    first = last - num_inputs
    copies, inputs, outputs = base.shape[:first], base.shape[first:last], base.shape[last:]
    # The variance of the usual initialization, which is uniform up to 1 / sqrt(inputs).
    draw = normal(std=(3 * math.prod(inputs)) ** -0.5)
    a = draw(key, (*copies, *inputs, lora.rank), (*axes[:last], RANK))
    b = jnp.zeros((*copies, lora.rank, *outputs), jnp.float32)
    magnitude = column_norms(base, num_inputs, num_outputs) if lora.dora else None
    return LowRankWeight(base, a, b, num_inputs, num_outputs, lora.gain, magnitude)


def _matrices(model: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each matrix of a layer, and the numbers of its input and output axes."""
    for name, _, axes in pair_axes(model, logical_axes(model)):
        if name.startswith("stacks.") and (counts := _matrix(axes)) is not None:
            yield name, counts


def _choose(names: Iterable[str], targets: tuple[str, ...]) -> set[str]:
    """Return the names of the matrices with adapters."""
    inner = {name: name.partition(".blocks.")[2].partition(".")[2] for name in names}
    chosen = {
        target: [name for name, in_layer in inner.items() if matches_param(in_layer, target)] for target in targets
    }
    if missed := [target for target, matched in chosen.items() if not matched]:
        known = ", ".join(dict.fromkeys(inner.values()))
        raise RecipeError(f"adapter.targets: {missed[0]!r} matches no matrix of a layer; these are {known}")
    return {name for matched in chosen.values() for name in matched} if targets else set(inner)


def _matrix(axes: Axes) -> tuple[int, int] | None:
    """Return the numbers of input and output axes of a weight that activations are contracted with; None for others.

    The inputs come first. They are one axis that is stored split and computed whole (the width of the residual stream, a
    latent); else the outputs are the width, and the inputs all before it.
    """
    dims = [lookup_axis(axis) for axis in axes]
    while dims and dims[0].copies:
        del dims[0]
    if len(dims) < 2 or any(dim.in_float32 or dim.read_out for dim in dims):
        return None
    if dims[0].storage and not dims[0].compute:
        return 1, len(dims) - 1
    return (len(dims) - 1, 1) if dims[-1].role is Role.WIDTH else None
