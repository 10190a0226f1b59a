"""The target of a compiled program: derived from devices, attached or not, and never from how many are attached."""

import jax
import jax.numpy as jnp
import pytest

from panax.core import PlatformTraits, Target, current_layout, current_target
from panax.core.layout.layout import arrays_are_local, use_global_arrays, use_layout
from panax.core.layout.target import device_target
from panax.kernels.product import product
from panax.mesh import MeshShape, Placement
from panax.plan import parse_target, target_devices


class Device:
    """What a plug-in that Panax has never heard of could describe."""

    platform = "fakechip"
    device_kind = "Fake F1"


@pytest.mark.parametrize("name", ["h100x8", "a100x1", "v5e-16", "v5p-8", "v6e-8"])
def test_a_mesh_of_absent_devices_is_a_target(name):
    hardware = parse_target(name)
    placement = Placement.create(MeshShape(replica=hardware.count), devices=target_devices(hardware))
    assert placement.target == hardware.target
    with placement.activate():
        assert current_target() == hardware.target
        with use_global_arrays():
            assert current_target() == hardware.target and current_layout() is None


def test_a_vendor_goes_with_its_platform():
    assert Target("rocm") == Target("gpu", vendor="amd") and Target("tpu").vendor == "google"
    assert str(Target("cuda", architecture="h100")) == "gpu (h100)"


def test_an_unknown_platform_keeps_its_name_and_has_the_traits_of_an_unknown_chip():
    target = device_target(Device(), 4)
    assert target == Target("fakechip", architecture="f1", devices=4)
    assert target.traits == PlatformTraits()


def test_arrays_are_local_whatever_is_attached():
    assert jax.device_count() == 8
    one, eight = Placement.create(devices=jax.devices()[:1]), Placement.create(MeshShape(fsdp=8))
    assert arrays_are_local()
    for placement, local_when_whole in ((one, True), (eight, False)):
        with use_layout(placement):
            assert arrays_are_local()
            with use_global_arrays():
                assert arrays_are_local() == local_when_whole


def test_whole_arrays_on_a_mesh_are_left_to_the_partitioner(library):
    """A custom call can't be split; on one device, or in a program for each device, it is used."""
    a = jnp.ones((8, 8))
    handed = {}
    for devices in (1, 8):
        with (
            use_layout(Placement.create(MeshShape(fsdp=devices), devices=jax.devices()[:devices])),
            use_global_arrays(),
        ):
            run = jax.jit(lambda a: product("ab,bc->ac", a, a, jnp.float32))
            handed[devices] = "panax_product" in run.lower(a).as_text()
    assert handed == {1: library != "xla", 8: False}
