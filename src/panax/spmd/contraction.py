"""Contraction of an activation with a weight, with dimensions given by logical names.

    y = contract("batch seq embed, embed ffn -> batch seq ffn", x, w)

The names document the shapes. This file decides the following for every model:

- The weight is gathered (`weights.py`) in the dtype of the activation.
- Matmuls accumulate in float32, whatever the dtype of their operands.
- The weight's gradient is computed in the dtype of its slot (float32), never in bfloat16. Over mesh axes that
  do not shard the parameter it stays a partial sum, which is reduced once per step.
- Contracting a sharded axis (`ffn` or `heads` over `tensor`) produces partial sums. These are
  reduce-scattered along `seq`, into the layout of the residual stream, and the cotangent is gathered along
  `seq`. If every device holds the whole residual stream (`Task.splits_residual` is false), partial sums are
  all-reduced, and so are cotangents, which are partial on each device.
- Which kernel computes the matmul (`kernels/product.py`): on CPU a library and an orientation are chosen,
  elsewhere it is a plain einsum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..core.layout.layout import MeshAxes, current_layout
from ..core.params.logical import Role, axis_for_role
from ..core.protocols import Axes
from ..kernels.product import product
from ..kernels.registry import refuse_exact
from .collectives import all_gather, all_reduce, reduce_scatter
from .overlap import gather_matmul, matmul_scatter, should_overlap, slice_rows
from .product import WeightOp, apply_weight_op
from .sequence import GATHERED_SEQUENCE, all_gather_sequence, sequence_parallel_axes
from .weights import CompositeWeight, GatheredWeight, gather_weight

PRODUCT = "product"
"""Name of matmul results in rematerialization policies."""


class Equation:
    """A parsed contraction of two operands.

    Attributes:
        text: The equation as written.
        axes: Logical axes of the activation, the weight and the result.
        letters: The same as einsum subscripts, one letter per axis.

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
        """Check that the operands have the stated ranks and agree on every shared axis.

        Raises:
            ValueError: The ranks or a shared axis disagree; the message names the axis and both sizes.
        """
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
def parse_equation(text: str) -> Equation:
    """Return the equation of a text; each is parsed once."""
    return Equation(text)


def contract(text: str, x: Float[Array, "..."], w: Any, *, out_dtype: Any = None) -> Float[Array, "..."]:
    """Contract an activation with a weight, by named axes.

    Args:
        text: "axes of x, axes of w -> axes of the result"; an axis that the result lacks is summed over.
        x: The activation in its compute layout. The matmul runs in its dtype.
        w: The weight in its storage layout (a float32 master copy, or any other dtype), or a `WeightLike`.
        out_dtype: Dtype of the result; that of `x` by default.

    Raises:
        ValueError: The operands' ranks or a shared axis disagree; the message names the axis and both sizes.

    >>> contract("batch embed, embed ffn -> batch ffn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    if isinstance(w, CompositeWeight):
        return w.contract(text, x, out_dtype or x.dtype)
    return contract_value(text, x, w, out_dtype)


def contract_value(text: str, x: Float[Array, "..."], w: Any, out_dtype: Any = None) -> Float[Array, "..."]:
    """Contract an activation with the gathered value of a weight; arguments as in `contract`."""
    return contract_opened(text, x, gather_weight(w, parse_equation(text).axes[1], x.dtype), out_dtype)


def contract_opened(
    text: str, x: Float[Array, "..."], opened: GatheredWeight, out_dtype: Any = None
) -> Float[Array, "..."]:
    """Contract an activation with a weight that was gathered in its dtype; arguments as in `contract`."""
    equation = parse_equation(text)
    equation.check(x, opened.value)
    contraction = _Contraction(text, jnp.dtype(out_dtype or x.dtype).name, *_partial(equation))
    # Named, so that a rematerialization policy can save matmul results and recompute the cheaper rest.
    return checkpoint_name(apply_weight_op(contraction, x, opened), PRODUCT)


def contract_gathered(
    x: Float[Array, "batch residual embed"], *products: tuple[str, Any], out_dtype: Any = None
) -> list[Float[Array, "..."]]:
    """Contract the residual stream with several weights after gathering it once along the sequence.

    Args:
        products: Pairs of an equation, as in `contract` with `batch seq embed` as first operand, and its
            weight.

    Returns:
        One result per weight, each with the whole sequence.

    >>> x, w = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
    >>> contract_gathered(x, ("batch seq embed, embed ffn -> batch seq ffn", w))[0].shape
    (1, 2, 4)
    """
    axes = sequence_parallel_axes()
    # Parts of a composite weight are contracted one after the other, which a ring of one product does not do.
    if not should_overlap(axes) or any(isinstance(w, CompositeWeight) for _, w in products):
        x = all_gather_sequence(x)
        return [contract(text, x, w, out_dtype=out_dtype) for text, w in products]
    dtype = jnp.dtype(out_dtype or x.dtype).name
    contractions = tuple(_Contraction(text, dtype, axes, 1, ring=True) for text, _ in products)
    weights = [gather_weight(w, parse_equation(text).axes[1], x.dtype) for text, w in products]
    outs: list[jax.Array] = apply_weight_op(_Contractions(contractions), x, *weights)
    return [checkpoint_name(out, PRODUCT) for out in outs]


def gather(w: Any, axes: str, dtype: Any) -> Float[Array, "..."]:
    """Gather a parameter into its compute layout and cast it to `dtype`.

    Its gradient is returned in the parameter's dtype and storage layout.

    >>> gather(jnp.ones((3,)), "norm", jnp.bfloat16).dtype.name
    'bfloat16'
    """
    return apply_weight_op(_Read(), (), gather_weight(w, axes, dtype))


@dataclasses.dataclass(frozen=True)
class _Contraction(WeightOp):
    """The contraction of one activation with one weight.

    With `x` [a], `w` [b] and result [o], as einsum subscripts (several letters each):

        result      a,b->o
        d loss/dx   o,b->a
        d loss/dw   a,o->b

    Attributes:
        text: The equation.
        out_dtype: Name of the result's dtype.
        partial: Mesh axes over which the matmul produces partial sums.
        dim: Dimension of the result along which partial sums are scattered; None to all-reduce them.
        ring: True to run the scatter, and the gather in the backward pass, as a ring that overlaps with the
            matmul.
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
            return matmul_scatter(lambda start: parts(slice_rows(x, start, rows)), self.partial, rows), (x, w)
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
        """Return the full cotangent; it is a partial sum on each device if the residual stream is whole."""
        if self.dim is None:
            return all_reduce(gradient, self.partial)
        return all_gather(gradient, self.partial, self.dim)

    def of(self, w: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return the matmul as a function of the activation."""
        a, b, o = parse_equation(self.text).letters
        return lambda x: product(f"{a},{b}->{o}", x, w, self.out_dtype)

    def back(self, w: jax.Array, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        """Return the activation's gradient as a function of the result's gradient."""
        a, b, o = parse_equation(self.text).letters
        return lambda gradient: product(f"{o},{b}->{a}", gradient, w, dtype)

    def outer(self, x: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
        """Compute the weight's gradient."""
        a, b, o = parse_equation(self.text).letters
        return product(f"{a},{o}->{b}", x, gradient, dtype)


@dataclasses.dataclass(frozen=True)
class _Contractions(WeightOp):
    """Contractions of the residual stream, gathered along the sequence in a ring, with several weights."""

    each: tuple[_Contraction, ...]

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[list[jax.Array], Any]:
        values = [w.value for w in weights]
        products = [one.of(w) for one, w in zip(self.each, values)]
        gathered, outs = gather_matmul(inputs, self.each[0].partial, products)
        return outs, (checkpoint_name(gathered, GATHERED_SEQUENCE), values)

    def backward(self, saved: Any, gradient: list[jax.Array], *dtypes: Any) -> tuple[jax.Array, list[jax.Array]]:
        gathered, values = saved
        gradients = [part.astype(gathered.dtype) for part in gradient]
        axes = self.each[0].partial
        rows = gathered.shape[1] // jax.lax.axis_size(axes)
        backs = [one.back(w, gathered.dtype) for one, w in zip(self.each, values)]

        def share(start: jax.Array) -> jax.Array:
            """Compute this device's partial sum of dx for the rows from `start`, over all weights."""
            return functools.reduce(jnp.add, (back(slice_rows(d, start, rows)) for back, d in zip(backs, gradients)))

        dx = matmul_scatter(share, axes, rows)
        return dx, [one.outer(gathered, d, dtype) for one, d, dtype in zip(self.each, gradients, dtypes)]


@dataclasses.dataclass(frozen=True)
class _Read(WeightOp):
    """Identity: returns the gathered weight."""

    def forward(self, inputs: Any, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        return weights[0].value, ()

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, list[jax.Array]]:
        return (), [gradient.astype(dtypes[0])]


def _partial(equation: Equation) -> tuple[MeshAxes, int | None, bool]:
    """Return how partial sums of an equation are reduced: `partial`, `dim` and `ring` of `_Contraction`."""
    layout = current_layout()
    summed = [name for name in equation.axes[1] if name not in equation.axes[2]]
    if layout is None:
        return (), 0, False
    axes = tuple(axis for dim in layout.compute(tuple(summed)) for axis in dim)
    if axes:
        refuse_exact(f"sums over the mesh axis {axes[0]}")
    # The whole residual stream is on every device: all-reduce.
    if axes and not sequence_parallel_axes():
        return axes, None, False
    positions = axis_for_role(Role.POSITIONS)
    if axes and positions not in equation.axes[2]:
        raise ValueError(
            f"contract({equation.text!r}) sums over {' '.join(map(str, summed))}, split over {axes}; the result needs an axis "
            f"{positions!r} to be scattered along"
        )
    # A ring cuts the second dimension, so both the activation and the result need their positions there.
    dims = [axes.index(positions) if positions in axes else 0 for axes in (equation.axes[0], equation.axes[2])]
    return axes, dims[1] if axes else 0, should_overlap(axes) and dims == [1, 1]
