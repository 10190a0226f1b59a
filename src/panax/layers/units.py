"""What a pipeline divides over its stages: layers, or whole periods of layers that differ in their parameters."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .stack import Stack


class LayerUnit(NamedTuple):
    """Adjacent layers that stay on one stage.

    Attributes:
        stack: Which of the model's stacks they are in.
        first: The number of the first layer.
        reports: Of each layer, whether it reports.
        signature: What its parameters are; equal units share arrays.
    """

    stack: int
    first: int
    reports: tuple[bool, ...]
    signature: Any


def units(stacks: Sequence[Stack]) -> list[LayerUnit]:
    """In the order of the layers. Layers that differ in settings alone, as in their windows, are units of their own."""
    found = []
    for number, stack_ in enumerate(stacks):
        layers = stack_.layers
        signatures, reports = [layer.signature for layer in layers], tuple(layer.reports for layer in layers)
        apart = len({*zip(signatures, reports)}) == 1
        for repeat in range(stack_.repeats):
            first = stack_.first + repeat * len(layers)
            if apart:
                found += [LayerUnit(number, first + place, reports[:1], signatures[0]) for place in range(len(layers))]
            else:
                found.append(LayerUnit(number, first, reports, tuple(signatures)))
    return found


def runs(stacks: Sequence[Stack]) -> list[list[LayerUnit]]:
    """The units in groups of adjacent ones whose parameters are alike."""
    return [
        list(group) for _, group in itertools.groupby(units(stacks), key=lambda unit: (unit.signature, unit.reports))
    ]
