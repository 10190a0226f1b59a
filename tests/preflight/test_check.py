"""`panax check` in one process of eight simulated devices: its measurements, its files, and wrong input."""

import dataclasses
import json
import math
import time

import pytest
import tiny_recipe
from profiles import healthy

import panax
from panax.cli.main import main
from panax.core import LayoutError, RecipeError
from panax.mesh import MeshShape
from panax.plan.search.profile import read_profile
from panax.preflight import HardwareFinding, devices, disks
from panax.preflight.clocks import estimate_offset
from panax.preflight.links import neighbor_links, schedule_rounds
from panax.run.tools import check
from panax.stores import LocalStore

RECIPE = tiny_recipe.__file__


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    # What is measured is as good or bad as the machine; here it only has to be quick.
    monkeypatch.setattr(disks, "LARGEST_BYTES", 2**22)
    monkeypatch.setitem(devices.SIZES, "cpu", devices.BenchmarkSize(128, "float32", 1, 2**20))
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_runs_own_collectives_are_measured_and_nothing_else_is_left(here, capsys):
    (here / "mine").mkdir()
    code = main(
        ["check", RECIPE, "--mesh.fsdp", "2", "--mesh.tensor", "2", "--directory", "mine", "--place", "not/there"]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "mesh           fsdp=2 · tensor=2" in said and "all-gather of 2" in said and "profile " in said
    [stored] = here.rglob("*.json")
    assert files(here) == ["cache", "cache/hardware", f"cache/hardware/{stored.name}", "mine"]
    profile = read_profile(stored)
    assert profile.mesh == {"replica": 1, "stage": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    assert {disk.place for disk in profile.disks} == {"mine", "not/there"}
    # Weights are gathered over fsdp, activations over tensor; a step has no exchange of all with all.
    over = {(each.kind, each.axes) for each in profile.collectives}
    assert {("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",)), ("all-gather", ("tensor",))} <= over
    assert not any(kind == "all-to-all" for kind, _ in over)
    # Simulated devices have no links.
    assert profile.links == ()


@pytest.mark.slow
def test_inspect_finds_the_profile_and_states_a_steps_time(capsys):
    layout = ["--mesh.fsdp", "2", "--mesh.tensor", "2"]
    assert main(["check", RECIPE, *layout]) == 0
    capsys.readouterr()
    assert main(["inspect", RECIPE, *layout, "--no-compile"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "time at least" in said and "on 4 x cpu: " in said and "was not measured" not in said
    # Of another mesh, what was measured of the devices counts; axes that were not are named.
    assert main(["inspect", RECIPE, "--mesh.fsdp", "4", "--no-compile"]) == 0
    assert "without communication over fsdp" in " ".join(capsys.readouterr().out.split())


def test_a_profile_that_cant_be_used_is_one_message(here, capsys):
    assert main(["inspect", RECIPE, "--no-compile", "--hardware", "missing.json"]) == 2
    assert "the hardware profile missing.json can't be read: No such file" in capsys.readouterr().err
    healthy(2, "gpu", "NVIDIA H100").save("other.json")
    assert main(["inspect", RECIPE, "--no-compile", "--hardware=other.json"]) == 2
    assert "other.json is the profile of NVIDIA H100, and the step is for cpu" in capsys.readouterr().err


def test_as_json_for_programs(here, capsys):
    assert main(["check", "--json", "--mesh.fsdp", "1", "--save", "profile.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept"] == "profile.json" and found["healthy"] == (found["findings"] == [])
    profile = read_profile(here / "profile.json")
    assert json.loads(profile.to_json()) == found["profile"]
    assert profile.matrix_flops > 0 and profile.collectives == ()


def test_strict_ends_with_a_message_of_every_finding(monkeypatch, capsys):
    odd = HardwareFinding("clock", "host b", "its clock is 3 s ahead", "have NTP set it")
    monkeypatch.setattr(check, "find_problems", lambda profile: [odd])
    one = MeshShape(fsdp=1)
    result = panax.check(mesh=one)
    assert result.findings == (odd,) and not result.healthy and "1 finding" in str(result)
    with pytest.raises(
        check.CheckError, match=r"1 finding, and nothing was started:\n  clock: host b: its clock is 3 s"
    ):
        panax.check(mesh=one, strict=True)
    assert main(["check", "--mesh.fsdp", "1", "--strict"]) == 6
    assert "host b" in capsys.readouterr().out
    assert main(["train", RECIPE, "--check", "--mesh.fsdp", "1", "--directory", "run"]) == 6
    said = capsys.readouterr()
    assert "its clock is 3 s ahead" in said.err and "loss" not in said.out


def test_a_place_that_cant_be_written_is_a_finding(here):
    (here / "file").write_text("not a folder")
    result = panax.check(mesh=MeshShape(fsdp=1), places=["s4://nowhere", str(here / "file" / "below")])
    found = [each for each in result.findings if each.kind == "disk"]
    assert [each.where.split(" on ")[0] for each in found] == ["s4://nowhere"]
    # A folder below a file can't be made either, but what is measured is the folder above it.
    assert (here / "file").read_text() == "not a folder"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh.fsdpp", "2"], "--mesh.fsdpp is not a flag of `panax check` without a recipe"),
        (["--mesh.fsdp", "two"], "invalid int value"),
        (["--mesh.fsdp", "3", "--mesh.tensor", "5"], "there are 8"),
        (["--save"], "expected one argument"),
        (["no_recipe_of_this_name"], "no_recipe_of_this_name"),
    ],
)
def test_wrong_input_is_one_message(arguments, said, capsys):
    assert main(["check", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_python_checks_what_the_command_line_checks(here):
    with pytest.raises(RecipeError, match="pass one of them"):
        panax.check(tiny_recipe.tiny(), mesh=MeshShape())
    with pytest.raises(LayoutError):
        panax.check(mesh=MeshShape(fsdp=3, tensor=5))
    (here / "file").write_text("")
    with pytest.raises(check.CheckError, match="can't be written"):
        panax.check(mesh=MeshShape(fsdp=1), save=here / "file" / "profile.json")


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_links_take_as_many_rounds_as_a_process_has_neighbours(count):
    links = neighbor_links([("replica", 2), ("fsdp", count)], list(range(2 * count)), between_processes=True)
    assert len({frozenset((link.source, link.target)) for link in links}) == len(links) <= 2 * 2 * count
    rounds = schedule_rounds(links, list(range(2 * count)))
    assert sum(map(len, rounds)) == len(links) and len(rounds) <= 5
    for each in rounds:
        ends = [end for link in each for end in (link.source, link.target)]
        assert len(set(ends)) == len(ends)


def test_a_clocks_offset_is_bounded_from_both_sides():
    # True offsets of 5 s, barriers that are left between 1 and 3 ms after they were entered.
    reference = [(float(i), i + 0.001) for i in range(10)]
    ahead = [(5.0 + i - 0.0005 * i, 5.0 + i + 0.003) for i in range(10)]
    offset, error = estimate_offset(ahead, reference)
    assert abs(offset - 5.0) <= error + 1e-9 and error <= 0.002
    assert math.isclose(estimate_offset(reference, ahead)[0], -offset)


def test_a_profile_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HardwareFinding("a", "b", "c", "d").kind = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_ctrl_c_leaves_no_file(here, monkeypatch):
    def interrupted(*arguments):
        assert list(here.glob("panax-check-*/bytes"))
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "read_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disks.measure_disk(str(here))
    assert files(here) == []


def test_to_a_slow_store_no_more_than_the_first_file_is_written(here, monkeypatch):
    written = []

    def slowly(store, path, parts):
        written.append(sum(map(len, parts)))
        time.sleep(0.5)
        write(store, path, parts)

    write = LocalStore.write
    monkeypatch.setattr(LocalStore, "write", slowly)
    disk = disks.measure_disk("below/here")
    assert written == [disks.FIRST_BYTES] and disk.write_bandwidth < disks.FIRST_BYTES / 0.5
    assert files(here) == []
