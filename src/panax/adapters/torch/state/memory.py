"""Tensors that share memory: a write to one changes the other, unlike two arrays of a compiled step."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclasses.dataclass(frozen=True, order=True)
class Extent:
    """The bytes from a tensor's first element to its last.

    Attributes:
        space: Address space: 0 for the host's memory; each storage on the meta device has a separate one.
        end: One past the last byte.
    """

    space: int
    start: int
    end: int

    def overlaps(self, other: "Extent") -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end


def memory_extent(value: torch.Tensor | np.ndarray) -> Extent | None:
    """Return the memory extent of a tensor or array; None if it has no memory that could be shared."""
    if isinstance(value, np.ndarray):
        reach = [(size - 1) * stride for size, stride in zip(value.shape, value.strides)]
        address = value.__array_interface__["data"][0]
        low, high = (address + sum(bound(0, each) for each in reach) for bound in (min, max))
        return Extent(0, low, high + value.itemsize) if value.size else None
    if isinstance(value, FakeTensor) or value.layout != torch.strided or not value.numel():
        return None
    length = (1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))) * value.element_size()
    if value.is_meta:
        start = int(value.storage_offset()) * value.element_size()
        return Extent(value.untyped_storage()._cdata, start, start + length)
    return Extent(0, value.data_ptr(), value.data_ptr() + length)


def find_overlaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of tensors with a common element; disjoint views of one storage don't count."""
    extents = {name: extent for name, tensor in tensors.items() if (extent := memory_extent(tensor)) is not None}
    cluster: list[str] = []
    reach = None
    for name in sorted(extents, key=extents.__getitem__):
        extent = extents[name]
        if reach is not None and reach.overlaps(extent):
            cluster.append(name)
            reach = dataclasses.replace(reach, end=max(reach.end, extent.end))
            continue
        yield from _within(cluster, tensors, extents)
        cluster, reach = [name], extent
    yield from _within(cluster, tensors, extents)


def _within(
    names: list[str], tensors: Mapping[str, torch.Tensor], extents: Mapping[str, Extent]
) -> Iterator[tuple[str, str]]:
    """Yield the overlapping pairs of tensors with overlapping extents, found by marking the elements of each."""
    if len(names) < 2:
        return
    base, end = min(extents[name].start for name in names), max(extents[name].end for name in names)
    grain = math.gcd(*(tensors[name].element_size() for name in names), *(extents[name].start - base for name in names))
    owners = torch.full(((end - base) // grain,), -1, dtype=torch.int32)
    for i, name in enumerate(names):
        tensor = tensors[name]
        grains = tensor.element_size() // grain
        dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if stride]
        marks = owners.as_strided(
            [*(size for size, _ in dims), grains],
            [*(stride * grains for _, stride in dims), 1],
            (extents[name].start - base) // grain,
        )
        if (owner := int(marks.max())) >= 0:
            yield names[owner], name
        marks.copy_(torch.full_like(marks, i))
