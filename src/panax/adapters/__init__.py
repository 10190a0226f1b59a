"""Other frameworks' models and weights, each in a room of its own that imports its library when used."""

from ..core.lazy import lazily

_ROOMS = (
    "equinox", "flax_linen", "flax_nnx", "haiku", "huggingface", "keras", "lightning", "onnx", "tensorflow", "torch",
)  # fmt: skip

__getattr__ = lazily(__name__, {}, rooms=_ROOMS)

__all__ = list(_ROOMS)  # pyright: ignore[reportUnsupportedDunderAll]
