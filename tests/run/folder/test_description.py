"""A run's settings as text, and a task built from it again: of registered classes, and of no others."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import typing

import pytest

from panax.agents import Ppo
from panax.core import CheckpointError, RecipeError, Task, register_serializable, serializable
from panax.core.former_names import FIELDS, with_former_names, with_present_names
from panax.core.serializable import find_serializable, register_serializable_module, serializable_names
from panax.data import (
    Bag,
    ConcatCorpus,
    CountVocabulary,
    FilteredCorpus,
    HashedIds,
    IntegerIds,
    Mixture,
    MixtureComponent,
    Table,
    TextFiles,
)
from panax.data.files.files import fingerprint
from panax.environments import GridWorld
from panax.layers import GateClamp
from panax.models import BaseWidth, DecoderConfig, DecoderTask, HeadSizes, TextClassifierTask, TextEmbedderTask
from panax.optim import AdamW
from panax.run import Experiment, RollbackConfig
from panax.run.folder.description import deserialize_config, deserialize_task, diff_configs, serialize_config
from panax.run.folder.previous_run import fill_defaults
from panax.run.reporting.evaluation import DATA_CLASSES

RENAMED_IN = {
    **dict.fromkeys(("Experiment", "RollbackConfig", "VerifyConfig"), "panax.run.experiment"),
    "Islands": "panax.comms",
    "Rules": "panax.mesh",
}


class Fitted(Task):
    def init(self, key):
        return {}, {}

    def parameter_axes(self, params):
        return params

    def loss(self, params, state, batch, key, train):
        raise NotImplementedError


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTask(Fitted):
    width: int
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unregistered(Fitted):
    width: int = 1


def test_a_task_that_registers_itself_comes_back():
    task = OwnTask(width=3, parts=("a", "b"))
    assert deserialize_task(json.dumps(serialize_config(task)), "here") == task


def dataclasses_of(hint) -> list[type]:
    """Dataclasses in a type."""
    own = [hint] if isinstance(hint, type) and dataclasses.is_dataclass(hint) else []
    return own + [found for part in typing.get_args(hint) for found in dataclasses_of(part)]


def test_every_setting_of_a_readable_class_is_readable():
    """Else a run trains, and its checkpoints can't be loaded."""
    unknown = [
        f"{name}.{field.name}: {cls.__name__}"
        for name in serializable_names()
        if (owner := find_serializable(name)) is not None and owner.__module__.startswith("panax.")
        for field in dataclasses.fields(owner)
        for cls in dataclasses_of(typing.get_type_hints(owner)[field.name])
        if find_serializable(cls.__name__) is not cls
    ]
    assert unknown == []


def test_every_task_of_the_library_is_readable():
    importlib.import_module("panax.models")
    importlib.import_module("panax.agents")
    classes, tasks = [Task], set()
    while classes:
        for cls in classes.pop().__subclasses__():
            classes.append(cls)
            if cls.__module__.startswith(("panax.models", "panax.agents")) and dataclasses.is_dataclass(cls):
                tasks.add(cls)
    concrete = {cls.__name__ for cls in tasks if not getattr(cls, "__abstractmethods__", None)}
    # A reward model's evaluation is made of its task where it is used, and is in no checkpoint.
    assert len(concrete) > 8 and concrete - {"RewardScores"} <= {*serializable_names()}


@pytest.mark.parametrize(
    "task",
    [
        DecoderTask(model=DecoderConfig(gate_clamp=GateClamp(limit=0.5), head_sizes=(HeadSizes(), HeadSizes(head_dim=8)))),
        DecoderTask(model=DecoderConfig(embed=64, tied=False), base=BaseWidth(embed=32, heads=2)),
        TextClassifierTask(model=DecoderConfig(), classes=3),
        TextEmbedderTask(model=DecoderConfig(), dims=(32, 64)),
    ],
    ids=["bounds and heads", "muP", "classifier", "embedder"],
)  # fmt: skip
def test_settings_in_settings_come_back(task):
    assert deserialize_task(json.dumps(serialize_config(task)), "here") == task


def test_a_name_whose_bytes_are_no_text_is_refused_before_a_checkpoint_holds_it():
    name = os.fsdecode(b"lat\xe9n")
    with pytest.raises(RecipeError, match=r"hold 'lat.udce9n', which is not UTF-8.*rename"):
        serialize_config(OwnTask(width=3, parts=(name,)))


def test_nothing_else_is_built():
    with pytest.raises(
        CheckpointError, match=r"here describes a Unregistered; this command builds DecoderTask, Deco.*, OwnT"
    ):
        deserialize_task(json.dumps(serialize_config(Unregistered())), "here")
    for text in ('{"type": "Popen", "args": "true"}', '{"type": 3}', "{}", '{"type": "subprocess.Popen"}'):
        with pytest.raises(CheckpointError, match="and no other class"):
            deserialize_task(text, "here")
    with pytest.raises(CheckpointError, match="does not describe a task"):
        deserialize_task('{"type": "Pipeline"}', "here")
    # Numbers by name are a mapping in a field that is declared so alone.
    for model in ("{}", '{"embed": 8}', '{"type": 3}'):
        with pytest.raises(CheckpointError, match="and no other class"):
            deserialize_task(f'{{"type": "DecoderTask", "model": {model}}}', "here")
    with pytest.raises(CheckpointError, match="OwnTask has no field 'depth'; it was saved by a newer Panax"):
        deserialize_task('{"type": "OwnTask", "width": 1, "depth": 2}', "here")


def test_what_can_be_registered():
    assert register_serializable(OwnTask) is OwnTask
    with pytest.raises(TypeError, match="is not a dataclass"):
        register_serializable(Fitted)
    with pytest.raises(ValueError, match="'OwnTask' is registered already"):
        register_serializable(dataclasses.make_dataclass("OwnTask", ["width"]))
    with pytest.raises(ValueError, match="'VitTask' is registered already"):
        register_serializable(dataclasses.make_dataclass("VitTask", ["width"]))
    again = type("OwnTask", (OwnTask,), {"__module__": OwnTask.__module__, "__qualname__": OwnTask.__qualname__})
    assert register_serializable(again) is again is find_serializable("OwnTask")
    register_serializable(OwnTask)


def test_a_module_is_imported_when_a_file_names_its_class():
    code = (
        "import sys, panax\n"
        "from panax.core.serializable import find_serializable, serializable_names\n"
        "assert find_serializable('RolledReplay') is None and 'panax.models' not in sys.modules and 'jax' not in sys.modules\n"
        "assert find_serializable('VitTask').__module__ == 'panax.models.vision.vit_task'\n"
        "assert all(isinstance(find_serializable(name), type) for name in serializable_names())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_panax_own_classes_are_those_of_its_tasks():
    importlib.import_module("panax.models")
    panax_names = {name for name in serializable_names() if find_serializable(name).__module__.startswith("panax.")}
    assert panax_names == {
        "DecoderTask", "DecoderConfig", "HybridConfig", "DeltaNetConfig", "ConvolutionConfig",
        "SideBySideConfig", "SublayerConfig", "Rotary", "RotaryScaling", "YarnScaling", "Latent",
        "MoE", "Pipeline", "DynamicScaling", "LinearScaling", "LongScaling", "GateClamp", "HeadSizes", "BaseWidth", "LoRA",
        "TextClassifierTask", "TextEmbedderTask", "RewardTask", "Distill", "Kto", "NextToken", "Preference", "PolicyGradient",
        "VitTask", "VitConfig", "DlrmTask", "DlrmConfig", "TwoTowerTask", "TwoTowerConfig", "SequenceTask", "HstuConfig",
        "TablesConfig", "TableConfig", "FeatureConfig", "Growth",
        "Dqn", "Ppo", "Sac", "Seeds", "PerceptronPolicy", "RecurrentPolicy", "DecoderPolicy",
        "Acrobot", "Brax", "CartPole", "GridWorld", "Gymnax", "Pendulum",
    }  # fmt: skip
    assert register_serializable_module("panax.models") is None


def old_form(value):
    """Settings as version 0.1.1 wrote them: classes and fields under the names that they had."""
    if isinstance(value, dict):
        fields = {new: old for old, new in FIELDS.get(value.get("type"), {}).items()}
        former = {fields.get(key, key): old_form(item) for key, item in value.items()}
        return {**former, "type": with_former_names(value["type"])} if "type" in value else former
    return [old_form(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "value",
    [
        Mixture(parts=(MixtureComponent(name="a", corpus=ConcatCorpus(corpora=(TextFiles(paths=("a.txt",)),))),)),
        Table(paths=("a.csv",), bags=(Bag(column="id", ids=CountVocabulary(min_count=2)),)),
        Table(paths=("a.csv",), bags=(Bag(column="id", ids=IntegerIds(rows=4)), Bag(column="user", ids=HashedIds()))),
    ],
    ids=["texts", "counted", "ids"],
)
def test_settings_that_name_a_class_as_it_was_called_are_the_same(value):
    now = json.loads(json.dumps(serialize_config(value)))
    before = old_form(now)
    assert before != now and with_present_names(before) == now
    assert fill_defaults(with_present_names(before), value) == now
    assert deserialize_config(before, "here", DATA_CLASSES) == value


@pytest.mark.parametrize("name", FIELDS)
def test_each_renamed_field_exists_under_its_present_name_only(name):
    cls = find_serializable(name) or getattr(importlib.import_module(RENAMED_IN.get(name, "panax.optim")), name)
    fields = {field.name for field in dataclasses.fields(cls)}
    assert set(FIELDS[name].values()) <= fields and not set(FIELDS[name]) & fields


def test_a_checkpoint_of_version_0_1_1_has_the_same_settings(tmp_path):
    experiment = Experiment(
        task=Ppo(environment=GridWorld(), gae_lambda=0.9), num_steps=2,
        optimizer=AdamW(lr_multipliers={"policy": 0.5}), rollback=RollbackConfig(after=2, max_rollbacks=5),
    )  # fmt: skip
    before = old_form(json.loads(json.dumps(serialize_config(experiment))))
    assert before["rewind"] == {"type": "RewindConfig", "after": 2, "most": 5} and before["task"]["trace"] == 0.9
    assert list(diff_configs(with_present_names(before), serialize_config(experiment))) == []
    assert deserialize_task(json.dumps(before["task"]), "here") == experiment.task


def test_a_caller_s_class_keeps_a_name_that_panax_has_given_up(monkeypatch):
    monkeypatch.setitem(serializable._classes, "Part", dataclasses.make_dataclass("Part", ["most"]))
    assert with_present_names({"type": "Part", "most": 1}) == {"type": "Part", "most": 1}


def test_another_class_is_another_setting():
    assert list(diff_configs({"type": "Part"}, {"type": "Mixture"})) == ["type: Part -> Mixture"]


def test_fingerprints_hash_the_names_that_classes_had(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    joined = ConcatCorpus(corpora=(TextFiles(paths=(str(tmp_path / "a.txt"),)),))
    assert FilteredCorpus(corpus=joined, min_characters=1).fingerprint() == fingerprint(
        "filtered", "Joined", joined.fingerprint(), 1, None, "", ""
    )
    assert with_former_names(repr(Bag(column="id", ids=IntegerIds(rows=4)))).count("Numbered(rows=4)") == 1
