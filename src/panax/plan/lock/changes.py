"""Changes of the cost of a step, in words: a lock compared with the present step."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from ...system.terminal_text import format_bytes
from .step_lock import LockedCollective, StepLock

FLOPS_TOLERANCE = 1e-3
"""Relative change of FLOPs below which nothing is reported."""

MEMORY_TOLERANCE = 0.01
"""Relative change of memory below which nothing is reported; the peak of temporaries is an estimate."""

_LAYER = re.compile(r"\blayers\.\d+\b")


def describe_changes(locked: StepLock, now: StepLock) -> list[str]:
    """List the changes, the most bytes first; empty if there are none.

    Collectives of equal kind, axes and bytes are the same, also with other names of their modules and lines: renames and
    moves are not reported.

    >>> gather = LockedCollective("all-gather", ("fsdp",), "weights", 1024, 2.0, "layers.0/attention", "a.py:10 (f)")
    >>> lock = StepLock("mine", (), {"fsdp": 8}, 10, 1e6, {"temporaries": 100}, (gather,), ())
    >>> twice = StepLock("mine", (), {"fsdp": 8}, 10, 1e6, {"temporaries": 200}, (gather._replace(times=4.0),), ())
    >>> for line in describe_changes(lock, twice):
    ...     print(line)
    runs an all-gather of 1.0 KiB on fsdp 4 times a step, 2 before, for weights in attention, from a.py:10 (f)
    takes 200 B of memory for temporaries on each device, 100 B before (+100 %)
    """
    return [
        *_mesh(locked.mesh, now.mesh),
        *_collectives(locked.collectives, now.collectives),
        *_figures(locked, now),
        *(f"leaves out of its figures: {each}" for each in now.unknown if each not in locked.unknown),
    ]


def _mesh(locked: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    if dict(locked) != dict(now):
        yield f"runs on the mesh {_sizes(now)}, {_sizes(locked)} before"


def _sizes(mesh: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items()) or "of one device"


def _figures(locked: StepLock, now: StepLock) -> Iterator[str]:
    if locked.parameters != now.parameters:
        yield f"has {now.parameters:,} parameters, {locked.parameters:,} before"
    if _differs(locked.flops, now.flops, FLOPS_TOLERANCE):
        yield f"computes {now.flops:.4g} FLOPs on each device, {locked.flops:.4g} before{_percent(locked.flops, now.flops)}"
    for kind in dict.fromkeys((*locked.memory, *now.memory)):
        before, after = locked.memory.get(kind, 0), now.memory.get(kind, 0)
        if _differs(before, after, MEMORY_TOLERANCE):
            yield (
                f"takes {format_bytes(after)} of memory for {kind} on each device, {format_bytes(before)} before"
                f"{_percent(before, after)}"
            )


def _differs(before: float, after: float, tolerance: float) -> bool:
    return abs(after - before) > tolerance * max(abs(before), abs(after))


def _percent(before: float, after: float) -> str:
    return f" ({100 * (after - before) / before:+.3g} %)" if before else ""


def _collectives(locked: Sequence[LockedCollective], now: Sequence[LockedCollective]) -> list[str]:
    old, new = _group(locked), _group(now)
    lines = []
    dropped = [group for key, group in old.items() if key not in new]
    for key, group in new.items():
        before, name = old.get(key), _describe(group)
        if before is None:
            before = next((each for each in dropped if _replaces(group, each)), None)
            if before is None:
                lines.append((group.total, f"adds {name}{_times(group)}, {group.where}"))
                continue
            dropped.remove(before)
            text = f"sends {name} {_often(group)} a step, {format_bytes(before.example.sent)} {_often(before)} before"
        elif before.times != group.times:
            text = f"runs {name} {_often(group)} a step, {before.times:g} before"
            group = group.of_change(before)
        else:
            continue
        lines.append((abs(group.total - before.total), f"{text}, {group.where}"))
    lines += [(group.total, f"drops {_describe(group)}{_times(group)}, {group.where}") for group in dropped]
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])]


@dataclasses.dataclass
class _Group:
    """All collectives of a step with the same kind, axes and bytes of one execution.

    Attributes:
        example: The first of them, or the one that is meant.
        times: Executions of all of them in a step.
        modules: The first of each module, with the executions of that module.
    """

    example: LockedCollective
    times: float
    modules: dict[str, tuple[LockedCollective, float]] = dataclasses.field(default_factory=dict)

    def of_change(self, before: "_Group") -> "_Group":
        """Return this group with the module as its example of which the number of executions differs most from before."""
        differences = {
            name: abs(self.modules.get(name, _NO_MODULE)[1] - before.modules.get(name, _NO_MODULE)[1])
            for name in (*self.modules, *before.modules)
        }
        most = max(differences, key=lambda name: differences[name])
        return dataclasses.replace(self, example=(self.modules.get(most) or before.modules[most])[0])

    @property
    def total(self) -> float:
        return self.example.sent * self.times

    @property
    def where(self) -> str:
        """Return the purpose, the module, and the line that traced it."""
        purpose, source = self.example.purpose, self.example.source
        # A part with a colon names the purpose.
        parts = [part for part in re.findall(r"[\w.:*]+", self.example.module) if ":" not in part]
        parts = [part for part in parts if not part.startswith(_NO_MODULES)]
        module = f" in {parts[-1]}" if parts and parts[-1] != purpose else ""
        return f"for {purpose}{module}{f', from {source}' if source else ''}"


_NO_MODULE = (None, 0.0)

_NO_MODULES = ("layers", "jvp", "transpose", "vmap", "checkpoint", "rematted_computation")
"""How parts of a scope begin that name no module."""


def _group(collectives: Sequence[LockedCollective]) -> dict[tuple[str, tuple[str, ...], int], _Group]:
    groups: dict[tuple[str, tuple[str, ...], int], _Group] = {}
    for each in collectives:
        group = groups.setdefault((each.kind, each.axes, each.sent), _Group(each, 0.0))
        group.times += each.times
        first, times = group.modules.get(_module(each), (each, 0.0))
        group.modules[_module(each)] = first, times + each.times
    return groups


def _replaces(new: _Group, old: _Group) -> bool:
    """Return True if a collective is of the same kind, axes and module as one that is gone."""
    first, second = new.example, old.example
    return (first.kind, first.axes, _module(first)) == (second.kind, second.axes, _module(second))


def _describe(group: _Group) -> str:
    kind = group.example.kind
    return f"{'an' if kind[0] == 'a' else 'a'} {kind} of {format_bytes(group.example.sent)} on {'·'.join(group.example.axes)}"


def _times(group: _Group) -> str:
    return f", {_often(group)} a step" if group.times != 1 else ""


def _often(group: _Group) -> str:
    return "once" if group.times == 1 else f"{group.times:g} times"


def _module(each: LockedCollective) -> str:
    """Return the module without the numbers of layers."""
    return _LAYER.sub("layers", each.module)
