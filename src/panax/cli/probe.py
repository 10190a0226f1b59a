"""Facts about a run that its supervisor needs before the start, from a separate process that may import jax and
the recipe.

    python -m panax.cli.probe RECIPE [flags of panax train]
"""  # fmt: skip

import json
import os
import sys

from .failures import report_error
from .plugins import skip_absent_plugins, suppress_plugin_warnings

LINE_PREFIX = "panax probe: "


def main() -> int:
    """Build the experiment, and print the run's folder, name and steps as JSON; an error is one message, as
    for `panax train`."""
    try:
        skip_absent_plugins()
        with suppress_plugin_warnings():
            from .commands.train import NON_SETTING_FLAGS
            from .overrides import experiment_from
        experiment = experiment_from([each for each in sys.argv[1:] if each not in NON_SETTING_FLAGS], "train")
        if "--fast-dev-run" in sys.argv[1:]:
            from ..core.errors import RecipeError

            raise RecipeError("--fast-dev-run takes one process; pass it to `panax train`")
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, with_traceback=False)
    facts = {"folder": os.path.abspath(experiment.folder), "name": experiment.name, "num_steps": experiment.num_steps}
    print(f"{LINE_PREFIX}{json.dumps(facts)}", flush=True)
    # A recipe may have started threads that never end.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
