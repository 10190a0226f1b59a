"""Signals: the first one asks, the second ends at once, and one that a compiler holds up ends a run that has nothing to save."""

import os
import signal
import subprocess
import sys
import time

import pytest

from panax.run.recovery import interrupt
from panax.run.recovery.interrupt import HANDLED_SIGNALS, SignalHandler


@pytest.mark.parametrize("number", [*HANDLED_SIGNALS, signal.SIGTERM])
def test_each_asks_for_a_save_and_a_second_one_ends_at_once(number, monkeypatch):
    before = signal.signal(number, signal.default_int_handler)  # SIGHUP is ignored under nohup
    try:
        _ends(number, monkeypatch)
    finally:
        signal.signal(number, before)


def _ends(number, monkeypatch):
    usual = signal.getsignal(number)
    with SignalHandler() as handler:
        handler.record_step()
        assert not handler.should_stop() and not handler.should_abandon_wait()
        os.kill(os.getpid(), number)
        assert handler.should_stop() and handler.signal == number and handler.should_abandon_wait()
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)  # by the same hand, to the group
            monkeypatch.setattr(interrupt, "DEBOUNCE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(5)
    assert signal.getsignal(number) == usual


def test_a_hangup_that_is_ignored_stays_so(monkeypatch):
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked.should_stop()
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_of_two_requests_to_a_launched_worker_the_second_is_the_same(monkeypatch):
    monkeypatch.setattr(interrupt, "DEBOUNCE_SECONDS", 0.0)
    monkeypatch.setattr("panax.job.heartbeat.Heartbeat.is_supervised", property(lambda self: True))
    with SignalHandler() as asked:
        asked.record_step()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal == signal.SIGTERM


HELD = """
import os, signal, sys, threading, time
from panax.run.recovery import interrupt
interrupt.RESPONSE_SECONDS = 0.5
with interrupt.SignalHandler() as asked:
    if {has_news}:
        asked.record_step()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.{name})).start()
    # A compiler holds the main thread: no handler of Python's runs.
    import ctypes
    ctypes.CDLL(None).sleep(3) or ctypes.CDLL(None).sleep(3)
    while ctypes.CDLL(None).sleep(1): pass
    print("asked", asked.should_stop())
"""


@pytest.mark.parametrize(("has_news", "code"), [(False, 128 + signal.SIGTERM), (True, 0)])
def test_a_run_that_a_compiler_holds_ends_if_there_is_nothing_to_save(has_news, code):
    # SIGTERM interrupts sleep(3), which is called again until its time is over.
    script = HELD.format(has_news=has_news, name="SIGTERM")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    if has_news:
        assert "asked True" in done.stdout
    else:
        assert "ended by SIGTERM with nothing new to save; checkpoints are as they were" in done.stderr
