"""Checkpoints of several processes: each writes its part, any number of processes on any layout resumes, each byte read once."""

import json
from pathlib import Path

import checkpoint_worker
import jax
import pytest
from launching import run_job

from panax.checkpoint import Checkpointer, restore
from panax.mesh import MeshShape, Placement


def run(folder: Path, processes: int, layout: dict[str, int], source: Path | str = "-", target: Path | str = "-"):
    arguments = [json.dumps(layout), str(source), str(target)]
    return run_job(folder, checkpoint_worker.__file__, arguments, processes=processes, devices=2)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Three processes write, three others of another layout read and write, two read."""
    folder = tmp_path_factory.mktemp("many")
    first = run(folder / "1", 3, {"fsdp": 6}, "-", folder / "a")
    second = run(folder / "2", 3, {"replica": 3, "fsdp": 2}, folder / "a", folder / "b")
    third = run(folder / "3", 2, {"replica": 2, "tensor": 2}, folder / "b")
    return folder, [first, second, third]


def test_all_processes_hold_what_was_written(chain):
    _, found = chain
    digests = {each["digest"] for processes in found for each in processes}
    assert digests == {checkpoint_worker.expected()}


def test_bytes_read_do_not_grow_with_the_replicas(chain):
    """Three replicas, on three processes, read each byte once among them."""
    _, (_, second, third) = chain
    for processes in (second, third):
        assert sum(each["read"] for each in processes) == processes[0]["held"]
    assert all(each["read"] > 0 for each in second), "the replicas share the reading"


@pytest.mark.parametrize("name", ["a", "b"])
def test_every_part_was_written_once_by_its_owner(chain, name):
    folder, _ = chain
    checkpoint = Checkpointer(folder / name).open(2)
    assert sum(e.nbytes for e in checkpoint.manifest.arrays.values()) == sum(
        chunk.box.size * entry.itemsize for entry in checkpoint.manifest.arrays.values() for chunk in entry.chunks
    )
    writers = {file.split("/")[1][:5] for file in checkpoint.manifest.files if file.endswith(".bin")}
    assert writers == {"00000", "00001", "00002"}
    assert checkpoint.verify() == [] and checkpoint.attachment("note.txt") == "hello"
    assert Checkpointer(folder / name).steps() == [1, 2]


@pytest.mark.parametrize("count", [1, 8])
def test_one_process_continues_with_what_three_wrote(chain, count):
    folder, _ = chain
    placement = Placement.create(MeshShape(fsdp=count), devices=jax.devices()[:count])
    wanted = checkpoint_worker.state(placement)
    checkpoint = Checkpointer(folder / "b").open(2)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    found = restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, wanted))
    assert checkpoint_worker.digest(found) == checkpoint_worker.expected()
    assert checkpoint.bytes_read == checkpoint.manifest.nbytes


def test_damage_that_one_process_meets_is_an_error_in_all(chain, tmp_path):
    folder, _ = chain
    checkpoint = Checkpointer(folder / "a").open(2)
    chunk = checkpoint.manifest.arrays["rows"].chunks[-1]
    file = Path(checkpoint.url, chunk.file)
    data = bytearray(file.read_bytes())
    data[chunk.offset] ^= 1
    file.write_bytes(data)
    try:
        params = run(tmp_path, 3, {"fsdp": 6}, folder / "a")
    finally:
        data[chunk.offset] ^= 1
        file.write_bytes(data)
    assert [each["kind"] for each in params] == ["DamagedError"] * 3
    assert all(f"{chunk.file} is damaged: bytes {chunk.offset} to" in each["error"] for each in params)
