"""Which device stands where, for devices that are only descriptions."""

import dataclasses
import warnings

import numpy as np
import pytest

from panax.core.errors import LayoutError
from panax.mesh.devices import device_grid


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int = 0
    platform: str = "gpu"
    slice_index: int | None = 0


def cluster(hosts: int, each: int, **attributes) -> list[FakeDevice]:
    """Devices in an order that says nothing."""
    devices = [FakeDevice(host * each + i, host, **attributes) for host in range(hosts) for i in range(each)]
    order = np.random.default_rng(0).permutation(len(devices))
    return [devices[i] for i in order]


def ids(grid: np.ndarray) -> list:
    return np.vectorize(lambda device: device.id)(grid).tolist()


def warned(devices, **sizes) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device_grid(devices, sizes)
    return [str(warning.message) for warning in caught]


def test_devices_are_counted_off_by_host_and_number():
    grid = device_grid(cluster(2, 4), {"fsdp": 4, "tensor": 2})
    assert ids(grid) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_hosts_of_one_slice_stand_together():
    # Devices 0 and 2 are of one rack, 1 and 3 of another.
    devices = [FakeDevice(i, process_index=i, slice_index=i % 2) for i in range(4)]
    assert ids(device_grid(devices, {"replica": 2, "fsdp": 2})) == [[0, 2], [1, 3]]


def test_another_number_of_devices_is_refused():
    with pytest.raises(LayoutError, match=r"the mesh fsdp=4·tensor=2 has 8 devices, 6 were given"):
        device_grid(cluster(1, 6), {"fsdp": 4, "tensor": 2})


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 16},
        {"fsdp": 2, "tensor": 8},
        {"replica": 2, "stage": 1, "fsdp": 1, "context": 4, "tensor": 2},
        {"fsdp": 4, "context": 2, "tensor": 2},
    ],
)
def test_axes_inside_of_hosts_are_no_reason_to_warn(sizes):
    assert warned(cluster(2, 8), **sizes) == []


def test_tensor_across_hosts_warns_with_a_better_mesh():
    (message,) = warned(cluster(4, 8), fsdp=2, tensor=16)
    assert "mesh.tensor=16 spans 2 hosts of 8 devices" in message
    assert "the mesh fsdp=4·tensor=8 keeps it within a host" in message


def test_context_across_hosts_warns_with_a_better_mesh():
    (message,) = warned(cluster(4, 8), fsdp=2, context=4, tensor=4)
    assert "mesh.context=4 spans 2 hosts" in message and "fsdp=4·context=2·tensor=4" in message


def test_a_size_that_does_not_divide_a_host_straddles():
    (message,) = warned(cluster(3, 8), fsdp=4, tensor=6)
    assert "mesh.tensor=6 spans 2 hosts" in message and "fsdp=12·tensor=2" in message


def test_experts_that_are_exchanged_over_hosts_are_warned_of():
    devices = cluster(4, 8)
    (message,) = warned(devices, fsdp=2, expert=16)
    assert "mesh.expert=16 spans 2 hosts" in message and "fsdp=4·expert=8" in message
    (message,) = warned(devices, fsdp=1, expert=8, tensor=4)
    assert "mesh.expert=8 spans 4 hosts" in message and "fsdp=4·expert=2·tensor=4" in message
    assert warned(devices, fsdp=4, expert=8) == []


def test_one_process_for_each_gpu_prints_nothing_of_hosts():
    assert warned(cluster(8, 1), fsdp=2, tensor=4) == []
    # Unless jax tells hosts apart as slices.
    devices = [FakeDevice(i, process_index=i, slice_index=i // 4) for i in range(8)]
    assert warned(devices, fsdp=2, tensor=4) == []
    assert "mesh.tensor=8 spans 2 hosts of 4" in warned(devices, tensor=8)[0]


def test_tpu_slices_must_be_even_and_spanned():
    devices = cluster(2, 8, platform="tpu")
    uneven = [dataclasses.replace(device, slice_index=int(device.id > 4)) for device in devices]
    with pytest.raises(LayoutError, match="slice 0 has 5, slice 1 has 11"):
        device_grid(uneven, {"replica": 2, "fsdp": 8})
    three = [FakeDevice(i, 0, "tpu", i // 4) for i in range(12)]
    with pytest.raises(
        LayoutError, match=r"3 TPU slices of 4 devices: only replica, stage, fsdp may span slices, and replica=2"
    ):
        device_grid(three, {"replica": 2, "stage": 1, "fsdp": 2, "tensor": 3})
