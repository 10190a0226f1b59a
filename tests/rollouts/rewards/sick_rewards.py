"""Reward functions of every kind of misbehavior, for test_pool.py and test_hostile_rewards.py."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def length(answer, record):
    return len(answer)


def equals(answer, record):
    return answer == record["answer"]


def process_id(answer, record):
    time.sleep(0.05)
    return os.getpid()


def slow_if_even(answer, record):
    time.sleep(0.05 * (int(answer) % 2 == 0))
    return float(answer)


def imported(answer, record):
    """0 if this process has imported neither jax nor the modules that need it."""
    return len({"jax", "equinox", "torch"} & sys.modules.keys())


def environment(answer, record):
    return float(eval(record["code"], {"os": os, "sys": sys, "signal": signal, "Path": Path}))


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


class _Base(BaseException):
    pass


class _Number:
    shape = ()

    def item(self):
        os._exit(9)


def _sleep():
    time.sleep(1000)


def _hang_in_c():
    ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock


def _print_without_end():
    while True:
        print("spam " * 1000)


def _fork_without_end():
    while True:
        os.fork()


def _fork_and_hang(record):
    Path(record["file"]).write_text("")
    for new_session in (False, True):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
        with Path(record["file"]).open("a") as file:
            file.write(f"{child.pid}\n")
    # The grandchild stays when the shell has ended.
    done = subprocess.run(
        ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], start_new_session=True, stdout=subprocess.PIPE
    )
    with Path(record["file"]).open("ab") as file:
        file.write(done.stdout)
    time.sleep(1000)


def _fork_and_return():
    os.fork()
    return 2.0


def _allocate():
    return len([bytearray(1 << 24) for _ in range(1 << 16)])


def _allocate_slowly():
    values = []
    while True:
        values.append([0] * 1000)


def _write_to_all_descriptors():
    for descriptor in range(1, 64):
        try:
            os.write(descriptor, b'{"call": 1, "value": 5.0}\n')
        except OSError:
            continue
    return 1.0


def _leave_the_folder():
    os.chdir("/")
    return 1.0


def _raise(error):
    raise error


MISBEHAVIOR = {
    "raises": lambda record: _raise(ValueError("no number\nin it")),
    "raises without a message": lambda record: _raise(KeyError()),
    "raises the unprintable": lambda record: _raise(_Unprintable()),
    "raises an interrupt": lambda record: _raise(KeyboardInterrupt()),
    "raises a base exception": lambda record: _raise(_Base("base")),
    "raises at length": lambda record: _raise(ValueError("long " * 100_000)),
    "recurses": lambda record: MISBEHAVIOR["recurses"](record),
    "hangs": lambda record: _sleep(),
    "hangs in C": lambda record: _hang_in_c(),
    "ignores signals": lambda record: (signal.signal(signal.SIGTERM, signal.SIG_IGN), _sleep()),
    "prints without end": lambda record: _print_without_end(),
    "forks without end": lambda record: _fork_without_end(),
    "forks and hangs": _fork_and_hang,
    "forks and returns": lambda record: _fork_and_return(),
    "NaN": lambda record: float("nan"),
    "infinity": lambda record: -float("inf"),
    "beyond float64": lambda record: 10**400,
    "None": lambda record: None,
    "text": lambda record: "1.0",
    "list": lambda record: [1.0],
    "complex": lambda record: 1j,
    "array": lambda record: np.ones(1),
    "array of no number": lambda record: np.array("a"),
    "dies when read": lambda record: _Number(),
    "float32": lambda record: np.float32(0.5),
    "int8": lambda record: np.int8(3),
    "bool": lambda record: True,
    "NumPy's bool": lambda record: np.bool_(True),
    "zero-dimensional": lambda record: np.array(2.5),
    "exits": lambda record: sys.exit("enough"),
    "exits at once": lambda record: os._exit(3),
    "dies by a signal": lambda record: os.kill(os.getpid(), signal.SIGTERM),
    "segfaults": lambda record: ctypes.string_at(0),
    "prints": lambda record: (print('{"call": 1, "value": 9}'), sys.stdout.flush(), 1.0)[-1],
    "prints to the descriptor": lambda record: (os.write(1, b'{"call": 1, "value": 9}\n'), 1.0)[-1],
    "writes everywhere": lambda record: _write_to_all_descriptors(),
    "closes everything": lambda record: (os.closerange(0, 256), 1.0)[-1],
    "reads stdin": lambda record: len(sys.stdin.read()) + len(os.read(0, 100)),
    "allocates": lambda record: _allocate(),
    "allocates slowly": lambda record: _allocate_slowly(),
    "leaves the folder": lambda record: _leave_the_folder(),
    "the folder": lambda record: float(os.getcwd() == record["folder"]),
    "changes the record": lambda record: (record.clear(), 1.0)[-1],
}


def misbehave(answer, record):
    return MISBEHAVIOR[answer](record)


nothing = lambda answer, record: 0.0  # noqa: E731
partial = functools.partial(length, record={})


def one_argument(answer):
    return 0.0


async def coroutine(answer, record):
    return 0.0


def outer():
    def inner(answer, record):
        return 0.0

    return inner


class Rewards:
    def method(self, answer, record):
        return 0.0
