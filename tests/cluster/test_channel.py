"""Agents get in however many come at once, strangers hold no place for long, and no message can be forged or repeated."""

import asyncio
import contextlib
import hashlib
import resource
import secrets
import socket
import threading
import time

import pytest

from panax.cluster.node import agent, channel
from panax.cluster.node.channel import (
    Channel,
    Handshake,
    HandshakeRefusedError,
    PeerBusyError,
    SigningKeys,
    accept_agent,
    connect_to_supervisor,
)
from panax.cluster.supervisor import nodes
from panax.cluster.supervisor.nodes import Nodes, raise_file_limit

SECRET = "5ec" * 20


@contextlib.contextmanager
def supervisor(count=1):
    """Nodes that accept all messages, in a thread; returns their address."""
    result, stop = Nodes(SECRET, count), threading.Event()
    place = result.listen("127.0.0.1")

    def turn():
        while not stop.is_set():
            list(result.messages(0.02))

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield result, place
    finally:
        stop.set()
        thread.join()
        result.close()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thousand_agents_that_come_at_once_over_a_slow_network_all_get_in():
    count = 1000
    raise_file_limit(3 * count)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3 * count:
        count = 150  # what a system allows that lets a process have 1,024 files

    async def comes(host, port, number):
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                theirs, mine = await reader.readexactly(32), secrets.token_bytes(32)
                await asyncio.sleep(0.05)
                writer.write(mine + channel._proof(SECRET, channel._AGENT, theirs, mine))
                assert (await reader.readexactly(33))[:1] == channel._WELCOME
                await asyncio.sleep(0.05)
                keys = channel._keys(SECRET, channel._AGENT, theirs, mine)
                line = b'{"hello": {"node": "%d"}}' % number
                writer.write(channel._seal(keys.own, 0, line) + line + b"\n")
                return writer
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)

    async def all_come(place):
        host, port = place.split(":")
        writers = await asyncio.gather(*(comes(host, port, number) for number in range(count)))
        while not actual.complete:
            await asyncio.sleep(0.02)
        for writer in writers:
            writer.close()

    with supervisor(count) as (actual, place):
        asyncio.run(asyncio.wait_for(all_come(place), 60))
        assert actual.refused == 0 and actual.lost <= set(range(count))


def test_strangers_hold_no_place_for_longer_than_their_time_in_all(monkeypatch):
    monkeypatch.setattr(channel, "GREETING_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "MAX_HANDSHAKES", 4)
    with supervisor() as (result, place):
        host, port = place.split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(6)]
        stop = threading.Event()

        def trickles():
            while not stop.wait(0.1):
                for stranger in strangers:
                    with contextlib.suppress(OSError):
                        stranger.send(b"x")

        thread = threading.Thread(target=trickles)
        thread.start()
        try:
            until(lambda: result.refused >= 4)
            late = socket.create_connection((host, int(port)))
            until(lambda: result.refused >= 7)  # the one that is silent, too
        finally:
            stop.set()
            thread.join()
        for stranger in (*strangers, late):
            stranger.close()
        ours = connect_to_supervisor(place, SECRET, 5.0)
        ours.send(hello={"node": "0"})
        until(lambda: result.complete)
        ours.close()


def test_a_wrong_secret_and_no_answer_are_two_answers(monkeypatch):
    monkeypatch.setattr(channel, "GREETING_SECONDS", 0.3)
    with (
        supervisor() as (_, place),
        pytest.raises(HandshakeRefusedError, match="rejected this agent's proof of the job's secret"),
    ):
        connect_to_supervisor(place, "another", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerBusyError, match="no answer within"):
        connect_to_supervisor(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, 5.0)


def test_an_agent_tries_again_where_the_supervisor_has_no_time_and_not_where_it_is_refused(monkeypatch):
    answers = [PeerBusyError("no answer"), TimeoutError(), ConnectionRefusedError(), "in"]

    def connecting(address, secret, seconds):
        assert secret == SECRET
        answer = answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr(agent, "connect_to_supervisor", connecting)
    monkeypatch.setattr(agent.random, "uniform", lambda low, high: 0.0)
    monkeypatch.setenv(agent.SUPERVISOR, "host:1")
    assert agent.connect(SECRET) == "in"
    monkeypatch.setenv(agent.SUPERVISOR, "host:1")
    answers[:] = [HandshakeRefusedError("wrong"), "in"]
    with pytest.raises(HandshakeRefusedError):
        agent.connect(SECRET)


def pair():
    """Both ends of a channel, and the agent's socket."""
    ours, theirs = socket.socketpair()
    keys = SigningKeys(hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest())
    return Channel(ours, keys), Channel(theirs, SigningKeys(keys.other, keys.own)), theirs


def test_messages_come_in_order_and_in_both_directions():
    one, other, _ = pair()
    for number in range(3):
        one.send(number=number)
    assert other.receive() == [{"number": 0}, {"number": 1}, {"number": 2}]
    other.send(answer=True)
    assert one.receive() == [{"answer": True}] and not one.closed and not other.closed
    one.close()
    other.close()


@pytest.mark.parametrize(
    "act",
    [
        lambda sent: sent + sent,  # repeated
        lambda sent: sent.replace(b"kill", b"stop"),
        lambda sent: sent[64:],  # not sealed
        lambda sent: b'{"kill": true}\n',
        lambda sent: b"0" * 64 + b'{"kill": true}\n',
        lambda sent: sent.partition(b"\n")[2],  # the first one left out
        lambda sent: b"\n".join(sent.split(b"\n")[1::-1]) + b"\n",  # the other way round
        lambda sent: b"\n",
    ],
)
def test_what_is_forged_changed_repeated_or_left_out_ends_the_connection(act):
    one, other, _ = pair()
    one.send(kill=True)
    one.send(ping=True)
    sent = other._connection.recv(4096)
    feed, end = socket.socketpair()
    feed.sendall(act(sent))
    victim = Channel(end, other._keys)
    message = victim.receive()
    assert victim.closed and message == []
    for each in (one, other, victim):
        each.close()
    feed.close()


def test_a_message_can_not_be_sent_back_to_its_sender():
    one, other, _ = pair()
    one.send(ping=True)
    reflected = other._connection.recv(4096)
    other._connection.sendall(reflected)
    assert one.receive() == [] and one.closed
    one.close()
    other.close()


def test_the_secret_is_nowhere_in_what_is_sent():
    ours, theirs = socket.socketpair()
    greeting = Handshake(ours, SECRET)
    seen = theirs.recv(4096)
    mine = secrets.token_bytes(32)
    theirs.sendall(mine + channel._proof(SECRET, channel._AGENT, seen, mine))
    actual = greeting.advance()
    assert actual is not None
    actual.send(start={"environment": {}})
    seen += theirs.recv(4096)
    for form in (SECRET.encode(), bytes.fromhex(SECRET), hashlib.sha256(SECRET.encode()).digest()):
        assert form not in seen
    actual.close()
    theirs.close()


def test_an_accepting_end_waits_no_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(channel, "GREETING_SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    with pytest.raises(HandshakeRefusedError, match="did not prove that it knows the job's secret"):
        accept_agent(ours, SECRET)
    ours.close()
    theirs.close()
