"""`--mesh auto` chooses what is legal, fits, and sends little; beside an enumeration of everything."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import pytest
import tiny_recipe

from panax.cli.overrides import experiment_from
from panax.core.errors import LayoutError
from panax.mesh import MeshShape
from panax.mesh.rules import MESH_AXES, Rules, divisors
from panax.models import PRESETS, DecoderTask
from panax.plan.auto import BUBBLE, MARGIN, REMAT, Choice, bubble, choose_mesh
from panax.plan.communication import DecoderStep, decoder_traffic
from panax.plan.memory import step_memory
from panax.run.automatic import with_chosen_mesh
from panax.run.prepare import prepare

ROWS, H100 = 1024, 84_929_347_584
QUICK = {("gpt2", 8), ("llama3_8b", 8), ("llama3_8b", 64), ("llama3_70b", 8)}


def step_of(name: str, mesh: dict[str, int], micro_batches: int, remat) -> DecoderStep:
    model = PRESETS[name]
    task = DecoderTask(model=model, compute_dtype="bfloat16", remat=remat)
    length = min(model.max_length, 8192)
    return DecoderStep(task=task, mesh=mesh, rows=ROWS, length=length, micro_batches=micro_batches)


def every_mesh(devices: int) -> Iterator[dict[str, int]]:
    """All factorisations over all axes but `expert`, which a dense model has no use for."""
    axes = [axis for axis in MESH_AXES if axis != "expert"]
    for sizes in itertools.product(divisors(devices), repeat=len(axes)):
        if math.prod(sizes) == devices:
            yield dict(zip(axes, sizes))


def fewest_bytes(name: str, devices: int) -> int | None:
    """Of all legal layouts that fit and whose stages wait for at most a fifth; None if there is none."""
    least: list[int] = []
    for mesh in every_mesh(devices):
        rows, rest = divmod(ROWS, mesh["replica"] * mesh["fsdp"])
        if rest or not rows:
            continue
        counts = [count for count in divisors(rows) if bubble(mesh["stage"], count) <= BUBBLE]
        # Without stages fewer parts send less, with them more parts do: fewer ticks for as many tokens.
        counts = counts if mesh["stage"] == 1 else counts[::-1]
        for remat in REMAT:
            for count in counts:
                try:
                    step = step_of(name, mesh, count, remat)
                    if step_memory(step).total * MARGIN > H100:
                        continue
                    least.append(sum(traffic.wire_bytes for traffic in decoder_traffic(step)))
                except ValueError:
                    pass
                break
    return min(least, default=None)


def chosen(name: str, devices: int) -> Choice:
    length = min(PRESETS[name].max_length, 8192)
    return choose_mesh(PRESETS[name], devices, rows=ROWS, length=length, memory_bytes=H100)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, devices, marks=() if (name, devices) in QUICK else pytest.mark.slow)
        for name in PRESETS
        for devices in (8, 64, 256)
    ],
)
def test_sends_at_most_a_fifth_more_than_the_best(name, devices):
    least = fewest_bytes(name, devices)
    if least is None:
        with pytest.raises(LayoutError, match=r"no layout of \d+ devices with 79 GiB .* \d+ would do"):
            chosen(name, devices)
        return
    choice = chosen(name, devices)
    sizes = choice.mesh.resolve(devices)
    assert math.prod(sizes.values()) == devices
    step = step_of(name, sizes, choice.micro_batches, choice.remat)
    assert step_memory(step).total == choice.memory_bytes <= H100 / MARGIN
    assert sum(traffic.wire_bytes for traffic in decoder_traffic(step)) == choice.wire_bytes
    assert choice.wire_bytes <= 1.2 * least


def test_the_number_of_devices_that_would_do_does():
    with pytest.raises(LayoutError) as error:
        chosen("llama3_70b", 8)
    assert "rows of 8192 tokens; 32 would do" in str(error.value)
    assert chosen("llama3_70b", 32).memory_bytes * MARGIN <= H100


def test_less_memory_means_more_is_split_or_computed_again():
    """From a whole copy on each device to pieces of everything."""
    needed = []
    for memory in (H100, H100 // 4, H100 // 8):
        choice = choose_mesh(PRESETS["gpt2_xl"], 64, rows=ROWS, length=1024, memory_bytes=memory)
        assert choice.memory_bytes * MARGIN <= memory
        needed.append(choice.memory_bytes)
    assert needed == sorted(needed, reverse=True)


def test_rows_that_are_too_few_are_split():
    choice = choose_mesh(PRESETS["llama3_1b"], 64, rows=8, length=65536, memory_bytes=H100)
    assert choice.mesh.context * choice.mesh.tensor * choice.mesh.stage >= 8


def tiny_experiment(*flags: str):
    return experiment_from([str(tiny_recipe.__file__), *flags], "train")


@pytest.mark.parametrize("flags", [("--mesh", "auto"), ("--mesh=auto",), ("--mesh.auto",)])
def test_a_run_takes_the_choice_and_says_it(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path))
    experiment = tiny_experiment(*flags)
    assert experiment.mesh == MeshShape(auto=True)
    said: list[str] = []
    prepared = prepare(experiment, said.append, jax.devices())
    assert not prepared.experiment.mesh.auto
    sizes = prepared.experiment.mesh.resolve(8)
    assert {axis: n for axis, n in prepared.step.placement.sizes.items() if n > 1} == {
        axis: n for axis, n in sizes.items() if n > 1
    }
    assert prepared.step.program.config.micro_batches == prepared.experiment.step.micro_batches
    (line,) = [line for line in said if line.startswith("mesh auto: ")]
    assert "each device sends" in line and "GiB" in line


def test_auto_leaves_no_size_to_set():
    with pytest.raises(LayoutError, match=r"mesh.auto chooses all sizes, and mesh.tensor is set too"):
        MeshShape(auto=True, tensor=2)
    with pytest.raises(LayoutError, match="a batch of text"):
        MeshShape(auto=True).resolve(8)


def test_auto_is_for_decoders_on_text():
    experiment = dataclasses.replace(tiny_experiment("--mesh.auto"), data=[{"x": 1}])
    with pytest.raises(LayoutError, match="DecoderTask on TextData"):
        with_chosen_mesh(experiment, experiment.task)


def test_rules_are_those_of_the_recipe():
    """Weights that are kept whole for a step take memory that the choice has to find."""
    options = {"rows": ROWS, "length": 8192, "memory_bytes": H100 // 2}
    kept = choose_mesh(PRESETS["llama3_8b"], 64, rules=Rules(zero="1"), **options)
    assert kept.memory_bytes * MARGIN <= H100 // 2
