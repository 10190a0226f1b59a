"""Time the suite as a new machine runs it: with an empty compilation cache, one run after another.

    python tests/timings [--tier default] [--times 3] [--record] [--write FILE.md] [-- PYTEST ARGUMENTS]

Prints each run's minutes with the processor's name, the load before it and pytest's last line. Start nothing else meanwhile.
`--record` writes each test's seconds to `tests/durations.json`, which the shares of slow tests and the affected tests go by.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from suite.records import write_durations  # noqa: E402

BUSY_LOAD = 0.5
"""Load average from which a machine is not quiet."""

SELECTIONS = {"default": None, "full": "full", "slow": "slow"}
"""What `-m` takes for each tier; None leaves pytest's own default."""


def main() -> int:
    """Run the suite some times and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=SELECTIONS, default="default")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write tests/durations.json")
    parser.add_argument("--write", type=Path, help="append the table to this Markdown file")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="after --: more arguments for pytest")
    chosen = parser.parse_args()
    if chosen.times < 1:
        parser.error(f"--times {chosen.times}: expected 1 or more")
    lines = [
        f"tier {chosen.tier}, {datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    ]
    lines += ["", "| run | minutes | load before | result |", "|---|---|---|---|"]
    worst = 0
    for number in range(1, chosen.times + 1):
        load = os.getloadavg()[0]
        if load > BUSY_LOAD:
            print(f"warning: the load is {load:.1f}; a time taken now is too long", file=sys.stderr)
        code, seconds, result, durations = run_once(SELECTIONS[chosen.tier], chosen.rest[1:])
        worst = max(worst, code)
        lines.append(f"| {number} | {seconds / 60:.2f} | {load:.2f} | {result} |")
        if chosen.record:
            write_durations(durations)
    print("\n".join(lines))
    if chosen.write:
        with chosen.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")
    return worst


def run_once(selection: str | None, arguments: list[str]) -> tuple[int, float, str, dict[str, tuple[float, float]]]:
    """Run pytest with empty caches: (exit code, seconds, its last line, (wall, CPU) seconds of each test)."""
    folder = Path(tempfile.mkdtemp(prefix="panax-timing-"))
    try:
        environment = dict(os.environ, PANAX_TEST_CACHE=str(folder / "programs"), PANAX_CACHE=str(folder / "cache"))
        # Python's own files are compiled once for a clone, on a new machine too.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "--write-durations", str(folder / "durations.json"), *arguments]
        if selection is not None:
            command += ["-m", selection]
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, text=True)
        last = ""
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        code = process.wait()
        seconds = time.perf_counter() - begin
        written = folder / "durations.json"
        rows = json.loads(written.read_text()) if written.exists() else {}
        return code, seconds, last, {name: (wall, cpu) for name, (wall, cpu) in rows.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_name() -> str:
    """The processor's model and the vector instructions by which machines of this project differ."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    model = f"{fields.get('model name', platform.machine())} family {fields.get('cpu family', '?')}"
    return f"{model} ({', '.join(flags) or 'no vector flags known'})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("timings: stopped; nothing was recorded")
