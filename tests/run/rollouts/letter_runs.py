"""Runs of `letters`, and what they leave."""

import json

import jax
import numpy as np

import panax
from panax.hooks import Hook
from panax.rollouts.journal import JOURNAL_FILE, JournalEntry


def run(experiment, devices=1, **settings):
    return panax.fit(experiment, devices=jax.devices()[:devices], **{"say": lambda line: None, **settings})


def params(result):
    return jax.device_get(jax.tree.leaves(result.state.params))


def same(first, second):
    return all(np.array_equal(one, other) for one, other in zip(params(first), params(second), strict=True))


def journal(folder):
    return [JournalEntry.from_json(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()]


def journal_lines(folder):
    """The journal's lines, of replies too."""
    return [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()]


class Ends(Hook):
    """Raises after a step."""

    def __init__(self, step):
        self.at = step

    def after_step(self, run):
        if run.step == self.at:
            raise KeyError("ended")
