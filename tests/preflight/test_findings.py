"""From figures to findings: each fault is named once, with its location, and healthy figures give none."""

import dataclasses

import pytest
from profiles import VERSIONS, healthy, with_one

from panax.preflight.findings import find_problems


def only(profile):
    [found] = find_problems(profile)
    return found


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
def test_alike_hosts_give_no_finding(hosts):
    assert find_problems(healthy(hosts)) == []
    assert find_problems(healthy(hosts, one_host=True)) == []
    assert find_problems(healthy(hosts, "gpu", "NVIDIA H100 80GB HBM3")) == []


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_a_slow_direction_is_named(hosts):
    found = only(with_one(healthy(hosts), "links", lambda link: (link.source, link.target) == (0, 1), bandwidth=3e7))
    assert found.kind == "link" and found.where == "host a (process 0) to host b (process 1)"
    assert "30 MB/s, where other links carry" in found.said and "mesh axis fsdp" in found.said


def test_a_slow_link_is_named_once_for_both_directions():
    found = only(with_one(healthy(4), "links", lambda link: {link.source, link.target} == {1, 2}, latency_seconds=0.02))
    assert found.where == "host b (process 1) and host c (process 2)"
    assert "latency 20 ms, where other links have 1" in found.said and "MB/s" not in found.said


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize("does", ["sends at", "receives at", "sends and receives at"])
def test_a_host_all_of_whose_links_are_slow_is_named_in_their_place(hosts, does):
    def theirs(link):
        return (link.source == 2 and "sends" in does) or (link.target == 2 and "receives" in does)

    found = only(with_one(healthy(hosts), "links", theirs, bandwidth=1e8))
    assert found.where == "host c (process 2)" and found.said.startswith(does)


def test_of_two_hosts_a_network_that_is_slow_both_ways_is_named_by_what_any_network_does():
    found = only(with_one(healthy(2), "links", lambda link: True, bandwidth=2e6))
    assert found.where == "host a (process 0) and host b (process 1)" and "below the 12.5 MB/s" in found.said


def test_a_slow_device_is_named():
    profile = healthy(4, "gpu", "NVIDIA H100 80GB HBM3")
    found = only(with_one(profile, "devices", lambda each: each.process == 3, matrix_flops=450e12))
    assert found.where == "NVIDIA H100 80GB HBM3:3 of host d (process 3)"
    assert "multiplies matrices at 450 TFLOP/s, where others reach 7" in found.said
    found = only(with_one(profile, "devices", lambda each: each.process == 0, memory_bandwidth=1e12))
    assert "copies memory at 1 TB/s" in found.said


def test_devices_that_are_all_slow_are_named_by_their_data_sheet():
    profile = healthy(2, "gpu", "NVIDIA H100 80GB HBM3")
    found = find_problems(with_one(profile, "devices", lambda each: True, matrix_flops=200e12))
    assert len(found) == 2 and "20% of the 989 TFLOP/s of its data sheet" in found[0].said


def test_a_stolen_core_is_named_once_for_a_host():
    profile = with_one(healthy(4, one_host=True), "processes", lambda each: True, stolen_cores=1.0, stolen_by="backup")
    assert "1.0 of its 8 cores: backup" in only(profile).said


def test_a_slow_disk_is_named():
    found = only(with_one(healthy(4), "disks", lambda each: each.host == "b", write_bandwidth=5e7))
    assert found.where == "runs on host b" and "writes 50 MB/s, where other hosts reach 300 MB/s" in found.said
    found = only(with_one(healthy(1), "disks", lambda each: True, read_bandwidth=5e6))
    assert "reads 5 MB/s, below 20 MB/s: 10 GB take 33 min" in found.said


@pytest.mark.parametrize("offset", [3600.0, -0.3])
def test_a_clock_that_is_off_is_named(offset):
    for process in range(4):
        profile = with_one(
            healthy(4), "processes", lambda each, process=process: each.index == process, clock_offset_seconds=offset
        )
        if process == 0:
            # The others are measured against it.
            others = lambda each: each.index != 0  # noqa: E731
            profile = with_one(healthy(4), "processes", others, clock_offset_seconds=-offset)
        findings = only(profile)
        assert findings.kind == "clock" and f"process {process}" in findings.where
        assert ("ahead of" if offset > 0 else "behind") in findings.said
    findings = only(with_one(healthy(2), "processes", lambda each: each.index == 1, clock_offset_seconds=offset))
    assert findings.where == "host a (process 0) and host b (process 1)"


def test_a_difference_that_the_clocks_error_explains_is_not_named():
    off = with_one(
        healthy(4), "processes", lambda each: each.index == 1, clock_offset_seconds=0.4, clock_error_seconds=0.5
    )
    assert find_problems(off) == []


def test_an_odd_version_is_named():
    odd = {**VERSIONS, "numpy": "2.0.0"}
    findings = only(with_one(healthy(4), "processes", lambda each: each.index == 2, versions=odd))
    assert findings.where == "host c (process 2)" and findings.said == "numpy is 2.0.0, elsewhere 2.4.6"
    findings = only(with_one(healthy(2), "processes", lambda each: each.index == 1, versions=odd))
    assert findings.where == "numpy"
    assert findings.said == "2.4.6 on host a (process 0); 2.0.0 on host b (process 1)"
    lacking = {name: version for name, version in VERSIONS.items() if name != "kernel"}
    findings = only(with_one(healthy(4), "processes", lambda each: each.index == 0, versions=lacking))
    assert findings.said == "kernel is missing, elsewhere 6.1"


def test_several_faults_are_all_named():
    profile = with_one(healthy(4), "links", lambda link: link.source == 1, bandwidth=1e8)
    profile = with_one(profile, "disks", lambda each: each.host == "d", read_bandwidth=1e7)
    profile = dataclasses.replace(
        with_one(profile, "processes", lambda each: each.index == 3, clock_offset_seconds=9.0)
    )
    assert [each.kind for each in find_problems(profile)] == ["link", "disk", "clock"]
