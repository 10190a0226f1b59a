"""A node that is lost and comes back, ten times: nothing is left of it, and nothing grows."""

import statistics
from typing import NamedTuple

import psutil
import pytest
from test_elastic import Played, on

import panax.cluster.supervisor.roster
from panax.cluster.node.local import LocalAgents

TIMES = 10


class Held(NamedTuple):
    """Memory of the supervisor and of the remaining agents while all nodes are there."""

    descriptors: int
    threads: int
    processes: int
    mebibytes: float

    @classmethod
    def now(cls, job: Played) -> "Held":
        here, agents = psutil.Process(), job.agents()
        staying = [here, agents[0], agents[1]]
        return cls(
            sum(each.num_fds() for each in staying),
            sum(each.num_threads() for each in staying),
            len(here.children(recursive=True)),
            sum(each.memory_info().rss for each in staying) / 2**20,
        )


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ten_losses_and_returns_leave_everything_as_it_was(launched, monkeypatch):
    signals: list[int] = []
    replace = LocalAgents.replace

    def later(self, node: int) -> None:
        signals.append(node)
        if len(signals) % 2 == 0:
            replace(self, node)

    monkeypatch.setattr(LocalAgents, "replace", later)
    monkeypatch.setattr(panax.cluster.supervisor.roster, "ASK_AGAIN_SECONDS", 1.0)
    held: list[Held] = []

    def play(job: Played) -> None:
        for time in range(TIMES + 1):
            whole = job.until(lambda status, time=time: on([0, 1, 2])(status) and status["attempt"] == 1 + 2 * time)
            held.append(Held.now(job))
            if time == TIMES:
                break
            job.agents()[2].kill()
            job.until(lambda status, whole=whole: on([0, 1])(status) and status["attempt"] == whole["attempt"] + 1)

    job = Played(launched, play)
    policy = {"replace_seconds": 0.2, "max_restarts": 2 * TIMES, "max_without_progress": 2 * TIMES}
    assert job.run(processes=3, nodes=3, policy=policy) == 0
    assert len(signals) == 2 * TIMES and len(held) == TIMES + 1
    assert [one["cause"] for one in launched.incidents] == ["lost host", "new layout"] * TIMES
    # The first return has made what is made once.
    first, last = held[1], held[-1]
    assert last.descriptors <= first.descriptors and last.threads <= first.threads, held
    assert last.processes == first.processes, held
    early, late = (statistics.median(each.mebibytes for each in held[part]) for part in (slice(1, 4), slice(-3, None)))
    assert late - early < 8, held
