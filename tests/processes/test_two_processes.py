"""Two processes of four devices each train as one device does; they speak over loopback alone."""

import json
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
def found(tmp_path_factory) -> list[dict]:
    return run_processes(tmp_path_factory.mktemp("processes"), [json.dumps(sizes) for sizes in MESHES])


@pytest.fixture(scope="module")
def alone() -> dict:
    return worker.trained({}, jax.devices()[:1])


def test_each_process_sees_all_devices_and_holds_its_own(found):
    assert [(each["local"], each["all"]) for each in found] == [(EACH, PROCESSES * EACH)] * PROCESSES


@pytest.mark.parametrize("index", range(len(MESHES)), ids=[str(sizes) for sizes in MESHES])
def test_trains_as_one_device_does(index, found, alone):
    for each in found:
        many = each["meshes"][index]
        np.testing.assert_allclose(many["losses"], alone["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(many["gradient_norm"], alone["gradient_norm"], rtol=10 * TOLERANCE)
        if index == 0:
            np.testing.assert_allclose(many["held_out"], alone["held_out"], rtol=TOLERANCE)
    assert found[0]["meshes"][index] == found[1]["meshes"][index]


def test_the_slowest_axis_spans_the_processes(found):
    spans = [mesh["processes"] for mesh in found[0]["meshes"]]
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
