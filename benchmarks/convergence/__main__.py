"""What optimizers are worth: updates, tokens and seconds to the same held-out loss, at 1, 8 and 64 times the base batch.

    python benchmarks/convergence [--folder DIR] [--only Muon] [--batch 64] [--budget-seconds S]
    python benchmarks/convergence --time          milliseconds of an update, on a machine that does nothing else

A decoder of 0.28 million parameters learns the quickstart's text (rows of 64 tokens, 512 in the vocabulary). Each optimizer has 5
rates and 2 warm-ups at each batch, more rates while the best is at the grid's edge, and three seeds of the best.

Each cell that ends is a line of cells.jsonl, so that a sweep that was killed loses one cell: the same command resumes.

The arithmetic, on two cores: an update takes about 7 ms at the base batch (128 tokens), 30 at 8 times, 300 at 64 times, and a
group has about 14 cells. Cells end where they reach the loss, or at 1.25 times the updates of the best so far. AdamW needs about
1,500, 350 and 120 of them: 14 * (1500 * 7 + 350 * 30 + 120 * 300) ms * 1.25 = 17 minutes for an optimizer, 1.7 hours for six of
AdamW's speed. A program is compiled once for an optimizer and batch (10 s), since the rate is an argument of the step.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from design import BATCHES, KINDS, SEEDS, append_record, next_cell, read_records
from shown import markdown, write_page

from panax.system.allocator import keep_freed_memory

CELLS, TIMES, TABLE, PAGE = "cells.jsonl", "times.json", "table.md", "convergence.html"


def chosen(only: list[str], batches: list[int]) -> Iterator[tuple[str, int]]:
    """The groups that are trained; an optimizer that is not there yet is told and left out."""
    import panax.optim

    for kind in KINDS:
        if not hasattr(panax.optim, kind.name):
            print(f"{kind.name} is left out: panax.optim has no such optimizer", flush=True)
    for batch in BATCHES:
        for kind in KINDS:
            if hasattr(panax.optim, kind.name) and kind.name in (only or [kind.name]) and batch in (batches or BATCHES):
                yield kind.name, batch


def sweep(folder: Path, groups: list[tuple[str, int]], until: float) -> bool:
    """Train what is lacking; whether all of it is there now."""
    from training import Group

    records = read_records(folder / CELLS)
    for optimizer, batch in groups:
        group = None
        while (cell := next_cell(optimizer, batch, records)) is not None:
            if time.monotonic() >= until:
                return False
            group = group or Group(optimizer, batch)
            own = [each for each in records if (each.cell.optimizer, each.cell.batch) == (optimizer, batch)]
            fewest = min((each.steps for each in own if each.steps is not None), default=None)
            began = time.monotonic()
            record = group.train(cell, fewest if cell.seed == SEEDS[0] else None)
            append_record(folder / CELLS, record)
            records.append(record)
            reached = f"{record.steps:,.0f} updates" if record.steps is not None else record.ended
            print(
                f"{optimizer} x{batch} rate {cell.rate:.3g} warm-up {cell.warmup_steps} seed {cell.seed}: {reached}, "
                f"{record.rank[1]:.3f} after {record.taken} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return True


def read_times(folder: Path) -> dict[tuple[str, int], float]:
    """Milliseconds of an update, where they were measured."""
    path = folder / TIMES
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(optimizer, batch): each for optimizer, batch, each in found}


def measure(folder: Path, groups: list[tuple[str, int]]) -> None:
    """Measure milliseconds of an update, and keep them."""
    from training import Group

    times = read_times(folder)
    for optimizer, batch in groups:
        times[optimizer, batch] = Group(optimizer, batch).milliseconds(max(3, 200 // batch))
        print(f"{optimizer} x{batch}: {times[optimizer, batch]:.1f} ms", flush=True)
        found = [(*group, each) for group, each in times.items()]
        (folder / TIMES).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(folder: Path) -> None:
    """Write the table and the page from what there is."""
    records, times = read_records(folder / CELLS), read_times(folder)
    if not records:
        return
    (folder / TABLE).write_text(markdown(records, times), encoding="utf-8")
    write_page(records, times, folder / PAGE)
    print(f"\n{markdown(records, times)}\n{folder / TABLE}, {folder / PAGE}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--folder", type=Path, default=Path("convergence"), help="of the results (%(default)s)")
    parser.add_argument("--only", action="append", default=[], choices=names, help="an optimizer; may be given again")
    parser.add_argument("--batch", action="append", default=[], type=int, choices=[*BATCHES], help="may be given again")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--time", action="store_true", help="measure milliseconds of an update instead")
    asked = parser.parse_args()
    if not asked.budget_seconds > 0:
        parser.error(f"--budget-seconds {asked.budget_seconds}: expected more than 0")
    asked.folder.mkdir(parents=True, exist_ok=True)
    groups, code = list(chosen(asked.only, asked.batch)), 0
    try:
        if asked.time:
            measure(asked.folder, groups)
        elif not sweep(asked.folder, groups, time.monotonic() + asked.budget_seconds):
            print("the time is over; the same command resumes")
    except KeyboardInterrupt:
        print("stopped; the same command resumes")
        code = 130
    show(asked.folder)
    return code


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
