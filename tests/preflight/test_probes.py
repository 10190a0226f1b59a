"""Measurements while a run trains: which axes, against which figures of a check before it."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh
from profiles import healthy

from panax.preflight.probes import MatrixProbe, axes_across_processes, axis_peers, axis_uses, is_same_hosts


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def mesh_of(**sizes: int) -> Mesh:
    """Two devices in each process."""
    count = int(np.prod(list(sizes.values())))
    devices = np.array([Device(number, number // 2) for number in range(count)], dtype=object)
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def test_an_axis_inside_of_processes_is_not_measured():
    mesh = mesh_of(replica=2, fsdp=2, tensor=2)
    assert axes_across_processes(mesh) == ["replica", "fsdp"]
    assert axis_peers(mesh, "fsdp", 0) == [0, 1] and axis_peers(mesh, "replica", 3) == [1, 3]
    assert [(use.axis, use.kind, use.expected_seconds) for use in axis_uses(mesh, None)] == [
        ("replica", "all-gather", None),
        ("fsdp", "all-gather", None),
    ]


def test_a_profile_states_what_is_expected_and_of_which_kind():
    mesh = mesh_of(replica=2, fsdp=4)
    profile = healthy(4)
    reduce = dataclasses.replace(profile.collectives[0], kind="all-reduce", axes=("replica",), bandwidth=5e8)
    uses = axis_uses(mesh, dataclasses.replace(profile, collectives=(*profile.collectives, reduce)))
    assert [(use.axis, use.kind) for use in uses] == [("replica", "all-reduce"), ("fsdp", "all-gather")]
    assert [use.expected_seconds for use in uses] == pytest.approx([2e-4 + 2**18 / 5e8, 2e-4 + 2**18 / 1e9])


def test_a_profile_of_other_hosts_or_another_mesh_is_none_of_this_run():
    profile = healthy(4)
    assert is_same_hosts(profile, ["a", "b", "c", "d"], {"replica": 1, "fsdp": 4})
    assert not is_same_hosts(profile, ["a", "b", "c", "e"], {"fsdp": 4})
    assert not is_same_hosts(profile, ["a", "b", "c", "d"], {"replica": 2, "fsdp": 2})


def test_a_burst_of_multiplications_takes_time():
    probe = MatrixProbe()
    assert probe.flops == 2 * 384**3 and probe() > 0
