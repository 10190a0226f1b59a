"""Copies in the memory of three simulated hosts outlive their workers, the loss of a host, and a flipped bit."""

import json
import shutil
import signal
from pathlib import Path

import checkpoint_worker
import memory_worker
import pytest
from launching import Job, run_job

HOSTS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Three hosts with copies of steps 10 and 15, after their workers were killed."""
    folder = tmp_path_factory.mktemp("memory")
    arguments = [json.dumps({"fsdp": 6}), "keep", str(folder / "hosts"), *HOSTS]
    job = Job(folder, memory_worker.__file__, arguments, processes=3, devices=2)
    try:
        for child in job.children:
            child.wait(120)
    finally:
        job.kill()
    assert [child.returncode for child in job.children] == [-signal.SIGKILL] * 3, job.shown()
    assert [json.loads(job.said(i).splitlines()[-1]) for i in range(3)] == [[]] * 3
    return folder / "hosts"


@pytest.fixture
def hosts(kept, tmp_path) -> Path:
    shutil.copytree(kept, tmp_path / "hosts")
    return tmp_path / "hosts"


def restored(folder: Path, hosts: Path, names: list[str], layout: dict[str, int]) -> list[dict]:
    arguments = [json.dumps(layout), "restore", str(hosts), *names]
    return run_job(folder, memory_worker.__file__, arguments, processes=len(names), devices=2)


def test_each_host_holds_two_parts_of_the_last_steps_alone(kept):
    for number, host in enumerate(HOSTS):
        parts = sorted(path.name for path in (kept / host).rglob("step_00000015/*/part-*"))
        assert parts == sorted(f"part-{p:05d}-of-00003.json" for p in (number, (number - 1) % 3))
        assert not list((kept / host).rglob("step_00000005")) and not list((kept / host).rglob("step_00000010"))


@pytest.mark.parametrize("names", [["a", "new", "c"], ["c", "a"]], ids=["replaced", "fewer"])
def test_continues_without_a_host_on_any_layout(hosts, tmp_path, names):
    """Host b is gone: its part is at its peer's, whatever takes its place."""
    shutil.rmtree(hosts / "b")
    found = restored(tmp_path / "job", hosts, names, {"replica": len(names), "fsdp": 2})
    for each in found:
        assert (each["step"], each["host"]) == (15, {"data": 15})
        assert each["digest"] == checkpoint_worker.expected()


def test_a_flipped_bit_is_read_from_the_other_copy_and_a_lost_pair_is_no_state(hosts, tmp_path):
    for file in (hosts / "a").rglob("step_00000015/*/00000-*.bin"):
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    [found] = restored(tmp_path / "first", hosts, ["a"], {"fsdp": 2})
    assert found["step"] is None, "one host holds two of three parts"
    found = restored(tmp_path / "second", hosts, ["a", "b"], {"fsdp": 4})
    assert [each["digest"] for each in found] == [checkpoint_worker.expected()] * 2
