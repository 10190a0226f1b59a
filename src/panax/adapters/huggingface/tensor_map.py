"""Matches between the tensors of files and the parameters and model state of a model."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...core import logical_axes, pair_axes
from ...models import Decoder, Vit
from .family import Family, TensorSource

StackIndex = tuple[int, ...]
"""Index into the leading axes of an array that is assembled from several tensors."""


class ParameterMatch(NamedTuple):
    """A parameter, or a part of the model state, and its source in the files.

    Attributes:
        name: The parameter's dotted name.
        leaf: Its array, real or abstract.
        axes: Its logical axes, without those that it is stacked along.
        stacked: For each axis that tensors are stacked along, its kind ("layer" or "expert"), and the numbers
            of its entries in the names.
        vocab_size: The vocabulary of the files' embedding and head; the parameter's rows past it are padding.
        beside: Sizes of the axes of other parameters in the same tensor.
    """

    name: str
    leaf: Any
    axes: tuple[str, ...]
    stacked: tuple[tuple[str, tuple[int, ...]], ...]
    source: TensorSource
    vocab_size: int
    beside: Mapping[str, int]

    @property
    def sizes(self) -> dict[str, int]:
        """Return logical axis to size in the files, for one tensor."""
        sizes = {**self.beside, **dict(zip(self.axes, self.leaf.shape[len(self.stacked) :]))}
        return sizes | {"vocab": self.vocab_size} if "vocab" in sizes else sizes

    @property
    def places(self) -> Iterator[StackIndex]:
        """Yield the index of each tensor; a single empty index if nothing is stacked."""
        return itertools.product(*(range(len(numbers)) for _, numbers in self.stacked))

    def tensor(self, index: StackIndex) -> str:
        """Return the tensor's name."""
        return self.source.name.format(**{kind: numbers[i] for i, (kind, numbers) in zip(index, self.stacked)})

    def layer(self, index: StackIndex) -> int:
        """Return the number of the layer in the model; -1 outside of the layers."""
        return self.stacked[0][1][index[0]] if self.stacked else -1

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.source.pattern.shape(self.sizes)


def match_parameters(family: Family, model: Decoder | Vit, state: Mapping[str, Any]) -> Iterator[ParameterMatch]:
    """Yield a match for each parameter of a model (real, abstract, or its gradients), in the order of its
    tree, then of its state."""
    if isinstance(model, Vit):
        yield from _matches_of_vit(family, model)
        return
    # No release has a value head.
    model = dataclasses.replace(model, value_head=None)
    vocab_size = model.config.vocab_size
    sizes, sources = _sizes(model), family.sources(model.config)
    for name, leaf, axes in pair_axes(model, logical_axes(model)):
        parts = name.split(".")
        named = tuple(axis for axis in axes if axis is not None)
        if parts[0] != "stacks":
            yield ParameterMatch(name, leaf, named, (), sources[name], vocab_size, {})
            continue
        stack = model.stacks[int(parts[1])]
        place, period = int(parts[3]), len(stack.blocks)
        layers = tuple(stack.first + repeat * period + place for repeat in range(stack.repeats))
        foreign = sources[".".join(["layers", *parts[4:]])]
        stacked = [("layer", layers)]
        if "{expert}" in foreign.name:
            stacked.append(("expert", tuple(range(leaf.shape[1]))))
        beside = {axis: sizes[axis] for axis in foreign.pattern.named if axis in sizes}
        yield ParameterMatch(name, leaf, named[len(stacked) :], tuple(stacked), foreign, vocab_size, beside)
    if "router_bias" in state:
        assert family.mixture is not None
        foreign = family.mixture.bias
        layers = (("layer", model.config.mixture_layers),)
        yield ParameterMatch("router_bias", state["router_bias"], ("router",), layers, foreign, vocab_size, {})


def _sizes(model: Decoder) -> dict[str, int]:
    """Return the size of each logical axis that has the same size in all parameters."""
    found: dict[str, set[int]] = {}
    for _, leaf, axes in pair_axes(model, logical_axes(model)):
        for axis, size in zip(axes, leaf.shape):
            found.setdefault(axis or "", set()).add(size)
    return {axis: next(iter(sizes)) for axis, sizes in found.items() if len(sizes) == 1}


def _matches_of_vit(family: Family, model: Vit) -> Iterator[ParameterMatch]:
    for name, leaf, axes in pair_axes(model, logical_axes(model)):
        named = tuple(axis for axis in axes if axis is not None)
        stack, _, inside = name.partition(".")
        if stack == "blocks":
            layers = (("layer", tuple(range(model.config.num_layers))),)
            yield ParameterMatch(name, leaf, named[1:], layers, family.weights[f"layers.{inside}"], 0, {})
        else:
            yield ParameterMatch(name, leaf, named, (), family.weights[name], 0, {})


def index_ranges(shape: tuple[int, ...], index: Any) -> list[tuple[int, int]]:
    """Return (first, past the last) along each dimension, for a device's index from JAX."""
    return [part.indices(size)[:2] for part, size in zip(index, shape)]
