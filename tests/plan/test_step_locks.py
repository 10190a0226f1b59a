"""Locks: changes of a step are named, renames and moves are not, and presets cost as locked."""

import contextlib
import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny

from panax.cli.main import main
from panax.comms import Comms
from panax.core.errors import DataError
from panax.layers import MoE
from panax.layers.feed_forward import FeedForward
from panax.layers.norm import Norm
from panax.mesh import MeshShape, Placement, Rules
from panax.models import DecoderConfig, DecoderTask
from panax.optim import Lion, Schedule
from panax.plan import walk_step
from panax.plan.lock.changes import describe_changes
from panax.plan.lock.step_lock import StepLock, lock_step
from panax.train import CompiledStep, Program, StepConfig

LOCKS = sorted((Path(__file__).parent / "locks").glob("*.json"))
CONFIG = DecoderConfig(**tiny.SIZES)
MIXTURE = dataclasses.replace(CONFIG, feed_forward=MoE(experts=4, active=2, ffn=16))
MESH = {"fsdp": 4, "tensor": 2}


def lock(mesh=None, model=CONFIG, optimizer=tiny.ADAMW, task=None, rules=None, rows=tiny.ROWS, **settings):
    """The lock of a step of a tiny decoder on eight devices."""
    mesh = mesh or MESH
    comms = settings.pop("comms", Comms())
    made = DecoderTask(model=model, **(task or {}))
    program = Program.create(made, optimizer, num_steps=4, config=StepConfig(**settings), comms=comms)
    step = CompiledStep(program, Placement.create(MeshShape(**({"fsdp": 1} | mesh)), rules or Rules()), tiny.AXES)
    cost = walk_step(step, tiny.batch(rows=rows))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params))
    return lock_step("tiny", (), cost, mesh=step.placement.sizes, parameters=parameters, state_bytes={})


@functools.cache
def base():
    return lock()


@contextlib.contextmanager
def patched(owner, name, wrap):
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrap(original))
        yield


def gathers_its_input(original):
    """A feed-forward that gathers the batch, and takes its own part again."""

    @functools.wraps(original)
    def call(self, x, *args, **settings):
        whole = jax.lax.all_gather(jax.lax.stop_gradient(x), "fsdp", axis=0, tiled=True)
        own = jax.lax.axis_index("fsdp") * x.shape[0]
        same = jax.lax.dynamic_slice_in_dim(whole, own, x.shape[0], 0)
        return original(self, x + 0.0 * same, *args, **settings)

    return call


def computes_twice(original):
    @functools.wraps(original)
    def call(self, x, *args, **settings):
        return (original(self, x, *args, **settings) + original(self, 2.0 * x, *args, **settings)) / 2.0

    return call


def takes_a_maximum(original):
    """A norm that looks at the largest value of all devices."""

    @functools.wraps(original)
    def call(self, x, *args, **settings):
        y = original(self, x, *args, **settings)
        return y + 0.0 * jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(y).max()), "fsdp")

    return call


PLANTED = {
    "a gather of the batch": (
        lambda: patched(FeedForward, "__call__", gathers_its_input),
        {},
        r"adds an all-gather of .* on fsdp, .* for feed_forward, from test_step_locks\.py:\d+ \(call\)",
    ),
    "products twice": (
        lambda: patched(FeedForward, "__call__", computes_twice),
        {},
        r"runs an? .* on tensor .* times a step, .* before, for feed_forward, from panax/layers/feed_forward\.py",
    ),
    "a maximum over devices": (
        lambda: patched(Norm, "__call__", takes_a_maximum),
        {},
        r"(runs|adds) an all-reduce of .* on fsdp.* from test_step_locks\.py:\d+ \(call\)",
    ),
    "rematerialization": (None, {"task": {"remat": "full"}}, r"computes .* FLOPs .*\(\+"),
    "sums in each micro-batch": (
        None,
        {"micro_batches": 2, "comms": Comms(sums="each_micro_batch"), "mesh": {"replica": 4, "tensor": 2}},
        r"runs on the mesh replica=4 tensor=2, fsdp=4 tensor=2 before",
    ),
    "weights gathered in 8 bits": (
        None,
        {"rules": Rules(weight_gather_dtype="int8")},
        r"sends an all-gather of .* on fsdp once a step, .* once before, for weights in embedding, from panax/layers/embedding",
    ),
    "another mesh": (None, {"mesh": {"fsdp": 8}}, r"drops an all-gather of .* on tensor"),
    "more key heads": (
        None,
        {"model": dataclasses.replace(CONFIG, kv_heads=4)},
        r"has [\d,]+ parameters, [\d,]+ before",
    ),
    "a wider feed-forward": (
        None,
        {"model": dataclasses.replace(CONFIG, ffn=64)},
        r"sends an all-gather .* on fsdp .* for weights in feed_forward, from panax/layers/feed_forward\.py",
    ),
    "a layer more": (None, {"model": dataclasses.replace(CONFIG, num_layers=5)}, r"runs .* times a step, .* before"),
    "more rows": (None, {"rows": 2 * tiny.ROWS}, r"sends .* on tensor .* before"),
    "less state of the optimizer": (
        None,
        {"optimizer": Lion(schedule=Schedule(peak=1e-3, decay="constant"))},
        r"of memory for state and batch on each device, .* before \(-",
    ),
    "moments in 16 bits": (
        None,
        {"optimizer": dataclasses.replace(tiny.ADAMW, moments="bfloat16")},
        r"of memory for state and batch on each device, .* before \(-",
    ),
}


BY_DEFAULT = ("a gather of the batch", "a maximum over devices")


@pytest.mark.parametrize(
    "change", [pytest.param(change, marks=() if change in BY_DEFAULT else pytest.mark.full) for change in PLANTED]
)
def test_a_change_is_named(change):
    (context, settings, wanted), locked = PLANTED[change], base()
    with contextlib.nullcontext() if context is None else context():
        lines = describe_changes(locked, lock(**settings, check_sums=context is None))
    assert any(re.search(wanted, line) for line in lines), lines


def test_an_equal_step_has_no_change():
    assert describe_changes(base(), lock()) == []


@pytest.mark.full
def test_exchanges_of_experts_are_named():
    wider = dataclasses.replace(MIXTURE, feed_forward=dataclasses.replace(MIXTURE.feed_forward, active=3))
    lines = describe_changes(lock({"fsdp": 2, "expert": 4}, MIXTURE), lock({"fsdp": 2, "expert": 4}, wider))
    assert any(re.search(r"sends an all-to-all of .* on expert .* before, .*, from panax/", line) for line in lines), (
        lines
    )


@pytest.mark.parametrize("number", range(20))
def test_renames_and_moves_are_no_change(number):
    """Modules and lines of some collectives have other names, and they are traced in another order."""
    locked = base()
    moved = [
        each._replace(module=f"{each.module}_{number}", source=f"elsewhere.py:{number} (f)")
        if place % (number + 1) == 0
        else each
        for place, each in enumerate(locked.collectives)
    ]
    turned = moved[number % len(moved) :] + moved[: number % len(moved)]
    assert describe_changes(locked, dataclasses.replace(locked, collectives=tuple(turned))) == []


def test_a_file_is_read_as_it_was_written():
    locked = base()
    assert StepLock.from_json(locked.to_json(), "a.json") == locked
    lines = locked.to_json().splitlines()
    assert sum('"kind"' in line for line in lines) == len(locked.collectives), "a line for each collective"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": 1}', "nonsense", '{"format": [1]}',
        json.dumps({**json.loads(StepLock("a", (), {}, 1, 1.0, {}, (), ()).to_json()), "collectives": [{"kind": "telepathy"}]}),
        json.dumps({**json.loads(StepLock("a", (), {}, 1, 1.0, {}, (), ()).to_json()), "mesh": ["fsdp"]}),
        "[" * 100_000,
    ],
)  # fmt: skip
def test_other_files_are_refused(text):
    with pytest.raises(DataError, match=r"a\.json"):
        StepLock.from_json(text, "a.json")


def test_the_command_writes_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    file, flags = str(tmp_path / "q.json"), ["--target", "h100x8", "--mesh.fsdp", "8"]
    assert main(["inspect", "quickstart", *flags, "--lock", file]) == 0
    assert main(["inspect", "--check", file]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{file}: as locked")
    assert main(["inspect", "quickstart", *flags, "--task.model.ffn=800", f"--check={file}"]) == 6
    out = capsys.readouterr().out
    assert "FLOPs on each device" in out and f"--lock {file}" in " ".join(out.split())
    assert main(["inspect", "quickstart", "--lock", file, "--check", file]) == 2
    assert main(["inspect", "quickstart", "--lock"]) == 2
    assert main(["inspect", "--check", str(tmp_path / "none.json")]) == 3
    (tmp_path / "other.json").write_text("[]")
    assert main(["inspect", "--check", str(tmp_path / "other.json")]) == 3


def test_a_file_does_not_choose_which_code_runs(tmp_path, capsys):
    path = tmp_path / "a.json"
    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')")
    for recipe in (str(tmp_path / "mine.py"), "os:system", "hf:/tmp", "--help"):
        path.write_text(dataclasses.replace(base(), recipe=recipe).to_json())
        assert main(["inspect", "--check", str(path)]) == 2
        assert "name it" in capsys.readouterr().err and not marker.exists()


@pytest.mark.full
@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_presets_cost_as_locked(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    code = main(["inspect", "--check", str(path)])
    assert code == 0, capsys.readouterr().out


def test_there_are_locks():
    assert len(LOCKS) >= 8
