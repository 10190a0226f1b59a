"""Layout legality: plain Python, and errors with the numbers and what would fit."""

import subprocess
import sys

import jax
import pytest

from panax.core import LayoutError
from panax.mesh import COMPUTE, STORAGE, MeshShape, Placement, Rules, assign

MESH = {"replica": 2, "stage": 1, "fsdp": 4, "expert": 2, "context": 1, "tensor": 2}


def test_rules_give_each_dimension_its_mesh_axes():
    assert assign(("batch", "seq", "embed"), (16, 8, 32), COMPUTE, MESH) == (("replica", "fsdp", "expert"), (), ())
    assert assign(("embed", "ffn"), (32, 64), STORAGE, MESH) == (("fsdp", "expert"), ("tensor",))


def test_an_axis_that_the_array_already_uses_is_dropped_from_a_longer_rule():
    assert assign(("expert", "embed", "ffn"), (8, 32, 64), STORAGE, MESH) == (("expert",), ("fsdp",), ("tensor",))


def test_two_dimensions_on_one_mesh_axis_are_an_error():
    with pytest.raises(LayoutError, match="w: its dimensions 'heads' and 'ffn' are both mapped to mesh axis 'tensor'"):
        assign(("heads", "ffn"), (8, 8), STORAGE, MESH, "w")


@pytest.mark.parametrize(
    "axes, shape, says",
    [
        (("heads",), (12,), r"w: heads=12 is not divisible by tensor=8; use tensor in \{1, 2, 3, 4, 6, 12\}"),
        (("embed",), (12,), r"w: embed=12 is not divisible by fsdp=8"),
    ],
)
def test_what_does_not_divide_names_what_would(axes, shape, says):
    with pytest.raises(LayoutError, match=says):
        assign(axes, shape, STORAGE, {"tensor": 8, "fsdp": 8}, "w")


def test_a_rule_to_an_unknown_mesh_axis_names_the_nearest():
    with pytest.raises(LayoutError, match=r"embed -> 'fsd' is not a mesh axis; did you mean 'fsdp'\?"):
        Rules(storage={"embed": ("fsd",)})


@pytest.mark.parametrize(
    "shape, says",
    [
        (MeshShape(fsdp=16), "fsdp=16 has 16 devices, there are 8"),
        (MeshShape(replica=3), "needs a multiple of 3 devices, there are 8"),
        (MeshShape(replica=-1, fsdp=-1), "mesh.replica and mesh.fsdp are both -1"),
        (MeshShape(fsdp=0), "mesh.fsdp=0; expected a positive number"),
    ],
)
def test_meshes_that_do_not_fit_the_devices(shape, says):
    with pytest.raises(LayoutError, match=says):
        shape.resolve(8)


def test_a_smaller_mesh_leaves_devices_idle():
    assert Placement.create(MeshShape(fsdp=2), devices=jax.devices()).devices.size == 2


def test_legality_is_checked_without_jax():
    code = "import sys, panax.data, panax.mesh.rules, panax.mesh.topology; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
