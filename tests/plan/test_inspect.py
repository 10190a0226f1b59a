"""`panax inspect`: the cost of a step, on simulated devices."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest
import tiny
import tiny_recipe

from panax.cli.main import main
from panax.data import TextData
from panax.mesh import MeshShape, Placement
from panax.plan import plan_step, summarize_collectives, text_batch
from panax.train import CompiledStep, Program

RECIPE = str(Path(tiny_recipe.__file__))
SMALL = ("--task.model.num-layers", "1", "--task.model.windows", "0")


@pytest.fixture
def inspected(tmp_path, monkeypatch, capsys):
    """Return the command's output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str, code: int = 0, recipe: str = RECIPE) -> str:
        assert main(["inspect", recipe, *arguments]) == code
        out = capsys.readouterr()
        return out.out + out.err

    return run


def test_shows_communication_and_memory_of_a_step(inspected):
    out = inspected("--mesh.replica", "2", "--mesh.fsdp", "4", *SMALL)
    assert re.search(r"compiled       in \d+\.\d s for 8 x cpu", out)
    memory = re.search(r"memory ([\d.]+) [KM]iB on each device: .* state and batch .* reused", " ".join(out.split()))
    assert memory and float(memory.group(1)) > 0
    rows = [line.split() for line in out.partition("communication")[2].partition("settings")[0].splitlines()[2:]]
    kinds = {(row[0], row[1]) for row in rows[:-1]}
    assert ("all-gather", "fsdp") in kinds and any("replica" in axes for _, axes in kinds)
    assert rows[-1][0] == "all"


def test_one_device_sends_nothing(inspected, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    out = inspected(*SMALL)
    assert "communication  none" in out and "sends          nothing" in out


def test_shows_what_an_optimizer_keeps_and_what_it_renews(inspected, tmp_path):
    (tmp_path / "other.py").write_text(
        "import dataclasses\n"
        "import tiny_recipe\n"
        "from panax import Experiment\n"
        "from panax.optim import Shampoo\n\n"
        "def other() -> Experiment:\n"
        "    return dataclasses.replace(tiny_recipe.tiny(), optimizer=Shampoo(moments='bfloat16'))\n"
    )
    out = inspected(*SMALL, "--mesh.fsdp", "8", "--no-compile", recipe=str(tmp_path / "other.py"))
    assert re.search(r"  mean +[\d.]+ KiB, [\d.]+ KiB on each: bfloat16, 2.00 bytes a parameter", out)
    assert re.search(r"  left_root +[\d.]+ KiB, [\d.]+ [Ki]*B on each: float32, ", out)
    assert re.search(r"renewal        after every 10 steps, in another program: [\d.e+]+ FLOPs", out)
    renewed = out.partition("in one renewal, each device")[2].splitlines()[2].split()
    assert renewed[:3] == ["optimizer", "all-to-all", "fsdp"]


def test_the_compilation_can_be_left_out(inspected):
    out = inspected("--no-compile", "--mesh.fsdp", "8")
    assert "compiled  " not in out and "communication" not in out
    rows = [line.split() for line in out.partition("sends  ")[2].partition("settings")[0].splitlines()[2:]]
    assert ["weights", "all-gather", "fsdp"] in [row[:3] for row in rows] and rows[-1][0] == "all"
    assert re.search(r"estimate       about [\d.]+ [KM]iB on each device", out)
    assert "fsdp=8" in out


def test_a_target_that_does_not_exist(inspected):
    assert "did you mean 'h100'" in inspected("--target", "h1000x8", code=2)
    assert "unknown target ''" in inspected("--target", code=2)


def test_the_shapes_of_text_are_those_of_its_batches(inspected, tmp_path):
    data = tiny_recipe.tiny().data
    assert isinstance(data, TextData)
    batch = next(data.open().train.batches()).batch
    shapes = text_batch(data)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()
    }


def test_a_plan_holds_what_the_compiler_states():
    task = dataclasses.replace(tiny.task(), model=dataclasses.replace(tiny.CONFIG, num_layers=1, windows=(0,)))
    program = Program.create(task, tiny.ADAMW, num_steps=4)
    step = CompiledStep(program, Placement.create(MeshShape(fsdp=8)), tiny.AXES)
    plan = plan_step(step, tiny.batch())
    state = jax.tree.leaves(program.abstract)
    # Sharded eight ways, a device holds more than an eighth of the state, since small leaves are whole everywhere.
    total_bytes = sum(leaf.size * (leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else 4) for leaf in state)
    assert total_bytes / 8 < plan.memory.arguments < total_bytes
    assert (
        plan.memory.total == plan.memory.arguments + plan.memory.temporaries + plan.memory.outputs - plan.memory.reused
    )
    # The state is donated: the next one lies in its place.
    assert plan.memory.reused > plan.memory.arguments * 0.8
    assert plan.compile_seconds > 0
    assert {axes for total in summarize_collectives(plan.collectives) for axes in total.axes} == {"fsdp"}
