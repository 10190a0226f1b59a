"""LoRA: trained corrections of low rank beside a decoder's frozen matrices."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

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

Number = TypeVar("Number", int, float)

NF4_BLOCK = 64
"""Inputs with one scale, as in bitsandbytes."""


class AdapterSize(NamedTuple):
    """Size of the adapter of one matrix.

    Attributes:
        alpha: The gain times the rank, or times its root with `rank_stabilized`.
        gain: Factor of the correction.
    """

    rank: int
    alpha: float
    gain: float


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
        ranks: Other ranks of some matrices, by the same names and patterns as `targets`; a later entry overrides an
            earlier one.
        alphas: Other alphas of some matrices, likewise.
    """

    rank: int = 16
    alpha: float = 32.0
    rank_stabilized: bool = False
    targets: tuple[str, ...] = ()
    base: Literal["same", "nf4"] = "same"
    dora: bool = False
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ranks = {"rank": self.rank, **{f"ranks[{name!r}]": rank for name, rank in self.ranks.items()}}
        alphas = {"alpha": self.alpha, **{f"alphas[{name!r}]": alpha for name, alpha in self.alphas.items()}}
        for setting, rank in ranks.items():
            if type(rank) is not int or rank < 1:
                raise RecipeError(f"adapter.{setting}={rank!r}; expected a whole number of at least 1")
        for setting, alpha in alphas.items():
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0.0 < alpha < math.inf:
                raise RecipeError(f"adapter.{setting}={alpha!r}; expected a positive number")

    @classmethod
    def of_rank(cls, rank: int) -> "LoRA":
        """Return adapters of a rank, with a gain of 2, of all matrices of the layers."""
        return cls(rank=rank, alpha=2.0 * rank)

    def size_of(self, matrix: str) -> AdapterSize:
        """Return the size of the adapter of a matrix, by its name in a layer.

        >>> LoRA(rank=16, alpha=32.0).size_of("attention.w_q")
        AdapterSize(rank=16, alpha=32.0, gain=2.0)
        >>> LoRA(rank=16, alpha=32.0, rank_stabilized=True, ranks={"attention": 4}).size_of("attention.w_q").gain
        16.0
        """
        rank, alpha = _last_match(matrix, self.ranks, self.rank), _last_match(matrix, self.alphas, self.alpha)
        return AdapterSize(rank, alpha, alpha / (math.sqrt(rank) if self.rank_stabilized else rank))


def add_adapters(key: jax.Array, model: Any, lora: LoRA) -> Any:
    """Return a model with adapters beside the chosen matrices of its stacks; trained parts are float32.

    Raises:
        RecipeError: A target, or the pattern of a rank or an alpha, matches no matrix; or a matrix can't be kept in 4 bits.
    """
    matrices = dict(_matrices(model))
    chosen = _choose(matrices, lora.targets)
    for setting, patterns in (("ranks", lora.ranks), ("alphas", lora.alphas)):
        _check_matched(setting, patterns, map(name_in_layer, sorted(chosen)), "matrix with an adapter")

    def one(name: str, leaf: Any, axes: Axes) -> Any:
        if name not in matrices:
            return leaf
        num_inputs, num_outputs = matrices[name]
        base = leaf if lora.base == "same" else _quantized(name, leaf, num_inputs, num_outputs)
        if name not in chosen:
            return base
        size = lora.size_of(name_in_layer(name))
        return _adapted(name_key(key, f"adapter.{name}"), base, axes, (num_inputs, num_outputs), size, dora=lora.dora)

    return jax.tree.structure(model).unflatten(one(*leaf) for leaf in pair_axes(model, logical_axes(model)))


def _quantized(name: str, w: Any, num_inputs: int, num_outputs: int) -> QuantizedWeight:
    try:
        return quantize_weight(w, num_inputs=num_inputs, num_outputs=num_outputs, format=NF4, block=NF4_BLOCK)
    except ValueError as error:
        raise RecipeError(f'adapter.base="nf4": {name}: {error}; leave adapter.base "same"') from error


def _adapted(
    key: jax.Array, base: Any, axes: Axes, counts: tuple[int, int], size: AdapterSize, *, dora: bool
) -> LowRankWeight:
    num_inputs, num_outputs = counts
    last = len(axes) - num_outputs
    first = last - num_inputs
    copies, inputs, outputs = base.shape[:first], base.shape[first:last], base.shape[last:]
    # The variance of the usual initialization, which is uniform up to 1 / sqrt(inputs).
    draw = normal(std=(3 * math.prod(inputs)) ** -0.5)
    a = draw(key, (*copies, *inputs, size.rank), (*axes[:last], RANK))
    b = jnp.zeros((*copies, size.rank, *outputs), jnp.float32)
    magnitude = column_norms(base, num_inputs, num_outputs) if dora else None
    return LowRankWeight(base, a, b, num_inputs, num_outputs, size.gain, magnitude)


def _matrices(model: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each matrix of a layer, and the numbers of its input and output axes."""
    for name, _, axes in pair_axes(model, logical_axes(model)):
        if name.startswith("stacks.") and (counts := _matrix(axes)) is not None:
            yield name, counts


def _choose(names: Iterable[str], targets: tuple[str, ...]) -> set[str]:
    """Return the names of the matrices with adapters."""
    inner = {name: name_in_layer(name) for name in names}
    _check_matched("targets", targets, inner.values(), "matrix of a layer")
    chosen = {name for name, in_layer in inner.items() if any(matches_param(in_layer, target) for target in targets)}
    return chosen if targets else set(inner)


def _check_matched(setting: str, patterns: Iterable[str], matrices: Iterable[str], kind: str) -> None:
    """Raise a RecipeError if a pattern matches none of these matrices."""
    known = list(dict.fromkeys(matrices))
    for pattern in patterns:
        if not any(matches_param(matrix, pattern) for matrix in known):
            raise RecipeError(f"adapter.{setting}: {pattern!r} matches no {kind}; these are {', '.join(known)}")


def _last_match(matrix: str, patterns: Mapping[str, Number], default: Number) -> Number:
    """Return the value of the last pattern that matches."""
    matched = [value for pattern, value in patterns.items() if matches_param(matrix, pattern)]
    return matched[-1] if matched else default


def name_in_layer(name: str) -> str:
    """Return the name of a stacked matrix in its layer.

    >>> name_in_layer("stacks.0.blocks.1.attention.w_q")
    'attention.w_q'
    """
    return name.partition(".blocks.")[2].partition(".")[2]


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
