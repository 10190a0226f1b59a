"""A launched run that is signaled to end, then one of its nodes: all save at one step, and the run resumes from that step."""

import json
import re

import pytest
from endurance import Launched, arguments, committed, finished, partial

from panax.cluster.supervisor.job_folder import read_incidents

STEPS = 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_sigterm_to_the_launch_and_to_an_agent(tmp_path):
    folder = tmp_path / "run"
    # No checkpoint is due before the end; a node that is told to end is waited for, so that the layout stays.
    flags = arguments(STEPS, "--replace-seconds", "600", "--log-every", "1", every=100_000)

    def steps_beyond(job: Launched, step: int, attempt: int) -> None:
        job.until(lambda: (status := job.status())["attempt"] == attempt and status["step"] > step, 300.0)

    with Launched(folder, *flags) as job:
        steps_beyond(job, 5, 1)
        job.terminate()
        job.done(143)
        assert {one["exit_code"] for one in job.status()["processes"]} == {143}
    first = committed(folder)
    assert first > 5 and partial(folder) == [] and read_incidents(folder / "job") == []
    with Launched(folder, *flags) as job:
        steps_beyond(job, first + 5, 1)
        job.agents()[3].terminate()
        steps_beyond(job, first + 6, 2)
        job.done()
    [incident] = read_incidents(folder / "job")
    assert incident["cause"] == "new layout" and incident["message"] == "node 3 was asked to end"
    said = (folder / "job/logs/process_0000.log").read_text()
    assert re.findall(r"resuming from step (\d+)", said) == [str(first), str(incident["step"])]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1)), "each step is taken once"
    planned = tmp_path / "planned"
    with Launched(planned, *flags) as job:
        job.done()
    assert finished(folder, STEPS) == finished(planned, STEPS)
