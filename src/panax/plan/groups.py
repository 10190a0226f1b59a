"""Mesh axes of a collective: conversion of groups of partition numbers to axis names.

A partition's number is the index of its device in `mesh.devices`, in row-major order, independent of the
device's id.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Groups = list[tuple[int, ...]]

_EXPLICIT = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}")
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"\breplica_groups=mesh\[(.*?)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{(.*?)\}")
_TILES = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def read_groups(attributes: str, num_partitions: int) -> Groups:
    """Return the groups in an instruction's attributes, in any of XLA's formats; all partitions if there are
    none.

    >>> read_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [(0, 2), (1, 3)]
    >>> read_groups("replica_groups=mesh['x'=2,'y'=2] {'y'}", 4)
    [(0, 1), (2, 3)]
    """
    if match := _IOTA.search(attributes):
        return [tuple(map(int, group)) for group in _tiles(match.group(1))]
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    match = _EXPLICIT.search(attributes)
    if match is None or not match.group(1):
        return [tuple(range(num_partitions))]
    return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match.group(1))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _tiles(text: str) -> np.ndarray:
    """Expand `[2,4]<=[4,2]T(1,0)`: count up in the shape [4,2], transpose, and reshape to [2,4];
    `[4,2]T(1,0)` omits the last."""
    match = _TILES.search(text)
    assert match is not None
    shape = _numbers(match.group(1))
    source = _numbers(match.group(2)) if match.group(2) else shape
    numbers = np.arange(math.prod(shape)).reshape(source)
    if match.group(3):
        numbers = numbers.transpose(_numbers(match.group(3)))
    return numbers.reshape(shape) if match.group(2) else numbers


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> Groups:
    """Return groups over axes of the compiler's mesh, with its own names and sizes. `x:(2)4` is a part of
    axis x."""
    sizes = {name.strip("' "): int(size) for name, size in (axis.split("=") for axis in axes.split(","))}
    if not device_ids:
        numbers = np.arange(math.prod(sizes.values()))
    else:
        numbers = _tiles(device_ids).ravel() if "[" in device_ids else np.array(_numbers(device_ids))
    # Each axis is divided at the bounds of its named parts; then the named pieces are moved to the end.
    chosen: list[_Piece] = []
    for part in filter(None, (part.strip() for part in over.split(","))):
        match = _AXIS.fullmatch(part)
        if match is None:
            raise ValueError(f"cannot parse the device group {over!r}")
        start = int(match.group(2) or 1)
        chosen.append(_Piece(match.group(1), start, start * int(match.group(3) or sizes[match.group(1)])))
    pieces: list[_Piece] = []
    for name, size in sizes.items():
        borders = sorted({1, size, *(border for part in chosen if part.axis == name for border in part[1:])})
        pieces += [_Piece(name, low, high) for low, high in itertools.pairwise(borders)]
    inside = [
        i
        for part in chosen
        for i, piece in enumerate(pieces)
        if piece.axis == part.axis and part.start <= piece.start and piece.end <= part.end
    ]
    outside = [i for i in range(len(pieces)) if i not in inside]
    cut = numbers.reshape([piece.end // piece.start for piece in pieces]).transpose(outside + inside)
    grouped = cut.reshape(-1, math.prod(pieces[i].end // pieces[i].start for i in inside))
    return [tuple(map(int, group)) for group in grouped]


class _Piece(NamedTuple):
    """A part of an axis, between two products of sizes, slowest first."""

    axis: str
    start: int
    end: int


def group_axes(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the members of a group differ, in the mesh's order.

    A group with only some of an axis's indices is written with both numbers: `fsdp[4 of 8]`.

    >>> group_axes([(0, 2), (1, 3)], {"fsdp": 2, "tensor": 2})
    ('fsdp',)
    """
    sizes = tuple(mesh_shape.values())
    places: dict[str, int] = {}
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(group), sizes))
        for axis, along in zip(mesh_shape, coordinates):
            places[axis] = max(places.get(axis, 1), len(set(along.tolist())))
    return tuple(
        axis if places[axis] == size else f"{axis}[{places[axis]} of {size}]"
        for axis, size in mesh_shape.items()
        if places[axis] > 1
    )


def permutation_axes(pairs: Sequence[tuple[int, ...]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which sources and targets of a permutation differ."""
    if not pairs:
        return ()
    sizes = tuple(mesh_shape.values())
    source, target = (np.array(np.unravel_index(np.array(side), sizes)) for side in zip(*pairs))
    return tuple(axis for axis, moved in zip(mesh_shape, (source != target).any(axis=1)) if moved)
