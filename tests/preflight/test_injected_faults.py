"""Real faults in real processes: `panax check` names each of them, and nothing else of that kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import checked, clock_library, hosts, kinds, odd_library, of_kind

CORES = sorted(os.sched_getaffinity(0))
SMALL = ("--place", "disk")


def test_a_clock_and_a_version_that_are_off_are_named(tmp_path):
    library = clock_library(tmp_path)
    odd = odd_library(tmp_path / "odd", "numpy", "1.0.99")
    report = checked(
        tmp_path,
        2,
        variables={1: {"LD_PRELOAD": str(library), "CLOCK_AHEAD": "7", "PYTHONPATH": str(odd)}},
    )
    [clock] = of_kind(report, "clock")
    assert clock["said"].startswith("the second one's clock is ") and "ahead of the first one's" in clock["said"]
    [version] = of_kind(report, "version")
    assert version["where"] == "numpy" and "1.0.99 on process 1" in version["said"]
    facts = report["profile"]["processes"][1]
    assert abs(facts["clock_offset_seconds"] - 7) <= facts["clock_error_seconds"] + 1e-6
    assert report["profile"]["mesh"]["fsdp"] == 2 and len(report["profile"]["links"]) == 2


@pytest.mark.slow
def test_of_three_the_odd_clock_is_named(tmp_path):
    library = clock_library(tmp_path)
    found = checked(tmp_path, 3, variables={1: {"LD_PRELOAD": str(library), "CLOCK_AHEAD": "-3"}})
    [clock] = of_kind(found, "clock")
    assert clock["where"].startswith("process 1") and "behind the others'" in clock["said"]


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, 0, 2])
def test_a_host_whose_network_is_slow_is_named(tmp_path, slow):
    with hosts(tmp_path, 3) as cluster:
        if slow is not None:
            cluster.limit(slow, 200)
        report = checked(
            tmp_path,
            3,
            prefixes={index: cluster.prefix(index) for index in range(3)},
            address=cluster.addresses[0],
        )
    assert report["profile"]["places"] == [{"process": i, "host": f"host{i}"} for i in range(3)]
    links = of_kind(report, "link")
    if slow is None:
        assert links == []
    else:
        [link] = links
        assert link["where"] == f"host host{slow} (process {slow})" and link["said"].startswith("sends at")
        assert "mesh axis fsdp" in link["said"]


@pytest.mark.slow
def test_of_two_hosts_the_slow_direction_is_named(tmp_path):
    with hosts(tmp_path, 2) as cluster:
        cluster.limit(1, 200)
        prefixes = {index: cluster.prefix(index) for index in range(2)}
        found = checked(tmp_path, 2, prefixes=prefixes, address=cluster.addresses[0])
    [link] = of_kind(found, "link")
    assert link["where"] == "host host1 (process 1) to host host0 (process 0)"


@pytest.mark.slow
def test_a_host_that_answers_late_is_named(tmp_path):
    with hosts(tmp_path, 3, delays={2: 0.005}) as cluster:
        prefixes = {index: cluster.prefix(index) for index in range(3)}
        found = checked(tmp_path, 3, prefixes=prefixes, address=cluster.addresses[0])
    [link] = of_kind(found, "link")
    assert link["where"] == "host host2 (process 2)" and "latency" in link["said"]
    late = [each["latency_seconds"] for each in found["profile"]["links"] if 2 in (each["source"], each["target"])]
    assert len(late) == 4 and min(late) >= 0.005


@pytest.mark.slow
def test_a_stolen_core_is_named_with_its_thief(tmp_path):
    thief = subprocess.Popen(["taskset", "-c", str(CORES[-1]), sys.executable, "-c", "while True: pass"])
    try:
        pins = {index: ["taskset", "-c", str(CORES[index % len(CORES)])] for index in range(2)}
        report = checked(tmp_path, 2, prefixes=pins)
    finally:
        thief.kill()
        thief.wait()
    [cores] = of_kind(report, "cores")
    assert f"(process {thief.pid})" in cores["said"]


@pytest.mark.slow
def test_a_slow_disk_is_named(tmp_path):
    device = os.stat(tmp_path).st_dev
    group = Path("/sys/fs/cgroup/blkio") / f"panax-slow-{os.getpid()}"
    group.mkdir()
    try:
        for what in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {5 * 2**20}"
            (group / f"blkio.throttle.{what}_bps_device").write_text(limit)
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        report = checked(tmp_path, 1, SMALL, prefixes={0: enter})
    finally:
        group.rmdir()
    [disk] = of_kind(report, "disk")
    assert disk["where"].startswith("disk on host") and "writes 5" in disk["said"] and "below 20 MB/s" in disk["said"]
    # Measured with 4 MiB alone, and removed.
    assert report["profile"]["disks"][0]["written_bytes"] == 2**22
    assert not list(tmp_path.glob("panax-check-*"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_machine_is_described_whatever_its_state(tmp_path, processes):
    """What others do on this machine may be found; faults that are not there are not."""
    found = checked(tmp_path, processes)
    assert not kinds(found) & {"link", "clock", "version", "disk"}
