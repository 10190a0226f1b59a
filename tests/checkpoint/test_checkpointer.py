"""Checkpoints of one process: bitwise, committed by the manifest alone, onto any layout, refused when anything is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.checkpoint import Checkpoint, CheckpointConfig, Checkpointer, Manifest, open_checkpoint, restore
from panax.checkpoint.manifest import VERSION, compute_checksum
from panax.core import CheckpointError, DamagedError, RecipeError
from panax.core.errors import StoreError
from panax.mesh import MeshShape, Placement
from panax.stores import LocalStore


def tree(placement, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "w": jax.device_put(jax.random.normal(keys[0], (8, 16, 4)), placement.sharding(None, "fsdp")),
        "half": jax.device_put(jax.random.normal(keys[1], (16, 3)).astype(jnp.bfloat16), placement.sharding("fsdp")),
        "count": jax.device_put(jnp.int32(7), placement.sharding()),
        "flags": jax.device_put(jnp.arange(6) % 2 == 0, placement.sharding()),
        "nothing": jax.device_put(jnp.zeros((0, 3)), placement.sharding()),
        "key": jax.device_put(keys[2], placement.sharding()),
    }


def abstract(of):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of)


def shardings(of):
    return jax.tree.map(lambda x: x.sharding, of)


def assert_same(a, b):
    for name in a:
        left, right = (jax.random.key_data(x[name]) if name == "key" else x[name] for x in (a, b))
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=name)


def back(checkpointer, step, like, **options):
    return restore(checkpointer.open(step), abstract(like), shardings(like), **options)


@pytest.fixture
def placement():
    return Placement.create(MeshShape(fsdp=8))


@pytest.fixture
def saved(tmp_path, placement):
    state = tree(placement)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=2, keep_best=1), {"model.json": "{}"})
    checkpointer.save(state, 3, {"data": {"index": 5}}, 1.5)
    checkpointer.finish()
    return checkpointer, state


def test_restores_bitwise_onto_the_same_layout(saved):
    checkpointer, state = saved
    result = back(checkpointer, 3, state)
    assert_same(result, state)
    assert result["w"].sharding == state["w"].sharding
    checkpoint = Checkpointer(checkpointer.store.url).open(3)
    assert (checkpoint.manifest.step, checkpoint.manifest.host, checkpoint.manifest.metric) == (
        3,
        {"data": {"index": 5}},
        1.5,
    )
    assert checkpoint.attachment("model.json") == "{}" and checkpoint.attachment("other.json") is None


@pytest.mark.parametrize("count", [1, 2, 4])
def test_restores_bitwise_onto_another_layout(saved, count):
    checkpointer, state = saved
    other = tree(Placement.create(MeshShape(fsdp=count), devices=jax.devices()[:count]), seed=1)
    found = restore(checkpointer.open(3), abstract(state), shardings(other))
    assert_same(found, state)
    assert found["w"].sharding == other["w"].sharding


def test_reads_only_the_part_that_is_asked_for(saved):
    checkpointer, state = saved
    part = {"w": state["w"]}
    checkpoint = checkpointer.open(3)
    found = restore(checkpoint, abstract(part), shardings(part), part=True)
    assert list(found) == ["w"] and checkpoint.bytes_read == state["w"].nbytes
    with pytest.raises(CheckpointError, match="another model or optimizer: it also has"):
        back(checkpointer, 3, part)


def test_reads_one_expert_and_no_more(saved):
    checkpointer, state = saved
    checkpoint = checkpointer.open(3)
    # The eight devices hold two of the sixteen rows each: one row lies in one chunk.
    np.testing.assert_array_equal(checkpoint.read("w", (slice(None), slice(5, 6))), np.asarray(state["w"])[:, 5:6])
    assert checkpoint.bytes_read == state["w"].nbytes // 8
    np.testing.assert_array_equal(checkpoint.read("w"), state["w"])
    with pytest.raises(CheckpointError, match=r"has no array 'v'; it has count, flags"):
        checkpoint.read("v")


def test_replicated_arrays_are_written_and_read_once(tmp_path):
    placement = Placement.create(MeshShape(replica=4, fsdp=2))
    state = {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (64, 32)), placement.sharding("fsdp")),
        "b": jax.device_put(jnp.arange(32.0), placement.sharding()),
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    checkpointer.finish()
    checkpoint = checkpointer.open(1)
    assert checkpoint.manifest.nbytes == state["w"].nbytes + state["b"].nbytes
    assert sum(len(entry.chunks) for entry in checkpoint.manifest.arrays.values()) == 2 + 1
    restore(checkpoint, abstract(state), shardings(state))
    assert checkpoint.bytes_read == checkpoint.manifest.nbytes


def test_large_arrays_are_cut_into_chunks_that_other_layouts_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("panax.checkpoint.snapshot.CHUNK_BYTES", 1000)
    monkeypatch.setattr("panax.checkpoint.snapshot.FILE_BYTES", 5000)
    many = Placement.create(MeshShape(fsdp=4, tensor=2))
    state = {"w": jax.device_put(jax.random.normal(jax.random.key(0), (48, 40, 3)), many.sharding("fsdp", "tensor"))}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    checkpointer.finish()
    manifest = checkpointer.open(1).manifest
    assert len(manifest.files) > 4
    assert all(chunk.box.size * 4 <= 1000 for chunk in manifest.arrays["w"].chunks)
    for shape, spec in [(MeshShape(fsdp=8), (None, "fsdp")), (MeshShape(tensor=2, fsdp=4), ("tensor", "fsdp"))]:
        other = {"w": jax.device_put(jnp.zeros((48, 40, 3)), Placement.create(shape).sharding(*spec))}
        checkpoint = checkpointer.open(1)
        assert_same(restore(checkpoint, abstract(state), shardings(other)), state)
        assert checkpoint.bytes_read == state["w"].nbytes


def test_the_state_may_be_donated_at_once(tmp_path, placement):
    state = {"w": tree(placement)["w"]}
    expected = np.asarray(state["w"]).copy()
    double = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, 1, {})
    for _ in range(3):
        state = double(state)
    checkpointer.finish()
    np.testing.assert_array_equal(back(checkpointer, 1, state)["w"], expected)


def test_keeps_the_last_two_the_best_and_every_fourth(tmp_path, placement):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=2, keep_best=1, keep_every=4))
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 2.5, 2.6, 2.7], start=1):
        checkpointer.save({"w": tree(placement)["w"]}, step, {}, metric)
    checkpointer.finish()
    assert checkpointer.steps() == [2, 4, 6, 7] == Checkpointer(tmp_path).steps()
    assert checkpointer.best() == 2 and checkpointer.latest() == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_0000000{n}" for n in (2, 4, 6, 7)]


def test_saving_a_step_again_replaces_it(saved, placement):
    checkpointer, _ = saved
    state = tree(placement, seed=5)
    checkpointer.save(state, 3, {})
    checkpointer.finish()
    assert_same(back(checkpointer, 3, state), state)
    assert len(list(Path(checkpointer.url(3)).iterdir())) == 2, "the manifest and the newer attempt's files"


def test_a_step_that_is_saved_again_is_whole_until_the_new_manifest_is_there(saved, placement, monkeypatch):
    checkpointer, state = saved
    monkeypatch.setattr("panax.checkpoint.checkpointer.commit", _killed)
    with pytest.raises(RuntimeError, match="killed here"):
        _save_in_the_foreground(checkpointer, tree(placement, seed=5), 3)
    again = Checkpointer(checkpointer.store.url)
    assert_same(back(again, 3, state), state)
    again.sweep()
    assert_same(back(again, 3, state), state)
    assert len(list(Path(checkpointer.url(3)).iterdir())) == 2


def _killed(*args):
    raise RuntimeError("killed here")


def _save_in_the_foreground(checkpointer, state, step):
    from panax.checkpoint.commit import SaveAttempt

    checkpointer.prepare(state)
    checkpointer._snapshot.take(state)
    checkpointer._write(SaveAttempt(checkpointer.folder(step), "0ddba115"), step, {}, None)


def test_uncommitted_folders_are_no_checkpoints(saved):
    checkpointer, state = saved
    root = Path(checkpointer.store.url)
    (root / "step_00000009" / "0123abcd").mkdir(parents=True)
    (root / "step_00000009" / "0123abcd" / "00000-0000.bin").write_bytes(b"half")
    (root / "step_00000003" / "0123abcd").mkdir()
    (root / "step_00000003" / "0123abcd" / "00000-0000.bin").write_bytes(b"half")
    (root / "other").mkdir()
    strangers = [
        root / "other" / "mine.txt",
        root / "step_00000003" / "notes.txt",
        root / "step_00000009" / "mine" / "x",
    ]
    strangers[2].parent.mkdir()
    for file in strangers:
        file.write_text("kept")
    again = Checkpointer(root)
    assert again.steps() == [3]
    again.sweep()
    assert not (root / "step_00000009" / "0123abcd").exists() and not (root / "step_00000003" / "0123abcd").exists()
    assert [file.read_text() for file in strangers] == ["kept"] * 3
    assert_same(back(again, 3, state), state)


def chunk_of(checkpoint: Checkpoint, name: str):
    chunk = checkpoint.manifest.arrays[name].chunks[0]
    return Path(checkpoint.url, chunk.file), chunk


def damage(checkpoint: Checkpoint, how: str) -> str:
    """Content of an error."""
    path, chunk = chunk_of(checkpoint, "w")
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[chunk.offset + 10] ^= 1
        path.write_bytes(data)
        return rf"{path} is damaged: bytes {chunk.offset} to {chunk.offset + 256}, part of w"
    if how == "truncated":
        path.write_bytes(data[:-1])
        return rf"{path} has {len(data) - 1} bytes; expected {len(data)}"
    path.unlink()
    return rf"{path} is missing"


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_an_error_and_never_loaded(saved, how):
    checkpointer, state = saved
    says = damage(checkpointer.open(3), how)
    with pytest.raises(DamagedError, match=says):
        back(checkpointer, 3, state)
    assert len(checkpointer.open(3).verify()) == 1


def test_every_flipped_bit_is_found(saved):
    """Flip one bit in each 61st byte of all files that carry values: each is found by verifying, in the right file."""
    checkpointer, _ = saved
    checkpoint = checkpointer.open(3)
    carried = {
        (chunk.file, byte)
        for entry in checkpoint.manifest.arrays.values()
        for chunk in entry.chunks
        for byte in range(chunk.offset, chunk.offset + chunk.box.size * entry.itemsize)
    }
    tried = sorted(carried)[::61]
    assert len(tried) > 30
    for file, byte in tried:
        path = Path(checkpoint.url, file)
        data = path.read_bytes()
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :])
        [problem] = checkpoint.verify()
        assert str(path) in problem
        path.write_bytes(data)
    assert checkpoint.verify() == []


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_flipped_or_torn_manifest_is_refused(saved, at):
    checkpointer, _state = saved
    path = Path(checkpointer.url(3), "manifest.json")
    text = path.read_bytes()
    where = int(len(text) * at)
    path.write_bytes(text[:where] + bytes([text[where] ^ 1]) + text[where + 1 :])
    with pytest.raises(DamagedError, match=r"manifest.json is damaged|is not a panax"):
        Checkpointer(checkpointer.store.url).open(3)
    path.write_bytes(text[:where])
    with pytest.raises(DamagedError, match=r"manifest.json is damaged: it is not valid JSON"):
        Checkpointer(checkpointer.store.url).open(3)


def test_the_newest_whole_checkpoint_is_used_saying_so_and_outlives_the_damaged_one(tmp_path, placement):
    said = []
    config = CheckpointConfig(keep_last=1, keep_best=0)
    state = tree(placement)
    Checkpointer(tmp_path, config).save(state, 5, {})
    first = Checkpointer(tmp_path, CheckpointConfig(keep_last=3))
    for step in (5, 7, 9):
        first.save(state, step, {})
    first.finish()
    Path(first.url(9), "manifest.json").write_text("torn")
    checkpointer = Checkpointer(tmp_path, config, say=said.append)
    candidates = checkpointer.newest_first()
    assert next(candidates).manifest.step == 7
    assert "the checkpoint of step 9 is not used" in said[0] and "manifest.json is damaged" in said[0]
    checkpointer.mark_damaged(7, DamagedError("flipped"))
    assert next(candidates).manifest.step == 5
    checkpointer.save(state, 6, {})
    checkpointer.finish()
    # The two that are damaged are newer: they neither count as kept, nor are they removed before the run has passed them.
    assert checkpointer.steps() == [6, 7] and (tmp_path / "step_00000009").exists()
    checkpointer.save(state, 9, {})
    checkpointer.finish()
    assert checkpointer.steps() == [9] == Checkpointer(tmp_path).steps()


def test_a_checkpoint_of_a_newer_panax_is_an_error_and_no_reason_to_go_back(saved):
    checkpointer, state = saved
    checkpointer.save(state, 4, {})
    checkpointer.finish()
    Path(checkpointer.url(4), "manifest.json").write_text('{"format": "panax-checkpoint", "version": 99}')
    with pytest.raises(CheckpointError, match="format version 99") as raised:
        list(Checkpointer(checkpointer.store.url).newest_first())
    assert not isinstance(raised.value, DamagedError)


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
    with pytest.raises(CheckpointError, match=says) as raised:
        restore(checkpointer.open(3), wanted, places)
    assert not isinstance(raised.value, DamagedError), "an older checkpoint would not be the right one either"


def sealed(**changes) -> str:
    body = {
        "step": 1,
        "saved": 0.0,
        "metric": None,
        "host": {},
        "files": [["a.bin", 8]],
        "attachments": {},
        "arrays": {"w": {"shape": [2], "dtype": "float32", "key_impl": None, "chunks": [[[0], [2], 0, 0, "0"]]}},
    } | changes
    seal = compute_checksum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({"format": "panax-checkpoint", "version": VERSION, "checksum": seal, "body": body})


def of_w(**changes) -> str:
    entry = {"shape": [2], "dtype": "float32", "key_impl": None, "chunks": [[[0], [2], 0, 0, "0"]]} | changes
    return sealed(arrays={"w": entry})


def test_a_sealed_manifest_is_read():
    assert Manifest.from_json(sealed(), "here").nbytes == 8


@pytest.mark.parametrize(
    "text, says",
    [
        ("not json", "is damaged: it is not valid JSON"),
        ("{}", "is not a panax-checkpoint manifest"),
        ('{"format": "panax-checkpoint", "version": 99}', "format version 99, this Panax reads version 2"),
        ('{"format": "panax-checkpoint", "version": 2, "body": {}, "checksum": "0"}', "its checksum does not match"),
        (sealed(files=[["../../etc/passwd", 8]]), "is not a path inside a store"),
        (sealed(files=[["/etc/passwd", 8]]), "is not a path inside a store"),
        (sealed(files=[["a.bin", -1]]), "a whole number of at least 0"),
        (sealed(files=[["a.bin", 7]]), "reaches beyond the end of a.bin"),
        (of_w(shape=[1]), "lies outside the array"),
        (of_w(shape=[2**62, 2**62, 0], chunks=[]), "is not a valid shape"),
        (of_w(shape=[1] * 65, chunks=[]), "is not a valid shape"),
        (of_w(key_impl=7), "a random key of the kind 7"),
        (sealed(saved=10**400), "an integer in it has 401 digits"),
        (sealed(metric="low"), "can't be used: could not convert"),
        ('{"format": "panax-checkpoint", "version": 99.5}', "is damaged: its checksum does not match"),
        (of_w(dtype="object"), "'object' is not a dtype of numbers"),
        (of_w(dtype="O"), "not a dtype of numbers"),
        (of_w(chunks=[[[0], [2], 5, 0, "0"]]), "can't be used"),
        (sealed(attachments={"../x": [0, "0"]}), "is not a path inside a store"),
    ],
)
def test_a_strange_manifest_is_refused(text, says):
    with pytest.raises(CheckpointError, match=says):
        Manifest.from_json(text, "here/manifest.json")


def test_memory_is_not_taken_for_an_array_whose_files_are_not_there(tmp_path):
    """A manifest that claims a petabyte is refused by the sizes of files, before anything is allocated."""
    size = 2**50
    text = sealed(
        files=[["a.bin", size]],
        arrays={"w": {"shape": [size // 4], "dtype": "float32", "key_impl": None, "chunks": [[[0], [size // 4], 0, 0, "0"]]}},
    )  # fmt: skip
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "a.bin").write_bytes(b"12345678")
    with pytest.raises(DamagedError, match=f"has 8 bytes; expected {size}"):
        open_checkpoint(tmp_path).read("w")


def test_a_save_that_is_due_while_one_is_under_way_waits_or_is_skipped(tmp_path, placement, monkeypatch):
    import threading

    go = threading.Event()
    real = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda self, *a: (go.wait(60), real(self, *a)))
    said = []
    state = tree(placement)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(when_busy="skip", keep_last=5), say=said.append)
    assert checkpointer.save(state, 1, {})
    assert not checkpointer.save(state, 2, {})
    assert said == ["the checkpoint of step 2 is skipped: the one before is still being written"]
    go.set()
    assert checkpointer.save(state, 3, {}, must=True)
    checkpointer.finish()
    assert checkpointer.steps() == [1, 3]


def test_a_wrong_setting_is_refused():
    for wrong in (
        {"keep_last": 0},
        {"every": -1},
        {"keep_every": -1},
        {"retries": -1},
        {"commit_seconds": 0.0},
    ):
        with pytest.raises(RecipeError, match="expected"):
            CheckpointConfig(**wrong)


FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp
from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.core import CheckpointError
checkpointer = Checkpointer(sys.argv[1], CheckpointConfig(retries=2, retry_seconds=0.01))
state = {"w": jnp.arange(200_000, dtype=jnp.float32)}
checkpointer.save(state, 1, {})
checkpointer.finish()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpointer.save(state, 2, {})
checkpointer.wait()
try:
    checkpointer.finish()
except CheckpointError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(state, 3, {})
checkpointer.finish()
print("steps:", checkpointer.steps())
"""


def test_a_full_disk_is_warned_of_tried_again_and_loses_nothing(tmp_path):
    """The file system refuses to write beyond a size, as it does when a disk or a quota is full."""
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("saving step 2 failed and is retried") == 2
    assert "refused: saving step 2" in run.stdout
    assert "the checkpoint of step 1 is undamaged" in run.stdout
    assert "steps: [1, 3]" in run.stdout
    assert not list(tmp_path.rglob("*.tmp")) and not [p for p in tmp_path.rglob("step_00000002/**/*") if p.is_file()]


def test_a_loss_that_is_not_finite_is_no_best(tmp_path, placement):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=1), say=lambda line: None)
    state = tree(placement)
    for step, loss in ((1, 2.0), (2, float("nan")), (3, float("-inf")), (4, 3.0), (5, float("nan"))):
        checkpointer.save(state, step, {"data": None}, loss)
        checkpointer.finish()
    again = Checkpointer(tmp_path)
    assert again.steps() == [1, 5]
    assert again.best() == 1 and next(again.best_first()).manifest.step == 1


def test_a_manifest_of_any_size_is_not_read(saved):
    """A sparse file: its bytes would be taken into memory before anything is looked at."""
    checkpointer, _ = saved
    manifest = Path(checkpointer.url(3), "manifest.json")
    intact = manifest.read_bytes()
    with manifest.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedError, match="a manifest has at most"):
        Checkpointer(checkpointer.store.url).open(3)
    with pytest.raises(DamagedError, match="a manifest has at most"):
        open_checkpoint(checkpointer.url(3))
    manifest.write_bytes(intact)


def test_a_store_that_lets_nothing_be_removed_keeps_all_and_states_it_once(tmp_path, placement, monkeypatch):
    said: list[str] = []
    may_delete = [False]
    usual = LocalStore.delete

    def delete(self, paths):
        paths = list(paths)
        if not may_delete[0] and paths:
            raise StoreError("403 Forbidden")
        usual(self, paths)

    monkeypatch.setattr(LocalStore, "delete", delete)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=0), say=said.append)
    state = tree(placement)
    for step in (1, 2, 3):
        checkpointer.save(state, step, {"data": None})
        checkpointer.finish()
    assert checkpointer.steps() == [1, 2, 3] and sum("could not be removed" in line for line in said) == 1
    (tmp_path / "step_00000009" / "aaaaaaaa").mkdir(parents=True)
    (tmp_path / "step_00000009" / "aaaaaaaa" / "00000-0000.bin").write_bytes(b"half")
    again = Checkpointer(tmp_path, CheckpointConfig(keep_last=1, keep_best=0), say=said.append)
    again.sweep()
    assert sum("could not be removed" in line for line in said) == 2
    may_delete[0] = True
    again.save(state, 4, {"data": None})
    again.finish()
    assert again.steps() == [4]
