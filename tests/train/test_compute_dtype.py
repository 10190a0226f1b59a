"""`compute_dtype="auto"`: by what devices have instructions for, agreed, reported, recorded, and kept when a run resumes."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny_recipe

from panax import fit
from panax.checkpoint import open_checkpoint
from panax.core.errors import RecipeError
from panax.core.layout.target import Target
from panax.data import TextData
from panax.kernels import compute_dtype
from panax.models import DecoderTask, DlrmTask, TwoTowerTask, VitTask
from panax.models.recommenders.sequence_task import SequenceTask
from panax.optim import Schedule, Sgd
from panax.run.folder.trained_model import load_model
from panax.train import Program, precision
from panax.train.precision import with_compute_dtype

CPU = Target("cpu")
WITH_INSTRUCTIONS = ["avx512_bf16 avx512f", "amx_bf16 avx512_bf16", "fp asimd bf16"]


@pytest.fixture
def processor(monkeypatch):
    """Makes this machine's processor one with these flags, with or without a kernel that uses them."""

    def become(flags: str, kernel: bool) -> None:
        monkeypatch.setattr(compute_dtype, "cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(compute_dtype, "multiplies_bfloat16", lambda: kernel)
        compute_dtype._slow_here.cache_clear()

    yield become
    compute_dtype._slow_here.cache_clear()


def auto(**settings) -> DecoderTask:
    task = tiny_recipe.tiny().task
    assert isinstance(task, DecoderTask)
    model = dataclasses.replace(task.model, vocab_size=64)
    return dataclasses.replace(task, model=model, compute_dtype="auto", **settings)


@pytest.mark.parametrize("flags", WITH_INSTRUCTIONS)
def test_a_processor_with_instructions_and_a_kernel_takes_bfloat16(processor, flags):
    processor(flags, kernel=True)
    assert compute_dtype.default_dtype(CPU) == "bfloat16" and auto().weight_dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "flags, why",
    [
        *((flags, "no kernel of them") for flags in WITH_INSTRUCTIONS),
        ("avx2 fma", "no instructions"),
        ("", "no instruct"),
    ],
)
def test_without_a_kernel_or_without_instructions_it_is_float32(processor, flags, why):
    processor(flags, kernel=False)
    assert compute_dtype.default_dtype(CPU) == "float32" and auto().weight_dtype == jnp.float32
    assert why in (compute_dtype.reason_for_float32(CPU) or "")


@pytest.mark.parametrize(
    "target, dtype",
    [
        (Target("tpu", architecture="v5e"), "bfloat16"),
        (Target("gpu", architecture="h100"), "bfloat16"),
        (Target("gpu", architecture="v100"), "float32"),
        (Target("rocm", architecture="mi300x"), "bfloat16"),
        (Target("of_a_plugin"), "float32"),
    ],
)
def test_accelerators_by_target(target, dtype):
    assert compute_dtype.default_dtype(target) == dtype


@pytest.mark.parametrize("kind", [DecoderTask, DlrmTask, SequenceTask, TwoTowerTask, VitTask])
def test_every_task_of_ours_takes_it(kind):
    assert "auto" in str(kind.__dataclass_fields__["compute_dtype"].type)


def test_a_program_has_it_filled_in(processor):
    processor("avx2", kernel=False)
    program = Program.create(auto(), Sgd(), num_steps=1)
    assert program.task.compute_dtype == "float32"


@pytest.mark.parametrize("others, dtype", [(["bfloat16"], "bfloat16"), (["bfloat16", "float32"], "float32")])
def test_the_lowest_of_a_job_wins_and_is_reported_once(processor, monkeypatch, others, dtype):
    processor("avx512_bf16", kernel=True)
    monkeypatch.setattr(precision, "gather_texts", lambda mine: others)
    said: list[str] = []
    assert with_compute_dtype(auto(), CPU, said.append).compute_dtype == dtype
    [line] = said
    assert line.startswith(f"compute dtype  {dtype} (auto: ") and ("process 1 of this job" in line) == (len(others) > 1)


def test_a_dtype_that_is_set_is_obeyed_and_the_slow_one_is_reported(processor):
    processor("avx2", kernel=False)
    said: list[str] = []
    task = dataclasses.replace(auto(), compute_dtype="bfloat16")
    assert with_compute_dtype(task, CPU, said.append).compute_dtype == "bfloat16"
    assert said == [
        "compute dtype  bfloat16, as set; this processor has no instructions for bfloat16: float32 is likely to be faster "
        "(task.compute_dtype)"
    ]
    with_compute_dtype(dataclasses.replace(auto(), compute_dtype="float32"), CPU, said.append)
    assert len(said) == 1


def test_products_in_tf32_are_of_float32_alone():
    with pytest.raises(RecipeError, match=r'matmul_precision="bfloat16" has no effect'):
        auto(matmul_precision="bfloat16")


def test_a_run_keeps_its_dtype_on_another_processor(processor, tmp_path):
    base = tiny_recipe.tiny()
    assert isinstance(base.data, TextData)
    task = dataclasses.replace(base.task, compute_dtype="auto")
    steady = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    run = dataclasses.replace(base, task=task, optimizer=steady, num_steps=2, directory=str(tmp_path / "run"))
    said: list[str] = []
    processor("avx2", kernel=False)
    result = fit(run, say=said.append)
    assert "compute dtype  float32 (auto: this processor has no instructions for bfloat16)" in said
    record = json.loads((Path(run.folder) / "checkpoints" / "run" / "run.json").read_text())["record"]
    assert record["compute_dtype"] == "float32"
    assert '"compute_dtype": "float32"' in (open_checkpoint(result.checkpoint).attachment("model.json") or "")
    processor("avx512_bf16", kernel=True)
    assert load_model(run.folder).task.weight_dtype == jnp.float32
    said.clear()
    resumed = fit(dataclasses.replace(run, num_steps=4), say=said.append)
    assert "compute dtype  float32 (auto: as this run began)" in said
    assert resumed.prepared.task.compute_dtype == "float32"
    fresh = fit(run, say=said.append, fresh=True)
    assert fresh.prepared.task.compute_dtype == "bfloat16", "a run that begins anew decides anew"
