"""A process of `test_killed_rollouts.py`: python killed_run.py FILES FOLDER STEPS ASYNCHRONOUS."""

import sys
from pathlib import Path

from letters import letters

import panax
from panax.models import PolicyGradient


def main() -> None:
    files, folder, steps, asynchronous = sys.argv[1:]
    several = PolicyGradient(several_updates=True)
    data = {"minibatches": 2, "asynchronous": asynchronous == "True"}
    experiment = letters(
        Path(files), "slow_share", objective=several, data=data, directory=folder, num_steps=int(steps)
    )
    panax.fit(experiment, quiet=True)


if __name__ == "__main__":
    main()
