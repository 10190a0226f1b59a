"""The tiny recipe, with a hook that stops it after the step that the environment names: a run with planned layouts."""

import dataclasses
import os

from tiny_recipe import tiny

from panax import Experiment
from panax.hooks import Hook


@dataclasses.dataclass
class StopAt(Hook):
    """Asks the run to end after a step."""

    step: int

    def after_step(self, run) -> None:
        if run.step == self.step:
            run.stop(f"as planned after step {self.step}")


def elastic() -> Experiment:
    stop = int(os.environ.get("PANAX_TEST_STOP", "0"))
    return dataclasses.replace(tiny(), hooks=(StopAt(stop),) if stop else ())
