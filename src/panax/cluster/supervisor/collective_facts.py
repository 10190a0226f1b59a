"""Collectives of a step as reported by its processes: their mesh axes, and the processes that take part in
them."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

MAX_NAMED = 8
"""Maximum number of processes or hosts named in one message."""


@runtime_checkable
class FactReporter(Protocol):
    """A process, and the facts that it reported."""

    process: int
    host: str
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CollectiveFacts:
    """Known collectives of a job; empty if no process reported any.

    Attributes:
        kinds: Each kind with its mesh axes.
        groups: Process to mesh axis to the members of its group along that axis, itself included.
        hosts: Process to its host.
        addresses: Address to a description of its process; only addresses of a single process.
    """

    kinds: Sequence[tuple[str, tuple[str, ...]]] = ()
    groups: Mapping[int, Mapping[str, Sequence[int]]] = dataclasses.field(default_factory=dict)
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, reporters: Sequence[FactReporter]) -> "CollectiveFacts":
        """Collect the facts of a job's processes; the first process reports the kinds."""
        kind_facts = reporters[0].facts.get("collectives") if reporters else None
        groups = {
            reporter.process: reporter.facts["groups"]
            for reporter in reporters
            if isinstance(reporter.facts.get("groups"), dict)
        }
        kinds = [(str(kind), tuple(map(str, axes))) for kind, axes in kind_facts or ()]
        by_address: dict[str, list[FactReporter]] = {}
        for reporter in reporters:
            by_address.setdefault(str(reporter.facts.get("address", "")), []).append(reporter)
        addresses = {
            address: f"{processes[0].host} (process {processes[0].process})"
            for address, processes in by_address.items()
            if address and len(processes) == 1
        }
        return cls(kinds, groups, {reporter.process: reporter.host for reporter in reporters}, addresses)

    def group(self, process: int, axes: Collection[str]) -> list[int]:
        """Return the group of a process in a collective over some axes, itself included."""
        members, new = {process}, {process}
        while new:
            neighbors = {each for one in new for axis in axes for each in self.groups.get(one, {}).get(axis, ())}
            new = neighbors - members
            members |= new
        return sorted(members)

    def around(self, process: int, kind: str = "") -> list[str]:
        """Describe the collectives in which a process takes part with others, grouped by axes.

        Args:
            kind: Only this kind; empty for all.
        """
        kinds: dict[tuple[str, ...], list[str]] = {}
        for each, axes in self.kinds:
            if kind in ("", each) and len(self.group(process, axes)) > 1:
                kinds.setdefault(axes, []).append(each)
        descriptions = []
        for axes, of_axes in kinds.items():
            hosts = _listed(dict.fromkeys(self.hosts.get(each, "?") for each in self.group(process, axes)))
            descriptions.append(
                f"an {' or '.join(sorted(of_axes))} over {' and '.join(axes)} ({hosts})".replace("an r", "a r")
            )
        return descriptions

    def waits(self, process: int, waiting: Collection[int]) -> str:
        """Describe which processes wait for a process, and in which collectives; empty if unknown.

        >>> met = {0: {"fsdp": [0, 1]}, 1: {"fsdp": [0, 1]}}
        >>> CollectiveFacts([("all-gather", ("fsdp",))], met, {0: "a", 1: "b"}).waits(1, [0])
        'process 0 waits for it in an all-gather over fsdp (a, b)'
        """
        others = sorted(set(waiting) - {process})
        descriptions = self.around(process)
        if not others or not descriptions:
            return ""
        who = f"process {others[0]} waits" if len(others) == 1 else f"processes {_listed(map(str, others))} wait"
        return f"{who} for it in {', or '.join(descriptions)}"

    def stands(self, process: int) -> str:
        """Describe the collectives in which a process may be blocked; empty if unknown."""
        return ", or ".join(self.around(process))


_KINDS = {
    "all-gather": r"all[-_ ]?gather",
    "reduce-scatter": r"reduce[-_ ]?scatter",
    "all-reduce": r"all[-_ ]?reduce",
    "all-to-all": r"all[-_ ]?to[-_ ]?all",
    "collective-permute": r"collective[-_ ]?permute|send[-_ ]?recv",
    "collective-broadcast": r"collective[-_ ]?broadcast|broadcast",
}


def parse_collective_kind(text: str) -> str:
    """Return the kind of collective named in a library's error; empty if it names none.

    >>> parse_collective_kind("Gloo AllGather failed: Timed out waiting 30000ms")
    'all-gather'
    >>> parse_collective_kind("Connection reset by peer")
    ''
    """
    found = [
        (match.start(), kind) for kind, words in _KINDS.items() if (match := re.search(words, text, re.IGNORECASE))
    ]
    return min(found, default=(0, ""))[1]


def parse_peers(text: str) -> list[str]:
    """Return the addresses of the peers named in a library's error.

    >>> parse_peers("Connection closed by peer [10.0.0.3]:41234"), parse_peers("Connect to 10.0.0.7<4471> failed")
    (['10.0.0.3'], ['10.0.0.7'])
    """
    pairs = re.findall(r"\[([0-9a-fA-F.:]{3,})\](?::\d+)?|\b(\d{1,3}(?:\.\d{1,3}){3})(?:<|:)\d+", text)
    return list(dict.fromkeys(one or other for one, other in pairs))


def _listed(names: Any) -> str:
    found = list(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{', '.join(found[:MAX_NAMED])}{more}"
