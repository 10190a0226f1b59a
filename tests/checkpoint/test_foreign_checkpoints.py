"""Checkpoints from other writers, or damaged on disk: their content is verified before it is used."""

import itertools
import json
import os
import random

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from panax.checkpoint import Checkpointer, open_checkpoint
from panax.checkpoint.commit import remove
from panax.checkpoint.conversion import copy_checkpoint, export_tensors, import_tensors, write_arrays
from panax.checkpoint.manifest import MANIFEST_FILE, ArrayEntry, Manifest, compute_checksum
from panax.checkpoint.restoration import check_arrays_match
from panax.checkpoint.slices import ArraySlice, full_slice, is_exact_cover, split_slice
from panax.core import CheckpointError
from panax.core.errors import DamagedError
from panax.stores import LocalStore


def resealed(path, change) -> None:
    """Change a manifest's body, and seal it as Panax would."""
    outer = json.loads(path.read_text())
    change(outer["body"])
    outer["checksum"] = compute_checksum(json.dumps(outer["body"], sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(outer))


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1 and 2, of one array each and one text."""
    for step in (1, 2):
        values = np.arange(4000.0, dtype=np.float32).reshape(40, 100) * step
        arrays = [("params.w", ArrayEntry(values.shape, "float32"), lambda box, values=values: values[box.slices])]
        write_arrays(LocalStore(tmp_path / "runs"), f"step_{step:08d}", arrays, step=step, attachments={"a.json": "{}"})
    return tmp_path / "runs"


def test_any_flipped_bit_of_a_manifest_leads_to_the_checkpoint_before(folder):
    path = folder / "step_00000002" / MANIFEST_FILE
    whole_text = path.read_bytes()
    for place, bit in itertools.product(range(whole_text.index(b'"body"') + 8), range(8)):
        changed = bytearray(whole_text)
        changed[place] ^= 1 << bit
        try:
            manifest = Manifest.from_json(bytes(changed), "here")
        except DamagedError:
            continue
        assert manifest == Manifest.from_json(whole_text, "here"), (place, bit)  # white space
    said: list[str] = []
    path.write_bytes(whole_text.replace(b'"version": 2', b'"version": 3'))
    assert [one.manifest.step for one in Checkpointer(folder, say=said.append).newest_first()] == [1]
    assert "is damaged: its version does not match" in said[0]


def boxes_drawn(rng: random.Random, shape: tuple[int, ...]) -> list[ArraySlice]:
    """An array cut at random, again and again."""
    boxes = [full_slice(shape)]
    for _ in range(rng.randrange(7)):
        box = boxes.pop(rng.randrange(len(boxes)))
        boxes += split_slice(box, rng.randrange(1, box.size + 1)) if box.size else [box]
    return boxes


@pytest.mark.parametrize("seed", range(40))
def test_boxes_cover_an_array_once_or_they_don_t(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(4)))
    boxes = boxes_drawn(rng, shape)
    rng.shuffle(boxes)
    assert is_exact_cover(shape, boxes)
    for _ in range(20):
        changed = list(boxes)
        at = rng.randrange(len(boxes))
        start = tuple(rng.randrange(n) for n in shape)
        changed[at] = ArraySlice(start, tuple(rng.randrange(1, n - s + 1) for s, n in zip(start, shape)))
        counts = np.zeros(shape, int)
        for box in changed:
            counts[box.slices] += 1
        assert is_exact_cover(shape, changed) == bool((counts == 1).all())


def test_boxes_are_looked_at_quickly_and_not_in_any_number_of_dimensions():
    assert is_exact_cover((150, 50), [*split_slice(full_slice((150, 50)), 1)])
    assert is_exact_cover((), [ArraySlice((), ())]) and not is_exact_cover((), [ArraySlice((), ())] * 2)
    assert is_exact_cover((3, 0), []) and is_exact_cover((3, 0), [ArraySlice((0, 0), (3, 0))])
    with pytest.raises(ValueError, match="cut in 11 dimensions; expected at most 10"):
        is_exact_cover((2,) * 11, [*split_slice(full_slice((2,) * 11), 1)])


def test_overlapping_chunks_are_damage(folder):
    path = folder / "step_00000002" / MANIFEST_FILE

    def overlap(body) -> None:
        chunk = body["arrays"]["params.w"]["chunks"][0]
        half = [[0, 0], [20, 100], 0, chunk[3], compute_checksum(bytes(8000))]
        body["arrays"]["params.w"]["chunks"] = [half, [[10, 0], *half[1:]]]

    loaded = open_checkpoint(folder / "step_00000002")
    resealed(path, overlap)
    says = "params.w has 4000 values, its chunks hold 4000, some twice or not at all"
    with pytest.raises(DamagedError, match=says):
        open_checkpoint(folder / "step_00000002")
    loaded.manifest = Manifest.from_json(path.read_bytes(), "here")
    assert any(says in problem for problem in loaded.verify())
    with pytest.raises(DamagedError, match=says):
        loaded.read("params.w")


@pytest.mark.parametrize("size", [2**29, 2**44])
def test_memory_is_not_taken_for_a_text_that_is_not_there(folder, size):
    def change(body) -> None:
        number = body["attachments"]["a.json"][0]
        body["files"][number][1] = size

    resealed(folder / "step_00000002" / MANIFEST_FILE, change)
    with pytest.raises(
        DamagedError, match=r"a\.json has (2 bytes; expected|17,592,186,044,416 bytes; a\.json is a text)"
    ):
        open_checkpoint(folder / "step_00000002").attachment("a.json")


def test_a_text_that_is_none_is_damage(folder):
    def change(body) -> None:
        body["attachments"]["a.json"][1] = compute_checksum(b"\xff\xff")

    resealed(folder / "step_00000002" / MANIFEST_FILE, change)
    [path] = (folder / "step_00000002").glob("*/a.json")
    path.write_bytes(b"\xff\xff")
    with pytest.raises(DamagedError, match=r"a\.json is not UTF-8 text"):
        open_checkpoint(folder / "step_00000002").attachment("a.json")


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "secret").write_text("the secret")
    return tmp_path / "secret"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_links_out_of_a_folder_of_safetensors_are_not_followed(tmp_path, secret, name):
    (tmp_path / "in").mkdir()
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "in" / "weights.safetensors")
    (tmp_path / "in" / name).symlink_to(os.path.relpath(secret, tmp_path / "in"))
    with pytest.raises(CheckpointError, match=rf"{name} is, or is below, a link to .*/secret, outside of .*/in"):
        import_tensors(tmp_path / "in", LocalStore(tmp_path / "out"))
    assert not list(tmp_path.glob("out/**/*.json"))


def test_links_inside_of_a_snapshot_of_the_hub_are_followed(tmp_path, secret):
    snapshot = tmp_path / "models--a" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a" / "blobs"
    blobs.mkdir()
    save_file({"w": np.ones(3, np.float32)}, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    manifest = import_tensors(snapshot, LocalStore(tmp_path / "out"))
    assert set(manifest.arrays) == {"w"} and set(manifest.attachments) == {"config.json"}
    (snapshot / "b.json").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match=r"b\.json is, or is below, a link"):
        import_tensors(snapshot, LocalStore(tmp_path / "again"))


def test_texts_beside_safetensors_that_are_none_are_named(tmp_path):
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "a.json").write_bytes(b"\xe9")
    with pytest.raises(CheckpointError, match=r"a\.json can't be read: .*; expected text in UTF-8"):
        import_tensors(tmp_path, LocalStore(tmp_path / "out"))


@pytest.mark.parametrize("export", [True, False])
def test_links_out_of_a_checkpoint_are_not_followed(folder, tmp_path, secret, export):
    def change(body) -> None:
        number, _ = body["attachments"]["a.json"]
        body["files"][number][1], body["attachments"]["a.json"][1] = 10, compute_checksum(b"the secret")

    resealed(folder / "step_00000002" / MANIFEST_FILE, change)
    [path] = (folder / "step_00000002").glob("*/a.json")
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"/a\.json is, or is below, a link to .*/secret, outside of"):
        checkpoint = open_checkpoint(folder / "step_00000002")
        export_tensors(checkpoint, tmp_path / "out") if export else copy_checkpoint(
            checkpoint, LocalStore(tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("impl", "shape"), [("threefry2x32", [3]), ("unknown", [2]), (None, [2]), ("rbg", [4])])
def test_random_keys_of_another_kind_are_named(tmp_path, impl, shape):
    entry = ArrayEntry(tuple(shape), "uint32", key_impl=impl)
    write_arrays(LocalStore(tmp_path), "", [("key", entry, lambda box: np.zeros(shape, np.uint32))])
    expected = {"key": jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))}
    with pytest.raises(CheckpointError, match=r"key is (not )?a random key( of .*)? there and key<fry>\[\] here"):
        check_arrays_match(open_checkpoint(tmp_path), expected, part=False)
    good = ArrayEntry((2,), "uint32", key_impl="threefry2x32")
    write_arrays(LocalStore(tmp_path), "good", [("key", good, lambda box: np.zeros(2, np.uint32))])
    check_arrays_match(open_checkpoint(tmp_path / "good"), expected, part=False)


def test_a_copied_checkpoint_is_listed_once_and_removed_whole(folder, tmp_path):
    result, counted = open_checkpoint(folder / "step_00000002"), []
    usual = result.store.list
    result.store.list = lambda prefix="": counted.append(prefix) or usual(prefix)  # type: ignore[method-assign]
    copy_checkpoint(result, LocalStore(tmp_path / "copy"), "step_00000002")
    assert len(counted) == 1
    old = tmp_path / "copy" / "step_00000002"
    assert len([path for path in old.rglob("*") if path.is_file()]) >= 3
    remove(LocalStore(tmp_path / "copy"), "step_00000002")
    assert not old.exists()


def test_texts_are_not_exported_through_links(folder, tmp_path, secret):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.json").symlink_to(secret)
    before = secret.read_bytes()
    export_tensors(open_checkpoint(folder / "step_00000002"), out)
    assert secret.read_bytes() == before and not (out / "a.json").is_symlink()
