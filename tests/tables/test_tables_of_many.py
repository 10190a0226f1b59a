"""Tables in checkpoints: resumed bit by bit, restored onto other meshes, and trained by two processes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tables_worker
from launching import run_job


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, dict, dict]:
    """(a folder with a checkpoint after two steps of one device, the run that wrote it, the same run without a break)."""
    folder = str(tmp_path_factory.mktemp("tables"))
    one = jax.devices()[:1]
    return folder, tables_worker.trained({}, 2, "-", folder, one), tables_worker.trained({}, 4, "-", "-", one)


def test_a_resumed_run_is_bitwise_the_one_without_a_break(saved):
    folder, first, unbroken = saved
    resumed = tables_worker.trained({}, 2, folder, "-", jax.devices()[:1])
    assert resumed["begun"] == first["ended"]
    assert first["losses"] + resumed["losses"] == unbroken["losses"]
    assert resumed["ended"] == unbroken["ended"]


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, pytest.param({"replica": 8}, marks=pytest.mark.slow)])
def test_a_checkpoint_is_restored_onto_another_mesh_bit_by_bit(saved, mesh):
    folder, first, unbroken = saved
    resumed = tables_worker.trained(mesh, 2, folder, "-")
    assert resumed["begun"] == first["ended"]
    np.testing.assert_allclose(resumed["losses"], unbroken["losses"][2:], rtol=1e-5)


@pytest.mark.slow
def test_two_processes_restore_train_and_save_what_one_continues_from(saved, tmp_path: Path):
    folder, first, unbroken = saved
    between = str(tmp_path / "between")
    arguments = [json.dumps({"fsdp": 8}), "1", folder, between]
    results = run_job(tmp_path / "job", tables_worker.__file__, arguments, processes=2, devices=4, seconds=180)
    assert results[0] == results[1] and results[0]["begun"] == first["ended"]
    last = tables_worker.trained({}, 1, between, "-", jax.devices()[:1])
    assert last["begun"] == results[0]["ended"]
    np.testing.assert_allclose(results[0]["losses"] + last["losses"], unbroken["losses"][2:], rtol=1e-5)
    np.testing.assert_allclose(last["sum"], unbroken["sum"], rtol=1e-6)
