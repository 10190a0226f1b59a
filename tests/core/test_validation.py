"""Settings are checked when they are built, from Python as from the command line: every class, every field."""

import dataclasses
import importlib
import inspect
import pkgutil
import types
from typing import Literal, Union, get_args, get_origin, get_type_hints

import jaxtyping
import numpy as np
import optax
import pytest

import panax
from panax import Experiment, fit
from panax.core.errors import PanaxError, RecipeError
from panax.core.validation import Validated
from panax.data import TextFiles
from panax.mesh import MeshShape, Rules
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Optax, Schedule
from panax.run import compile_step


@pytest.fixture(autouse=True)
def as_for_a_user():
    """The tests' own checks of types, which users don't have, look at arguments before the settings do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


OPTIONAL = ("panax.adapters", "panax.cli")


def all_settings() -> list[type]:
    for module in pkgutil.walk_packages(panax.__path__, "panax."):
        if not module.name.startswith(OPTIONAL):
            importlib.import_module(module.name)
    classes, waiting = [], [Validated]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        # The fields of an abstract one are those of its subclasses.
        if dataclasses.is_dataclass(cls) and cls.__module__.startswith("panax.") and not inspect.isabstract(cls):
            classes.append(cls)
    return sorted(classes, key=lambda cls: (cls.__module__, cls.__name__))


SETTINGS = all_settings()
MODEL = DecoderConfig()
TASK = DecoderTask(model=MODEL)


def test_all_settings_are_found():
    assert {
        "Experiment",
        "DecoderConfig",
        "MoE",
        "Schedule",
        "TextData",
        "Rules",
        "CheckpointConfig",
        "RetryPolicy",
    } <= {cls.__name__ for cls in SETTINGS}
    assert len(SETTINGS) > 40


def wrong_for(hint):
    """A value of another kind than the annotation's, and a word of the message; None where anything goes."""
    each = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(get_origin(one) is Literal for one in each):
        return "no such word", "did you mean|known: |expected one of"
    if str in each or not all(one in (bool, int, float, type(None)) or get_origin(one) is tuple for one in each):
        return None
    if bool in each:
        return "yes", "expected True or False"
    # The message is of the first alternative.
    return ("text", "expected a tuple, and this is text") if get_origin(each[0]) is tuple else ("text", "number")


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_every_field_refuses_another_kind(cls):
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        case = wrong_for(hints[field.name])
        if case is None or not field.init:
            continue
        # As `dataclasses.replace` would call it, without what other fields need.
        made = object.__new__(cls)
        for other in dataclasses.fields(cls):
            missing = other.default is dataclasses.MISSING
            if not (missing and other.default_factory is dataclasses.MISSING):
                object.__setattr__(made, other.name, other.default_factory() if missing else other.default)
        for name in {f.name for f in dataclasses.fields(cls)} - vars(made).keys():
            del_hint = hints[name]
            object.__setattr__(made, name, del_hint() if del_hint in (str, int, float) else None)
        object.__setattr__(made, field.name, case[0])
        with pytest.raises(PanaxError, match=case[1]) as caught:
            try:
                made.__post_init__()
            except PanaxError as error:
                if field.name not in str(error):
                    # A field that must be given, and was left out above, comes first.
                    raise RecipeError(f"{field.name}: {case[1].split('|')[0]}") from error
                raise
        assert field.name in str(caught.value)


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: DecoderConfig(norm="rmsnorm"), r"DecoderConfig\.norm='rmsnorm': did you mean 'rms'"),
        (lambda: Schedule(decay="consine"), r"Schedule\.decay='consine': did you mean 'cosine'"),
        (
            lambda: DecoderTask(model=MODEL, remat="selective"),
            r"DecoderTask\.remat='selective': known: full, none, products",
        ),
        (
            lambda: DecoderTask(model=MODEL, compute_dtype="bfloat61"),
            r"compute_dtype='bfloat61': did you mean 'bfloat16'",
        ),
        (lambda: Schedule(peak=float("nan")), r"Schedule\.peak=nan: expected a number, not NaN"),
        (lambda: Schedule(warmup_steps=1.5), r"Schedule\.warmup_steps=1\.5: expected a whole number"),
        (lambda: Schedule(warmup_steps=True), r"warmup_steps=True: expected a whole number"),
        (
            lambda: TextFiles(paths="texts"),
            r"TextFiles\.paths='texts': expected a tuple, and this is text: write \('texts',\)",
        ),
        (lambda: Experiment(task=TASK, frozen="embed"), r"frozen='embed': expected a tuple, and this is text"),
        (lambda: Experiment(task=TASK, optimizer=optax.adam(1e-3)), r"wrap the optax transformation: Optax\("),
        (lambda: Experiment(task=TASK, optimizer=AdamW), r"this is a class: write AdamW\(\.\.\.\)"),
        (lambda: Experiment(task=DecoderTask), r"expected a Task, and this is a class: write DecoderTask\(\.\.\.\)"),
        (
            lambda: Experiment(task=recipe),
            r"expected a Task, and this is a function: write its result, recipe\(\.\.\.\)",
        ),
        (lambda: Experiment(task=TASK, data=recipe), r"data is the function recipe; expected its result"),
        (lambda: Experiment(task=TASK, mesh={"fsdp": 8}), r"expected a MeshShape, got a dict"),
        (lambda: AdamW(schedule=1e-3), r"AdamW\.schedule=0\.001: expected a Schedule, got a float"),
        (lambda: Rules(storage={"vocab": 3}), r"storage"),
        (lambda: fit(recipe), r"fit takes an Experiment, and this is a function: call it, fit\(recipe\(\)\)"),
        (lambda: compile_step(TASK, {}, optax.adam(1e-3)), r"wrap the optax transformation"),
    ],
)
def test_one_message_suggests_the_intended_name(build, said):
    with pytest.raises(RecipeError, match=said):
        build()


def recipe() -> Experiment:
    return Experiment(task=TASK)


def test_what_is_meant_alike_is_taken():
    assert Schedule(peak=1, warmup_steps=np.int64(3)).warmup_steps == 3
    assert type(Schedule(peak=np.float32(0.5)).peak) is float
    assert TextFiles(paths=["a", "b"]).paths == ("a", "b")
    assert MeshShape(fsdp=np.int32(4)).fsdp == 4
    assert isinstance(Experiment(task=TASK, optimizer=Optax(transformation=optax.adam(1e-3))).optimizer, Optax)


def test_a_subclass_of_ones_own_is_checked_too():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(AdamW):
        factor: float = 1.0

        def __post_init__(self):
            assert self.factor > 0

    assert Mine(factor=2).factor == 2
    with pytest.raises(RecipeError, match=r"Mine\.factor='two': expected a number"):
        Mine(factor="two")
    with pytest.raises(RecipeError, match=r"Mine\.b1=None: expected a number"):
        Mine(b1=None)
