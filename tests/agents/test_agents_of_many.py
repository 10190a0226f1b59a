"""Agents in a job of two processes with two devices each: they train as four devices of one process do, and resume in either."""

import shutil
from pathlib import Path
from typing import Any

import agents_worker
import numpy as np
import pytest
from launching import run_job

RATE, HALF, WHOLE = agents_worker.RATE, 2, agents_worker.STEPS

# As between layouts in one process, tests/contracts/test_layouts.py: sums over devices are in another order.
TOLERANCE = 1e-5

# Of weights and moments, in units of the largest number of an array or of 1: each of a run's updates rounds a weight once (at
# most 2^-23 of a number below 2), and differs by RATE times what its gradient differs by.
UPDATES = WHOLE * max(
    task.rollouts_per_step * task.updates
    for name, task in agents_worker.AGENTS.items()
    if name not in ("seeds", "gymnasium")
)
STATE_TOLERANCE = UPDATES * (2.0**-23 + RATE * TOLERANCE)


def trained(folder: Path, agent: str, run: Path, until: int, processes: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Output of each process, and the final state."""
    left = folder / "left.npz"
    said = run_job(
        folder,
        agents_worker.__file__,
        [agent, str(run), str(until), str(left)],
        processes=processes,
        devices=4 // processes,
    )
    with np.load(left) as saved:
        return said, dict(saved)


def assert_equal_state(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], discrete: bool) -> None:
    """Where actions are whole numbers, environments, episodes and buffers are equal to the last bit, and weights nearly."""
    assert actual.keys() == expected.keys()
    seen = [name for name in expected if "acting" in name or "replay" in name]
    exact = {name for name in expected if expected[name].dtype.kind != "f"} | set(seen if discrete else ())
    assert any("ongoing.state" in name for name in seen) and len(exact) < len(expected)
    for name, leaf in expected.items():
        if name in exact:
            np.testing.assert_array_equal(actual[name], leaf, err_msg=name)
        else:
            limit = STATE_TOLERANCE * max(1.0, np.abs(leaf).max())
            np.testing.assert_allclose(actual[name], leaf, rtol=0, atol=limit, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "first"), [("ppo", 2), ("dqn", 2), ("sac", 1), ("sac", 2), ("seeds", 1)])
def test_two_processes_train_as_one_and_resume_in_either(agent, first, tmp_path):
    """Half a run in one process or two; its checkpoint is resumed by one process and by two; against a whole run in one."""
    (alone,), expected = trained(tmp_path / "alone", agent, tmp_path / "alone-run", WHOLE, 1)
    cut, _ = trained(tmp_path / "cut", agent, tmp_path / "cut-run", HALF, first)
    assert [each["step"] for each in cut] == [HALF] * first
    assert [each["ended"] for each in cut] == [cut[0]["ended"]] * first
    for processes in (1, 2):
        run = shutil.copytree(tmp_path / "cut-run", tmp_path / f"resumed-run-{processes}")
        said, state = trained(tmp_path / f"resumed-{processes}", agent, run, WHOLE, processes)
        assert [each["begun"] for each in said] == [cut[0]["ended"]] * processes, "all of it is in the checkpoint"
        assert [each["ended"] for each in said] == [said[0]["ended"]] * processes
        assert_equal_state(state, expected, discrete=agent != "sac")
        # All processes know an evaluation; one writes to trackers.
        assert [each["evaluation"] for each in said] == [pytest.approx(alone["evaluation"], rel=TOLERANCE)] * processes
        assert [bool(each["figures"]) for each in said] == [True, False][:processes]
        # A policy's loss is a mean of normalized advantages, which cancel.
        assert {**cut[0]["figures"], **said[0]["figures"]} == pytest.approx(
            alone["figures"], rel=TOLERANCE, abs=TOLERANCE
        )


@pytest.mark.slow
def test_environments_of_the_host_are_refused_by_all_processes(tmp_path):
    """They would train, and an environment that breaks would leave both waiting."""
    arguments = ["gymnasium", str(tmp_path / "run"), "1", str(tmp_path / "left.npz")]
    said = run_job(tmp_path, agents_worker.__file__, arguments, processes=2, devices=2)
    assert [each["kind"] for each in said] == ["RecipeError"] * 2
    for each in said:
        assert each["error"].startswith(
            "Gymnasium(name='CartPole-v1') is stepped by one host, and this job has 2 processes"
        )
