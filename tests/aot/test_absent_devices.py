"""Devices that are not there, and meshes of them."""

import numpy as np
import pytest

from panax.core.errors import LayoutError
from panax.mesh.devices import device_grid
from panax.plan import parse_target, target_devices


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("h100x16", "H100"),
        ("h200x8", "H200"),
        ("a100x2", "A100"),
        ("v4-16", "TPU v4"),
        ("v5e-1", "TPU v5 lite"),
        ("v5e-4x2", "TPU v5 lite"),
        ("v5p-8", "TPU v5"),
        ("v6e-16", "TPU v6 lite"),
    ],
)
def test_there_are_as_many_as_the_name_states(name, kind):
    target = parse_target(name)
    devices = target_devices(target)
    assert len(devices) == target.count and kind in devices[0].device_kind
    assert len({device.id for device in devices}) == target.count


def grid(name: str, **sizes: int) -> np.ndarray:
    return device_grid(target_devices(parse_target(name)), sizes)


def coordinates(grid: np.ndarray) -> np.ndarray:
    return np.array([device.coords for device in grid.flat]).reshape(*grid.shape, 3)


def test_on_a_tpu_the_fastest_axis_lies_on_neighbouring_chips():
    placed = coordinates(grid("v5p-64", replica=2, fsdp=4, context=2, tensor=2))
    assert (np.abs(np.diff(placed, axis=-2)).sum(-1) == 1).all()


def test_several_slices_are_spanned_by_the_slowest_axis_that_can():
    def slices(grid: np.ndarray) -> np.ndarray:
        return np.vectorize(lambda device: device.slice_index)(grid)

    placed = slices(grid("v5e-16x2", replica=2, stage=1, fsdp=4, tensor=4))
    assert (placed[0] == 0).all() and (placed[1] == 1).all()
    placed = slices(grid("v5e-16x2", replica=1, stage=2, fsdp=4, tensor=4))
    assert (placed[:, 0] == 0).all() and (placed[:, 1] == 1).all()
    placed = slices(grid("v5e-4x4", replica=2, stage=1, fsdp=4, tensor=2))
    assert placed[:, 0, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert (placed[..., 0] == placed[..., 1]).all()
    with pytest.raises(LayoutError, match=r"2 TPU slices of 16 devices.*fsdp=1; use for example mesh.replica=2"):
        grid("v5e-16x2", replica=1, stage=1, fsdp=1, expert=8, tensor=4)


def test_a_part_of_a_slice_is_a_mesh_too():
    devices = target_devices(parse_target("v5e-16"))
    assert device_grid(devices[:6], {"fsdp": 3, "tensor": 2}).shape == (3, 2)


def test_hosts_of_gpus_hold_the_fastest_axes():
    placed = np.vectorize(lambda device: device.process_index)(grid("h100x16", replica=2, fsdp=2, context=2, tensor=2))
    assert placed.reshape(2, 8).tolist() == [[0] * 8, [1] * 8]
