"""Compiled programs are kept for the next start, and one process of a job compiles for all."""

import shutil

import pytest
from launching import run_job
from once_worker import __file__ as WORKER


def run(folder, name, processes=1, **variables):
    variables = {"PANAX_CACHE": str(folder / "cache")} | variables
    return run_job(folder / name, WORKER, [str(folder / f"run-{name}")], processes=processes, devices=1, **variables)


def names(found):
    return {name for name, _ in found["longest"]}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_damage_is_compiled_again(tmp_path):
    [cold] = run(tmp_path, "cold")
    assert cold["hits"] == 0 and "jit_step" in names(cold)
    files = sorted((tmp_path / "cache" / "programs").glob("*/*.program"), key=lambda path: path.stat().st_size)
    assert len(files) == cold["misses"]
    # The two largest: the step is among them.
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    files[-2].write_bytes(files[-2].read_bytes()[:-100])
    [again] = run(tmp_path, "again")
    assert (again["hits"], again["misses"]) == (cold["misses"] - 2, 2)
    assert sum("was damaged on disk, and is compiled again" in line for line in again["said"]) == 2
    assert again["loss"] == cold["loss"]


@pytest.mark.slow
def test_one_of_two_processes_compiles_and_all_have_hits_at_the_second_start(tmp_path):
    first, second = run(tmp_path, "cold", processes=2)
    assert {"jit_step", "jit_initial_state", "jit_evaluate"} <= names(first)
    assert not {"jit_step", "jit_initial_state", "jit_evaluate"} & names(second)
    assert first["received"] == 0 and second["received"] >= 3
    warm = run(tmp_path, "warm", processes=2)
    assert [each["misses"] for each in warm] == [0, 0]
    # Each reads what it made, read or was given: the first one has timed kernels besides.
    assert [each["hits"] for each in warm] == [
        cold["hits"] + cold["misses"] + cold["received"] for cold in (first, second)
    ]
    losses = {each["loss"] for each in (first, second, *warm)}
    assert len(losses) == 1


@pytest.mark.slow
def test_hosts_that_share_no_folder(tmp_path):
    """The first has its programs on disk, the second has none: it is given those that span both."""
    run(tmp_path, "cold", processes=2, APART="1")
    first, second = run(tmp_path, "warm", processes=2, APART="1")
    assert (first["misses"], second["misses"], second["received"]) == (0, 0, 0)
    shutil.rmtree(tmp_path / "cache1" / "programs")
    first, second = run(tmp_path, "lost", processes=2, APART="1")
    assert (first["misses"], first["received"]) == (0, 0)
    assert second["received"] >= 3 and "jit_step" not in names(second) and second["loss"] == first["loss"]


@pytest.mark.slow
def test_without_a_folder_one_of_two_processes_compiles_still(tmp_path):
    """Also with JAX's own cache, the hits of which can't be passed on: no process waits for what will not come."""
    off = run(tmp_path, "off", processes=2, PANAX_COMPILATION_CACHE_GB="0")
    assert not (tmp_path / "cache" / "programs").exists()
    of_jax = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "of-jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    by_jax = run(tmp_path, "jax", processes=2, **of_jax)
    assert not (tmp_path / "cache" / "programs").exists() and any((tmp_path / "of-jax").iterdir())
    for first, second in (off, by_jax):
        assert first["received"] == 0 and second["received"] >= 3 and "jit_step" not in names(second)
    again = run(tmp_path, "again", processes=2, **of_jax)
    assert again[0]["misses"] == 0 and again[0]["hits"] == by_jax[0]["misses"] + by_jax[0]["hits"]
    assert len({each["loss"] for outcomes in (off, by_jax, again) for each in outcomes}) == 1


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "programs").mkdir(mode=0o777)
    (tmp_path / "cache" / "programs").chmod(0o777)
    [found] = run(tmp_path, "open")
    [line] = [line for line in found["said"] if "programs" in line]
    assert line.startswith("warning: compiled programs are not kept in") and "others may write to" in line
