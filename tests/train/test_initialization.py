"""A state that the memory of its devices does not hold is refused before it is there."""

import jax
import pytest
import tiny

from panax.core import RecipeError
from panax.mesh import MeshShape, Placement, Rules
from panax.train import CompiledStep, Program, initialization


def make_step(devices=1):
    program = Program.create(tiny.task(), tiny.ADAMW, num_steps=3)
    return CompiledStep(program, Placement.create(MeshShape(fsdp=devices), Rules(), jax.devices()[:devices]), tiny.AXES)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_larger_than_the_hosts_free_memory_is_refused(devices, monkeypatch):
    step = make_step(devices)
    requests = []
    monkeypatch.setattr(initialization, "free_bytes", lambda: requests.append(1) or 1 << 40)
    params = step.program.abstract.params
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    initialization.check_memory(step.program.abstract, step.shardings)
    assert requests
    # Parameters and two moments.
    monkeypatch.setattr(initialization, "free_bytes", lambda: 3 * needed - 1)
    with pytest.raises(RecipeError, match=r"larger than the host's free memory.*they take .* GiB there.*--mesh.fsdp"):
        step.init(0)


def test_devices_with_memory_of_their_own_are_asked_one_by_one(monkeypatch):
    """As a GPU's: a replicated state must fit each, a sharded one by parts."""
    unsharded, sharded = make_step(1), make_step(4)
    needed = 3 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(unsharded.program.abstract.params))

    class Traits:
        own_memory = True

    monkeypatch.setattr(initialization, "device_target", lambda device: type("Target", (), {"traits": Traits}))
    monkeypatch.setattr(initialization, "_limit", lambda device: needed // 2)
    with pytest.raises(RecipeError, match=r"larger than the memory of cpu"):
        initialization.check_memory(unsharded.program.abstract, unsharded.shardings)
    initialization.check_memory(sharded.program.abstract, sharded.shardings)
    monkeypatch.setattr(initialization, "_limit", lambda device: None)
    initialization.check_memory(unsharded.program.abstract, unsharded.shardings)
