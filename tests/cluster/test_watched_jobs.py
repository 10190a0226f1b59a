"""A job of processes that pretend to train and to measure: slow ones are reported, shown, recorded, and taken out by policy."""

import json
import threading
import time
from collections.abc import Callable

import pytest

from panax.cluster.job import RestartPolicy, Stragglers
from panax.cluster.stragglers import slow_hosts
from panax.cluster.supervisor.job_folder import read_findings
from panax.core.errors import LaunchError
from panax.metrics.report.incidents import list_incidents
from panax.metrics.report.run_files import read_run


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Steps of 50 ms: what would be a host's slowness for seconds is one for tenths."""
    monkeypatch.setattr(slow_hosts, "SLOW_SECONDS", 0.2)


class Slowed:
    """A job with nodes that become slow while it runs, until the awaited event."""

    def __init__(self, launched, slow: str, awaited: Callable[[dict, list[str]], bool], seconds: float = 60.0):
        self.launched, self.slow, self.awaited, self.seconds = launched, slow, awaited, seconds
        self.came = False

    def run(self, **settings) -> None:
        thread = threading.Thread(target=self._play, daemon=True)
        thread.start()
        assert self.launched.run("elastic", **settings) == 0
        thread.join(10)
        assert self.came, self.launched.out.getvalue()

    def _play(self) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not self.came:
            time.sleep(0.05)
            path = self.launched.folder / "job/status.json"
            status = json.loads(path.read_text()) if path.exists() else {"step": -1}
            slow = self.launched.folder / "slow_nodes"
            if status["step"] >= 8 and not slow.exists():
                # Processes that pretend don't wait for each other: all of them begin at one later probe.
                slow.write_text(f"{status['step'] + 30} {self.slow}")
            self.came = status["step"] >= 8 and self.awaited(status, self.kinds())
        (self.launched.folder / "finish").touch()

    def kinds(self) -> list[str]:
        return [one["kind"] for one in read_findings(self.launched.folder / "job")]


def test_a_slow_node_is_reported_shown_and_listed(launched, capsys):
    from panax.cli.main import main

    def awaited(status: dict, kinds: list[str]) -> bool:
        return bool(status["slow"]) and "slow host" in kinds

    Slowed(launched, "1", awaited).run(processes=3, nodes=3)
    said = " ".join(launched.out.getvalue().split())
    assert "slow host at step" in said and "node 1 on" in said
    assert "its matrix multiplications take 30 ms, those of the others 10 ms" in said
    assert f"`panax cordon {launched.folder} 1` continues without it" in said
    assert launched.status["nodes"]["running"] == [0, 1, 2] and not launched.incidents
    assert main(["status", str(launched.folder)]) == 0
    shown = capsys.readouterr().out
    assert "slow now: node 1 on" in shown and ": slow host: node 1 on" in shown
    [mishap] = [one for one in list_incidents(read_run(launched.folder)) if one.cause == "slow host"]
    assert mishap.step > 0 and "node 1 on" in mishap.message and mishap.lost_steps is None


def test_a_slow_node_is_taken_out_by_policy_and_the_others_stay(launched):
    def awaited(status: dict, kinds: list[str]) -> bool:
        return status["nodes"]["running"] == [0, 1] and status["attempt"] == 2 and status["step"] > 90

    Slowed(launched, "2", awaited).run(processes=3, nodes=3, policy={"stragglers": "cordon"})
    assert [one["cause"] for one in launched.incidents] == ["new layout"]
    assert "node 2 was taken out of the job" in launched.incidents[0]["message"]
    [why] = json.loads((launched.folder / "job/cordoned.json").read_text()).values()
    assert "its matrix multiplications take 30 ms" in why
    # The two that are left are as they were: neither is named.
    assert Slowed.kinds(Slowed(launched, "", lambda *_: True)) == ["slow host"]


def test_no_more_nodes_are_taken_out_than_the_policy_leaves(launched):
    def awaited(status: dict, kinds: list[str]) -> bool:
        return "stays in the job" in " ".join(launched.out.getvalue().split())

    Slowed(launched, "2", awaited).run(processes=3, nodes=3, policy={"stragglers": "cordon", "min_nodes": 3})
    assert launched.status["nodes"]["running"] == [0, 1, 2] and not launched.incidents
    assert not (launched.folder / "job/cordoned.json").exists()


@pytest.mark.slow
def test_of_two_slow_nodes_one_is_taken_out_at_a_time(launched):
    def awaited(status: dict, kinds: list[str]) -> bool:
        return len(status["nodes"]["running"]) == 4 and status["attempt"] == 2 and status["step"] > 20

    Slowed(launched, "1 3", awaited).run(processes=5, nodes=5, policy={"stragglers": "cordon"})
    assert Slowed.kinds(Slowed(launched, "", lambda *_: True))[:2] == ["slow host"] * 2
    assert len(json.loads((launched.folder / "job/cordoned.json").read_text())) <= 2


@pytest.mark.slow
def test_nodes_that_are_all_slow_stay_and_ignored_ones_are_not_named(launched):
    def awaited(status: dict, kinds: list[str]) -> bool:
        return status["step"] > 70

    Slowed(launched, "0 1 2", awaited).run(processes=3, nodes=3, policy={"stragglers": "cordon"})
    assert not read_findings(launched.folder / "job") and not (launched.folder / "job/cordoned.json").exists()


def test_a_policy_of_ignoring_names_no_host_but_links(launched):
    def awaited(status: dict, kinds: list[str]) -> bool:
        return status["step"] > 70

    Slowed(launched, "1 link", awaited).run(processes=3, nodes=3, policy={"stragglers": "ignore"})
    [one] = read_findings(launched.folder / "job")
    assert one["kind"] == "slow link" and one["message"].startswith("mesh axis fsdp is slow between")
    assert "an all-gather over it carries 2.62 MB/s, down from 131 MB/s at the run's first probes" in one["message"]


def test_policies_of_other_names_are_refused():
    assert RestartPolicy(stragglers="cordon").stragglers is Stragglers.CORDON
    with pytest.raises(LaunchError, match=r"policy.stragglers='remove'; expected ignore, warn, cordon"):
        RestartPolicy(stragglers="remove")
    with pytest.raises(LaunchError, match=r"policy.slow_factor=1.0, policy.slow_probes=3; expected more than 1"):
        RestartPolicy(slow_factor=1.0)
