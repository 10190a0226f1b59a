"""Elementwise operations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from ....kernels.product import fusion_barrier
from .registry import DTYPES, OutputSpec, aten, register_functions, register_lowering, upcast


def _floating(function: Any) -> Any:
    """Wrap a function of real numbers to accept integers, and to compute in at least float32."""

    def apply(out: OutputSpec, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = jnp.asarray(x)
        x = upcast(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
        return function(x, *args, **kwargs)

    return apply


for _name, _function in {
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan,
    "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh, "atanh": jnp.arctanh,
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt, "rsqrt": jax.lax.rsqrt, "sigmoid": jax.nn.sigmoid, "erf": special.erf, "erfc": special.erfc,
    "erfinv": special.erfinv, "lgamma": special.gammaln, "digamma": special.digamma, "reciprocal": lambda x: 1 / x,
    "log_sigmoid": jax.nn.log_sigmoid, "silu": jax.nn.silu, "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "special_i0": special.i0, "special_i1": special.i1, "special_ndtr": special.ndtr,
}.items():  # fmt: skip
    if hasattr(aten, _name):
        register_lowering(getattr(aten, _name))(_floating(_function))

register_functions(
    {
        "abs": jnp.abs, "neg": jnp.negative, "sign": jnp.sign, "sgn": jnp.sign, "floor": jnp.floor, "ceil": jnp.ceil,
        "trunc": jnp.trunc,
        "relu": jax.nn.relu, "isnan": jnp.isnan, "isinf": jnp.isinf, "isfinite": jnp.isfinite, "signbit": jnp.signbit,
        "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not, "positive": lambda x: x, "conj": jnp.conj,
        "_conj": jnp.conj, "_conj_copy": jnp.conj,
        "_conj_physical": jnp.conj, "conj_physical": jnp.conj, "real": jnp.real, "imag": jnp.imag,
        "angle": jnp.angle,
        "frac": lambda x: x - jnp.trunc(x), "nan_to_num": lambda x, nan=0.0, posinf=None, neginf=None: jnp.nan_to_num(
            x, nan=nan or 0.0, posinf=posinf, neginf=neginf),
        "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
        "view_as_complex": lambda x: jax.lax.complex(x[..., 0], x[..., 1]),
        "view_as_real_copy": lambda x: jnp.stack([x.real, x.imag], -1),
        "view_as_complex_copy": lambda x: jax.lax.complex(x[..., 0], x[..., 1]), "complex": jax.lax.complex,
        "polar": lambda r, a: jax.lax.complex(r * jnp.cos(a), r * jnp.sin(a)),
        "square": jnp.square, "hardtanh": lambda x, low=-1, high=1: jnp.clip(x, low, high), "relu6": lambda x: jnp.clip(x, 0, 6),
    }
)  # fmt: skip


@register_lowering(aten.round)
def _round(out: OutputSpec, x: Any, *, decimals: int = 0) -> Any:
    return jnp.round(x, decimals)


def _operands(out: OutputSpec, *operands: Any) -> list[Any]:
    """Convert operands to the result's dtype, as in PyTorch; half precisions are widened, to round once."""
    return [upcast(jnp.asarray(operand).astype(out.dtype)) for operand in operands]


@register_lowering(aten.add)
def _add(out: OutputSpec, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    a, b = _operands(out, a, b)
    if out.dtype == jnp.bool_:
        return jnp.logical_or(a, b)
    found = a + (b if alpha == 1 else b * jnp.asarray(alpha, b.dtype))
    # The gradient of a residual stream: see `fusion_barrier`.
    return fusion_barrier(found) if out.shared_backward else found


@register_lowering(aten.sub)
def _sub(out: OutputSpec, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    a, b = _operands(out, a, b)
    return a - (b if alpha == 1 else b * jnp.asarray(alpha, b.dtype))


@register_lowering(aten.rsub)
def _rsub(out: OutputSpec, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _sub(out, b, a, alpha=alpha)


@register_lowering(aten.mul)
def _mul(out: OutputSpec, a: Any, b: Any) -> Any:
    a, b = _operands(out, a, b)
    return a * b


@register_lowering(aten.div)
def _div(out: OutputSpec, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    a, b = _operands(out, a, b)
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return jax.lax.div(*jnp.broadcast_arrays(a, b)) if jnp.issubdtype(out.dtype, jnp.integer) else jnp.trunc(a / b)


@register_lowering(aten.pow)
def _pow(out: OutputSpec, a: Any, b: Any) -> Any:
    if isinstance(b, int | float) and float(b).is_integer() and abs(b) <= 8:
        # By multiplication, which is exact, unlike a general power, and defined for negative bases.
        (a,) = _operands(out, a)
        return jax.lax.integer_pow(a, int(b))
    a, b = _operands(out, a, b)
    return jnp.sqrt(a) if isinstance(b, float) and b == 0.5 else jnp.power(a, b)


def _of_two(function: Any) -> Any:
    return lambda out, a, b: function(*_operands(out, a, b))


for _name, _function in {
    "floor_divide": jnp.floor_divide, "remainder": jnp.remainder, "fmod": jnp.fmod, "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax, "fmin": jnp.fmin, "atan2": jnp.arctan2, "hypot": jnp.hypot, "xlogy": special.xlogy,
    "logaddexp": jnp.logaddexp,
}.items():  # fmt: skip
    register_lowering(getattr(aten, _name))(_of_two(_function))


def _compare(function: Any) -> Any:
    return lambda out, a, b: function(*_common(a, b))


def _common(a: Any, b: Any) -> tuple[Any, Any]:
    """Convert to a common dtype; a Python number takes the tensor's, unless it is of a higher kind."""
    if not isinstance(b, jax.Array) and isinstance(a, jax.Array):
        kind = jnp.float32 if isinstance(b, float) and not jnp.issubdtype(a.dtype, jnp.inexact) else a.dtype
        kind = jnp.int32 if a.dtype == jnp.bool_ and not isinstance(b, bool | float) else kind
        return a.astype(kind), jnp.asarray(b, kind)
    if not isinstance(a, jax.Array):
        second, first = _common(jnp.asarray(b), a)
        return first, second
    kind = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(kind), b.astype(kind)


for _name, _function in {
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal,
    "bitwise_and": jnp.bitwise_and, "bitwise_or": jnp.bitwise_or, "bitwise_xor": jnp.bitwise_xor,
    "__and__": jnp.bitwise_and, "__or__": jnp.bitwise_or, "__xor__": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift,
    "__lshift__": jnp.left_shift, "__rshift__": jnp.right_shift,
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor,
}.items():  # fmt: skip
    register_lowering(getattr(aten, _name))(_compare(_function))


@register_lowering(aten.where)
def _where(out: OutputSpec, condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, jnp.asarray(a).astype(out.dtype), jnp.asarray(b).astype(out.dtype))


@register_lowering(aten.masked_fill)
def _masked_fill(out: OutputSpec, x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value).astype(out.dtype), x)


@register_lowering(aten.clamp, aten.clip)
def _clamp(out: OutputSpec, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x.astype(out.dtype)
    if min is not None:
        x = jnp.maximum(x, jnp.asarray(min).astype(out.dtype))
    return x if max is None else jnp.minimum(x, jnp.asarray(max).astype(out.dtype))


@register_lowering(aten.clamp_min)
def _clamp_min(out: OutputSpec, x: Any, min: Any) -> Any:
    return _clamp(out, x, min=min)


@register_lowering(aten.clamp_max)
def _clamp_max(out: OutputSpec, x: Any, max: Any) -> Any:
    return _clamp(out, x, max=max)


@register_lowering(aten.lerp)
def _lerp(out: OutputSpec, a: Any, b: Any, weight: Any) -> Any:
    a, b, weight = _operands(out, a, b, weight)
    # As in PyTorch, from the nearer end.
    return jnp.where(jnp.abs(weight) < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@register_lowering(aten.addcmul)
def _addcmul(out: OutputSpec, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = _operands(out, x, a, b)
    return x + value * a * b


@register_lowering(aten.addcdiv)
def _addcdiv(out: OutputSpec, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    x, a, b = _operands(out, x, a, b)
    return x + value * (a / b)


@register_lowering(
    aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.alias, aten.detach, aten.detach_copy, aten.alias_copy
)
@register_lowering(aten.lift_fresh, aten.lift_fresh_copy, aten.lift, aten.resolve_conj, aten.resolve_neg)
def _same(out: OutputSpec, x: Any, *args: Any, **kwargs: Any) -> Any:
    if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) and jnp.issubdtype(out.dtype, jnp.integer):
        return jnp.trunc(x)
    return x


@register_lowering(aten.copy)
def _copy(out: OutputSpec, x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(jnp.asarray(source).astype(out.dtype), out.shape)


@register_lowering(aten.gelu)
def _gelu(out: OutputSpec, x: Any, *, approximate: str = "none") -> Any:
    x = upcast(x)
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    # PyTorch's own formula. With erfc, as in jax.nn, it takes five times as long on CPU.
    return x * 0.5 * (1 + special.erf(x * math.sqrt(0.5)))


@register_lowering(aten.gelu_backward)
def _gelu_backward(out: OutputSpec, gradient: Any, x: Any, *, approximate: str = "none") -> Any:
    g, x = upcast(gradient), upcast(x)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        t = jnp.tanh(inner)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    cdf = 0.5 * (1 + special.erf(x * math.sqrt(0.5)))
    return g * (cdf + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))


@register_lowering(aten.silu_backward)
def _silu_backward(out: OutputSpec, gradient: Any, x: Any) -> Any:
    g, x = upcast(gradient), upcast(x)
    s = jax.nn.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@register_lowering(aten.tanh_backward)
def _tanh_backward(out: OutputSpec, gradient: Any, y: Any) -> Any:
    y = upcast(y)
    return upcast(gradient) * (1 - y * y)


@register_lowering(aten.sigmoid_backward)
def _sigmoid_backward(out: OutputSpec, gradient: Any, y: Any) -> Any:
    y = upcast(y)
    return upcast(gradient) * y * (1 - y)


@register_lowering(aten.threshold_backward)
def _threshold_backward(out: OutputSpec, gradient: Any, x: Any, threshold: Any) -> Any:
    return jnp.where(x > threshold, gradient, jnp.zeros_like(gradient))


@register_lowering(aten.leaky_relu)
def _leaky_relu(out: OutputSpec, x: Any, slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * slope)


@register_lowering(aten.leaky_relu_backward)
def _leaky_relu_backward(out: OutputSpec, gradient: Any, x: Any, slope: Any, is_result: bool) -> Any:
    return jnp.where(x > 0, gradient, gradient * slope)


@register_lowering(aten.elu)
def _elu(out: OutputSpec, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    x = upcast(x)
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(jnp.minimum(x, 0) * input_scale))


@register_lowering(aten.softplus)
def _softplus(out: OutputSpec, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    x = upcast(x)
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


@register_lowering(aten.softplus_backward)
def _softplus_backward(out: OutputSpec, gradient: Any, x: Any, beta: Any, threshold: Any) -> Any:
    g, x = upcast(gradient), upcast(x)
    return jnp.where(x * beta > threshold, g, g * jax.nn.sigmoid(x * beta))


@register_lowering(aten.scalar_tensor)
def _scalar_tensor(out: OutputSpec, value: Any, **kwargs: Any) -> Any:
    return jnp.asarray(value, out.dtype)


@register_lowering(aten.full, aten.full_like, aten.new_full)
def _full(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jnp.full(out.shape, args[-1] if len(args) > 1 else kwargs["fill_value"]).astype(out.dtype)


@register_lowering(aten.fill)
def _fill(out: OutputSpec, x: Any, value: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value).astype(out.dtype), out.shape)


@register_lowering(aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero)
@register_lowering(
    aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty, aten.new_empty_strided
)
def _zeros(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jnp.zeros(out.shape, out.dtype)


@register_lowering(aten.ones, aten.ones_like, aten.new_ones)
def _ones(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jnp.ones(out.shape, out.dtype)


@register_lowering(aten.arange)
def _arange(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    (count,) = out.shape
    return (jnp.arange(count) * step + start).astype(out.dtype)


@register_lowering(aten.linspace)
def _linspace(out: OutputSpec, start: Any, end: Any, steps: int, **kwargs: Any) -> Any:
    return jnp.linspace(start, end, steps, dtype=out.dtype)


@register_lowering(aten.view.dtype)
def _bitcast(out: OutputSpec, x: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, DTYPES[dtype])
