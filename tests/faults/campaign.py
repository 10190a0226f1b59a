"""Kill -9 during each phase, on one process and on three: the table in docs/reliability/index.md comes from it.

python tests/faults/campaign.py [KILLS] [PROCESSES ...]      prints the table; hours of nothing, minutes of killing
"""

import dataclasses
import datetime
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launching import Job
from phases import PHASES

from panax.checkpoint import Checkpointer, open_checkpoint

WORKER = str(Path(__file__).with_name("fit_worker.py"))
STEPS = 160
LAYOUTS = {1: {"fsdp": 2}, 3: {"replica": 3, "fsdp": 2}}
SECONDS = 300.0
WITH_MEMORY = ("copy to peer",)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of killing a run again and again in one phase.

    Attributes:
        steps: The newest committed step after each kill.
        damaged: Committed checkpoints that were not whole, over all kills.
        same: Whether the final state is bitwise that of the undisturbed run.
    """

    phase: str
    processes: int
    kills: int
    steps: tuple[int, ...]
    damaged: int
    same: bool


def start(folder: Path, processes: int, phase: str | None = None, saves: int = 0, **settings) -> Job:
    """Start the job in `folder`, each process a host of its own, to announce a phase if one is named, after so many saves."""
    cache = Path(tempfile.gettempdir()) / "panax-fault-cache"
    more = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if phase is not None:
        (folder / "announced").unlink(missing_ok=True)
        more |= {"PANAX_TEST_PHASE": phase, "PANAX_TEST_SAVES": str(saves)}
    arguments = [str(folder), json.dumps(LAYOUTS[processes]), str(STEPS), json.dumps(settings)]
    return Job(folder / "job", WORKER, arguments, processes=processes, devices=2, **more)


def finish(folder: Path, processes: int, **settings) -> str:
    """Run to the end; a digest of the last checkpoint's arrays."""
    job = start(folder, processes, **settings)
    codes = job.wait(SECONDS)
    assert codes == [0] * processes, f"exit codes {codes}\n{job.shown()}"
    return digest(settings.get("directory") or str(folder / "run" / "checkpoints"))


def digest(checkpoints: str) -> str:
    """Of the arrays of the last checkpoint among these."""
    last = open_checkpoint(f"{checkpoints}/step_{STEPS:08d}")
    found = hashlib.sha256()
    for name in sorted(last.manifest.arrays):
        found.update(name.encode() + last.read(name).tobytes())
    return found.hexdigest()


def kill_in(phase: str, processes: int, kills: int, folder: Path, expected: str, rng: random.Random) -> Outcome:
    """Kill a process at a random moment of the phase, its others shortly after, `kills` times; then run to the end."""
    settings = {"memory": 3} if phase in WITH_MEMORY else {}
    steps, damaged = [], 0
    if phase == "restore":  # from something
        kill_once("cleanup", processes, folder, rng, settings)
    for _ in range(kills):
        kill_once(phase, processes, folder, rng, settings)
        checkpointer = Checkpointer(folder / "run" / "checkpoints", say=lambda line: None)
        damaged += sum(bool(checkpoint.verify()) for checkpoint in checkpointer.newest_first()) + len(
            checkpointer.damaged_steps
        )
        steps.append(checkpointer.latest() or 0)
    return Outcome(phase, processes, kills, tuple(steps), damaged, finish(folder, processes, **settings) == expected)


def kill_once(phase: str, processes: int, folder: Path, rng: random.Random, settings: dict) -> None:
    """Start the job, and kill it when it has announced the phase."""
    job = start(folder, processes, phase, rng.choice((0, 0, 1, 2)), **settings)
    try:
        deadline = time.monotonic() + SECONDS
        while not (folder / "announced").exists():
            assert all(child.poll() is None for child in job.children), job.shown()
            assert time.monotonic() < deadline, job.shown()
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        rng.choice(job.children).kill()
        # The others go on for a moment, as they do until somebody notices.
        time.sleep(rng.uniform(0.0, 0.2))
    finally:
        job.kill()


def undisturbed(folder: Path, processes: int) -> str:
    return finish(folder, processes)


def phases_for(processes: int) -> tuple[str, ...]:
    """One process has no peer."""
    return tuple(phase for phase in PHASES if processes > 1 or phase not in WITH_MEMORY)


def main() -> None:
    kills, *counts = map(int, sys.argv[1:] or ["10"])
    seed = random.SystemRandom().randrange(2**32)
    print(f"{datetime.date.today()}, seed {seed}", flush=True)
    print("| killed during | processes | kills | newest step after each | damaged or lost | end bitwise the same |")
    print("|---|---|---|---|---|---|", flush=True)
    for processes in counts or LAYOUTS:
        root = Path(tempfile.mkdtemp(prefix="panax-campaign-"))
        try:
            expected = undisturbed(root / "undisturbed", processes)
            for phase in phases_for(processes):
                checkpoint = kill_in(
                    phase, processes, kills, root / phase.replace(" ", "-"), expected, random.Random(f"{seed} {phase}")
                )
                lost = checkpoint.damaged + sum(b < a for a, b in zip(checkpoint.steps, checkpoint.steps[1:]))
                at = ", ".join(map(str, checkpoint.steps))
                print(
                    f"| {phase} | {processes} | {kills} | {at} | {lost} | {'yes' if checkpoint.same else 'NO'} |",
                    flush=True,
                )
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
