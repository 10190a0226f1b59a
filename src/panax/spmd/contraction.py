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

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..core.layout import MeshAxes, current_layout
from ..core.logical import Role, axis_of
from ..core.protocols import Axes
from ..kernels.product import product
from .collectives import all_gather, all_reduce, reduce_scatter
from .overlap import gathered_products, overlaps, rows_of, scattered_product
from .sequence import SPREAD, sequence_parallel_axes, whole_sequence
from .weights import Opened, open_weight

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
        w: The weight as it is stored (float32 master or other dtype, in its storage layout), or an `Openable`.
        out_dtype: The result's dtype; by default that of `x`.

    Raises:
        ValueError: The operands' ranks or a shared axis disagree; the message names the axis and both sizes.

    >>> contract("batch embed, embed ffn -> batch ffn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    equation = _parse(text)
    opened = open_weight(w, equation.axes[1], x.dtype)
    equation.check(x, opened.value)
    static = _Static(text, jnp.dtype(out_dtype or x.dtype).name, opened.slot.dtype.name, *_partial(equation))
    # Named, so that a rematerialisation policy can keep the products and compute the cheap rest again.
    return checkpoint_name(_contract(static, x, opened), PRODUCT)


def contract_whole(
    x: Float[Array, "batch residual embed"], *products: tuple[str, Any], out_dtype: Any = None
) -> list[Float[Array, "..."]]:
    """Contract the residual stream, gathered along the sequence, with several weights: one gather for all of them.

    Args:
        products: Each an equation as `contract` takes, whose first operand is `batch seq embed`, and its weight.

    >>> x, w = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
    >>> contract_whole(x, ("batch seq embed, embed ffn -> batch seq ffn", w))[0].shape
    (1, 2, 4)
    """
    axes = sequence_parallel_axes()
    if not overlaps(axes):
        x = whole_sequence(x)
        return [contract(text, x, w, out_dtype=out_dtype) for text, w in products]
    statics, weights = [], []
    for text, w in products:
        opened = open_weight(w, _parse(text).axes[1], x.dtype)
        statics.append(_Static(text, jnp.dtype(out_dtype or x.dtype).name, opened.slot.dtype.name, axes, 1, ring=True))
        weights.append(opened)
    outs: list[jax.Array] = _contract_whole(tuple(statics), x, weights)
    return [checkpoint_name(out, PRODUCT) for out in outs]


def gather(w: Any, axes: str, dtype: Any) -> Float[Array, "..."]:
    """A parameter in its compute layout and `dtype`; its gradient arrives in the parameter's own dtype and layout.

    >>> gather(jnp.ones((3,)), "norm", jnp.bfloat16).dtype.name
    'bfloat16'
    """
    opened = open_weight(w, axes, dtype)
    return _read(opened.slot.dtype.name, opened)


class _Static(NamedTuple):
    """Everything about a contraction that is known before it runs.

    Attributes:
        gradient_dtype: What the weight's gradient is formed in.
        partial: The mesh axes over which the product gives partial sums.
        dim: The result's dimension along which these are scattered; None where they are added up whole.
        ring: Scatter, and gather, in a ring beside the product.
    """

    text: str
    out_dtype: str
    gradient_dtype: str
    partial: MeshAxes
    dim: int | None
    ring: bool


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(static: _Static, x: jax.Array, w: Opened) -> jax.Array:
    return _contract_forward(static, x, w)[0]


def _contract_forward(static: _Static, x: jax.Array, w: Opened) -> tuple[jax.Array, Any]:
    a, b, o = _parse(static.text).letters
    if static.ring:
        rows = x.shape[1] // jax.lax.axis_size(static.partial)
        out = scattered_product(
            lambda start: product(f"{a},{b}->{o}", rows_of(x, start, rows), w.value, static.out_dtype),
            static.partial,
            rows,
        )
        return out, (x, w.value)
    out = product(f"{a},{b}->{o}", x, w.value, static.out_dtype)
    return _summed(out, static), (x, w.value)


def _summed(out: jax.Array, static: _Static) -> jax.Array:
    if static.dim is None:
        return all_reduce(out, static.partial)
    return reduce_scatter(out, static.partial, static.dim)


def _gathered(gradient: jax.Array, static: _Static) -> jax.Array:
    """The cotangent of what `_summed` gave; of a whole residual stream, each device's own is a share of it."""
    if static.dim is None:
        return all_reduce(gradient, static.partial)
    return all_gather(gradient, static.partial, static.dim)


def _contract_backward(static: _Static, saved: Any, gradient: jax.Array) -> tuple[jax.Array, Opened]:
    x, w = saved
    a, b, o = _parse(static.text).letters
    gradient = gradient.astype(x.dtype)
    if static.ring:
        gradient, (dx,) = gathered_products(
            gradient, static.partial, [lambda rows: product(f"{o},{b}->{a}", rows, w, x.dtype)]
        )
    else:
        gradient = _gathered(gradient, static)
        dx = product(f"{o},{b}->{a}", gradient, w, x.dtype)
    return dx, _of_slot(product(f"{a},{o}->{b}", x, gradient, static.gradient_dtype))


def _of_slot(gradient: jax.Array) -> Any:
    """The cotangent of an opened weight: nothing of its value."""
    return Opened(None, gradient)  # pyright: ignore[reportArgumentType]


_contract.defvjp(_contract_forward, _contract_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract_whole(statics: tuple[_Static, ...], x: jax.Array, weights: list[Opened]) -> list[jax.Array]:
    return _contract_whole_forward(statics, x, weights)[0]


def _contract_whole_forward(
    statics: tuple[_Static, ...], x: jax.Array, weights: list[Opened]
) -> tuple[list[jax.Array], Any]:
    def multiply(static: _Static, w: jax.Array) -> Any:
        a, b, o = _parse(static.text).letters
        return lambda rows: product(f"{a},{b}->{o}", rows, w, static.out_dtype)

    values = [w.value for w in weights]
    whole, outs = gathered_products(x, statics[0].partial, list(map(multiply, statics, values)))
    return outs, (checkpoint_name(whole, SPREAD), values)


def _contract_whole_backward(
    statics: tuple[_Static, ...], saved: Any, gradients: list[jax.Array]
) -> tuple[jax.Array, list[Opened]]:
    whole, values = saved
    gradients = [gradient.astype(whole.dtype) for gradient in gradients]
    axes = statics[0].partial
    rows = whole.shape[1] // jax.lax.axis_size(axes)

    def share(start: jax.Array) -> jax.Array:
        parts = []
        for static, w, gradient in zip(statics, values, gradients):
            a, b, o = _parse(static.text).letters
            parts.append(product(f"{o},{b}->{a}", rows_of(gradient, start, rows), w, whole.dtype))
        return functools.reduce(jnp.add, parts)

    dx = scattered_product(share, axes, rows)
    slots = []
    for static, gradient in zip(statics, gradients):
        a, b, o = _parse(static.text).letters
        slots.append(_of_slot(product(f"{a},{o}->{b}", whole, gradient, static.gradient_dtype)))
    return dx, slots


_contract_whole.defvjp(_contract_whole_forward, _contract_whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(gradient_dtype: str, w: Opened) -> jax.Array:
    return w.value


_read.defvjp(
    lambda gradient_dtype, w: (w.value, None),
    lambda gradient_dtype, _, gradient: (_of_slot(gradient.astype(gradient_dtype)),),
)
