"""Drawing ahead changes nothing but the time, passes errors on, and leaves no thread behind."""

import gc
import itertools
import subprocess
import sys
import threading
import time
import traceback

import pytest

from panax.core import RecipeError
from panax.data import prefetch


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    until = time.monotonic() + 5
    while (left := [t for t in threading.enumerate() if t.name == "panax-prefetch"]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def wait_until(condition) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_items_come_in_order_and_then_it_ends(size):
    items = prefetch(iter(range(20)), size)
    assert list(items) == list(range(20))
    assert list(items) == [] and not items._thread.is_alive()


def test_it_draws_ahead_but_no_further_than_asked():
    drawn = []
    with prefetch((drawn.append(i) or i for i in itertools.count()), 3) as items:
        wait_until(lambda: len(drawn) == 3)
        time.sleep(0.05)
        assert drawn == [0, 1, 2]
        assert next(items) == 0
        wait_until(lambda: len(drawn) == 4)


def test_an_error_comes_in_its_place_with_the_traceback_of_the_source():
    def failing():
        yield 1
        yield 2
        raise KeyError("broken shard")

    items = prefetch(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="broken shard") as caught:
        next(items)
    assert "failing" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(items) == []


@pytest.mark.parametrize("consumed", [0, 1, 3])
def test_closing_early_ends_the_thread_and_the_source(consumed):
    closed = threading.Event()

    def endless():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    items = prefetch(endless())
    for _ in range(consumed):
        next(items)
    if not consumed:
        wait_until(lambda: items._ahead._items)
    items.close()
    assert closed.is_set() and not items._thread.is_alive()
    items.close()
    assert list(items) == []


def test_the_source_is_closed_in_the_thread_that_drew_from_it():
    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            self.drawn_in = threading.current_thread()
            return 1

        def close(self):
            self.closed_in = threading.current_thread()

    source = Source()
    with prefetch(source) as items:
        next(items)
    assert source.closed_in is source.drawn_in is items._thread


def test_dropping_it_ends_the_thread():
    items = prefetch(itertools.count())
    thread = items._thread
    next(items)
    del items
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_ctrl_c_while_waiting_ends_the_thread(monkeypatch):
    items = prefetch(itertools.count())

    def interrupted(gives_up):
        raise KeyboardInterrupt

    monkeypatch.setattr(items._ahead, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert not items._thread.is_alive()


def test_a_wait_that_is_given_up_waits_for_nothing_more(monkeypatch):
    """A job that is signaled to end has half a minute for its checkpoint: none of it goes to a source that does not answer."""
    free = threading.Event()
    items = prefetch(iter(free.wait, True))
    items.should_stop = lambda: True
    with monkeypatch.context() as patched:
        patched.setattr(items._thread, "join", lambda seconds: pytest.fail("waits for the source"))
        assert list(items) == []
        items.close()
    free.set()
    items._thread.join()


def test_a_process_ends_though_nobody_closed_it():
    code = "import itertools; from panax.data import prefetch; p = prefetch(itertools.count()); print(next(p))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_waiting_is_measured():
    def slow():
        for i in range(3):
            time.sleep(0.05)
            yield i

    items = prefetch(slow())
    list(items)
    assert 0.1 < items.seconds_waited < 2
    with prefetch(iter(range(3)), 3) as ready:
        wait_until(lambda: len(ready._ahead._items) == 3)
        next(ready)
        assert ready.seconds_waited < 0.04


def test_a_size_below_one_is_refused():
    with pytest.raises(RecipeError, match="size=0"):
        prefetch([], 0)
