"""A store that takes nothing for a while, and one with lists an hour old: a run continues, and resumes from what exists."""

import dataclasses
import errno

import jax
import pytest
from rollback_run import experiment

import panax
from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.hooks import Hook
from panax.stores.local import LocalStore


def trained(folder, steps, *, hooks=()):
    config = CheckpointConfig(every=5, keep_last=2, retries=1, retry_seconds=0.01)
    said: list[str] = []
    run = dataclasses.replace(experiment(folder, steps=steps), checkpoint=config, hooks=hooks)
    return panax.fit(run, devices=jax.devices()[:1], say=said.append), said


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_run_continues_while_its_store_takes_nothing_and_saves_when_it_can(code, tmp_path, monkeypatch):
    write, refuses = LocalStore.write, []

    class Quota(Hook):
        def after_step(self, run):
            refuses[:] = [code] if 1 <= run.step < 27 else []

    def refusing(self, path, parts):
        if refuses:
            raise OSError(refuses[0], "refused", path)
        return write(self, path, parts)

    monkeypatch.setattr(LocalStore, "write", refusing)
    result, said = trained(tmp_path, 40, hooks=(Quota(),))
    assert result.step == 40 and result.checkpoint.endswith("step_00000040")
    assert any("saving step 10 to" in line and "failed" in line for line in said)
    refuses.clear()
    again, said = trained(tmp_path, 40)
    assert again.step == 40 and any("all 40 steps are done" in line for line in said)


def test_lists_of_an_hour_ago_lose_no_checkpoint(tmp_path, monkeypatch):
    trained(tmp_path, 10)
    real_methods = {"list": LocalStore.list, "folders": LocalStore.folders}
    store = LocalStore(tmp_path / "checkpoints")
    places = ("", *real_methods["folders"](store))
    then = {(name, place): real_methods[name](store, place) for name in real_methods for place in places}
    for name in real_methods:
        monkeypatch.setattr(LocalStore, name, lambda self, prefix="", name=name: then.get((name, prefix), []))
    result, said = trained(tmp_path, 20)
    assert result.step == 20 and not any("failed" in line for line in said)
    result, said = trained(tmp_path, 30)
    # Not from step 10, which the list knows.
    assert any("resuming from step 20 of 30" in line for line in said) and result.step == 30
    assert any("lacks" in line and "step_00000020" in line and "it is stale" in line for line in said)
    monkeypatch.undo()
    assert Checkpointer(tmp_path / "checkpoints").latest() == 30
