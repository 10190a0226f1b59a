"""What a supervisor must know of a run before it starts it, from a process of its own that may import jax and the recipe.

    python -m panax.cli.probe RECIPE [flags of panax train]
"""  # fmt: skip

import json
import os
import sys

from .failures import said_and_done
from .plugins import leave_out_absent, unsaid

MARK = "panax probe: "


def main() -> int:
    """Build the experiment, and print the run's folder, name and steps as JSON; an error is one message, as of `panax train`."""
    try:
        leave_out_absent()
        with unsaid():
            from .commands.train import NO_SETTINGS
            from .overrides import experiment_from
        experiment = experiment_from([each for each in sys.argv[1:] if each not in NO_SETTINGS], "train")
        if "--fast-dev-run" in sys.argv[1:]:
            from ..core.errors import RecipeError

            raise RecipeError("--fast-dev-run takes one process; give it to `panax train`")
    except (Exception, KeyboardInterrupt) as error:
        return said_and_done(error, with_traceback=False)
    found = {"folder": os.path.abspath(experiment.folder), "name": experiment.name, "num_steps": experiment.num_steps}
    print(f"{MARK}{json.dumps(found)}", flush=True)
    # A recipe may have started threads that never end.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
