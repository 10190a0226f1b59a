"""Four processes, of which a random one is killed fifty times at random moments: nothing is lost, left behind, or grows.

    PANAX_TEST_KILLS=5 PANAX_TEST_SEED=7 pytest tests/faults/test_fifty_kills.py -m slow -n 0 -s

What it prints is what benchmarks/results has of it.
"""  # fmt: skip

import os
import random
import re
import signal
import statistics
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from endurance import Launched, arguments, committed, environment, finished, partial, workers

from panax.cluster.supervisor.job_folder import read_incidents
from panax.metrics.goodput import read_life

KILLS = int(os.environ.get("PANAX_TEST_KILLS", "50"))
SEED = int(os.environ.get("PANAX_TEST_SEED", "20"))
STEPS = 20 * KILLS + 100
PATIENCE = 150.0
"""For a worker to be there that was not there at the kill before: the pause after starts without progress grows to a minute."""

PAGES = 2**20
"""Python gives memory back by arenas of 256 KiB, malloc by what is free at its end: four arenas come and go. Over the 35 restarts
between the medians that is 30 kB for each, less than two last words of a worker (16 kB each), which is what a supervisor and an
agent hold of one attempt."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_fifty_kills(tmp_path):
    rng, folder = random.Random(SEED), tmp_path / "killed"
    print(f"seed {SEED}, {KILLS} kills, {STEPS} steps")
    with Launched(folder, *arguments(STEPS, "--max-restarts", "1000", "--max-without-progress", "1000")) as job:
        killed, before, saved_before = [], set(), []
        furthest = 0
        while len(killed) < KILLS:
            how = rng.choices(("any time", "steps", "a save"), (5, 3, 2))[0]
            victim = _victim(job, rng, how, before, furthest)
            before = {each.pid for each in workers(job)}
            saved_before.append(committed(folder))
            furthest = max(furthest, job.status()["step"])
            os.kill(victim, signal.SIGKILL)
            killed.append(how)
        said = job.done()
        samples, seen, seconds = job.samples(), job.seen(), job.seconds
    growth = grown(samples)
    life = read_life(folder)
    print(f"{seconds:.0f} s, {len(seen)} processes, goodput {life.goodput:.1%}; killed {dict(Counter(killed))}")
    for who, (early_fds, late_fds, early_bytes, late_bytes) in growth.items():
        print(
            f"{who}: descriptors {early_fds} -> {late_fds}, {early_bytes / 2**20:.2f} -> {late_bytes / 2**20:.2f} MiB"
        )
    print(f"restarts took {restarts(folder)}")
    planned = tmp_path / "planned"
    with Launched(planned, *arguments(STEPS)) as undisturbed:
        undisturbed.done()
        quiet = undisturbed.seconds

    # Bitwise what nobody disturbed has learnt.
    assert finished(folder, STEPS) == finished(planned, STEPS)

    # Each kill is an incident, with its cause and what going on took.
    status = read_incidents(folder / "job")
    assert [one["cause"] for one in status] == ["killed"] * KILLS, said
    assert [one["attempt"] for one in status] == [*range(1, KILLS + 1)]
    early = [one for one in status if one["step"] < 0]
    assert KILLS < 10 or 0 < len(early) < KILLS, "kills before a first step, and after"
    # A machine that others use too may have a slow link for a while, which is told as well.
    rows = [row for row in table(report(folder)) if not row["cause"].startswith("slow ")]
    assert len(rows) == KILLS
    for row in rows:
        assert row["cause"] == "killed" and row["until it trained again"] and row["device-hours"]

    # What was committed before a kill is what the next attempt begins with, or a later one.
    log = (folder / "job/logs/process_0000.log").read_text(errors="replace")
    attempts = {int(n): text for n, text in re.findall(r"^== attempt (\d+),(.*?)(?=^== attempt |\Z)", log, re.M | re.S)}
    assert sorted(attempts) == [*range(1, KILLS + 2)]
    resumed = {n: re.search(r"resuming from step (\d+)", text) for n, text in attempts.items()}
    resumes = 0
    for number, step in enumerate(saved_before, start=2):
        if (at := resumed[number]) is not None:
            assert int(at[1]) >= step, f"attempt {number}"
            resumes += 1
        else:
            # Killed before it said so, or there was nothing to resume from.
            assert step == 0 or number <= KILLS
    assert resumed[KILLS + 1] is not None

    # Every second is booked but for the way in and out, which the undisturbed run has, too.
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds, rel=1e-6)
    unbooked = seconds - (life.wall_seconds + life.sessions[0].began - job.began)
    planned_life = read_life(planned)
    usual = quiet - (planned_life.wall_seconds + planned_life.sessions[0].began - undisturbed.began)
    print(f"not booked: {unbooked:.1f} s, undisturbed {usual:.1f} s")
    # Of few kills another way out, some seconds, is more than a hundredth.
    assert unbooked == pytest.approx(usual, abs=0.01 * seconds if KILLS >= 25 else 20.0)

    # Nothing is left: no process, no file.
    gone = [each for each in seen if not each.is_running() or each.status() == psutil.STATUS_ZOMBIE]
    assert len(gone) == len(seen), [each for each in seen if each not in gone]
    assert naming(folder) == []
    assert partial(folder) == []
    assert names(folder) - names(planned) <= {"job/incidents.jsonl", "job/findings.jsonl"}

    print(f"undisturbed {quiet:.0f} s; {len(early)} kills before a first step; {resumes} resumes seen")
    if KILLS >= 25:
        for who, (early_fds, late_fds, early_bytes, late_bytes) in growth.items():
            assert late_fds <= early_fds and late_bytes <= early_bytes + PAGES, who


def _victim(job: Launched, rng: random.Random, how: str, before: set[int], furthest: int) -> int:
    """A worker of an attempt that nobody was killed in, at a random moment."""
    folder = job.folder
    fresh = job.until(lambda: [each for each in workers(job) if each.pid not in before], PATIENCE)
    if how == "any time":
        job.wait(rng.uniform(0.0, 12.0))
    else:
        attempt = job.until(lambda: job.status() if fresh[0].pid in job.pids() else None, PATIENCE)["attempt"]
        # Further than before, so that the run comes to an end.
        job.until(lambda: (status := job.status())["attempt"] == attempt and status["step"] > furthest, 2 * PATIENCE)
        job.wait(rng.uniform(0.0, 4.0))
        if how == "a save":
            job.until(lambda: partial(folder), 2 * PATIENCE, every=0.001)
    # All four, if it was early.
    here = job.until(lambda: [each for each in workers(job) if each.pid not in before], PATIENCE)
    return rng.choice(here).pid


def grown(samples) -> dict[str, tuple[float, float, float, float]]:
    """Of supervisor and agents: the medians of descriptors and resident bytes, of restarts 5 to 15 and of the last ten."""
    status = {}
    for who in sorted({sample.who for sample in samples}):
        of_process = [sample for sample in samples if sample.who == who]
        early = [each for each in of_process if 5 <= each.attempt <= 15]
        late = [each for each in of_process if each.attempt > KILLS + 1 - 10]
        if early and late:
            medians = [
                statistics.median(getattr(x, name) for x in part)
                for name in ("descriptors", "resident")
                for part in (early, late)
            ]
            status[who] = tuple(medians)
    return status


def restarts(folder: Path) -> str:
    """Seconds from the last sign of life to the next step, of failures that no other one followed before that."""
    parts = ("detect", "teardown", "restart", "restore", "first_step")
    sums = [sum(one[part] for part in parts) for one in read_incidents(folder / "job") if one["first_step"] is not None]
    return f"{statistics.median(sums):.1f} s ({min(sums):.1f} to {max(sums):.1f}), {len(sums)} of {KILLS}"


def report(folder: Path) -> str:
    page = folder.parent / "report.html"
    subprocess.run(
        [*Launched.PANAX, "report", str(folder), "--output", str(page)], env=environment(), check=True, timeout=120
    )
    return page.read_text()


class _Tables(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tables, self._cell = [], None

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self._cell = ""

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append(self._cell.strip())
            self._cell = None


def table(page: str) -> list[dict[str, str]]:
    """The rows of the page's table of incidents."""
    reader = _Tables()
    reader.feed(page)
    (found,) = [each for each in reader.tables if each and each[0][:1] == ["incident"]]
    return [dict(zip(found[0], row)) for row in found[1:] if row[0] != "in all"]


def naming(folder: Path) -> list[int]:
    """Processes with the folder in their command line."""
    lines = [(each.pid, " ".join(each.info["cmdline"] or ())) for each in psutil.process_iter(["cmdline"])]
    return [pid for pid, line in lines if str(folder) in line and pid != os.getpid()]


def names(folder: Path) -> set[str]:
    """Its files; those of checkpoints by what they are, since attempts have names of their own."""
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    # One file of curves for each session, by its time and process.
    return {re.sub(r"/[0-9a-f]{8}(-\d+)?/|tfevents.*", "/ATTEMPT/", name) for name in found}
