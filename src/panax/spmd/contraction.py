"""Named contraction: a product of an activation and a weight, written by logical names.

    y = contract("batch seq embed, embed ffn -> batch seq ffn", x, w)

The names are documentation, and this file is the one place where the following are decided for every model:
- the weight is opened (`weights.py`) in the activation's dtype;
- products accumulate in float32 whatever their operands are;
- the weight's gradient is formed in the dtype of its slot (float32), never in bfloat16; over axes that the parameter is not split
  over it stays this device's share, to be summed once a step;
- a sum over a split axis (`ffn` and `heads` over `tensor`) gives partial products: these are reduce-scattered along `seq`, into
  the residual stream's layout, and their cotangent is gathered along it; where the residual stream is whole on each device
  (`Task.splits_residual`), partial sums are all-reduced, and so are cotangents, of which each device holds a share;
- each product itself (`product.py`): on CPU, whose it is and in which orientation; else a plain einsum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..core.layout import MeshAxes, current_layout
from ..core.logical import Role, axis_of
from ..core.protocols import Axes
from ..kernels.product import product
from .collectives import all_gather, all_reduce, reduce_scatter
from .overlap import gather_matmul, matmul_scatter, overlaps, rows_of
from .product import WeightOp, apply_weight_op
from .sequence import SPREAD, all_gather_sequence, sequence_parallel_axes
from .weights import GatheredWeight, gather_weight

PRODUCT = "product"
"""The name under which a rematerialisation policy knows the results of products."""


class Equation:
    """A parsed two-operand contraction.

    >>> Equation("batch seq embed, embed ffn -> batch seq ffn").letters
    ('abc', 'cd', 'abd')
    """

    def __init__(self, text: str):
        left, arrow, out = text.partition("->")
        operands = left.split(",")
        if not arrow or len(operands) != 2:
            raise ValueError(f"expected 'axes, axes -> axes', got {text!r}")
        self.text = text
        self.axes: tuple[Axes, Axes, Axes] = (
            tuple(operands[0].split()),
            tuple(operands[1].split()),
            tuple(out.split()),
        )
        names = dict.fromkeys((*self.axes[0], *self.axes[1]))
        unknown = [name for name in self.axes[2] if name not in names]
        if unknown:
            raise ValueError(f"{text!r}: {unknown[0]!r} of the result is in neither operand")
        letter = {name: chr(ord("a") + i) for i, name in enumerate(names)}
        self.letters = tuple("".join(letter[name] for name in axes) for axes in self.axes)

    def check(self, x: jax.Array, w: jax.Array) -> None:
        """Raise a ValueError that names the axis on which the operands disagree."""
        sizes: dict[str | None, tuple[int, str]] = {}
        for array, axes, which in ((x, self.axes[0], "first"), (w, self.axes[1], "second")):
            if array.ndim != len(axes):
                raise ValueError(
                    f"contract({self.text!r}): the {which} operand should have axes {' '.join(map(str, axes))}, "
                    f"got shape {array.shape}"
                )
            for name, size in zip(axes, array.shape):
                if name in sizes and sizes[name][0] != size:
                    raise ValueError(
                        f"contract({self.text!r}): axis {name!r} is {sizes[name][0]} in the {sizes[name][1]} operand "
                        f"and {size} in the {which} one"
                    )
                sizes[name] = (size, which)


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Equation:
    return Equation(text)


def contract(text: str, x: Float[Array, "..."], w: Any, *, out_dtype: Any = None) -> Float[Array, "..."]:
    """Contract an activation with a weight, by named axes.

    Args:
        text: "axes of x, axes of w -> axes of the result"; an axis that the result lacks is summed over.
        x: The activation, already in its compute layout. Its dtype is the one multiplied in.
        w: The weight as it is stored (float32 master or other dtype, in its storage layout), or an `WeightLike`.
        out_dtype: The result's dtype; by default that of `x`.

    Raises:
        ValueError: The operands' ranks or a shared axis disagree; the message names the axis and both sizes.

    >>> contract("batch embed, embed ffn -> batch ffn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    equation = _parse(text)
    opened = gather_weight(w, equation.axes[1], x.dtype)
    equation.check(x, opened.value)
    contraction = _Contraction(text, jnp.dtype(out_dtype or x.dtype).name, *_partial(equation))
    # Named, so that a rematerialisation policy can keep the products and compute the cheap rest again.
    return checkpoint_name(apply_weight_op(contraction, x, opened), PRODUCT)


def contract_gathered(
    x: Float[Array, "batch residual embed"], *products: tuple[str, Any], out_dtype: Any = None
) -> list[Float[Array, "..."]]:
    """Contract the residual stream, gathered along the sequence, with several weights: one gather for all of them.

    Args:
        products: Each an equation as `contract` takes, whose first operand is `batch seq embed`, and its weight.

    >>> x, w = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
    >>> contract_gathered(x, ("batch seq embed, embed ffn -> batch seq ffn", w))[0].shape
    (1, 2, 4)
    """
    axes = sequence_parallel_axes()
    if not overlaps(axes):
        x = all_gather_sequence(x)
        return [contract(text, x, w, out_dtype=out_dtype) for text, w in products]
    dtype = jnp.dtype(out_dtype or x.dtype).name
    contractions = tuple(_Contraction(text, dtype, axes, 1, ring=True) for text, _ in products)
    weights = [gather_weight(w, _parse(text).axes[1], x.dtype) for text, w in products]
    outs: list[jax.Array] = apply_weight_op(_Contractions(contractions), x, *weights)
    return [checkpoint_name(out, PRODUCT) for out in outs]


def gather(w: Any, axes: str, dtype: Any) -> Float[Array, "..."]:
    """A parameter in its compute layout and `dtype`; its gradient arrives in the parameter's own dtype and layout.

    >>> gather(jnp.ones((3,)), "norm", jnp.bfloat16).dtype.name
    'bfloat16'
    """
    return apply_weight_op(_Read(), (), gather_weight(w, axes, dtype))


@dataclasses.dataclass(frozen=True)
class _Contraction(WeightOp):
    """One activation by one weight.

    Attributes:
        partial: The mesh axes over which the product gives partial sums.
        dim: The result's dimension along which these are scattered; None where they are added up whole.
        ring: Scatter, and gather, in a ring beside the product.
    """

    text: str
    out_dtype: str
    partial: MeshAxes
    dim: int | None
    ring: bool

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        x, w = inputs, weights[0].value
        if self.ring:
            rows = x.shape[1] // jax.lax.axis_size(self.partial)
            parts = self.of(w)
            return matmul_scatter(lambda start: parts(rows_of(x, start, rows)), self.partial, rows), (x, w)
        out = self.of(w)(x)
        if self.dim is None:
            return all_reduce(out, self.partial), (x, w)
        return reduce_scatter(out, self.partial, self.dim), (x, w)

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[jax.Array, list[jax.Array]]:
        x, w = saved
        gradient = gradient.astype(x.dtype)
        back = self.back(w, x.dtype)
        if self.ring:
            gradient, (dx,) = gather_matmul(gradient, self.partial, [back])
        else:
            gradient = self._gathered(gradient)
            dx = back(gradient)
        return dx, [self.outer(x, gradient, dtypes[0])]

    def _gathered(self, gradient: jax.Array) -> jax.Array:
        """The whole cotangent; of a residual stream that is whole, each device's own is a share of it."""
        if self.dim is None:
            return all_reduce(gradient, self.partial)
        return all_gather(gradient, self.partial, self.dim)

    def of(self, w: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """The product of an activation."""
        a, b, o = _parse(self.text).letters
        return lambda x: product(f"{a},{b}->{o}", x, w, self.out_dtype)

    def back(self, w: jax.Array, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        """The activation's gradient, of the result's."""
        a, b, o = _parse(self.text).letters
        return lambda gradient: product(f"{o},{b}->{a}", gradient, w, dtype)

    def outer(self, x: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
        """The weight's gradient."""
        a, b, o = _parse(self.text).letters
        return product(f"{a},{o}->{b}", x, gradient, dtype)


@dataclasses.dataclass(frozen=True)
class _Contractions(WeightOp):
    """The residual stream, gathered along the sequence in a ring, by several weights."""

    each: tuple[_Contraction, ...]

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[list[jax.Array], Any]:
        values = [w.value for w in weights]
        products = [one.of(w) for one, w in zip(self.each, values)]
        whole, outs = gather_matmul(inputs, self.each[0].partial, products)
        return outs, (checkpoint_name(whole, SPREAD), values)

    def backward(self, saved: Any, gradient: list[jax.Array], *dtypes: Any) -> tuple[jax.Array, list[jax.Array]]:
        whole, values = saved
        gradients = [part.astype(whole.dtype) for part in gradient]
        axes = self.each[0].partial
        rows = whole.shape[1] // jax.lax.axis_size(axes)
        backs = [one.back(w, whole.dtype) for one, w in zip(self.each, values)]

        def share(start: jax.Array) -> jax.Array:
            return functools.reduce(jnp.add, (back(rows_of(d, start, rows)) for back, d in zip(backs, gradients)))

        dx = matmul_scatter(share, axes, rows)
        return dx, [one.outer(whole, d, dtype) for one, d, dtype in zip(self.each, gradients, dtypes)]


@dataclasses.dataclass(frozen=True)
class _Read(WeightOp):
    """A weight's value itself."""

    def forward(self, inputs: Any, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        return weights[0].value, ()

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, list[jax.Array]]:
        return (), [gradient.astype(dtypes[0])]


def _partial(equation: Equation) -> tuple[MeshAxes, int | None, bool]:
    layout = current_layout()
    summed = [name for name in equation.axes[1] if name not in equation.axes[2]]
    if layout is None:
        return (), 0, False
    axes = tuple(axis for dim in layout.compute(tuple(summed)) for axis in dim)
    if axes and not sequence_parallel_axes():
        return axes, None, False
    positions = axis_of(Role.POSITIONS)
    if axes and positions not in equation.axes[2]:
        raise ValueError(
            f"contract({equation.text!r}) sums over {' '.join(map(str, summed))}, split over {axes}; the result needs an axis "
            f"{positions!r} to be scattered along"
        )
    dims = [axes.index(positions) if positions in axes else 0 for axes in (equation.axes[0], equation.axes[2])]
    return axes, dims[1] if axes else 0, overlaps(axes) and dims == [1, 1]
