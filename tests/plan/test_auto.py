"""`--mesh auto` chooses a layout that is legal, fits, and sends little; beside an enumeration of everything by formulas."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import tiny_recipe
from formulas.communication import decoder_traffic
from formulas.decoder_step import DecoderStep
from planned import devices, text

from panax.cli.overrides import experiment_from
from panax.core import Task
from panax.core.errors import LayoutError
from panax.mesh import MeshShape, Rules
from panax.mesh.rules import MESH_AXES, divisors
from panax.models import PRESETS, DecoderConfig, DecoderTask
from panax.optim import AdamW
from panax.plan.search.auto import MAX_BUBBLE, MEMORY_MARGIN, DeviceGroup, LayoutChoice, bubble_share, choose_mesh
from panax.run.preparation import prepare
from panax.train import Program, StepConfig

ROWS, H100 = 1024, 84_929_347_584
SMALL = DecoderConfig(vocab_size=8192, max_length=1024, embed=512, num_layers=8, heads=8, ffn=2048)


def program_of(task: Task, micro_batches: int) -> Program:
    return Program.create(task, AdamW(), num_steps=1000, config=StepConfig(micro_batches=micro_batches))


def chosen(
    model: DecoderConfig, count: int, *, rows: int = ROWS, memory: int = H100, rules: Rules | None = None
) -> LayoutChoice:
    batch = text(rows, min(model.max_length, 8192), packed=True)
    axes = dict.fromkeys(batch, ("batch", "seq"))
    task = DecoderTask(model=model, compute_dtype="bfloat16")
    group = DeviceGroup(devices(f"h100x{count}"), memory)
    return choose_mesh(program_of, task, group, batch, axes, rules)


def every_mesh(count: int) -> Iterator[dict[str, int]]:
    """All factorizations over all axes but `expert`, which a dense model has no use for."""
    axes = [axis for axis in MESH_AXES if axis != "expert"]
    for sizes in itertools.product(divisors(count), repeat=len(axes)):
        if math.prod(sizes) == count:
            yield dict(zip(axes, sizes))


def fewest_bytes(model: DecoderConfig, count: int) -> int:
    """Of all legal layouts that wait for at most a fifth, whether they fit or not, by formula."""
    least = []
    for mesh in every_mesh(count):
        rows, rest = divmod(ROWS, mesh["replica"] * mesh["fsdp"])
        for parts in divisors(rows) if not rest else ():
            if bubble_share(mesh["stage"], parts) <= MAX_BUBBLE:
                task = DecoderTask(model=model, compute_dtype="bfloat16")
                length = min(model.max_length, 8192)
                try:
                    step = DecoderStep(task=task, mesh=mesh, rows=ROWS, length=length, micro_batches=parts)
                    least.append(sum(traffic.wire_bytes for traffic in decoder_traffic(step)))
                except ValueError:
                    pass
                break
    return min(least)


def test_sends_at_most_a_fifth_more_than_the_best():
    """A small model fits everywhere, so that the best of all layouts is one that fits."""
    choice = chosen(SMALL, 4)
    assert math.prod(choice.mesh.resolve(4).values()) == 4
    assert choice.memory_bytes * MEMORY_MARGIN <= H100
    assert choice.wire_bytes <= 1.2 * fewest_bytes(SMALL, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        # What an enumeration of all layouts by formulas, memory included, had found: bytes of a step.
        ("gpt2", 8, 0.9e9),
        ("llama3_8b", 8, 72.8e9),
        ("llama3_8b", 64, 31.5e9),
    ],
)
def test_larger_models_get_about_the_best_of_an_enumeration(name, count, expected):
    choice = chosen(PRESETS[name], count)
    assert choice.memory_bytes * MEMORY_MARGIN <= H100
    assert choice.wire_bytes <= 1.2 * expected


def test_what_does_not_fit_is_an_error():
    with pytest.raises(LayoutError, match=r"no layout of 8 devices with 79 GiB each holds a step of 1024 rows"):
        chosen(PRESETS["llama3_70b"], 8)


@pytest.mark.slow
def test_less_memory_means_more_is_split_or_computed_again():
    needed = []
    for memory in (H100, H100 // 4, H100 // 8):
        choice = chosen(PRESETS["gpt2_xl"], 64, memory=memory)
        assert choice.memory_bytes * MEMORY_MARGIN <= memory
        needed.append(choice.memory_bytes)
    assert needed == sorted(needed, reverse=True)


@pytest.mark.slow
def test_rules_are_those_of_the_recipe():
    """Weights that are kept whole for a step take memory that the choice has to find."""
    kept = chosen(PRESETS["llama3_8b"], 64, memory=H100 // 2, rules=Rules(zero="1"))
    assert kept.memory_bytes * MEMORY_MARGIN <= H100 // 2


def tiny_experiment(*flags: str):
    return experiment_from([str(tiny_recipe.__file__), *flags], "train")


@pytest.mark.parametrize("flags", [("--mesh", "auto"), ("--mesh=auto",), ("--mesh.auto",)])
def test_a_run_takes_the_choice_and_states_it(flags, tmp_path, monkeypatch):
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
    with pytest.raises(LayoutError, match="for a task and its batch"):
        MeshShape(auto=True).resolve(8)


class Whole(DecoderTask):
    names_axes = False


def test_a_task_that_xla_partitions_prints_nothing_before_it_is_compiled():
    batch = text(8, 64, packed=True)
    task = Whole(model=dataclasses.replace(SMALL, max_length=64))
    with pytest.raises(LayoutError, match=r"Whole leaves that to XLA; set the mesh's sizes"):
        axes = dict.fromkeys(batch, ("batch", "seq"))
        choose_mesh(program_of, task, DeviceGroup(jax.devices(), 2**30), batch, axes)


def test_auto_chooses_for_images_too(tmp_path, monkeypatch):
    from panax.models import VitConfig, VitTask

    model = VitConfig(image_size=16, patch=8, embed=32, num_layers=2, heads=2, ffn=64, num_classes=10)
    images = [{"image": np.zeros((16, 16, 16, 3), np.uint8), "label": np.zeros((16,), np.int32)}]
    experiment = dataclasses.replace(
        tiny_experiment("--mesh.auto"), task=VitTask(model=model), data=images, held_out=None
    )
    prepared = prepare(experiment, devices=jax.devices())
    assert math.prod(prepared.step.placement.sizes.values()) == 8
