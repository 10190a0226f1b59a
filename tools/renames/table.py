"""The table of renames: what was called what, for scripts outside this tree."""

import csv
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Kind = Literal["name", "member", "module", "flag", "metric", "file"]

KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}

TEXT_KINDS = ("flag", "metric", "file")
"""Kinds of what is text wherever it stands, not an identifier."""

FIELDS = ("kind", "old", "new")


class Rename(NamedTuple):
    """One line of a table.

    Attributes:
        kind: `name`: a class, function or constant of a module; `member`: a method, field or attribute of a class; `module`;
            `flag`: of the command line, with its dashes; `metric`: as in metrics.jsonl; `file`: its name.
        old: Dotted path from the package on, of a member with its class; or the text.
        new: Likewise, after the rename.
    """

    kind: Kind
    old: str
    new: str

    @property
    def old_name(self) -> str:
        """The identifier alone."""
        return self.old.rpartition(".")[2]

    @property
    def new_name(self) -> str:
        """The identifier alone, after the rename."""
        return self.new.rpartition(".")[2]


def read_table(path: Path) -> list[Rename]:
    """Read a table; `new` may be the identifier alone.

    Raises:
        ValueError: A line of another kind, or no identifier.
    """
    renames = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            given, old, new = (row.get(field) or "" for field in FIELDS)
            kind = KINDS.get(given)
            if kind is None:
                raise ValueError(f"{path}:{number}: kind {given!r}; expected one of {', '.join(KINDS)}")
            if kind in TEXT_KINDS:
                if not old.strip() or not new.strip():
                    raise ValueError(f"{path}:{number}: {old!r} to {new!r}; expected the text of a {kind}")
                renames.append(Rename(kind, old, new))
                continue
            if not all(part.isidentifier() for part in (*old.split("."), *new.split("."))) or "." not in old:
                raise ValueError(f"{path}:{number}: {old!r} to {new!r}; expected dotted identifiers")
            if "." not in new:
                new = f"{old.rpartition('.')[0]}.{new}"
            renames.append(Rename(kind, old, new))
    return renames


def write_table(path: Path, renames: list[Rename]) -> None:
    """Write a table, sorted, so that a difference between two of them can be read."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(sorted(set(renames)))


def merge(before: list[Rename], after: list[Rename]) -> list[Rename]:
    """One table that does what two do, one after the other; names that a later module move carries along keep one line.

    >>> merge([Rename("name", "p.a.X", "p.a.Y")], [Rename("name", "p.a.Y", "p.a.Z"), Rename("module", "p.a", "p.b")])
    [Rename(kind='name', old='p.a.X', new='p.b.Z'), Rename(kind='module', old='p.a', new='p.b')]
    """
    back = {rename.new: rename.old for rename in before}
    merged = [Rename(rename.kind, rename.old, forward(rename.new, after)) for rename in before]
    for rename in after:
        if rename.new not in back and rename.old not in back:
            old = back.get(rename.old.rpartition(".")[0])
            merged.append(rename if old is None else Rename(rename.kind, f"{old}.{rename.old_name}", rename.new))
    return [rename for rename in merged if rename.old != rename.new]


def forward(path: str, renames: list[Rename]) -> str:
    """Where a dotted path has gone: its longest prefix in the table, then what follows it."""
    table = {rename.old: rename.new for rename in renames}
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        prefix = ".".join(parts[:count])
        if prefix in table:
            moved = table[prefix]
            # A member's new path names its class as it was; the class may have another name too.
            holder, _, name = moved.rpartition(".")
            if holder == prefix.rpartition(".")[0] and holder:
                moved = f"{forward(holder, renames)}.{name}"
            return ".".join((moved, *parts[count:]))
    return path
