"""`panax sweep`: the table at its end, and its refusals."""

import dataclasses

import pytest

from panax.cli.commands import sweep as command
from panax.cli.main import main
from panax.run.tools.sweep import Sweep, Trial


def test_its_table_has_the_best_first_and_fits_a_terminal(monkeypatch, capsys):
    requests = []

    def trained(trials, **how):
        requests.append((trials, how))
        losses = iter((3.0, 2.0))
        ended = tuple(
            Trial(settings, f"runs/x-sweep/{n}", 20, {"loss": next(losses), "accuracy": 0.25})
            for n, (settings, _) in enumerate(trials[:2])
        )
        return Sweep("runs/x-sweep", (*ended, Trial(trials[2][0], "runs/x-sweep/2", error="it diverged")))

    monkeypatch.setattr(command, "run_trials", trained)
    assert main(["sweep", "quickstart", "--optimizer.schedule.peak", "1e-3,3e-3,9", "--num-steps=20", "--fresh"]) == 0
    (trials, how), out = requests[0], capsys.readouterr().out.splitlines()
    assert [experiment.optimizer.schedule.peak for _, experiment in trials] == [1e-3, 3e-3, 9.0]
    assert all(experiment.num_steps == 20 for _, experiment in trials) and how == {
        "fresh": True,
        "accept_changes": False,
    }
    assert [line.split() for line in out[1:5]] == [
        ["peak", "steps", "loss", "accuracy"], ["3e-3", "20", "2.0000", "25.0%"], ["1e-3", "20", "3.0000", "25.0%"],
        ["9", "0", "failed"],
    ]  # fmt: skip
    assert out[5:] == [
        "best          runs/x-sweep/1", "table         runs/x-sweep/sweep.csv", "chart         runs/x-sweep/sweep.svg"
    ]  # fmt: skip
    broken = dataclasses.replace(trained(trials), interrupted_by="SIGINT")
    monkeypatch.setattr(command, "run_trials", lambda trials, **how: broken)
    assert main(["sweep", "quickstart", "--seed", "1,2"]) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected `panax sweep RECIPE --SETTING A,B`"),
        (["quickstart"], "no setting has several values; separate them by commas"),
        (["quickstart", "--data", "a,b.txt"], "no setting has several values"),
        (["quickstrat", "--seed", "1,2"], "did you mean 'quickstart'"),
        (["quickstart", "--optimizer.schedule.peak", "1e-3,-1"], "peak"),
    ],
)
def test_what_it_refuses_is_one_message(arguments, message, capsys):
    assert main(["sweep", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out and "Traceback" not in captured.err


def test_its_help_fits_a_terminal(capsys):
    assert main(["sweep", "--help"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
