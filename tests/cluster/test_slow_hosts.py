"""Which host is slow: judging of figures that hosts report, with noise and without."""

import random

import pytest

from panax.cluster.stragglers.slow_hosts import HostProbe, SlowHosts, measure_slowness

ROW = 3


def named(probes: list[dict[int, HostProbe]]) -> dict[int, list[int]]:
    """Host to the probes, from 1, with which it became slow."""
    hosts, found = SlowHosts(), {}
    for number, probe in enumerate(probes, start=1):
        for change in hosts.add(probe, 10.0 * number):
            if change.slow:
                found.setdefault(change.host, []).append(number)
    return found


def matrices(*seconds: float) -> dict[int, HostProbe]:
    return {host: HostProbe(each) for host, each in enumerate(seconds)}


@pytest.mark.parametrize("hosts", [3, 4, 64])
def test_a_slow_host_is_named_after_three_probes(hosts):
    well = matrices(*[0.010] * hosts)
    slow = {**well, 1: HostProbe(0.016)}
    assert named([well] * 5 + [slow] * 5) == {1: [5 + ROW]}


def test_what_is_slow_once_or_twice_is_not():
    well, slow = matrices(0.01, 0.01, 0.01), matrices(0.01, 0.5, 0.01)
    assert named([well, slow, slow, well] * 20) == {}


def test_what_is_slow_for_some_seconds_is_not():
    hosts, slow = SlowHosts(), matrices(0.01, 0.5, 0.01)
    assert [hosts.add(slow, now) for now in (0.0, 1.0, 2.0, 3.0, 19.0)] == [[]] * 5
    assert [change.host for change in hosts.add(slow, 20.0)] == [1]


def test_hosts_that_are_all_slow_name_nobody():
    assert named([matrices(0.01, 0.01, 0.01)] * 3 + [matrices(0.1, 0.1, 0.1)] * 10) == {}


def test_noise_names_nobody():
    random.seed(4)
    probes = [matrices(*(0.01 * random.uniform(1, 1.9) for _ in range(4))) for _ in range(200)]
    assert named(probes) == {}
    # The same noise on a host that takes twice as long.
    slow = [{**probe, 2: HostProbe(2 * probe[2].matrix)} for probe in probes]
    assert list(named(slow)) == [2]


def test_a_host_is_well_again_and_can_be_slow_again():
    well, slow = matrices(0.01, 0.01, 0.01), matrices(0.01, 0.03, 0.01)
    hosts = SlowHosts()
    changes = [
        (number, change.slow)
        for number, probe in enumerate([slow] * 5 + [well] * 5 + [slow] * 5)
        for change in hosts.add(probe, 10.0 * number)
    ]
    assert changes == [(2, True), (7, False), (12, True)]
    hosts.begin()
    assert not hosts.slow


def test_of_two_hosts_the_one_that_has_become_slow_is_named():
    # One was always slower, as a machine of another year is: that is no fault.
    before, after = matrices(0.010, 0.018), matrices(0.020, 0.018)
    assert named([before] * 10) == {}
    assert named([before] * 3 + [after] * 5) == {0: [3 + ROW]}
    assert named([before] * 3 + [matrices(0.020, 0.036)] * 5) == {}


def test_of_two_hosts_a_check_before_the_run_reports_from_the_first_probe():
    slow = {0: HostProbe(0.010, could=0.012), 1: HostProbe(0.018, could=0.011)}
    assert named([slow] * 3) == {1: [ROW]}
    alike = {0: HostProbe(0.010, could=0.010), 1: HostProbe(0.018, could=0.018)}
    assert named([alike] * 9) == {}


def test_a_host_that_holds_the_others_up_by_its_own_work_is_named():
    well = {host: HostProbe(0.01, host=0.01, part="hooks", device_wait=0.48, step=0.5) for host in range(3)}
    slow = {**well, 2: HostProbe(0.01, host=0.3, part="waiting for data", device_wait=0.01, step=0.5)}
    assert named([well] * 3 + [slow] * 3) == {2: [6]}
    said = measure_slowness(slow, {})[2].description
    assert said == "it spends 300 ms of each step of 500 ms on waiting for data, where others spend 10 ms"
    # Work that is done while the devices are busy holds nobody up.
    hidden = {**well, 2: HostProbe(0.01, host=0.3, part="hooks", device_wait=0.19, step=0.5)}
    assert named([hidden] * 9) == {}
    # All of them wait for the same slow disk.
    alike = {host: HostProbe(0.01, host=0.3, part="waiting for data", step=0.5) for host in range(3)}
    assert named([alike] * 9) == {}


def test_one_host_is_compared_with_nobody():
    assert named([matrices(0.01)] * 3 + [matrices(9.0)] * 9) == {}
