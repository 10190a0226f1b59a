"""Which tensors of the files each parameter of a decoder is."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...core import logical_axes, pair_axes
from ...models import Decoder
from .families import Family, Foreign


class Match(NamedTuple):
    """A parameter and where it is in the files.

    Attributes:
        name: The parameter's, dotted.
        leaf: Its array, real or abstract.
        axes: Its logical axes, without the one that layers are stacked along.
        layers: The number of each stacked layer in the model; empty for a parameter outside of the layers.
        vocab_size: Of the files' embedding and head; the parameter's rows past it are padding.
    """

    name: str
    leaf: Any
    axes: tuple[str, ...]
    layers: tuple[int, ...]
    foreign: Foreign
    vocab_size: int

    @property
    def sizes(self) -> dict[str, int]:
        """Logical axis to size in the files, for one layer."""
        sizes = dict(zip(self.axes, self.leaf.shape[1 if self.layers else 0 :]))
        return sizes | {"vocab": self.vocab_size} if "vocab" in sizes else sizes

    @property
    def tensors(self) -> list[str]:
        """The name of each layer's tensor, in order; a single one outside of the layers."""
        return [self.foreign.name.format(layer=layer) for layer in self.layers or (0,)]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.foreign.pattern.shape(self.sizes)


def matches(family: Family, model: Decoder) -> Iterator[Match]:
    """A match for each parameter of a decoder (real, abstract, or its gradients), in the order of its tree."""
    vocab_size = model.config.vocab_size
    for name, leaf, axes in pair_axes(model, logical_axes(model)):
        parts = name.split(".")
        named = tuple(axis for axis in axes if axis is not None)
        if parts[0] == "stacks":
            stack = model.stacks[int(parts[1])]
            place, period = int(parts[3]), len(stack.blocks)
            layers = tuple(stack.first + repeat * period + place for repeat in range(stack.repeats))
            yield Match(name, leaf, named[1:], layers, family.weights[".".join(["layers", *parts[4:]])], vocab_size)
        else:
            yield Match(name, leaf, named, (), family.weights[name], vocab_size)


def ranges_of(shape: tuple[int, ...], index: Any) -> list[tuple[int, int]]:
    """(first, past the last) along each dimension, of a device's index as JAX gives it."""
    return [part.indices(size)[:2] for part, size in zip(index, shape)]
