"""What work on CPU is done by: timed once, kept, recorded with a run, taken up again when it resumes."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
import tiny_recipe

from panax import fit
from panax.checkpoint import open_checkpoint
from panax.kernels.cpu import choice as cpu_kernels
from panax.kernels.cpu import library
from panax.kernels.cpu import timing as cpu_timing
from panax.kernels.cpu.choice import CpuKernels
from panax.kernels.cpu.timing import KernelSelection, build_record, choose_kernels, machine_key
from panax.optim import Schedule, Sgd


@pytest.fixture
def unchosen(monkeypatch, tmp_path):
    """As in a new process of a user without a cache."""
    monkeypatch.delenv("PANAX_CPU_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernels, "_current", None)
    monkeypatch.setattr(cpu_timing, "ROUNDS", 1)
    return monkeypatch


def timed(times, monkeypatch, count):
    def measured(work, dtype, names, best):
        count.append(f"{work}_{dtype}")
        return {name: times[name] for name in names}

    monkeypatch.setattr(cpu_timing, "_measure_seconds", measured)
    monkeypatch.setattr(cpu_timing, "cpu_flags", lambda: {cpu_timing.MATRIX_UNITS})
    monkeypatch.setattr(cpu_timing, "unavailable_reason", lambda kernel, dtype: None)
    monkeypatch.setattr(cpu_kernels, "unavailable_reason", lambda kernel, dtype: None)


def test_a_candidate_must_win_by_a_twentieth():
    assert cpu_timing._winner({"xla": 1.0, "c": 0.94, "mkl": 0.95}) == "c"
    assert cpu_timing._winner({"xla": 1.0, "c": 0.96, "mkl": 2.0}) == "xla"
    assert cpu_timing._winner({"xla": 1.0}) == "xla"


def test_without_matrix_units_the_instruction_set_decides(unchosen):
    """Also where Intel's library is there."""
    timed({"xla": 1.0, "c": 0.5, "mkl": 0.4}, unchosen, count := [])
    unchosen.setattr(cpu_timing, "cpu_flags", lambda: {"avx512_bf16"})
    told: list[KernelSelection] = []
    choose_kernels(on_choice=told.append)
    assert not count and set(dataclasses.asdict(cpu_kernels.current_choice()).values()) == {"c"}
    assert told[0].summary().endswith(f"by instruction set ({library.instruction_set()})")


def test_what_some_process_lacks_is_not_taken(unchosen):
    timed({"xla": 1.0, "c": 0.5, "mkl": 0.4}, unchosen, count := [])
    unchosen.setattr(cpu_timing, "cpu_flags", frozenset)
    unchosen.setattr(cpu_timing, "gather_texts", lambda mine: ["", "c_float32 c_bfloat16 mkl_float32 mkl_bfloat16"])
    told: list[KernelSelection] = []
    choose_kernels(on_choice=told.append)
    assert (
        not count and cpu_kernels.current_choice() == CpuKernels() and "some process of this job" in told[0].summary()
    )


def test_it_is_timed_once_for_a_machine_and_kept(unchosen):
    count, told = [], []
    timed({"xla": 1.0, "c": 0.5, "mkl": 0.7}, unchosen, count)
    choose_kernels(on_choice=told.append)
    assert len(count) == 6 and cpu_kernels.current_choice() == CpuKernels(
        **{f"{work}_{dtype}": "c" for work in cpu_kernels.WORKS for dtype in cpu_kernels.DTYPES}
    )
    assert "matmul on cpu runs 'c' in float32 (xla 2.00, mkl 1.40 times as long)" in told[0].details()[0]
    choose_kernels(on_choice=told.append)
    assert len(told) == 1, "one choice for a process"
    unchosen.setattr(cpu_kernels, "_current", None)
    choose_kernels(on_choice=told.append)
    assert len(count) == 6 and told[1] == told[0], "from the cache"
    # A cache that is torn, and a machine with other processors or versions: timed again.
    [file] = cpu_timing.kernels_folder().glob("choice-*.json")
    file.write_text(file.read_text()[:40])
    unchosen.setattr(cpu_kernels, "_current", None)
    choose_kernels()
    assert len(count) == 12
    unchosen.setattr(cpu_timing, "describe_processor", lambda: "another")
    unchosen.setattr(cpu_kernels, "_current", None)
    choose_kernels()
    assert len(count) == 18


def test_what_a_run_began_with_is_taken_on_a_machine_like_its_own(unchosen):
    timed({"xla": 1.0, "c": 0.5, "mkl": 0.7}, unchosen, [])
    began = CpuKernels(product_float32="mkl")
    told: list[KernelSelection] = []
    choose_kernels(build_record(began), on_choice=told.append)
    assert cpu_kernels.current_choice() == began and told[0].source == "as this run began"
    for other in (json.dumps({**json.loads(build_record(began)), "machine": "0" * 16}), "not JSON", "[]", "{}"):
        unchosen.setattr(cpu_kernels, "_current", None)
        choose_kernels(other)
        assert cpu_kernels.current_choice().product_float32 == "c", other


def test_a_real_timing_finds_every_kind_of_work(unchosen):
    """With every kernel that this machine has; whichever wins, what is chosen is there."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        choose_kernels()
    assert cpu_kernels.is_chosen() and not cpu_kernels.current_choice().list_unavailable()


def test_a_run_records_and_states_its_kernels(tmp_path):
    base = tiny_recipe.tiny()
    steady = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    lines: list[str] = []
    run = dataclasses.replace(base, optimizer=steady, num_steps=2, directory=str(tmp_path / "run"))
    result = fit(run, say=lines.append)
    assert (
        sum(
            line.startswith("kernels on CPU: matmul ") and line.endswith("as set by $PANAX_CPU_KERNELS")
            for line in lines
        )
        == 1
    )
    assert any("matmul on cpu runs" in line for line in (Path(run.folder) / "log.txt").read_text().splitlines())
    actual = json.loads(open_checkpoint(result.checkpoint).attachment("kernels.json") or "")
    assert actual.pop("machine") == machine_key() and CpuKernels(**actual) == cpu_kernels.current_choice()
    recorded = json.loads((Path(run.folder) / "checkpoints" / "run" / "run.json").read_text())["record"]["kernels"]
    assert recorded == build_record(cpu_kernels.current_choice())
