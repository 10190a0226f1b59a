"""Reward functions, which processes import from this file."""

import os
import random
import time
from pathlib import Path


def share_of_letters(answer, record):
    return sum(each in "abcdefghijklmnopqrstuvwxyz" for each in answer) / max(1, len(answer))


def any_number(answer, record):
    return random.random()


def hangs_once(answer, record):
    """The first call for a prompt marked so never ends."""
    mark = Path(os.environ["LETTERS_MARK"])
    if record["prompt"] == "b" and not mark.exists():
        mark.touch()
        time.sleep(60)
    return float("a" in answer)


def fails_on_b(answer, record):
    if record["prompt"] == "b":
        raise ValueError("no b here")
    return float("a" in answer)


def counts_calls(answer, record):
    with open(os.environ["LETTERS_MARK"], "a") as file:
        file.write("x")
    return float(len(answer) % 3)


def slow_share(answer, record):
    """Takes its time, so that a run is often killed while it waits for rewards."""
    time.sleep(0.01)
    return share_of_letters(answer, record)


def some_prompts(answer, record):
    """The same for all answers to the first letters."""
    return 1.0 if record["prompt"] < "i" else share_of_letters(answer, record)


def nothing(answer, record):
    return 0.0


def takes_long(answer, record):
    time.sleep(30)
    return 1.0
