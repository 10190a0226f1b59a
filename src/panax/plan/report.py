"""Results of a plan as lines for the user."""

from collections.abc import Sequence

from ..system.terminal_text import align_columns, format_bytes
from .collectives import Collective, summarize_collectives
from .overlap import OverlapReport
from .step import StepPlan
from .walk.walk import StepCost


def plan_lines(plan: StepPlan, limit: int | None, name: str) -> list[str]:
    """Format the cost of a compiled step: compilation, memory, communication.

    Args:
        limit: Memory of each device in bytes; None if unknown.
        name: Name of the target.
    """
    memory = plan.memory
    of = f" of {format_bytes(limit)}" if limit else ""
    lines = [
        f"compiled       in {plan.compile_seconds:.1f} s for {name}",
        f"memory         {format_bytes(memory.total)}{of} on each device: {format_bytes(memory.arguments)} state and batch + "
        f"{format_bytes(memory.temporaries)} temporaries + {format_bytes(memory.outputs)} results - "
        f"{format_bytes(memory.reused)} reused",
    ]
    if not plan.collectives:
        return [*lines, "communication  none"]
    rows = [("collective", "over", "executions", "sent")]
    counted = [collective for collective in plan.collectives if not collective.open_ended]
    for total in summarize_collectives(counted):
        count = f"{'' if total.exact else '~'}{total.count:,}"
        rows.append((total.kind, "·".join(total.axes), count, format_bytes(total.wire_bytes)))
    rows.append(("all", "", "", format_bytes(sum(collective.total_wire_bytes for collective in counted))))
    lines += ["communication  of one step, sent by each device", *(f"  {line}" for line in align_columns(rows, left=2))]
    if not all(collective.exact for collective in counted):
        lines.append("  ~ some are in a branch that may not be taken")
    return [*lines, *_overlap_lines(plan.overlap), *_exchange_lines(plan.collectives)]


def walk_lines(cost: StepCost, limit: int | None) -> list[str]:
    """Format the cost of a traced step: memory, work, and communication by purpose.

    Args:
        limit: Memory of each device in bytes; None if unknown.
    """
    of = f" of {format_bytes(limit)}" if limit else ""
    prefix = "at least " if cost.unknown else ""
    lines = [
        f"traced         in {cost.seconds:.1f} s, before anything is compiled",
        f"estimate       about {format_bytes(cost.memory)}{of} on each device: {format_bytes(cost.arguments)} state and batch + "
        f"{format_bytes(cost.temporaries)} temporaries",
        f"work           {prefix}{cost.work.flops:.3g} FLOPs of matrix multiplications in a step on each device",
    ]
    return [*lines, *_sent_lines(cost, "in one step"), *(f"  at least: {name} is not counted" for name in cost.unknown)]


def rare_lines(name: str, cost: StepCost, when: str) -> list[str]:
    """Format the cost of a program that does not run with each step.

    Args:
        name: Name of its task.
        when: Text for the times at which it runs.
    """
    return [
        f"{name:14} {when}, in another program: {cost.work.flops:.3g} FLOPs on each device, "
        f"{format_bytes(cost.temporaries)} temporaries",
        *_sent_lines(cost, f"in one {name}"),
    ]


def _sent_lines(cost: StepCost, when: str) -> list[str]:
    if not cost.traffic:
        return [f"sends          nothing {when}"]
    groups: dict[tuple[str, str, str], int] = {}
    for one in cost.traffic:
        key = (one.purpose, one.kind, "·".join(one.axes))
        groups[key] = groups.get(key, 0) + one.wire_bytes
    rows = [("for", "by", "over", "sent")]
    rows += [(*key, format_bytes(sent)) for key, sent in sorted(groups.items(), key=lambda item: -item[1]) if sent]
    rows.append(("all", "", "", format_bytes(sum(groups.values()))))
    return [f"sends          {when}, each device", *(f"  {line}" for line in align_columns(rows, left=3))]


def _overlap_lines(beside: Sequence[OverlapReport]) -> list[str]:
    """Format the overlap of communication with matrix multiplications in the schedule, by mesh axes."""
    rows = [("hidden over", "sent", "overlapped by matmuls", "of FLOPs")]
    for axes in dict.fromkeys(one.collective.axes for one in beside):
        members = [one for one in beside if one.collective.axes == axes and not one.collective.open_ended]
        sent = sum(one.collective.total_wire_bytes for one in members)
        hides = sum(one.collective.total_wire_bytes for one in members if one.flops)
        flops = sum(one.flops * one.collective.times for one in members)
        if sent:
            rows.append(("·".join(axes), format_bytes(sent), f"{hides / sent:.0%}", f"{flops:.3g}"))
    return [f"  {line}" for line in align_columns(rows, left=1)] if len(rows) > 1 else []


def _exchange_lines(collectives: Sequence[Collective]) -> list[str]:
    """Format the exchange of rows with experts, and the content of loops of unknown length, which may not run
    at all."""
    lines = []
    exchanges = [collective for collective in collectives if collective.kind == "ragged-all-to-all"]
    first = [collective for collective in exchanges if not collective.open_ended]
    if first:
        axes, buffer_bytes = "·".join(first[0].axes), max(collective.buffer_bytes for collective in first)
        lines.append(
            f"expert exchange {format_bytes(sum(c.total_wire_bytes for c in first))} of these: rows to their experts over {axes} "
            f"and back, at equal loads; buffers of {format_bytes(buffer_bytes)}"
        )
    later = [collective for collective in collectives if collective.open_ended]
    if later:
        lines.append(
            f"in addition    {format_bytes(sum(c.total_wire_bytes for c in later))} for one turn of each loop of unknown length: "
            f"the later rounds of an expert exchange, which don't run at equal loads"
        )
    return lines
