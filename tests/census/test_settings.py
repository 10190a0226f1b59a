"""Boundary values of every field of every public class of settings: refused with the field's name, or known to be meant."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import types
import typing
from typing import Any

import pytest

import panax
from panax.core import PanaxError
from panax.core.validation import Validated
from panax.environments import Box, CartPole, Discrete
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.models import DecoderConfig, DlrmConfig, VitConfig

LEFT_OUT = ("panax.cli", "panax.adapters", "panax.__main__", "panax.metrics.page")

_TABLES = TablesConfig(
    tables=(TableConfig(name="a", rows=9, width=4, features=(FeatureConfig(leaf="a"), FeatureConfig(leaf="b"))),)
)
_MODEL = DecoderConfig(vocab_size=64, max_length=16, embed=16, num_layers=1, heads=2, ffn=32)
NEEDED: dict[str, dict[str, Any]] = {
    "Categorical": {"count": 3},
    "DiagonalGaussian": {"space": Box(low=-1.0, high=1.0, shape=(2,))},
    "SquashedGaussian": {"space": Box(low=-1.0, high=1.0, shape=(2,))},
    "Dqn": {"environment": CartPole(max_steps=10)},
    "Ppo": {"environment": CartPole(max_steps=10)},
    "ArrayRecord": {"paths": ("x",)},
    "Arrow": {"paths": ("x",)},
    "HashBuckets": {"buckets": 9},
    "TextFiles": {"paths": ("x",)},
    "Criteo": {"paths": ("x",)},
    "ImageFolder": {"path": "x"},
    "ParquetImages": {"paths": ("x",)},
    "WebDatasetImages": {"paths": ("x",)},
    "Mds": {"path": "x"},
    "MegatronTokens": {"path": "x"},
    "HuggingFaceDisk": {"path": "x"},
    "Jsonl": {"paths": ("x",)},
    "Parquet": {"paths": ("x",)},
    "RowNumbers": {"batch_size": 8},
    "Sequences": {"paths": ("x",)},
    "TokenFile": {"path": "x"},
    "WebDataset": {"paths": ("x",)},
    "Box": {"low": -1.0, "high": 1.0},
    "Discrete": {"count": 3},
    "TargetReached": {"target": 1.0},
    "TimeLimit": {"hours": 1.0},
    "FeatureConfig": {"leaf": "a"},
    "TableConfig": {"name": "a", "rows": 9, "width": 4, "features": (FeatureConfig(leaf="a"),)},
    "TablesConfig": {"tables": _TABLES.tables},
    "DecoderTask": {"model": _MODEL},
    "SequenceTask": {"model": dataclasses.replace(_MODEL, tied=True)},
    "DlrmConfig": {"tables": _TABLES},
    "DlrmTask": {"model": DlrmConfig(tables=_TABLES)},
    "VitTask": {"model": VitConfig(num_classes=4)},
}
"""What a class needs before one of its fields is set; a class that is not here and needs something is not asked."""

MEANT = {
    # Any number is a seed, a bound, a reward or a target; -1 stands for "all that are left", "chosen" or "none".
    *((cls, "seed") for cls in ("Film", "SyntheticClicks", "TextData", "Samples", "ExampleData", "Mixture", "Experiment")),
    *(("Box", name) for name in ("low", "high")),
    *(("MeshShape", name) for name in ("replica", "stage", "fsdp", "expert", "context", "tensor")),
    ("GridWorld", "step_cost"), ("SyntheticClicks", "bias"), ("TargetReached", "target"), ("ProbeConfig", "every"),
    ("PerceptronPolicy", "first_gain"), ("RecurrentPolicy", "first_gain"), ("Ppo", "init_log_std"),
    ("Ppo", "ent_coef"), ("Sac", "target_entropy"), ("Sampling", "presence_penalty"), ("Sampling", "frequency_penalty"),
}  # fmt: skip
"""Fields in which a negative number means something."""


def _import_all() -> None:
    for module in pkgutil.walk_packages(panax.__path__, "panax."):
        if module.name.startswith(LEFT_OUT) or module.name.endswith(("_gpu", "_tpu")):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:  # of an extra that is not installed
            continue


def _below(cls: type) -> set[type]:
    return {cls, *(each for sub in cls.__subclasses__() for each in _below(sub))}


def _classes() -> list[type]:
    _import_all()
    found = [
        cls
        for cls in _below(Validated)
        if cls.__module__.startswith("panax.") and dataclasses.is_dataclass(cls) and not inspect.isabstract(cls)
        and not cls.__name__.startswith("_")
    ]  # fmt: skip
    return sorted(found, key=lambda cls: (cls.__name__, cls.__module__))


def _needed(cls: type) -> dict[str, Any] | None:
    given = NEEDED.get(cls.__name__, {})
    lacking = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]  # fmt: skip
    return None if lacking else given


def _values(hint: Any) -> list[Any]:
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    wrong_values: list[Any] = []
    if float in alternatives:
        wrong_values += [math.nan, math.inf, -math.inf, -1.0, "0.5", True]
    if int in alternatives:
        wrong_values += [-1, -(2**40), "1", math.nan, *([] if float in alternatives else [0.5])]
    if bool in alternatives:
        wrong_values += ["yes", 2]
    if str in alternatives and type(None) not in alternatives:
        wrong_values += [3]
    return list(dict.fromkeys(wrong_values)) if float not in alternatives else [*wrong_values]


CASES = [
    pytest.param(cls, field.name, value, id=f"{cls.__name__}-{field.name}-{value}")
    for cls in _classes()
    if _needed(cls) is not None
    for hints in [typing.get_type_hints(cls)]
    for field in dataclasses.fields(cls)
    if field.init
    for value in _values(hints[field.name])
]


def test_there_are_as_many_cases_as_settings():
    assert len(CASES) > 1500
    assert {Discrete, DecoderConfig} <= set(_classes())


@pytest.mark.parametrize(("cls", "name", "value"), CASES)
def test_a_setting_out_of_range_is_refused_by_its_name(cls, name, value):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not math.isnan(value) and (cls.__name__, name) in MEANT:
        return
    with pytest.raises((PanaxError, ValueError, TypeError), match=name):
        cls(**{**(_needed(cls) or {}), name: value})
