"""Checkpoints that branches need: in any order of making, pruning, deleting and sweeping, none is lost."""

import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.checkpoint.branches import (
    YOUNG_SECONDS,
    BranchOrigin,
    check_no_branch,
    live_branches,
    make_branch,
    read_origin,
)
from panax.checkpoint.commit import remove
from panax.core.errors import CheckpointError
from panax.stores import open_store


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save({"w": jax.device_put(np.full(4, step, np.float32))}, step, {"data": None})
    checkpointer.finish()


@pytest.fixture
def aged(monkeypatch):
    """Let every reference be old enough to count only with its branch."""
    monkeypatch.setattr("panax.checkpoint.branches.YOUNG_SECONDS", -1.0)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_branch_keeps_its_step(where, tmp_path, aged):
    root = str(tmp_path) if where == "disk" else f"memory://branches-{tmp_path.name}"
    location, config = f"{root}/parent/checkpoints", CheckpointConfig(keep_last=1, keep_best=0)

    def saved(step: int) -> Checkpointer:
        # Another one for each save: the store in memory holds on to the buffers that it is given.
        checkpointer = Checkpointer(location, config, say=lambda line: None)
        save(checkpointer, step)
        return checkpointer

    savers = [saved(1)]
    origin = make_branch(location, 1, f"{root}/b/checkpoints", "b")
    assert read_origin(open_store(f"{root}/b/checkpoints")) == origin
    savers += [saved(2), saved(3)]
    parent = savers[-1]
    assert parent.steps() == [1, 3]
    assert origin.open().read("w").tolist() == [1, 1, 1, 1]
    assert [each.name for each in live_branches(parent.store)[1]] == ["b"]
    with pytest.raises(CheckpointError, match="beginning of b"):
        check_no_branch(parent.store, 1)
    assert parent.remove_abandoned(lambda manifest: manifest.step > 1) == []
    store = open_store(f"{root}/b/checkpoints")
    store.delete([entry.path for entry in store.list()])
    assert saved(4).steps() == [4]
    with pytest.raises(CheckpointError, match="does not exist any more"):
        origin.open()


def test_refused_branches(tmp_path):
    parent = Checkpointer(tmp_path / "parent", say=lambda line: None)
    save(parent, 1)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        make_branch(str(tmp_path / "parent"), 2, str(tmp_path / "b" / "checkpoints"), "b")
    make_branch(str(tmp_path / "parent"), 1, str(tmp_path / "b" / "checkpoints"), "b")
    with pytest.raises(CheckpointError, match="holds a run already"):
        make_branch(str(tmp_path / "parent"), 1, str(tmp_path / "b" / "checkpoints"), "b")
    # A branch that has just been made counts even before it has an origin.
    shutil.rmtree(tmp_path / "b")
    assert live_branches(parent.store)
    assert not live_branches(parent.store, now=lambda: 2 * YOUNG_SECONDS + 2e9 * 10)
    (file,) = (tmp_path / "parent" / "run" / "branches").iterdir()
    file.write_text(file.read_text().replace('"step": 1', '"step": 3'))
    with pytest.raises(CheckpointError, match="is not the reference"):
        live_branches(parent.store)


def test_a_changed_checkpoint_is_no_beginning(tmp_path):
    parent = Checkpointer(tmp_path / "parent", say=lambda line: None)
    save(parent, 1)
    origin = make_branch(str(tmp_path / "parent"), 1, str(tmp_path / "b" / "checkpoints"), "b")
    remove(parent.store, "step_00000001")
    other = Checkpointer(tmp_path / "parent", say=lambda line: None)
    other.save({"w": jax.device_put(np.zeros(4, np.float32))}, 1, {"data": None})
    other.finish()
    with pytest.raises(CheckpointError, match="has changed since"):
        origin.open()


def schedule(folder: Path, seed: int) -> None:
    """Act at random on a run and its branches, and check after each action that every branch can still begin."""
    chance = random.Random(seed)
    where = folder / "parent"
    parent = Checkpointer(where, CheckpointConfig(keep_last=1, keep_best=0), say=lambda line: None)
    branches: dict[str, tuple[int, BranchOrigin]] = {}
    step = 0
    for number in range(12):
        action = chance.choice(["save", "save", "branch", "branch", "delete", "sweep", "restart", "abandon"])
        if action == "save":
            step += 1
            save(parent, step)
        elif action == "branch" and parent.steps():
            at = chance.choice(parent.steps())
            location = folder / f"b{number}" / "checkpoints"
            branches[f"b{number}"] = at, make_branch(str(where), at, str(location), f"b{number}")
        elif action == "delete" and branches:
            name = chance.choice(sorted(branches))
            shutil.rmtree(folder / name)
            del branches[name]
        elif action == "sweep":
            parent.sweep()
        elif action == "restart":
            parent = Checkpointer(where, CheckpointConfig(keep_last=1, keep_best=0), say=lambda line: None)
        elif action == "abandon":
            limit = chance.randint(0, step)
            parent.remove_abandoned(lambda manifest, limit=limit: manifest.step >= limit)
        for at, origin in branches.values():
            assert origin.open().read("w").tolist() == [at] * 4, (seed, number, action)
    needed = {at for at, _ in branches.values()}
    step += 1
    save(parent, step)
    assert set(parent.steps()) == needed | {step}, seed


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 500), marks=pytest.mark.slow)], ids=["20", "480"])
def test_random_schedules_lose_nothing(seeds, tmp_path, aged):
    for seed in seeds:
        schedule(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))
