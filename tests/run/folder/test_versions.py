"""A run that resumes under another JAX reports it in one line; under the same one there is no line."""

import dataclasses

import pytest

from panax import fit
from panax.checkpoint import open_checkpoint
from panax.optim import Schedule, Sgd
from panax.run import versions


@pytest.fixture
def resumed(experiment):
    """Resume a run of two steps for one more; the lines of the second session about changes."""

    def run(monkeypatch=None, recorded=None):
        endless = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
        first = dataclasses.replace(experiment, optimizer=endless, num_steps=2)
        saved = fit(first, say=lambda line: None)
        assert open_checkpoint(saved.checkpoint).manifest.host[versions.VERSIONS] == versions.jax_versions()
        if monkeypatch is not None:
            monkeypatch.setattr(versions, "jax_versions", lambda: recorded)
        lines = []
        fit(dataclasses.replace(first, num_steps=3), say=lines.append)
        assert any("resuming from step 2" in line for line in lines)
        return [line for line in lines if "changed since that checkpoint" in line and "num_steps" not in line]

    return run


def test_another_jax_is_reported_once(resumed, monkeypatch):
    before = versions.jax_versions()
    lines = resumed(monkeypatch, before | {"jax": "0.99.0"})
    assert lines == [
        f"changed since that checkpoint: jax {before['jax']} -> 0.99.0; compiled programs may round differently, so the run may "
        f"differ in the last digits from one that was not interrupted"
    ]


def test_the_same_jax_is_not_mentioned(resumed):
    assert resumed() == []


@pytest.mark.parametrize("host", [{}, {"versions": None}, {"versions": {"jax": 3}}, {"versions": ["jax"]}])
def test_versions_that_are_not_there_are_not_compared(host):
    class Checkpoint:
        manifest = type("Manifest", (), {"host": host})

    assert list(versions.changed_versions(Checkpoint())) == []
