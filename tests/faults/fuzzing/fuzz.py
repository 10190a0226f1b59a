"""Every file format that Panax reads, with files that were changed at random: a value or a PanaxError comes out, nothing else.

python tests/faults/fuzzing/fuzz.py                                       every format, 300 changes each: some minutes
python tests/faults/fuzzing/fuzz.py --format arrow --seed 3 --count 50    one format; the same seed gives the same changes
python tests/faults/fuzzing/fuzz.py --format arrow --seed 3 --case 17     one change again, in this process, with its traceback
python tests/faults/fuzzing/fuzz.py --binary --count 20000                formats with binary headers: half an hour

One process for each format reads case after case under a limit on its memory; after a death, or if a case takes too long, it
is started again with the next case. The files that nobody changed are read first. Half of the changes are made below the
outer checksum, or the checksum is made again, so that what lies behind it is reached.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from panax.system.signals import signal_name

BINARY = ("parquet", "mds", "webdataset", "safetensors", "array_record", "npz")
"""Formats with headers that announce sizes and counts; most changes of them are made by the formats' own rules."""

CASE_SECONDS = 5.0
START_SECONDS = 120.0
CASE_BYTES = 100 * 2**20
"""Maximum memory of reading, in addition to that of the process at its start."""

_BACKSTOP_BYTES = 2**30
"""What the system gives a reader at most, so that a bomb is an error of its own and not the end of other processes."""


class Finding(NamedTuple):
    """A case that ended in something else than a value or a PanaxError."""

    format: str
    seed: int
    case: int
    what: str

    def __str__(self) -> str:
        again = f"python tests/faults/fuzzing/fuzz.py --format {self.format} --seed {self.seed} --case {self.case}"
        return f"{self.format}, seed {self.seed}, case {self.case}: {self.what}\n  {again}"


class Fuzzed(NamedTuple):
    """What came of a format's cases.

    Attributes:
        refused: How many ended in a PanaxError; the others were read.
        seconds: What the longest case took, of those that ended.
        taken: What the largest case took of memory, in bytes, beside what the process had before it.
    """

    cases: int
    refused: int
    findings: list[Finding]
    seconds: float = 0.0
    taken: int = 0


def fuzz(format: str, seed: int, cases: Sequence[int]) -> Fuzzed:
    """Run cases of a format in a process that is started again when it dies."""
    findings, refused, longest, largest = [], 0, 0.0, 0
    waiting = list(cases)
    while waiting:
        with _reader(format, seed) as reader:
            ready, _ = _answer(reader, START_SECONDS)
            if ready != "ready":
                raise AssertionError(f"{format}: the files that nobody changed can't be read: {ready}")
            while waiting:
                case = waiting.pop(0)
                assert reader.stdin is not None
                reader.stdin.write(f"{case}\n".encode())
                reader.stdin.flush()
                began = time.monotonic()
                answer, memory_bytes = _answer(reader, CASE_SECONDS)
                longest, largest = max(longest, time.monotonic() - began), max(largest, memory_bytes)
                if answer == "refused":
                    refused += 1
                elif answer != "value":
                    findings.append(Finding(format, seed, case, answer))
                    if reader.poll() is not None or answer.startswith("hangs"):
                        break
    return Fuzzed(len(cases), refused, findings, longest, largest)


@contextlib.contextmanager
def _reader(format: str, seed: int):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, __file__, "--child", "--format", format, "--seed", str(seed)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, bufsize=0
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def _answer(reader: subprocess.Popen, seconds: float) -> tuple[str, int]:
    """The next line that a reader says, how it died if there is none; and the bytes that the case took."""
    assert reader.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(seconds):
                reader.kill()
                reader.wait()
                return f"hangs: no answer in {seconds:.0f} s", 0
            part = os.read(reader.stdout.fileno(), 2**16)
            if not part:
                code = reader.wait()
                name = signal_name(-code) if code < 0 else f"exit code {code}"
                return f"dies: {name}", 0
            line += part
    text, memory_bytes = json.loads(line)
    return text, memory_bytes


def _child(format: str, seed: int) -> None:
    """Read cases as their numbers come in, and report the outcome of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def answer(text: str, taken: int = 0) -> None:
        answers.write(json.dumps([text[:4000], taken]) + "\n")
        answers.flush()

    from fuzz_formats import FORMATS

    with tempfile.TemporaryDirectory(prefix="panax-fuzz-") as folder:
        made, case_folder = Path(folder, "made"), Path(folder, "case")
        made.mkdir()
        try:
            FORMATS[format].make(made)
            for _ in range(2):  # what is loaded once, threads and plug-ins, belongs to the beginning
                shutil.copytree(made, case_folder)
                FORMATS[format].load(case_folder)
                shutil.rmtree(case_folder)
        except BaseException:
            answer(traceback.format_exc())
            return
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _BACKSTOP_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        answer("ready")
        for line in sys.stdin:
            shutil.rmtree(case_folder, ignore_errors=True)
            shutil.copytree(made, case_folder)
            before = _resident_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the highest point is counted from here
            try:
                said = "refused" if run_case(format, seed, int(line), case_folder) else "value"
                taken = _resident_bytes("VmHWM") - before
                answer(said if taken <= CASE_BYTES else f"takes {taken / 2**20:.0f} MiB of memory ({said})", taken)
            except BaseException:
                answer(f"raises: {traceback.format_exc()[-3500:]}")


def _resident_bytes(what: str) -> int:
    """Memory of this process that is there: now ("VmRSS"), or at its highest point ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def run_case(format: str, seed: int, case: int, folder: Path) -> str:
    """Change the files in a folder and read them; return the message of the PanaxError, if one is raised."""
    from fuzz_formats import FORMATS

    from panax.core.errors import PanaxError

    rng = random.Random(f"{format} {seed} {case}")
    fuzzed = FORMATS[format]
    change = fuzzed.structure if fuzzed.structure and case // 2 % 2 else fuzzed.change
    change(folder, rng, case % 2 == 1)
    try:
        FORMATS[format].load(folder)
    except PanaxError as error:
        return str(error) or type(error).__name__
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", help="which (default: all)")
    parser.add_argument("--binary", action="store_true", help=f"these: {', '.join(BINARY)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="how many changes of each format")
    parser.add_argument("--case", type=int, help="one change alone, in this process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.format[0], options.seed)
        return 0
    from fuzz_formats import FORMATS

    if options.case is not None:
        (format,) = options.format
        with tempfile.TemporaryDirectory(prefix="panax-fuzz-") as folder:
            FORMATS[format].make(Path(folder))
            print(run_case(format, options.seed, options.case, Path(folder)) or "a value")
        return 0
    failed = 0
    for format in options.format or (BINARY if options.binary else FORMATS):
        report = fuzz(format, options.seed, range(options.count))
        failed += len(report.findings)
        limits = f"at most {report.seconds:.2f} s and {report.taken / 2**20:.0f} MiB"
        print(
            f"{format}: {report.cases} cases, {report.refused} refused, {len(report.findings)} findings, {limits}",
            flush=True,
        )
        for finding in report.findings:
            print(finding, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
