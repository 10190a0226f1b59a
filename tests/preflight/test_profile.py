"""The file of a profile: it reads back, and anything else is refused with one message."""

import dataclasses
import json

import pytest
from profiles import healthy

from panax.core import RecipeError
from panax.plan.search.profile import ProfileError, newest_profile, profile_path, read_profile
from panax.plan.search.roofline import DataSheet, ProfileFigures, step_time, time_lines
from panax.plan.search.targets import parse_target
from panax.plan.walk.operations import StepWork
from panax.plan.walk.traffic import Traffic
from panax.plan.walk.trip_counts import ExecutionCount
from panax.plan.walk.walk import StepCost

PROFILE = healthy(4)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "new" / "hardware.json"
    PROFILE.save(path)
    return path


def test_what_is_written_is_read_again(file):
    assert read_profile(file) == PROFILE
    assert [path.name for path in file.parent.iterdir()] == ["hardware.json"]


def test_a_file_cut_short_anywhere_is_one_message(file):
    text = file.read_text()
    for end in range(0, len(text) - 1, 97):
        file.write_text(text[:end])
        with pytest.raises(ProfileError, match=r"panax check --save FILE"):
            read_profile(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.update(schema_version=2), "version 2, and this Panax reads version 1"),
        (lambda found: found.pop("schema_version"), "schema_version is missing"),
        (lambda found: found.pop("devices"), "lacks 'devices'"),
        (lambda found: found.update(color="red"), "has 'color'"),
        (lambda found: found.update(devices=[]), "devices or .processes is empty"),
        (lambda found: found.update(devices=7), "devices is not a list"),
        (lambda found: found["devices"][0].update(matrix_flops=-1), "above 0"),
        (lambda found: found["devices"][0].update(matrix_flops=float("inf")), "finite"),
        (lambda found: found["devices"][0].update(matrix_flops="fast"), "expected a number"),
        (lambda found: found["devices"][0].update(process=99), "lacks process 99"),
        (lambda found: found["links"][0].update(source=44), "not one of its 4 places"),
        (lambda found: found["collectives"][0].update(axes="fsdp"), "axes is not a list"),
        (lambda found: found["mesh"].update(fsdp=3), "mesh has 3 devices, places has 4"),
        (lambda found: found["mesh"].update(fsdp="x"), "mesh.fsdp is 'x'; expected a whole number"),
        (lambda found: found.update(mesh=4), "mesh is not an object"),
        (lambda found: found["processes"].append(None), "not an object"),
    ],
)
def test_a_damaged_file_is_one_message(file, change, said):
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))
    with pytest.raises(RecipeError) as caught:
        read_profile(file)
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_what_is_not_a_profile_is_one_message(tmp_path):
    with pytest.raises(ProfileError, match="No such file"):
        read_profile(tmp_path / "missing")
    for name, data in (("list", b"[1]"), ("bytes", b"\xff\xfe\x00"), ("deep", b"[" * 100_000)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ProfileError, match="not a hardware profile"):
            read_profile(tmp_path / name)


def test_the_newest_profile_of_the_same_devices_is_found(tmp_path):
    later = dataclasses.replace(PROFILE, made="2026-12-01T00:00:00+00:00")
    other_mesh = dataclasses.replace(later, mesh={"replica": 2, "fsdp": 2})
    for name, profile in (("1", PROFILE), ("2", later), ("3", other_mesh), ("4", healthy(2))):
        profile.save(tmp_path / name)
    (tmp_path / "5").write_text("{}")
    paths = sorted(tmp_path.iterdir())
    assert newest_profile("cpu", {"fsdp": 4, "tensor": 1}, paths) == (later, tmp_path / "2")
    assert newest_profile("cpu", {"fsdp": 2}, paths) == (healthy(2), tmp_path / "4")
    assert newest_profile("cpu", {"fsdp": 16}, paths) is None
    assert newest_profile("NVIDIA H100", {"fsdp": 4}, paths) is None
    assert profile_path(PROFILE) != profile_path(other_mesh)


def cost(*traffic):
    return StepCost(tuple(traffic), StepWork(7e12, 0.0, ()), 3_000_000_000, 0, (), 0.0)


def test_a_step_takes_as_long_as_what_it_does_over_what_was_measured():
    gather = Traffic("all-gather", ("fsdp",), 10**9, ExecutionCount(2, 2), "weights")
    elsewhere = dataclasses.replace(gather, axes=("tensor",))
    time = step_time(cost(gather, elsewhere), ProfileFigures(PROFILE, {"fsdp": 4, "tensor": 2}))
    assert time.compute == pytest.approx(7e12 / PROFILE.matrix_flops)
    assert time.state == pytest.approx(6e9 / PROFILE.memory_bandwidth)
    assert time.communication == pytest.approx(2 * (1.0 + 2e-4))
    assert time.unknown == (("tensor",),)
    known, unknown = time.links
    assert (known.axes, known.sent) == (("fsdp",), 2 * 10**9) and known.seconds == pytest.approx(time.communication)
    assert (unknown.axes, unknown.sent, unknown.seconds) == (("tensor",), 2 * 10**9, None)
    assert any(line.split() == ["tensor", "1.9", "GiB"] for line in time_lines(time, "a profile"))
    # Of an axis of another length than was measured nothing is known.
    assert step_time(cost(gather), ProfileFigures(PROFILE, {"fsdp": 8})).unknown == (("fsdp",),)


def test_data_sheets_state_which_axes_leave_the_fast_network():
    sheet = DataSheet(parse_target("h100x16"), {"replica": 2, "fsdp": 4, "tensor": 2})
    assert sheet.collective_figures("all-gather", ("fsdp",)) == (450e9, 0.0)
    assert sheet.collective_figures("all-reduce", ("replica",)) == (50e9, 0.0)
    assert sheet.collective_figures("all-gather", ("fsdp", "tensor")) == (450e9, 0.0)
