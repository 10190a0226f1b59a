"""Checkpoints: bitwise, atomic, on any layout, and refused when anything is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.checkpoint import CheckpointConfig, Checkpointer, Manifest, restore
from panax.core import CheckpointError
from panax.mesh import MeshShape, Placement


def tree(placement, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "w": jax.device_put(jax.random.normal(keys[0], (8, 16, 4)), placement.sharding(None, "fsdp")),
        "half": jax.device_put(jax.random.normal(keys[1], (16, 3)).astype(jnp.bfloat16), placement.sharding("fsdp")),
        "count": jax.device_put(jnp.int32(7), placement.sharding()),
        "flags": jax.device_put(jnp.arange(6) % 2 == 0, placement.sharding()),
        "key": jax.device_put(keys[2], placement.sharding()),
    }


def abstract(of):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of)


def shardings(of):
    return jax.tree.map(lambda x: x.sharding, of)


def assert_same(a, b):
    for name in a:
        left, right = (jax.random.key_data(x[name]) if name == "key" else x[name] for x in (a, b))
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=name)


@pytest.fixture
def placement():
    return Placement.create(MeshShape(fsdp=8))


@pytest.fixture
def saved(tmp_path, placement):
    state = tree(placement)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=2, keep_best=1), {"model.json": "{}"})
    checkpointer.save(state, 3, {"data": {"index": 5}}, 1.5)
    checkpointer.wait()
    return checkpointer, state


def test_restores_bitwise_onto_the_same_layout(saved):
    checkpointer, state = saved
    back, manifest = restore(checkpointer.path(3), abstract(state), shardings(state))
    assert_same(back, state)
    assert manifest.step == 3 and manifest.host == {"data": {"index": 5}} and manifest.metric == 1.5
    assert back["w"].sharding == state["w"].sharding
    assert (checkpointer.path(3) / "model.json").read_text() == "{}"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_restores_bitwise_onto_another_layout(saved, count):
    checkpointer, state = saved
    other = tree(Placement.create(MeshShape(fsdp=count), devices=jax.devices()[:count]), seed=1)
    back, _ = restore(checkpointer.path(3), abstract(state), shardings(other))
    assert_same(back, state)
    assert back["w"].sharding == other["w"].sharding


def test_reads_only_the_part_that_is_asked_for(saved):
    checkpointer, state = saved
    part = {"w": state["w"]}
    back, _ = restore(checkpointer.path(3), abstract(part), shardings(part), part=True)
    assert list(back) == ["w"]
    with pytest.raises(CheckpointError, match="another model or optimizer: it also has"):
        restore(checkpointer.path(3), abstract(part), shardings(part))


def test_the_state_may_be_donated_at_once(tmp_path, placement):
    state = {"w": tree(placement)["w"]}
    expected = np.asarray(state["w"])
    double = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    for _ in range(3):
        state = double(state)
    checkpointer.wait()
    back, _ = restore(checkpointer.path(1), abstract(state), shardings(state))
    np.testing.assert_array_equal(back["w"], expected)


def test_keeps_the_last_two_and_the_best(tmp_path, placement):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=2, keep_best=1))
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 2.5], start=1):
        checkpointer.save({"w": tree(placement)["w"]}, step, {}, metric)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 5]
    assert checkpointer.best() == 2 and checkpointer.latest() == 5


def test_saving_a_step_again_replaces_it(saved, placement):
    checkpointer, _ = saved
    state = tree(placement, seed=5)
    checkpointer.save(state, 3, {})
    checkpointer.wait()
    assert_same(restore(checkpointer.path(3), abstract(state), shardings(state))[0], state)


def test_half_written_folders_are_no_checkpoints(saved):
    checkpointer, _ = saved
    (checkpointer.directory / "step_00000009.partial").mkdir()
    (checkpointer.directory / "step_00000008").mkdir()
    (checkpointer.directory / "other").mkdir()
    assert checkpointer.steps() == [3]
    checkpointer.remove_partial()
    assert not (checkpointer.directory / "step_00000009.partial").exists()


def damage(path: Path, how: str) -> None:
    file = max(
        (p for p in path.rglob("*") if p.is_file() and "zarr.json" not in p.name), key=lambda p: p.stat().st_size
    )
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        (path / "zarr.json").unlink()


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_an_error_and_never_loaded(saved, how):
    checkpointer, state = saved
    damage(checkpointer.path(3) / "arrays" / "w", how)
    with pytest.raises(CheckpointError, match=r"could not read .*arrays/w"):
        restore(checkpointer.path(3), abstract(state), shardings(state))


def test_a_missing_chunk_is_an_error(saved):
    checkpointer, state = saved
    chunks = [p for p in (checkpointer.path(3) / "arrays" / "w").rglob("*") if p.is_file() and p.name != "zarr.json"]
    chunks[0].unlink()
    with pytest.raises(CheckpointError, match=r"could not read .*arrays/w"):
        restore(checkpointer.path(3), abstract(state), shardings(state))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"w": ((8, 16, 5), "float32")},
            r"another model or optimizer: w is float32\[8, 16, 4\] there and float32\[8, 16, 5\] here",
        ),
        ({"half": ((16, 3), "float32")}, r"half is bfloat16\[16, 3\] there and float32\[16, 3\] here"),
        ({"extra": ((2,), "float32")}, "it has no extra"),
    ],
)
def test_another_models_checkpoint_names_what_differs(saved, change, says):
    checkpointer, state = saved
    wanted = abstract(state) | {n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype) in change.items()}
    places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), wanted)
    with pytest.raises(CheckpointError, match=says):
        restore(checkpointer.path(3), wanted, places)


@pytest.mark.parametrize(
    "text, says",
    [
        ("not json", "can't be read"),
        ("{}", "is not a panax-checkpoint manifest"),
        ('{"format": "panax-checkpoint", "version": 99}', "format version 99, this Panax reads up to 1"),
        ('{"format": "panax-checkpoint", "version": 1}', "is damaged"),
        (
            json.dumps({"format": "panax-checkpoint", "version": 1, "step": 1, "host": {},
                        "arrays": {"../../etc": {"shape": [], "dtype": "float32"}}}),
            "not a plain name inside the checkpoint",
        ),
    ],
)  # fmt: skip
def test_a_strange_manifest_is_refused(saved, text, says):
    checkpointer, _ = saved
    (checkpointer.path(3) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Manifest.read(checkpointer.path(3))


FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp
from panax.checkpoint import Checkpointer
from panax.core import CheckpointError
checkpointer = Checkpointer(sys.argv[1])
state = {"w": jnp.arange(200_000, dtype=jnp.float32)}
checkpointer.save(state, 1, {})
checkpointer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpointer.save(state, 2, {})
try:
    checkpointer.wait()
except CheckpointError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(state, 3, {})
checkpointer.wait()
print("steps:", checkpointer.steps())
"""


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path):
    """The file system refuses to write beyond a size, as it does when a disk or a quota is full."""
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert run.returncode == 0, run.stderr
    assert "refused: saving step 2" in run.stdout
    assert "the checkpoint of step 1 is whole" in run.stdout
    assert "steps: [1, 3]" in run.stdout
    assert not list(tmp_path.glob("*.partial"))
