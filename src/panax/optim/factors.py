"""Learning-rate and weight-decay multipliers by parameter and by layer."""

from collections.abc import Mapping

import numpy as np

from ..core.params.selection import LayerParameters, select_params
from .parameter import Parameter


def select_factors(
    setting: str, patterns: Mapping[str, float], names: list[str], layers: LayerParameters
) -> dict[str, list[tuple[frozenset[int] | None, float]]]:
    """Resolve patterns to (the layers of the stack, or None for all; the factor) per parameter, later entries
    overriding earlier ones."""
    factors: dict[str, list[tuple[frozenset[int] | None, float]]] = {}
    for pattern, factor in patterns.items():
        for name, rows in select_params(pattern, names, layers, f"optimizer.{setting}").items():
            factors.setdefault(name, []).append((rows, float(factor)))
    return factors


def factor_by_layer(
    chosen: list[tuple[frozenset[int] | None, float]], default: float, parameter: Parameter
) -> np.ndarray:
    """Return a parameter's factor: a scalar, or one per stacked layer, shaped to broadcast against the
    parameter."""
    factors = np.float32(default)
    for rows, factor in chosen:
        if rows is None:
            factors = np.float32(factor)
            continue
        each = np.array(np.broadcast_to(np.ravel(factors), parameter.shape[:1]))
        each[list(rows)] = factor
        factors = each
    factors = np.asarray(factors)
    return factors.reshape(-1, *(1,) * (len(parameter.shape) - 1)) if factors.ndim else factors
