"""`panax check --full` on CPU: its findings, its page, and its outcome."""

import dataclasses
import json

import accelerators
import jax.numpy as jnp
import numpy as np
import pytest

from panax.cli.main import main
from panax.core import RecipeError
from panax.kernels import registry
from panax.kernels.registry import Kernel, list_kernels, list_works, register
from panax.preflight import full
from panax.preflight.full import (
    Case,
    CaseSkipped,
    CheckOutcome,
    ResultMismatch,
    cases,
    execution,
    kernels,
    run_case,
    train_benchmark,
)
from panax.preflight.full.comparison import local_target, run_kernel, select_supported, worst_error_share
from panax.preflight.full.layouts import LAYOUTS, MIXTURE_LAYOUTS
from panax.run.tools import check

SMALL = dataclasses.replace(full.CPU, positions=64, heads=4, head_dim=8, rows=128, width=32)


@pytest.fixture(autouse=True)
def current(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    # PyTorch takes seconds to import.
    monkeypatch.setattr(kernels, "_load_adapted", lambda: False)
    return tmp_path


@pytest.fixture
def with_torch(current, monkeypatch):
    monkeypatch.setattr(kernels, "_load_adapted", load_adapted)


load_adapted = kernels._load_adapted


@pytest.fixture
def broken(monkeypatch):
    """A kernel for row sums that is off by a thousandth, registered while the test runs."""
    monkeypatch.setattr(registry, "_kernels", {work: list(found) for work, found in registry._kernels.items()})
    register(Kernel(work="row sums", name="broken", run=lambda x: 1.001 * x.astype(jnp.float32).sum(axis=0)))
    yield
    registry._chosen.cache_clear()


def test_every_kernel_for_this_platform_is_a_part():
    names = {case.name for case in kernels.kernel_cases(SMALL)}
    for work in list_works():
        assert work in kernels.CHECKS
        for kernel in list_kernels(work, local_target()):
            assert {f"{work}, {kernel.name}, {dtype}" for dtype in ("float32", "bfloat16")} <= names
    assert not any("cudnn" in name or "megablox" in name for name in names)
    groups = [case.group for case in cases(SMALL)]
    assert groups.count("layout") == len(LAYOUTS) + len(MIXTURE_LAYOUTS)
    assert groups[-2:] == ["checkpoint", "benchmark"]


def test_a_broken_kernel_is_named_and_the_others_continue(broken, current):
    report = full.full_check("1.0", sizes=SMALL, only=lambda case: case.name.startswith("row sums"))
    by_name = {part.name: part for part in report.parts}
    assert [part.name for part in report.failed] == ["row sums, broken, float32", "row sums, broken, bfloat16"]
    assert "sum is " in report.failed[0].why and "times what rounding may make" in report.failed[0].why
    assert by_name["row sums, xla, float32"].outcome is CheckOutcome.PASSED
    text = full.format_markdown(report, ["figures"])
    assert "### kernel: row sums, broken, float32" in text and "1 x" not in text.splitlines()[0]
    assert "row sums, broken, float32" in "\n".join(full.part_lines(report))
    assert full.write_result(full.result_file(None, *key(report)), text) is None
    assert [path.name for path in current.glob("*.md")] == [f"{report.day}-check-cpu-{report.chip}.md"]


def key(found):
    return found.day, found.platform, found.chip


def test_errors_reasons_and_interrupts():
    def raising(error):
        def run():
            raise error

        return run_case(Case("kernel", "x", run))

    crashed = raising(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\n" + "x" * 10000))
    assert crashed.outcome is CheckOutcome.FAILED and crashed.why.startswith("RuntimeError: CUDA_ERROR")
    assert len(crashed.why) < 5000
    assert raising(CaseSkipped("it takes 2 devices")).outcome is CheckOutcome.LEFT_OUT
    assert raising(ResultMismatch("off by 3")).why == "off by 3"
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1.0, np.nan], "1 of 2 entries"),
        ([1.0, 2.1], "times what rounding may make"),
        ([[1.0, 2.0]], r"shape \(1, 2\); its definition has \(2,\)"),
    ],
)
def test_what_is_not_the_definition_is_refused(found, said):
    with pytest.raises(ResultMismatch, match=said):
        worst_error_share(["out"], [np.asarray(found)], [np.asarray([1.0, 2.0])], [0.05])
    assert worst_error_share(["out"], [np.asarray([1.0, 2.025])], [np.asarray([1.0, 2.0])], [0.05]) == pytest.approx(
        0.5
    )


def test_a_kernel_that_silently_is_another_one_is_found():
    x = np.ones((8, 8), np.float32)
    # By its name it is Panax's custom call for CPUs; what it compiles to is XLA's own sum.
    impostor = Kernel(work="row sums", name="c", platforms=("cpu",), run=lambda x: x.sum(axis=0))
    with pytest.raises(ResultMismatch, match="has no custom call: something else would run"):
        run_kernel(impostor, impostor.run, (x,), "float32")
    named = next(kernel for kernel in list_kernels("matmul") if kernel.run is None)
    with pytest.raises(ResultMismatch, match=r"was to run 'xla'; what was traced ran none of it"):
        run_kernel(named, lambda x: x, (x,), "float32", named={"matmul": "xla"})
    absent = dataclasses.replace(impostor, missing=lambda: "no compiler here")
    with pytest.raises(CaseSkipped, match="no compiler here"):
        select_supported(absent, [None], local_target())


def test_results_are_never_written_over(current):
    day = ("2030-01-02", "gpu", "h100")
    assert str(full.result_file(None, *day)) == "2030-01-02-check-gpu-h100.md"
    (current / "benchmarks/results").mkdir(parents=True)
    first = full.result_file(None, *day)
    assert str(first) == "benchmarks/results/2030-01-02-check-gpu-h100.md"
    full.write_result(first, "mine")
    assert full.result_file(None, *day).name == "2030-01-02-check-gpu-h100-2.md"
    with pytest.raises(RecipeError, match="written by another program meanwhile"):
        full.write_result(first, "other")
    with pytest.raises(RecipeError, match="it exists already"):
        full.result_file(first, *day)
    with pytest.raises(RecipeError, match="the folder none is missing"):
        full.result_file("none/page.md", *day)
    assert first.read_text() == "mine"


def test_a_cell_breaks_no_table():
    part = full.CheckResult("kernel", "a|b", CheckOutcome.LEFT_OUT, "one\ntwo | three ```", {}, 1.0)
    failed = dataclasses.replace(part, outcome=CheckOutcome.FAILED)
    result = full.FullCheck("2030-01-02", "tpu", "v5e", {"x": "1\n2"}, (part, failed), 2.0)
    text = full.format_markdown(result, [])
    assert "| kernel | a\\|b | left out |  | one two \\| three ``` |" in text
    assert "````text" in text and "| x | 1 2 |" in text


def test_as_many_layers_as_fit():
    asked = []

    def fits(count):
        asked.append(count)
        return count <= 19

    assert train_benchmark.find_largest(32, fits) == 19 and len(asked) <= 7


def test_layers_that_do_not_fit_are_tried_with_fewer(monkeypatch):
    tried = []

    def timed(model, *rest):
        tried.append(model.num_layers)
        if len(tried) < 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"layers": str(model.num_layers)}

    sizes = dataclasses.replace(full.CPU, trained=dataclasses.replace(full.CPU.trained, num_layers=32), seconds=None)
    monkeypatch.setattr(train_benchmark, "_timed", timed)
    monkeypatch.setattr(train_benchmark, "_free_bytes", lambda device, share: 60.0)
    monkeypatch.setattr(
        train_benchmark.MemoryModel, "of", lambda *arguments: train_benchmark.MemoryModel(fixed=20.0, per_layer=3.0)
    )
    figures = train_benchmark.benchmark(sizes)
    assert tried == [13, 11, 9] and "13 layers were planned" in figures["note"]
    monkeypatch.setattr(train_benchmark, "_free_bytes", lambda device, share: 22.0)
    with pytest.raises(CaseSkipped, match=r"one layer of .* takes"):
        train_benchmark.benchmark(sizes)
    monkeypatch.setattr(train_benchmark, "_free_bytes", lambda device, share: 60.0)
    monkeypatch.setattr(train_benchmark, "_timed", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_benchmark.benchmark(sizes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ful"], "--ful is not a flag"),
        (["--fu"], "--fu is not a flag"),
        (["--full=yes"], "ignored explicit argument"),
        (["--output", "page.md"], "output has no effect without full"),
        (["--full", "--output", "there.md"], "it exists already"),
    ],
)
def test_half_a_flag_and_flags_without_effect(arguments, said, current, capsys, monkeypatch):
    monkeypatch.setattr(check, "full_check", lambda *arguments, **options: pytest.fail("it was run"))
    (current / "there.md").write_text("mine")
    assert main(["check", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert (current / "there.md").read_text() == "mine"


@pytest.fixture
def quick(monkeypatch):
    """A full check of two parts, with small sizes before it."""
    from panax.preflight import devices, disks

    monkeypatch.setattr(disks, "LARGEST_BYTES", 2**22)
    monkeypatch.setitem(devices.SIZES, "cpu", devices.BenchmarkSize(128, "float32", 1, 2**20))
    some = [Case("kernel", "good", lambda: {"error": "0%"}), Case("kernel", "bad", lambda: 1 / 0)]
    monkeypatch.setattr(execution, "cases", lambda *arguments: some)
    return some


def test_the_command_writes_a_page_and_reports_by_its_exit_code(quick, current, capsys):
    one = ["check", "--mesh.fsdp", "1", "--full"]
    assert main([*one, "--output", "page.md"]) == 1
    said = capsys.readouterr().out
    assert "1 passed, 1 failed, 0 left out" in said and "ZeroDivisionError" in said and "page.md" in said
    assert max(map(len, said.partition("\nprofile ")[0].splitlines())) <= 80
    page = (current / "page.md").read_text()
    assert "ZeroDivisionError: division by zero" in page and "matrices (float32)" in page and "| jax |" in page
    assert main([*one, "--json", "--output", "json.md"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [part["outcome"] for part in result["full"]["parts"]] == ["passed", "failed"] and not result["healthy"]
    del quick[1]
    assert main(one) == 0
    assert len(list(current.glob("*-check-cpu-*.md"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_on_eight_simulated_devices(with_torch):
    found = full.full_check("1.0")
    assert not found.failed, [f"{part.name}: {part.why}" for part in found.failed]
    assert all(part.figures if part.outcome is CheckOutcome.PASSED else part.why for part in found.parts)
    passed = {f"{part.group}: {part.name}" for part in found.parts if part.outcome is CheckOutcome.PASSED}
    layouts = {name for name in passed if name.startswith("layout: ")}
    assert len(layouts) == len(LAYOUTS) + len(MIXTURE_LAYOUTS)
    assert {"kernel: context attention, ring, float32", "kernel: adapted attention, whole scores, float32"} <= passed
    assert "checkpoint: save, train on, restore" in passed and "benchmark: " + full.CPU.trained_as in passed


def test_each_part_on_an_accelerator_has_a_test_case_where_it_is_asked_for():
    assert accelerators.named("gpu", "not slow and not gpu and not tpu") == []
    for platform, own in (("gpu", {"cudnn", "pallas", "triton"}), ("tpu", {"pallas", "megablox"})):
        names = accelerators.named(platform, platform)
        taken = {name.split(", ")[1] for name in names if name.startswith("kernel: ") and name.count(", ") == 2}
        assert own <= taken and not {"c", "mkl"} & taken and len(set(names)) == len(names)
        assert f"benchmark: {full.ACCELERATOR.trained_as}" in names
