"""Metrics that a Prometheus server reads from a run."""

import re
import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from panax.cli.main import main
from panax.core.errors import RecipeError
from panax.core.install_hints import install_command
from panax.metrics import PrometheusTracker, RunFacts

FACTS = RunFacts("digits", "abc123", "runs/digits", {"type": "Experiment"})


def read(tracker: PrometheusTracker) -> dict[tuple[str, ...], float]:
    """(name, label values but the run's) to value."""
    address, port = tracker.address_bound
    assert address == "127.0.0.1"
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("run") == "digits"
            samples[sample.name, *sample.labels.values()] = sample.value
    return samples


def test_the_newest_value_of_each_figure_until_the_run_ends():
    tracker = PrometheusTracker(port=0)
    tracker.about(FACTS)
    tracker.record(10, {"train/loss": 2.5, "goodput/data_wait_seconds": 4.0, "goodput/fraction": 0.5})
    tracker.record(20, {"train/loss": float("inf"), "goodput/data_wait_seconds": 5.0, "goodput/training_seconds": 9.0})
    samples = read(tracker)
    assert samples.pop(("panax_train_loss",)) != 2.5
    assert samples == {
        ("panax_step",): 20, ("panax_run_seconds", "data wait"): 5.0, ("panax_run_seconds", "training"): 9.0,
        ("panax_goodput_fraction",): 0.5,
    }  # fmt: skip
    address = tracker.address_bound
    tracker.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    tracker.record(30, {"train/loss": 1.0})
    # The next run of a sweep begins anew.
    tracker.about(FACTS)
    assert read(tracker) == {}
    tracker.close()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"can't listen on 127.0.0.1, port {port} \(.*\); choose another port"):
            PrometheusTracker(port=port).about(FACTS)


@pytest.mark.parametrize("place", ["", "host", "127.0.0.1:", "70000"])
def test_a_place_that_is_none_is_refused_before_anything_runs(place, capsys):
    assert main(["train", "quickstart", "--prometheus", place]) == 2
    assert "prometheus" in capsys.readouterr().err.lower()


def test_without_the_library_it_explains_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RecipeError, match=re.escape(install_command("prometheus"))):
        PrometheusTracker()
