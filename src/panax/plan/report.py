"""What a plan says, as lines for a person."""

from collections.abc import Sequence

from .collectives import summary
from .step import StepPlan


def plan_lines(plan: StepPlan, limit: int | None, name: str) -> list[str]:
    """What a compiled step takes: compilation, memory, communication.

    Args:
        limit: Bytes that each device has; None if not known.
        name: What it was compiled for.
    """
    memory = plan.memory
    of = f" of {size(limit)}" if limit else ""
    lines = [
        f"compiled       in {plan.compile_seconds:.1f} s for {name}",
        f"memory         {size(memory.total)}{of} on each device: {size(memory.arguments)} state and batch + "
        f"{size(memory.temporaries)} temporaries + {size(memory.outputs)} results - {size(memory.reused)} reused",
    ]
    if not plan.collectives:
        return [*lines, "communication  none"]
    rows = [("collective", "over", "executions", "sent")]
    for total in summary(plan.collectives):
        count = f"{'' if total.exact else '~'}{total.count:,}"
        rows.append((total.kind, "·".join(total.axes), count, size(total.wire_bytes)))
    rows.append(("all", "", "", size(sum(collective.total_wire_bytes for collective in plan.collectives))))
    lines += ["communication  of one step, sent by each device", *(f"  {line}" for line in aligned(rows, left=2))]
    if not all(collective.exact for collective in plan.collectives):
        lines.append("  ~ some are in a loop of unknown length, counted once, or in a branch that may not be taken")
    return lines


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as lines of columns, the first `left` of them flush left and the others flush right.

    >>> aligned([("a", "10"), ("bcd", "2")], left=1)
    ['a    10', 'bcd   2']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def size(count: int) -> str:
    """A number of bytes in the unit that fits it.

    >>> size(3 * 2**20)
    '3.0 MiB'
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
