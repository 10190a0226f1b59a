"""Which mesh axes gradients travel compressed over, by what was measured and by hosts."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_recipe import tiny

import panax
from panax.comms import Comms
from panax.core.errors import RecipeError
from panax.mesh import MeshShape, Placement
from panax.plan import parse_target, target_devices
from panax.plan.search.profile import (
    CollectiveRates,
    DeviceLocation,
    DeviceRates,
    HardwareProfile,
    ProcessFacts,
    profile_in,
    profiles_folder,
)
from panax.run.preparation import prepare
from panax.run.tools.slow_axes import axis_bandwidths, crosses_hosts, devices_per_process, resolve_slow_axes

MESH = {"replica": 2, "fsdp": 4}


@pytest.fixture(autouse=True)
def no_other_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    assert not list(profiles_folder().glob("*.json"))


def profile(**gigabytes):
    kind = jax.devices()[0].device_kind
    return HardwareProfile(
        made="2026-11-25T00:00:00+00:00",
        platform="cpu",
        device_kind=kind,
        matrix_dtype="float32",
        mesh=MESH,
        places=tuple(DeviceLocation(process=0, host="here") for _ in range(8)),
        devices=(DeviceRates(name="cpu:0", process=0, host="here", matrix_flops=1e9, memory_bandwidth=1e9),),
        processes=(ProcessFacts(index=0, host="here"),),
        collectives=tuple(
            CollectiveRates(
                kind=kind,
                axes=(axis,),
                ways=MESH[axis],
                sent_bytes=2**20,
                latency_seconds=1e-5,
                bandwidth=rate * 1e9 / share,
            )
            for axis, rate in gigabytes.items()
            for kind, share in (("all-gather", 1.0), ("all-to-all", 3.0))
        ),
    )


def experiment(folder, **comms):
    return dataclasses.replace(
        tiny(), directory=str(folder), mesh=MeshShape(**MESH), comms=Comms(compress="int8", over=("auto",), **comms)
    )


def test_the_axis_that_was_measured_slow_is_taken(tmp_path):
    profile(replica=0.1, fsdp=12.0).save(profile_in(tmp_path))
    said = []
    found = prepare(experiment(tmp_path), said.append)
    assert found.step.program.comms.over == ("replica",)
    assert "comms.over     replica: measured: replica 0.1 GB/s, fsdp 12 GB/s" in said
    assert any("gradients travel as int8 over replica" in line for line in said)
    assert found.step.program.abstract.owed is not None
    assert axis_bandwidths(profile(fsdp=12.0), {"fsdp": 4, "replica": 1}) == {"fsdp": 12e9}


def test_a_fast_network_asks_for_no_compression(tmp_path):
    profile(replica=11.0, fsdp=12.0).save(profile_in(tmp_path))
    with pytest.raises(RecipeError, match=r"finds no slow axis among replica: measured: replica 11 GB/s, fsdp 12 GB/s"):
        prepare(experiment(tmp_path), lambda line: None)


def test_without_a_profile_hosts_decide(tmp_path):
    with pytest.raises(RecipeError, match=r"there is no profile of this mesh .*no axis crosses hosts; name one"):
        prepare(experiment(tmp_path), lambda line: None)
    placement = Placement.create(MeshShape(replica=8, fsdp=8), devices=target_devices(parse_target("h100x64")))
    hosts = np.vectorize(lambda device: device.process_index)(placement.devices.devices)
    assert len(set(hosts.flat)) == 8
    assert crosses_hosts(placement, "replica") and not crosses_hosts(placement, "fsdp")


def test_a_step_by_itself_is_asked_too(tmp_path):
    batch = next(
        prepare(dataclasses.replace(experiment(tmp_path), comms=Comms()), lambda line: None).data.train.batches()
    )
    task = tiny().task.adapt_to_data(panax.core.DataFacts(300, 64))
    with pytest.raises(RecipeError, match="finds no slow axis among replica"):
        panax.compile_step(
            task,
            batch.batch,
            mesh=MeshShape(**MESH),
            axes=dict.fromkeys(batch.batch, ("batch", "seq")),
            comms=Comms(compress="int8", over=("auto",)),
        )
    with pytest.raises(RecipeError, match=r"comms.over: 'atuo' is not a mesh axis"):
        Comms(compress="int8", over=("atuo",))


def test_an_axis_that_joins_hosts_and_their_devices_is_advised_against(tmp_path, monkeypatch):
    """Copies on all 16 devices of two hosts: those inside a host are to be added up first."""
    mixed = Placement.create(MeshShape(replica=16), devices=target_devices(parse_target("h100x16")))
    apart = Placement.create(MeshShape(replica=2, fsdp=8), devices=target_devices(parse_target("h100x16")))
    assert (
        devices_per_process(mixed, "replica"),
        devices_per_process(apart, "replica"),
        devices_per_process(apart, "fsdp"),
    ) == (
        8,
        1,
        8,
    )
    chosen = dataclasses.replace(experiment(tmp_path), comms=Comms(compress="int8", over=("replica",)))
    said = {}
    for name, placement in (("mixed", mixed), ("apart", apart)):
        resolve_slow_axes(prepare(chosen).step.program, placement, None, said.setdefault(name, []).append)
    (line,) = said["mixed"]
    assert "replica=16 joins 2 hosts with 8 devices each" in line
    assert "--mesh.replica 2 --mesh.fsdp 8" in line
    assert said["apart"] == []
