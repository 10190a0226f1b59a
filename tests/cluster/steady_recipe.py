"""The tiny recipe with a larger model: steps of tenths of a second, which say something of a processor.

The environment may name a process with a hook that takes long after each step.
"""

import dataclasses
import os
import time

import jax
from tiny_recipe import tiny

from panax import Experiment
from panax.hooks import Hook
from panax.models import DecoderConfig, DecoderTask


@dataclasses.dataclass
class Slow(Hook):
    """Takes long in one process."""

    process: int
    seconds: float = 0.7

    def after_step(self, run) -> None:
        if jax.process_index() == self.process:
            time.sleep(self.seconds)


def steady() -> Experiment:
    model = DecoderConfig(max_length=64, embed=256, num_layers=3, heads=4, ffn=1024, windows=(16,))
    slow = os.environ.get("PANAX_TEST_SLOW_HOOK")
    hooks = () if slow is None else (Slow(int(slow)),)
    return dataclasses.replace(tiny(), name="steady", task=DecoderTask(model=model), hooks=hooks)
