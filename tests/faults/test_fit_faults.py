"""A whole run on S3 with a fault while it saves, a kill -9, and a fault while it restores: the end is bitwise the same."""

import functools
import time

import campaign
import pytest
from servers import Fault

from panax.checkpoint import Checkpointer

EVERY = 20
PASSING = ("500", "503", "429", "reset", "lost", "slow", "cut", "404", "flip_write", "flip_read")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Digest of the end of a run on a disk that nobody disturbs, by number of processes."""
    return functools.cache(lambda n: campaign.undisturbed(tmp_path_factory.mktemp(f"undisturbed{n}"), n))


def disturbed(kind: str, processes: int, folder, proxy, bucket: str) -> tuple[str, list[str]]:
    """The digest of the end of a disturbed run, and the output of the first process before it was killed and after."""
    settings = {"directory": f"{bucket}/run", "every": EVERY}
    if kind == "403":  # As long as step 40 is saved; the run goes on, and the next is saved.
        saving = [Fault(kind=kind, method="PUT", path="step_00000040", times=None)]
        restoring = []
    else:
        saving = [
            Fault(kind=kind, method="PUT", path=r"\.bin", first=2, times=2, seconds=2.0),
            Fault(kind=kind, method="PUT", path=r"manifest\.json", first=2, seconds=2.0),
        ]
        restoring = [
            Fault(kind=kind, method="GET", path=r"\.bin", times=2, seconds=2.0),
            Fault(kind=kind, method="GET", path=r"manifest\.json", seconds=2.0),
        ]
    proxy.faults.set(*saving)
    job = campaign.start(folder, processes, **settings)
    said = []
    try:
        deadline = time.monotonic() + campaign.SECONDS
        while (Checkpointer(settings["directory"]).latest() or 0) < 3 * EVERY:
            assert all(child.poll() in (None, 0) for child in job.children), job.shown()
            assert time.monotonic() < deadline, job.shown()
            time.sleep(0.1)
    finally:
        job.kill()
        said.append(job.said(0))
    proxy.faults.set(*restoring)
    digest = campaign.finish(folder, processes, **settings)
    return digest, [*said, (folder / "job" / "0.out").read_text()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind, processes",
    [*((kind, 1) for kind in (*PASSING, "403")), ("503", 3), ("reset", 3), ("flip_read", 3), ("403", 3)],
)
def test_the_end_is_bitwise_that_of_an_undisturbed_run(kind, processes, tmp_path, proxy, bucket, undisturbed):
    result, (before, after) = disturbed(kind, processes, tmp_path, proxy, bucket)
    assert proxy.faults.counts.faults.get(kind, 0) >= 1
    assert result == undisturbed(processes)
    assert "resuming from step" in after and "is not used" not in after
    if kind == "403":
        assert "saving step 40" in before and "permission denied" in before and "step 20 is undamaged" in before
        assert not [step for step in Checkpointer(f"{bucket}/run").steps() if step == 40]
    else:
        assert "failed" not in before + after
