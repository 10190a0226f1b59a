"""Which link is slow: plain judging of collectives that processes time, with flapping and recovery."""

import random

import pytest

from panax.cluster.stragglers.slow_links import FLAPPING, SLOW, WELL, CollectiveTimes, SlowLinks, find_suspects

ALL = (0, 1, 2, 3)
SQUARE = {0: {"fsdp": (0, 1), "replica": (0, 2)}, 1: {"fsdp": (0, 1), "replica": (1, 3)},
          2: {"fsdp": (2, 3), "replica": (0, 2)}, 3: {"fsdp": (2, 3), "replica": (1, 3)}}  # fmt: skip
"""Four processes, two by two."""


def ring(seconds: float, links: dict[int, dict[int, float]] | None = None) -> dict[int, CollectiveTimes]:
    return {
        process: CollectiveTimes({"fsdp": seconds}, {"fsdp": ALL}, (links or {}).get(process, {})) for process in ALL
    }


def square(slow: dict[tuple[str, tuple[int, ...]], float]) -> dict[int, CollectiveTimes]:
    return {
        process: CollectiveTimes({axis: slow.get((axis, group), 0.002) for axis, group in groups.items()}, groups)
        for process, groups in SQUARE.items()
    }


def changes(probes, **settings) -> list[tuple[int, str, object]]:
    links = SlowLinks(**settings)
    return [(number, each.what, each.link) for number, probe in enumerate(probes, start=1) for each in links.add(probe)]


def test_a_link_that_degrades_is_named_with_the_second_probe_and_reported_to_be_well_again():
    found = changes([ring(0.002)] * 4 + [ring(0.1)] * 3 + [ring(0.002)] * 3)
    assert [(number, what) for number, what, _ in found] == [(6, SLOW), (9, WELL)]
    link = found[0][2]
    assert (link.axis, link.group, link.seconds, link.baseline) == ("fsdp", ALL, 0.1, 0.002)


def test_a_check_before_the_run_reports_from_the_first_probe():
    assert [each[:2] for each in changes([ring(0.1)] * 3, expected={"fsdp": 0.002})] == [(2, SLOW)]
    assert changes([ring(0.1)] * 9) == []


def test_how_often_a_link_was_slow_is_counted():
    well, slow = [ring(0.002)] * 3, [ring(0.1)] * 3
    found = [(what, link.times) for _, what, link in changes(well + slow + well + slow + well)]
    assert found == [(SLOW, 1), (WELL, 1), (SLOW, 2), (WELL, 2)]


def test_a_link_that_is_slow_in_one_probe_of_a_few_flaps():
    found = changes([ring(0.002)] * 3 + [ring(0.1), ring(0.002), ring(0.002)] * 4)
    assert [(what, link.times) for _, what, link in found] == [(FLAPPING, 3)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_noise_names_no_link(platform):
    random.seed(5)
    usual = {"cpu": (0.001, 0.0045), "gpu": (0.0003, 0.00045)}[platform]
    assert changes([ring(random.uniform(*usual)) for _ in range(300)], platform=platform) == []


def test_only_the_slow_group_of_an_axis_is_named():
    slow = {("fsdp", (2, 3)): 0.1}
    found = changes([square({})] * 3 + [square(slow)] * 3)
    assert [(link.axis, link.group, link.suspects) for _, _, link in found] == [("fsdp", (2, 3), ())]


def test_the_process_that_slow_groups_of_two_axes_share_is_named():
    slow = {("fsdp", (2, 3)): 0.1, ("replica", (1, 3)): 0.1}
    found = changes([square({})] * 3 + [square(slow)] * 3)
    assert sorted((link.axis, link.suspects) for _, _, link in found) == [("fsdp", (3,)), ("replica", (3,))]


def test_messages_to_neighbours_report_the_host_or_the_link():
    well = {0: {1: 0.002, 3: 0.002}, 1: {0: 0.002, 2: 0.002}, 2: {1: 0.002, 3: 0.002}, 3: {2: 0.002, 0: 0.002}}

    def suspects(**slow: float) -> tuple[int, ...]:
        links = {source: dict(targets) for source, targets in well.items()}
        for name, seconds in slow.items():
            links[int(name[1])][int(name[2])] = seconds
        return find_suspects(ALL, ring(0.1, links))

    assert suspects(_21=0.1, _23=0.1) == (2,)  # sends slowly
    assert suspects(_12=0.1, _32=0.1) == (2,)  # receives slowly
    assert suspects(_12=0.1, _21=0.1) == (1, 2)
    assert suspects(_12=0.1) == (1, 2)
    assert suspects(_12=0.1, _32=0.012) == (1, 2)  # waited for a core
    assert suspects() == ()
