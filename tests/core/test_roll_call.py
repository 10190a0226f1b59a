"""Process 0 waits for the others, and all of them learn how that ended. Each process is a thread."""

import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import free_port

from panax.core import PanaxError, RecipeError
from panax.job.membership import Membership
from panax.job.rendezvous import RendezvousInfo, rendezvous

FACTS = {"jax": "1"}


def job(processes: int, seconds: float = 10.0, **more) -> list[RendezvousInfo]:
    address = f"127.0.0.1:{free_port()}"
    places = [Membership(coordinator=address, processes=processes, index=index) for index in range(processes)]
    return [RendezvousInfo(place, FACTS, seconds, **more) for place in places]


def outcomes(rolls: list[RendezvousInfo]) -> list[str]:
    """The error of each process; "" if it continues. What answers after the roll call is a server, as JAX's is."""

    def one(roll: RendezvousInfo) -> str:
        address = roll.place.coordinator
        try:
            rendezvous(roll, address)
        except PanaxError as error:
            return str(error)
        if roll.place.index == 0:
            host, port = address.split(":")
            after = socket.create_server((host, int(port)))
            served.append(after)
        return ""

    served: list[socket.socket] = []
    with ThreadPoolExecutor(len(rolls)) as pool:
        result = list(pool.map(one, rolls))
    for each in served:
        each.close()
    return result


def test_all_continue_when_all_are_there_and_the_port_is_free_again():
    rolls = job(6, secret=b"s")
    for _ in range(2):
        assert outcomes(rolls) == [""] * 6


def test_who_is_missing_is_reported_to_all_that_came():
    first, second, _, fourth = outcomes_without(2)
    assert first == second == fourth
    assert "3 of 4 processes reached" in first and "missing: 2;" in first


def outcomes_without(index: int) -> list[str]:
    rolls = job(4, seconds=1.0)
    found = outcomes([roll for roll in rolls if roll.place.index != index])
    return [*found[:index], "", *found[index:]]


def test_process_0_that_does_not_come_is_named():
    rolls = job(2, seconds=1.0)
    [error] = outcomes(rolls[1:])
    assert f"did not reach process 0 at {rolls[0].place.coordinator} within 1 s: connection refused" in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda roll: dataclasses.replace(roll, facts={"jax": "2"}), "has jax 2, process 0 has 1; install the same"),
        (lambda roll: with_place(roll, index=1), "two processes were started as process 1"),
        (lambda roll: with_place(roll, processes=4), "was started with 4 processes, process 0 with 3"),
    ],
)
def test_processes_that_do_not_agree_end_at_once(change, said):
    first, second, third = job(3)
    start = time.monotonic()
    found = outcomes([first, second, change(third)])
    assert said in found[0] and found[0] in found[1:], found
    assert time.monotonic() - start < 9


def with_place(roll: RendezvousInfo, **changes) -> RendezvousInfo:
    return dataclasses.replace(roll, place=dataclasses.replace(roll.place, **changes))


def test_a_process_without_the_secret_is_refused_and_reported():
    # Longer than a busy machine takes to start the other thread.
    first, second = job(2, seconds=4.0, secret=b"right")
    found = outcomes([first, dataclasses.replace(second, secret=b"wrong")])
    assert "a process at 127.0.0.1 has another secret" in found[0]
    assert "has another secret" in found[1]


def test_strangers_and_what_they_send_change_nothing():
    rolls = job(2)
    host, port = rolls[0].place.coordinator.split(":")

    def disturb() -> None:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"index": "1"}\n', b"x" * 20000):
            while True:
                try:
                    with socket.create_connection((host, int(port)), timeout=5) as connection:
                        connection.sendall(text)
                        break
                except ConnectionRefusedError:
                    time.sleep(0.01)
                except OSError:  # thrown out while it still sends
                    break
        result.extend(outcomes(rolls[1:]))

    result: list[str] = []
    thread = threading.Thread(target=disturb)
    thread.start()
    rendezvous(rolls[0], rolls[0].place.coordinator)
    with socket.create_server((host, int(port))):
        thread.join(30)
    assert result == [""]


def test_a_port_in_use_is_one_message():
    first, _ = job(2)
    host, port = first.place.coordinator.split(":")
    with socket.create_server((host, int(port))), pytest.raises(RecipeError, match=r"can't listen at .*choose a port"):
        rendezvous(first, first.place.coordinator)


@pytest.mark.parametrize("count", [1, 2])
def test_strangers_that_trickle_bytes_hold_nobody_up(count, monkeypatch):
    """While a process is waited for, and where all have come."""
    monkeypatch.setattr("panax.job.rendezvous._STRANGER_SECONDS", 0.5)
    monkeypatch.setattr("panax.job.rendezvous._CLOSE_SECONDS", 0.5)
    rolls = job(2, seconds=2.0 if count == 1 else 20.0)
    host, port = rolls[0].place.coordinator.split(":")
    closed, stop = [], threading.Event()

    def trickle() -> None:
        while not stop.is_set():
            try:
                connection = socket.create_connection((host, int(port)), timeout=5)
                break
            except OSError:
                time.sleep(0.02)
        else:
            return
        with connection:
            began = time.monotonic()
            try:
                while not stop.wait(0.05):
                    connection.sendall(b"x")
            except OSError:
                closed.append(time.monotonic() - began)

    threads = [threading.Thread(target=trickle) for _ in range(3)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    results = outcomes(rolls[:count])
    assert ("1 of 2 processes reached" in results[0]) if count == 1 else results == ["", ""]
    assert time.monotonic() - began < 15
    if count == 1:
        assert len(closed) == 3 and max(closed) < 2.0
    stop.set()
    for thread in threads:
        thread.join()
