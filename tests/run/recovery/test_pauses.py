"""While processes of a launched job are missing, what one replica or one device can't do pauses, with a message."""

import dataclasses

import jax
import pytest
from tiny_recipe import tiny

import panax
from panax.checkpoint import CheckpointConfig
from panax.comms import Comms
from panax.core.errors import LayoutError, RecipeError
from panax.mesh import MeshShape
from panax.run import EvaluateConfig, VerifyConfig
from panax.run.degraded_features import PROCESSES_VARIABLE, count_missing_processes
from panax.run.preparation import prepare
from panax.run.recovery.verification import check_verifiable

ALONE = MeshShape(fsdp=1)

COMMS = {
    "compressed": Comms(compress="int8"),
    "compressed over what is slow": Comms(compress="bfloat16", over=("auto",)),
    "local steps": Comms(local_steps=2),
    "delayed": Comms(delayed=True),
}


def experiment(folder, mesh, **settings):
    values = {
        "optimizer": panax.optim.AdamW(schedule=panax.optim.Schedule(peak=1e-3)),
        "evaluate": EvaluateConfig(every=0),
    }
    values |= {"checkpoint": CheckpointConfig(every=2, keep_last=9), "directory": str(folder), "mesh": mesh} | settings
    return dataclasses.replace(tiny(), **values)


@pytest.mark.parametrize("how", COMMS)
def test_comms_pause_while_one_replica_is_left(how, tmp_path, monkeypatch):
    alone = experiment(tmp_path, ALONE, comms=COMMS[how])
    with pytest.raises(RecipeError, match="remove comms"):
        prepare(alone, devices=jax.devices()[:1])
    monkeypatch.setenv(PROCESSES_VARIABLE, "2")
    assert count_missing_processes() == 1
    said: list[str] = []
    prepared = prepare(alone, said.append, devices=jax.devices()[:1])
    [line] = [line for line in said if "pauses" in line]
    assert "of the job's processes 1 are missing, and one replica is left" in line
    assert prepared.step.program.comms == Comms() and prepared.experiment.comms == COMMS[how]
    # Where replicas are left, they go on as they were.
    said.clear()
    two = prepare(
        experiment(tmp_path, MeshShape(replica=2), comms=dataclasses.replace(COMMS[how], over=("replica",))),
        said.append,
        devices=jax.devices()[:2],
    )
    assert not two.step.program.comms.is_plain and not any("pauses" in line for line in said)


def test_checks_on_other_devices_pause_while_there_is_none(tmp_path, monkeypatch):
    prepared = prepare(experiment(tmp_path, ALONE, verify=VerifyConfig(every=2)), devices=jax.devices()[:1])
    with pytest.raises(LayoutError, match="this run has one"):
        check_verifiable(prepared)
    monkeypatch.setenv(PROCESSES_VARIABLE, "2")
    check_verifiable(prepared)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"comms": COMMS[how]} for how in COMMS if "auto" not in str(COMMS[how])] + [{"verify": VerifyConfig(every=2)}],
)
def test_a_job_that_loses_a_replica_continues_and_takes_it_back(settings, tmp_path, monkeypatch):
    complete, alone = (experiment(tmp_path, mesh, **settings) for mesh in (MeshShape(replica=2), ALONE))
    panax.fit(dataclasses.replace(complete, num_steps=4), devices=jax.devices()[:2], quiet=True)
    monkeypatch.setenv(PROCESSES_VARIABLE, "2")
    said: list[str] = []
    panax.fit(dataclasses.replace(alone, num_steps=8), devices=jax.devices()[:1], say=said.append)
    assert any("pauses" in line for line in said)
    monkeypatch.delenv(PROCESSES_VARIABLE)
    result = panax.fit(dataclasses.replace(complete, num_steps=12), devices=jax.devices()[:2], quiet=True)
    assert result.step == 12
