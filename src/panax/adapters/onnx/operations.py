"""ONNX operations of exported transformers that jaxonnxruntime lacks; importing this registers them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxonnxruntime.core.handler import Handler, register_op
from onnx import numpy_helper


@register_op("LayerNormalization")
class LayerNormalization(Handler):
    """Layer normalization over all dimensions from `axis` on; also returns its mean and reciprocal deviation
    if requested."""

    @classmethod
    def version_17(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return partial(
            _layer_normalization,
            axis=node.attrs.get("axis", -1),
            epsilon=node.attrs.get("epsilon", 1e-5),
            num_outputs=len(node.outputs),
        )


def _layer_normalization(x: Any, scale: Any, shift: Any = None, *, axis: int, epsilon: float, num_outputs: int) -> Any:
    axes = tuple(range(axis % x.ndim, x.ndim))
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide - mean).mean(axes, keepdims=True) + epsilon)
    out = ((wide - mean) * inverse).astype(x.dtype) * scale
    out = out if shift is None else out + shift
    return out if num_outputs == 1 else (out, mean, inverse)[:num_outputs]


@register_op("Gelu")
class Gelu(Handler):
    """GELU, exact or with the tanh approximation."""

    @classmethod
    def version_20(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return partial(jax.nn.gelu, approximate=node.attrs.get("approximate", "none") == "tanh")


@register_op("Size")
class Size(Handler):
    """Number of elements of an array."""

    @classmethod
    def version_1(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x: jnp.asarray(x.size)

    version_13 = version_19 = version_1


@register_op("ConstantOfShape")
class ConstantOfShape(Handler):
    """One value in a shape that is known when the graph is built."""

    @classmethod
    def version_9(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        value = node.attrs.get("value")
        filled = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
        shape = tuple(np.asarray(inputs[0]).tolist())
        return lambda _: jnp.full(shape, filled.reshape(-1)[0])

    version_20 = version_9


@register_op("HardSigmoid")
class HardSigmoid(Handler):
    """Linear function, clipped at 0 and 1."""

    @classmethod
    def version_6(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        slope, middle = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
        return lambda x: jnp.clip(slope * x + middle, 0.0, 1.0)


@register_op("Elu")
class Elu(Handler):
    """ELU: exponential below zero."""

    @classmethod
    def version_6(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return partial(jax.nn.elu, alpha=node.attrs.get("alpha", 1.0))


@register_op("InstanceNormalization")
class InstanceNormalization(Handler):
    """Normalization of each channel of each row separately."""

    @classmethod
    def version_6(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        epsilon = node.attrs.get("epsilon", 1e-5)

        def normalize(x: Any, scale: Any, shift: Any) -> Any:
            axes = tuple(range(2, x.ndim))
            across = (1, -1, *(1,) * (x.ndim - 2))
            centered = x - x.mean(axes, keepdims=True)
            normal = centered * jax.lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + epsilon)
            return normal * scale.reshape(across) + shift.reshape(across)

        return normalize


@register_op("Mod")
class Mod(Handler):
    """Remainder, with the divisor's sign, or with the dividend's as in C."""

    @classmethod
    def version_10(cls, node: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return jnp.fmod if node.attrs.get("fmod", 0) else jnp.mod

    version_13 = version_10
