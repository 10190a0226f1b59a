"""`panax checkpoint`, as a person uses it on a run of two checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_recipe
from safetensors.numpy import load_file, save_file

from panax.checkpoint import open_checkpoint
from panax.checkpoint.conversion import export_tensors, import_tensors
from panax.cli.main import main
from panax.core import CheckpointError
from panax.stores import LocalStore

RECIPE = str(Path(tiny_recipe.__file__))
CHECKPOINTS = "runs/tiny/checkpoints"
FIRST, SECOND = f"{CHECKPOINTS}/step_00000005", f"{CHECKPOINTS}/step_00000008"


@pytest.fixture(scope="module")
def trained(run_of) -> Path:
    return run_of(8)


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> str:
    found = main(["checkpoint", *arguments])
    out = capsys.readouterr()
    assert found == code, out.err
    return out.out + out.err


def flip(address: str, array: str) -> str:
    checkpoint = open_checkpoint(address)
    chunk = checkpoint.manifest.arrays[array].chunks[0]
    path = Path(address, chunk.file)
    data = bytearray(path.read_bytes())
    data[chunk.offset] ^= 1
    path.write_bytes(data)
    return str(path)


def test_ls(here, capsys):
    out = run(capsys, "ls", "runs/tiny")
    assert [line.split()[0] for line in out.splitlines()] == [CHECKPOINTS, "step", "5", "8"]
    assert out.splitlines()[3].endswith("best")
    shutil.copytree(FIRST, f"{CHECKPOINTS}/step_00000006")
    Path(CHECKPOINTS, "step_00000006", "manifest.json").unlink()
    Path(SECOND, "manifest.json").write_text("torn")
    out = run(capsys, "ls", CHECKPOINTS)
    assert "not committed" in out.splitlines()[3] and "damaged manifest" in out.splitlines()[4]
    out = run(capsys, "ls", FIRST)
    assert "params.embedding.table" in out and "optimizer_state.mean.embedding.table" in out and "  key (" in out


def test_verify(here, capsys):
    out = run(capsys, "verify", "runs/tiny")
    assert [line.split(":")[0] for line in out.splitlines()] == [f"whole    {FIRST}", f"whole    {SECOND}"]
    path = flip(SECOND, "params.embedding.table")
    out = run(capsys, "verify", "runs/tiny", code=4)
    assert out.startswith(f"whole    {FIRST}") and f"DAMAGED {path} is damaged: bytes " in " ".join(out.split())
    run(capsys, "verify", FIRST)
    run(capsys, "verify", SECOND, code=4)


def test_diff(here, capsys):
    assert "0 differences" in run(capsys, "diff", FIRST, FIRST)
    out = run(capsys, "diff", FIRST, "runs/tiny", code=1)
    assert "step: 5 -> 8" in out and "params.embedding.table: " in out and "values differ, by at most" in out
    shutil.copytree(SECOND, "copy")
    run(capsys, "diff", SECOND, "copy")


def test_rm(here, capsys):
    run(capsys, "rm", FIRST)
    assert not Path(FIRST).exists()
    assert "is the last checkpoint of its run; pass --force" in run(capsys, "rm", SECOND, code=4)
    run(capsys, "rm", SECOND, "--force")
    assert "is not a checkpoint's own folder" in run(capsys, "rm", SECOND, code=4)
    assert "is not a checkpoint's own folder" in run(capsys, "rm", "runs/tiny", code=4)


def test_to_safetensors_and_back(here, capsys):
    assert "11 arrays" in run(capsys, "convert", "runs/tiny", "tensors")
    written = load_file("tensors/model.safetensors")
    checkpoint = open_checkpoint(SECOND)
    assert set(written) == {name for name in checkpoint.manifest.arrays if name.startswith("params.")}
    for name, values in written.items():
        np.testing.assert_array_equal(values, checkpoint.read(name))
    run(capsys, "convert", "tensors", "back")
    for name, values in written.items():
        np.testing.assert_array_equal(open_checkpoint("back").read(name), values)
    # What came back is a checkpoint: models are made of it, and runs begin with it.
    assert main(["generate", "back", "--prompt", "def ", "--tokens", "4"]) == 0
    assert main(["train", RECIPE, "--num-steps", "8", "--directory", "tuned", "--init", "checkpoint:back"]) == 0
    assert "starting from the weights in back" in " ".join(capsys.readouterr().out.split())
    assert "holds a checkpoint already" in run(capsys, "convert", "tensors", "back", code=4)
    assert "holds weights already" in run(capsys, "convert", "runs/tiny", "tensors", code=4)


def test_to_another_store(here, capsys):
    run(capsys, "convert", SECOND, "whole", "--format", "panax")
    assert "0 differences" in run(capsys, "diff", SECOND, "whole")
    out = run(capsys, "convert", SECOND, "part", "--format", "panax", "--prefix", "params.embedding")
    assert out.startswith("1 arrays")
    assert "no array with a name that begins with 'nothing'" in run(
        capsys, "convert", SECOND, "x", "--prefix", "nothing", code=4
    )


def test_what_is_damaged_is_not_converted(here, capsys):
    flip(SECOND, "params.embedding.table")
    assert "is damaged: bytes" in run(capsys, "convert", SECOND, "tensors", code=4)
    assert not Path("tensors/model.safetensors").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "epoch.ckpt"])
def test_pickled_weights_are_refused_with_what_to_do(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    out = run(capsys, "convert", str(tmp_path), str(tmp_path / "out"), code=4)
    assert f"{name} is pickled" in out and "safetensors.torch.save_file" in out


def test_a_dcp_checkpoint_is_refused_with_what_to_do(tmp_path, capsys):
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04.")
    out = run(capsys, "convert", str(tmp_path), str(tmp_path / "out"), code=4)
    assert "torch.distributed.checkpoint with a pickled index" in out and "dcp_to_torch_save" in out


def test_large_exports_take_several_files_with_an_index(here):
    checkpoint = open_checkpoint(SECOND)
    names = export_tensors(checkpoint, "many", max_bytes=40_000)
    index = json.loads(Path("many/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert set(index["weight_map"]) == set(names) and len(files) > 2
    assert index["metadata"]["total_size"] == sum(checkpoint.manifest.arrays[name].nbytes for name in names)
    assert {name for file in files for name in load_file(f"many/{file}")} == set(names)
    assert set(import_tensors("many", LocalStore("from_many")).arrays) == set(names)
    Path("many", index["weight_map"][names[-1]]).unlink()
    with pytest.raises(CheckpointError, match=rf"names .*, in {index['weight_map'][names[-1]]}, which does not exist"):
        import_tensors("many", LocalStore("from_less"))


def test_every_dtype_and_shape_survives(tmp_path):
    import ml_dtypes

    arrays = {
        "bf16": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "int8": np.arange(5, dtype=np.int8),
        "flags": np.array([True, False]),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    (tmp_path / "in").mkdir()
    save_file(arrays, tmp_path / "in" / "model.safetensors")
    store = LocalStore(tmp_path / "checkpoint")
    import_tensors(tmp_path / "in", store)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    export_tensors(checkpoint, tmp_path / "out", prefix="")
    for name, values in load_file(tmp_path / "out" / "model.safetensors").items():
        assert values.dtype == arrays[name].dtype and values.shape == arrays[name].shape
        assert values.tobytes() == arrays[name].tobytes()


def test_truncated_safetensors_are_an_error(tmp_path):
    save_file({"a": np.arange(100.0)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="can't be read"):
        import_tensors(tmp_path, LocalStore(tmp_path / "out"))


def test_diff_counts_what_is_not_finite(tmp_path, capsys):
    for name, values in {"a": [1.0, 2.0, np.inf, np.nan], "b": [1.5, np.nan, np.inf, np.nan]}.items():
        (tmp_path / f"{name}_in").mkdir()
        save_file({"w": np.array(values)}, tmp_path / f"{name}_in" / "model.safetensors")
        import_tensors(tmp_path / f"{name}_in", LocalStore(tmp_path / name))
    out = run(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"), code=1)
    assert "w: 2 of 4 values differ, by at most 0.5 (of at most 1); 2 -> 3 are not finite" in " ".join(out.split())
