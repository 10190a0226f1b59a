"""Attention weights with a heads dimension, as in Flax and Keras: `[embed, heads, head_dim]` and the
reverse."""

from collections.abc import Mapping

from ..core import Axes

_PROJECTING = ("query", "key", "value")
_MERGING = ("out", "attention_output")
_VECTORS = ("bias", "scale", "gamma", "beta")


def head_axes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Axes]:
    """Return the logical axes of attention parameters, with heads computed in parallel, and of biases and
    scales of any layer.

    A bias or scale with more dimensions belongs to stacked layers, or has one for heads; it is not a matrix.
    >>> head_axes({"attn.query.kernel": (64, 4, 16), "attn.query.bias": (4, 16), "up.bias": (3, 64)})
    {'attn.query.kernel': ('width', 'features', None), 'attn.query.bias': ('features', None), 'up.bias': (None, None)}
    """
    axes: dict[str, Axes] = {}
    for path, shape in shapes.items():
        layer, _, leaf = path.rpartition(".")
        layer = layer.rpartition(".")[2]
        if layer in _PROJECTING and leaf == "kernel" and len(shape) == 3:
            axes[path] = ("width", "features", None)
        elif layer in _PROJECTING and leaf == "bias" and len(shape) == 2:
            axes[path] = ("features", None)
        elif layer in _MERGING and leaf == "kernel" and len(shape) == 3:
            axes[path] = ("features", None, "width")
        elif leaf in _VECTORS:
            axes[path] = (None,) * len(shape)
    return axes
