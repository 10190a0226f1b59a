"""Programs of a run are compiled while its state is drawn or read: once, and by nobody else."""

import dataclasses
import threading

import numpy as np
import pytest

from panax import fit
from panax.core.errors import PanaxError
from panax.run.compile_ahead import expected_shapes
from panax.run.preparation import prepare
from panax.train import CompiledStep
from panax.train.compilation.background_compile import BackgroundBuilder


def test_errors_come_to_whoever_asks():
    ahead, here = BackgroundBuilder(), threading.current_thread()

    def fail():
        raise ValueError("no program")

    ahead.begin("wrong", fail)
    ahead.begin("right", threading.current_thread)
    assert ahead.get_or_make("right", lambda: None) is not here
    with pytest.raises(ValueError, match="no program"):
        ahead.get_or_make("wrong", lambda: None)
    # Each is given once, and what nobody began is made by whoever asks.
    assert ahead.get_or_make("right", threading.current_thread) is here


def traced_in(monkeypatch, experiment, **settings):
    """The names of the threads that traced training steps in a run."""
    threads, trace = [], CompiledStep.trace
    monkeypatch.setattr(
        CompiledStep, "trace", lambda self, batch: threads.append(threading.current_thread().name) or trace(self, batch)
    )
    fit(experiment, quiet=True, **settings)
    return threads


def test_a_run_traces_its_step_once(experiment, monkeypatch):
    """The shapes that are known before the data is read are those that come; a run that resumes compiles while it reads."""
    for steps, threads in ((6, 1), (8, 1), (8, 0)):
        # The last run has ended before it begins: nothing is compiled for it.
        found = traced_in(monkeypatch, dataclasses.replace(experiment, num_steps=steps), accept_changes=True)
        assert len(found) == threads
        assert all(thread.startswith("panax-compile") for thread in found)


def test_shapes_that_only_reading_reveals(experiment):
    ramped = dataclasses.replace(experiment, overfit_batches=1)
    assert expected_shapes(prepare(ramped)) is None
    rows = ({"x": np.zeros((4, 2), np.float32)} for _ in range(3))
    assert (
        expected_shapes(dataclasses.replace(prepare(experiment), experiment=dataclasses.replace(experiment, data=rows)))
        is None
    )
    train, held_out = expected_shapes(prepare(experiment))
    assert {name: leaf.shape for name, leaf in train.items()} == {name: leaf.shape for name, leaf in held_out.items()}


def test_an_error_of_the_step_is_the_run_s_own(experiment, monkeypatch):
    """An error in the thread ends the run as if the run had compiled."""

    def refuse(self, batch):
        raise PanaxError("this step can't be")

    monkeypatch.setattr(CompiledStep, "trace", refuse)
    with pytest.raises(PanaxError, match="this step can't be"):
        fit(experiment, quiet=True)
