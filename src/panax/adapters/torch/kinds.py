"""Kinds of the parameters of a module, from the type of the module that holds each: for automatic layouts."""

from torch import nn

from ..layouts import Kind

_BY_TYPE: tuple[tuple[type, Kind], ...] = (
    (nn.Linear, "out_in"),
    (nn.Embedding, "embedding"),
    (nn.EmbeddingBag, "embedding"),
    (nn.modules.conv._ConvNd, "convolution_first"),
    (nn.MultiheadAttention, "out_in"),
    (nn.RNNBase, "out_in"),
    (nn.RNNCellBase, "out_in"),
)


def classify_parameters(module: nn.Module) -> dict[str, Kind]:
    """Return the kinds of parameters by name, as far as they are known."""
    kinds: dict[str, Kind] = {}
    for path, part in module.named_modules():
        kind: Kind | None = next((kind for cls, kind in _BY_TYPE if isinstance(part, cls)), None)
        for name, parameter in part.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if kind is not None and parameter.ndim > 1:
                kinds[full] = kind
            elif parameter.ndim == 3 and "expert" in (path + type(part).__name__).lower():
                # Stacked as in transformers: (expert, output, input).
                kinds[full] = "members_out_in"
            elif parameter.ndim == 2 and type(part).__name__ != "Conv1D":
                kinds[full] = "out_in"
    return kinds
