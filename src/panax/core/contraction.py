"""Named contraction: a product of an activation and a weight, written by logical names.

    y = contract("batch seq embed, embed ffn -> batch seq ffn", x, w)

The names are documentation, and this file is the one place where the following are decided for every model:
- the weight is cast to the activation's dtype in its storage layout, and only then gathered (half the bytes);
- products accumulate in float32 whatever their operands are;
- the gathered weight bears a name that rematerialisation drops, so that the backward pass gathers it again, once;
- the weight's gradient is formed in the parameter's own dtype (float32) and its storage layout, so that it is
  reduce-scattered once and never in bfloat16;
- each product itself (`product.py`): today the same plain einsum on every backend.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .layout import current_layout
from .product import product
from .protocols import Axes

PRODUCT = "product"
"""The name under which a rematerialisation policy knows the results of products."""

GATHERED = "gathered_weight"
"""The name under which it knows a weight in its compute layout: whole over fsdp, and never to be kept."""


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


def contract(
    text: str, x: Float[Array, "..."], w: Float[Array, "..."], *, out_dtype: Any = None
) -> Float[Array, "..."]:
    """Contract an activation with a weight, by named axes.

    Args:
        text: "axes of x, axes of w -> axes of the result"; an axis that the result lacks is summed over.
        x: The activation, already in its compute layout. Its dtype is the one multiplied in.
        w: The weight as it is stored: float32 master or other dtype, in its storage layout.
        out_dtype: The result's dtype; that of `x` unless told.

    Raises:
        ValueError: The operands' ranks or a shared axis disagree; the message names the axis and both sizes.

    >>> contract("batch embed, embed ffn -> batch ffn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    _parse(text).check(x, w)
    # Named, so that a rematerialisation policy can keep the products and compute the cheap rest again.
    stored = _Weight(w.dtype.name, spec_of(w))
    return checkpoint_name(_contract(text, jnp.dtype(out_dtype or x.dtype).name, stored, x, w), PRODUCT)


def gather(w: Float[Array, "..."], axes: str, dtype: Any) -> Float[Array, "..."]:
    """A parameter in its compute layout and `dtype`; its gradient arrives in the parameter's own dtype and layout.

    >>> gather(jnp.ones((3,)), "norm", jnp.bfloat16).dtype.name
    'bfloat16'
    """
    return _gather(tuple(axes.split()), jnp.dtype(dtype).name, w)


def constrain(x: Any, axes: str) -> Any:
    """An activation, laid out as the compute rules say for its axes."""
    layout = current_layout()
    return x if layout is None else jax.reshard(x, layout.compute_spec(tuple(axes.split())))


def spec_of(x: Any) -> PartitionSpec | None:
    """The sharding that is part of an array's type; None outside of a mesh."""
    return None if current_layout() is None else jax.typeof(x).sharding.spec


def compute_spec(axes: Axes) -> PartitionSpec | None:
    """The spec of the compute rules; None outside of a mesh."""
    layout = current_layout()
    return None if layout is None else layout.compute_spec(axes)


def _placed(w: jax.Array, axes: Axes, dtype: Any) -> jax.Array:
    layout = current_layout()
    w = w.astype(dtype)
    return w if layout is None else jax.reshard(w, layout.compute_spec(axes))


def _returned(gradient: jax.Array, like: Any) -> jax.Array:
    """A gradient in the dtype and the layout of what it is the gradient of."""
    spec = spec_of(like)
    gradient = gradient.astype(like.dtype)
    return gradient if spec is None else jax.reshard(gradient, spec)


class _Weight(NamedTuple):
    """What the backward pass must know of a weight that it does not keep."""

    dtype: str
    spec: PartitionSpec | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(text: str, out_dtype: str, stored: _Weight, x: jax.Array, w: jax.Array) -> jax.Array:
    return _contract_forward(text, out_dtype, stored, x, w)[0]


def _contract_forward(text: str, out_dtype: str, stored: _Weight, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    equation = _parse(text)
    a, b, o = equation.letters
    # Named, so that every rematerialisation policy drops the gathered copy and the backward pass gathers it again, once.
    placed = checkpoint_name(_placed(w, equation.axes[1], x.dtype), GATHERED)
    return product(f"{a},{b}->{o}", x, placed, out_dtype, compute_spec(equation.axes[2])), (x, placed)


def _contract_backward(
    text: str, out_dtype: str, stored: _Weight, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, placed = saved
    a, b, o = _parse(text).letters
    gradient = gradient.astype(x.dtype)
    dx = product(f"{o},{b}->{a}", gradient, placed, x.dtype, spec_of(x))
    dw = product(f"{a},{o}->{b}", x, gradient, stored.dtype, stored.spec)
    return dx, dw


_contract.defvjp(_contract_forward, _contract_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axes: Axes, dtype: str, w: jax.Array) -> jax.Array:
    return _placed(w, axes, dtype)


def _gather_forward(axes: Axes, dtype: str, w: jax.Array) -> tuple[jax.Array, Any]:
    return _placed(w, axes, dtype), w


def _gather_backward(axes: Axes, dtype: str, w: Any, gradient: jax.Array) -> tuple[jax.Array]:
    return (_returned(gradient, w),)


_gather.defvjp(_gather_forward, _gather_backward)
