"""Kill -9 in every phase of saving and restoring, on one process and on three: nothing is lost, the end is bitwise the same."""

import functools
import random
from collections.abc import Callable

import campaign
import pytest

SEED = random.SystemRandom().randrange(2**32)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], str]:
    """Digest of the end of a run that nobody disturbs, by number of processes."""
    return functools.cache(lambda n: campaign.undisturbed(tmp_path_factory.mktemp(f"undisturbed{n}"), n))


def assert_nothing_lost(found: campaign.Outcome) -> None:
    where = f"seed {SEED}: {found}"
    assert found.damaged == 0 and found.same, where
    assert list(found.steps) == sorted(found.steps), where


@pytest.mark.slow
@pytest.mark.parametrize("phase, processes", [("commit", 1), ("copy to peer", 3)])
def test_once(phase, processes, tmp_path, undisturbed):
    rng = random.Random(SEED)
    assert_nothing_lost(campaign.kill_in(phase, processes, 1, tmp_path, undisturbed(processes), rng))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("phase, processes", [(phase, n) for n in campaign.LAYOUTS for phase in campaign.phases_for(n)])
def test_ten_times(phase, processes, tmp_path, undisturbed):
    found = campaign.kill_in(phase, processes, 10, tmp_path, undisturbed(processes), random.Random(f"{SEED} {phase}"))
    assert_nothing_lost(found)
