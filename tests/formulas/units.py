"""What a pipeline divides over its stages: layers, or whole periods of layers that differ in their parameters. Plain values."""

import itertools
from typing import NamedTuple

from panax.models.decoder.config import DecoderConfig, LayerKind


class Unit(NamedTuple):
    """Adjacent layers that stay on one stage.

    Attributes:
        stack: Which of the decoder's stacks they are in.
        first: The number of the first layer.
        kinds: Of each layer.
    """

    stack: int
    first: int
    kinds: tuple[LayerKind, ...]


def units(config: DecoderConfig) -> list[Unit]:
    """In the order of the layers. Layers that differ only in their windows are units of their own.

    >>> from panax.layers import MoE
    >>> [len(unit.kinds) for unit in units(DecoderConfig(num_layers=5, feed_forward=MoE(every=2)))]
    [2, 2, 1]
    """
    result, first = [], 0
    for number, (period, repeats) in enumerate(config.stacks):
        like = len({kind.mixture for kind in period}) == 1
        for _ in range(repeats):
            result += (
                [Unit(number, first + place, (kind,)) for place, kind in enumerate(period)]
                if like
                else [Unit(number, first, period)]
            )
            first += len(period)
    return result


def runs(config: DecoderConfig) -> list[list[Unit]]:
    """The units in groups of adjacent ones with parameters alike."""
    return [
        list(group) for _, group in itertools.groupby(units(config), key=lambda u: tuple(k.mixture for k in u.kinds))
    ]
