"""Adapters of other frameworks' models and weights, each in a module that imports its library when used."""

from ..core.lazy import lazy_getattr

_ROOMS = (
    "equinox", "flax_linen", "flax_nnx", "haiku", "huggingface", "keras", "lightning", "onnx", "tensorflow", "torch",
)  # fmt: skip

__getattr__ = lazy_getattr(__name__, {}, rooms=_ROOMS)

__all__ = list(_ROOMS)  # pyright: ignore[reportUnsupportedDunderAll]
