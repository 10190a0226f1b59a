"""Two processes of four devices each train as one device does; they speak over loopback alone."""

import json
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import worker
from launching import run_job

PROCESSES, EACH, SECONDS = 2, 4, 180
MESHES = [{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"stage": 2, "fsdp": 2, "tensor": 2}]

# As between layouts in one process, tests/contracts/test_layouts.py.
TOLERANCE = 1e-5


def run_processes(folder: Path, arguments: list[str]) -> list[dict]:
    return run_job(folder, worker.__file__, arguments, processes=PROCESSES, devices=EACH, seconds=SECONDS)


@pytest.fixture(scope="module")
def alone() -> dict:
    return worker.trained({}, jax.devices()[:1])


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(MESHES)))])
def test_trains_as_one_device_does(index, alone, tmp_path):
    trained, *others = (json.dumps(sizes) for sizes in (MESHES[index], *MESHES))
    results = run_processes(tmp_path, [trained, *others])
    assert [(each["local"], each["all"]) for each in results] == [(EACH, PROCESSES * EACH)] * PROCESSES
    many = results[0]["trained"]
    assert results[1]["trained"] == many
    np.testing.assert_allclose(many["losses"], alone["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose(many["gradient_norm"], alone["gradient_norm"], rtol=10 * TOLERANCE)
    np.testing.assert_allclose(many["held_out"], alone["held_out"], rtol=TOLERANCE)
    if hasattr(os, "SCHED_BATCH"):
        # Which policy it chooses depends on what else runs here.
        assert [each["watches_cores"] for each in results] == [True] * PROCESSES
    # The slowest axis spans the processes.
    spans = results[0]["processes"]
    assert spans[0]["fsdp"] == 2
    assert spans[1] == dict.fromkeys(spans[1], 1) | {"replica": 2}
    assert spans[2] == dict.fromkeys(spans[2], 1) | {"stage": 2}


def test_a_process_that_fails_is_shown_and_the_others_are_ended(tmp_path):
    start = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"(?s)exit codes.*LayoutError: the mesh fsdp=16 has 16 devices, there are 8"
    ):
        run_processes(tmp_path, [json.dumps({"fsdp": 16})])
    assert time.monotonic() - start < SECONDS / 2
