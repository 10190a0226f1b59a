"""Units that a pipeline distributes over its stages: single layers, or whole periods of layers with different
parameters."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .stack import Stack


class LayerUnit(NamedTuple):
    """Adjacent layers that stay on one stage.

    Attributes:
        stack: Index of their stack in the model.
        first: Index of the first layer in the model.
        reports: For each layer, True if it reports.
        signature: Signature of the parameters; units with equal signatures share arrays.
    """

    stack: int
    first: int
    reports: tuple[bool, ...]
    signature: Any


def list_units(stacks: Sequence[Stack]) -> list[LayerUnit]:
    """Split the stacks into units, in layer order. Layers that differ only in settings, such as windows, are
    separate units."""
    units = []
    for number, stack_ in enumerate(stacks):
        layers = stack_.layers
        signatures, reports = [layer.signature for layer in layers], tuple(layer.reports for layer in layers)
        apart = len({*zip(signatures, reports)}) == 1
        for repeat in range(stack_.repeats):
            first = stack_.first + repeat * len(layers)
            if apart:
                units += [LayerUnit(number, first + place, reports[:1], signatures[0]) for place in range(len(layers))]
            else:
                units.append(LayerUnit(number, first, reports, tuple(signatures)))
    return units


def group_runs(stacks: Sequence[Stack]) -> list[list[LayerUnit]]:
    """Group adjacent units with equal signatures."""
    return [
        list(group)
        for _, group in itertools.groupby(list_units(stacks), key=lambda unit: (unit.signature, unit.reports))
    ]
