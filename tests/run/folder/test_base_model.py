"""Checkpoints of adapters: they name their base by checksums, resume to the same bits, and refuse another base."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import panax
from panax.adapters.huggingface import config_from, save, save_adapter
from panax.checkpoint import CheckpointConfig, Checkpointer, MemoryConfig
from panax.cli.main import main
from panax.core import CheckpointError, RecipeError, named_leaves
from panax.core.params.checksums import compute_checksums, fingerprint_weights
from panax.data import BytePairTokenizer, TextData, TextFiles
from panax.mesh import MeshShape
from panax.models import DecoderConfig, DecoderTask, LoRA
from panax.models.merged_lora import check_merged, compare_merged, merge_adapters
from panax.optim import AdamW, Schedule
from panax.run.folder.base_model import NamedBase
from panax.run.folder.initial_state import init_state
from panax.run.preparation import prepare
from panax.spmd.composite.low_rank import base_weights, low_rank_mask

MODEL = DecoderConfig(**{**tiny.SIZES, "vocab_size": 300}, qk_norm=True)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two released models of one shape, `base` and `other`, and a text."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "a.txt").write_text("the oak, the ash, and the bonny ivy tree " * 40)
    tokenizer = BytePairTokenizer(vocab_size=300).train(TextFiles(paths=(str(folder / "a.txt"),)))
    for seed, name in enumerate(("base", "other")):
        params, _ = jax.jit(DecoderTask(model=MODEL).init)(jax.random.key(seed))
        save(folder / name, params)
        tokenizer.save(folder / name)
    return folder


def tuning(released: Path, directory: Path, **changes: Any) -> panax.Experiment:
    settings: dict[str, Any] = {
        "name": "tuned",
        "directory": str(directory),
        "num_steps": 4,
        "mesh": MeshShape(fsdp=2),
        "optimizer": AdamW(schedule=Schedule(peak=1e-2, decay="constant")),
        "task": DecoderTask(model=config_from(released / "base"), adapter=LoRA(rank=4, targets=("attention",))),
        "checkpoint": CheckpointConfig(every=2),
        "data": TextData(
            corpus=TextFiles(paths=(str(released / "a.txt"),)),
            tokenizer=panax.data.PretrainedTokenizer(path=str(released / "base")),
            sequence_length=32,
            batch_size=8,
            held_out=0,
            cache_dir=str(released / "cache"),
        ),
    }
    return panax.Experiment(**{"init": f"hf:{released / 'base'}"} | settings | changes)


def fit(experiment: panax.Experiment, **how: Any) -> panax.run.Result:
    return panax.fit(experiment, quiet=True, devices=jax.devices()[:2], **how)


def test_checksums_depend_on_each_bit_and_on_no_mesh() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(16, 6)).astype(np.float32)
    expected = compute_checksums({"w": values})["w"]
    mesh = jax.make_mesh((8,), ("x",))
    sharded = jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    assert compute_checksums({"w": sharded}) == {"w": expected}
    for index in np.ndindex(values.shape):
        for bit in (0, 31):
            changed = values.copy()
            changed.view(np.uint32)[index] ^= np.uint32(1 << bit)
            assert compute_checksums({"w": changed})["w"] != expected, (index, bit)
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert compute_checksums({"w": swapped})["w"] != expected
    assert fingerprint_weights({"w": values}) != fingerprint_weights({"v": values})


def test_a_checkpoint_holds_adapters_alone_and_resumes_bitwise(released: Path, tmp_path: Path) -> None:
    whole = fit(tuning(released, tmp_path / "whole"))
    # Two steps, then the rest.
    started = tuning(released, tmp_path / "parts", num_steps=2)
    fit(started)
    resumed = fit(dataclasses.replace(started, num_steps=4))
    ours, theirs = named_leaves(resumed.state), named_leaves(whole.state)
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(jax.random.key_data(ours[name]) if name == "key" else ours[name],
                                      jax.random.key_data(leaf) if name == "key" else leaf, err_msg=name)  # fmt: skip
    checkpointer = Checkpointer(tmp_path / "parts" / "checkpoints")
    manifest = checkpointer.open(4).manifest
    trained = named_leaves(jax.tree.map(lambda leaf, one: leaf if one else None, resumed.state.params,
                                        low_rank_mask(resumed.state.params)))  # fmt: skip
    assert {name for name in manifest.arrays if name.startswith("params.")} == {f"params.{name}" for name in trained}
    # Adapters, both moments of the optimizer, and little else.
    own = 3 * sum(leaf.nbytes for leaf in trained.values())
    assert manifest.nbytes <= 1.1 * own
    stored = sum(file.stat().st_size for file in (tmp_path / "parts" / "checkpoints").glob("step_00000004/**/data*"))
    assert stored <= 1.1 * own
    base = NamedBase.of(manifest)
    assert base is not None and base.init == f"hf:{released / 'base'}"
    loaded = panax.load(tmp_path / "parts")
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_base_that_has_changed_or_gone_is_named(released: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(released / "base", moved)
    experiment = dataclasses.replace(tuning(released, tmp_path / "run", num_steps=2), init=f"hf:{moved}")
    state = fit(experiment).state
    shutil.copy(released / "other" / "model.safetensors", moved / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"is not the model that .* was trained beside: .* and \d+ others has another"
    ):
        panax.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is not the model that"):
        fit(dataclasses.replace(experiment, num_steps=4))
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match=r"holds trained weights alone, beside the model .*moved.*--base DIR"):
        panax.load(tmp_path / "run")
    loaded = panax.load(tmp_path / "run", base=released / "base")
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # It trains on beside the same weights elsewhere.
    again = dataclasses.replace(experiment, num_steps=4, init=f"hf:{released / 'base'}")
    assert fit(again, accept_changes=True).step == 4
    base = NamedBase.of(Checkpointer(tmp_path / "run" / "checkpoints").open(4).manifest)
    assert base is not None and base.init == f"hf:{released / 'base'}"


def test_a_run_that_stores_its_base_keeps_doing_so(released: Path, tmp_path: Path) -> None:
    stored = tuning(released, tmp_path / "run", num_steps=2, checkpoint=CheckpointConfig(every=2, base="stored"))
    fit(stored)
    manifest = Checkpointer(tmp_path / "run" / "checkpoints").open(2).manifest
    assert NamedBase.of(manifest) is None
    # What a run has resumed from a stored base is not known to be that of `init`.
    fit(dataclasses.replace(stored, num_steps=4, checkpoint=CheckpointConfig(every=2)))
    assert NamedBase.of(Checkpointer(tmp_path / "run" / "checkpoints").open(4).manifest) is None


def test_frozen_layers_of_a_whole_model_are_named_by_choice(released: Path, tmp_path: Path) -> None:
    plain = DecoderTask(model=config_from(released / "base"))
    named = CheckpointConfig(every=2, base="named", memory=MemoryConfig(every=1, directory=str(tmp_path / "memory")))
    experiment = tuning(released, tmp_path / "run", task=plain, frozen=("embedding",), checkpoint=named)
    state = fit(experiment).state
    base = NamedBase.of(Checkpointer(tmp_path / "run" / "checkpoints").open(4).manifest)
    assert base is not None and base.checksums.keys() == {"embedding.table"}
    for ours, theirs in zip(
        jax.tree.leaves(panax.load(tmp_path / "run").params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(RecipeError, match="this run trains all of them"):
        fit(dataclasses.replace(experiment, frozen=(), directory=str(tmp_path / "free")))
    with pytest.raises(RecipeError, match=r"is for weights that init=hf:\.\.\. loads, and init is ''"):
        fit(dataclasses.replace(experiment, init="", directory=str(tmp_path / "new")))


def test_a_relative_folder_is_found_from_another_one(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(released.parent)
    # It has the form of a name in a hub, too.
    name = f"{released.name}/base"
    state = fit(tuning(released, tmp_path / "run", num_steps=1, init=f"hf:{name}")).state
    monkeypatch.chdir(tmp_path)
    for ours, theirs in zip(jax.tree.leaves(panax.load("run").params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_begins_from_the_adapters_of_another(released: Path, tmp_path: Path) -> None:
    first = fit(tuning(released, tmp_path / "first", num_steps=2))
    second = tuning(released, tmp_path / "second", init=f"checkpoint:{tmp_path / 'first'}")
    begun = init_state(prepare(second, print, devices=jax.devices()[:2]), print)
    for ours, theirs in zip(jax.tree.leaves(begun.params), jax.tree.leaves(first.state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # A checkpoint may be removed, so that bases of checkpoints are stored.
    named = dataclasses.replace(second, checkpoint=CheckpointConfig(base="named"))
    with pytest.raises(RecipeError, match=r"is for weights that init=hf:\.\.\. loads, and init is 'checkpoint:"):
        fit(named)
    fit(second)
    assert NamedBase.of(Checkpointer(tmp_path / "second" / "checkpoints").open(4).manifest) is None


def test_an_adapter_of_peft_is_loaded_trained_on_and_merged(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = fit(tuning(released, tmp_path / "run"))
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    loaded = panax.load("peft:adapter")
    assert loaded.task.adapter == LoRA(
        rank=4, targets=("attention.w_q", "attention.w_k", "attention.w_v", "attention.w_o")
    )
    for ours, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(trained.state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # Trained on, it begins with the same weights.
    experiment = panax.adapted_model(
        "adapter", data=str(released / "a.txt"), num_steps=40, directory=str(tmp_path / "more")
    )
    begun = init_state(prepare(experiment, devices=jax.devices()[:1]), print)
    for ours, theirs in zip(jax.tree.leaves(begun.params), jax.tree.leaves(trained.state.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    wrong = dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, adapter=LoRA(rank=8)))
    with pytest.raises(
        RecipeError, match=r"task.adapter is LoRA\(rank=8.* and adapter has another \(of attention.w_k Ad"
    ):
        init_state(prepare(wrong, devices=jax.devices()[:1]), print)
    capsys.readouterr()
    assert main(["merge", "peft:adapter", "merged"]) == 0
    assert "merged: a mean divergence of " in capsys.readouterr().out
    assert main(["merge", "run", "again"]) == 0
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    merged = panax.load("hf:merged")
    difference = compare_merged(loaded.params, merged.params)
    assert difference.mean < 1e-6 and difference.changed == 0.0
    # The base alone is another model.
    large = jax.tree.map(lambda leaf, one: leaf * 40 if one else leaf, loaded.params, low_rank_mask(loaded.params))
    assert compare_merged(large, merge_adapters(large)).mean < 1e-6
    moved = compare_merged(large, base_weights(large))
    with pytest.raises(RecipeError, match="differs from the adapters by a mean divergence of"):
        check_merged(moved, accept=False)
    check_merged(moved, accept=True)
    assert main(["merge", f"hf:{released / 'base'}", "none"]) == 2
    assert main(["train", "peft:adapter", "--lora", "4"]) == 2
    assert main(["merge", "peft:merged", "none"]) == 4
    errors = capsys.readouterr().err
    assert (
        "has no adapters to merge" in errors
        and "has one of its own rank" in errors
        and "adapter_config.json can't be read" in errors
    )


def test_a_base_of_an_adapter_that_has_moved_is_named(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = panax.load(f"hf:{released / 'base'}")
    task = dataclasses.replace(base.task, adapter=LoRA(rank=2, targets=("attention.w_q",)))
    save_adapter(
        tmp_path / "adapter", jax.jit(task.init)(jax.random.key(0))[0], task.adapter, base=str(tmp_path / "gone")
    )
    tokenizer = ["--prompt", "the oak", "--tokens", "2", "--temperature", "0"]
    assert main(["generate", f"peft:{tmp_path / 'adapter'}", *tokenizer]) == 4
    assert main(["generate", f"peft:{tmp_path / 'adapter'}", *tokenizer, "--base", str(released / "base")]) == 0
    # The adapter is zero: the base alone answers so.
    answer = capsys.readouterr()
    assert main(["generate", f"hf:{released / 'base'}", *tokenizer]) == 0
    assert "gone" in answer.err and capsys.readouterr().out == answer.out
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="names no base: base_model_name_or_path=None; pass --base DIR"):
        panax.load(f"peft:{tmp_path / 'adapter'}")


@pytest.mark.slow
def test_two_processes_name_one_base(released: Path, tmp_path: Path) -> None:
    flags = {"processes": "2", "devices": "2", "mesh.fsdp": "4", "lora": "4", "name": "two", "data.batch-size": "8",
             "data.sequence-length": "32", "data.held-out": "0", "optimizer.schedule.decay": "constant",
             "optimizer.schedule.warmup-steps": "2"}  # fmt: skip
    launch = [
        sys.executable,
        "-m",
        "panax",
        "launch",
        f"hf:{released / 'base'}",
        "--data",
        str(released / "a.txt"),
        "--quiet",
    ]
    launch += [part for name, value in flags.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "XLA_FLAGS": "", "PANAX_CACHE": str(tmp_path / "cache")}
    for steps in ("3", "5"):
        command = [*launch, "--num-steps", steps]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "two"
    manifest = Checkpointer(folder / "checkpoints").open(5).manifest
    base = NamedBase.of(manifest)
    assert base is not None and base.init == f"hf:{released / 'base'}"
    # The parts of two processes hold adapters alone, and one process reads them beside the whole base.
    assert all(name.endswith((".a", ".b")) for name in manifest.arrays if name.startswith("params."))
    loaded, original = panax.load(folder), panax.load(f"hf:{released / 'base'}")
    for ours, theirs in zip(
        jax.tree.leaves(base_weights(loaded.params)), jax.tree.leaves(original.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert any(leaf.any() for name, leaf in named_leaves(loaded.params).items() if name.endswith(".b"))
