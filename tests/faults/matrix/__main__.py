"""Each kind of fault in each phase of a run of four processes: the source of the table in docs/reliability/fault-matrix.md.

    python tests/faults/matrix [--seed S] [--sample] [--nodes N] [--only KIND] [--phase PHASE] [--out FILE]

About an hour on two cores that do nothing else. The exit code is 1 if a cell does not end as `expected.py` states.
Faults of the network take root, for namespaces: who may not make them is told which cells are left out.
"""  # fmt: skip

import argparse
import datetime
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from cells import ON_HOSTS, Matrix, Row, cells, makes_hosts, sample
from expected import PHASES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--sample", action="store_true", help="every kind and every phase, in a few cells")
    parser.add_argument("--nodes", type=int, default=4, choices=(2, 4))
    parser.add_argument("--only", action="append", help="a kind of fault; may be given more than once")
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument(
        "--silent-seconds", type=float, default=30.0, help="until a host that says nothing is lost (%(default)s)"
    )
    parser.add_argument(
        "--stall-seconds", type=float, default=15.0, help="until a process without progress hangs (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="for the table, as Markdown")
    options = parser.parse_args()
    chosen = [
        (kind, phase)
        for kind, phase in (sample() if options.sample else cells())
        if (not options.only or kind in options.only) and (not options.phase or phase in options.phase)
    ]
    if not chosen:
        parser.error("no cell of the table is of this kind and phase")
    if not makes_hosts():
        out = [f"{kind} in {phase}" for kind, phase in chosen if kind in ON_HOSTS]
        chosen = [(kind, phase) for kind, phase in chosen if kind not in ON_HOSTS]
        print(f"left out, since they take root and network namespaces: {', '.join(out)}")
    print(f"{datetime.date.today()}, seed {options.seed}, {options.nodes} nodes, {len(chosen)} cells", flush=True)
    rows, began = [], time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="panax-matrix-"))
    try:
        matrix = Matrix(folder, options.seed, options.nodes, options.silent_seconds, options.stall_seconds)
        for kind, phase in chosen:
            row = matrix.run(kind, phase)
            rows.append(row)
            told = f"WRONG: {row.wrong}" if row.wrong else f"{row.end.outcome} {row.end.cause}".strip()
            passed = time.monotonic() - began
            print(f"{passed:6.0f} s  {kind} in {phase}, node {row.node}: {told} ({row.seconds:.1f} s)", flush=True)
            if row.wrong:
                shutil.copytree(folder / "run", folder / f"wrong-{kind}-{phase}".replace(" ", "-"), dirs_exist_ok=True)
    finally:
        wrong = [row for row in rows if row.wrong]
        if not wrong:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"what is wrong is left in {folder}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(rows) - len(wrong)} of {len(rows)} cells as the table says, in {minutes:.1f} minutes")
    if options.out is not None:
        options.out.write_text(table(rows))
    return 1 if wrong else 0


def table(rows: list[Row]) -> str:
    """Kinds by phases: how each ended, the cause on record, and the seconds from the fault to the job's end."""
    rows_by_phase = {(row.kind, row.phase): row for row in rows}
    lines = [f"| | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for kind in sorted({row.kind for row in rows}):
        told = []
        for phase in PHASES:
            row = rows_by_phase.get((kind, phase))
            if row is None:
                told.append("")
                continue
            end = f"{row.end.outcome}: {row.end.cause}" if row.end.cause else row.end.outcome
            told.append(f"**{row.wrong}**" if row.wrong else f"{end}, {row.seconds:.0f} s")
        lines.append(f"| {kind} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
