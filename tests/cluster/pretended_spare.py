"""A spare worker without jax: it becomes `pretended_worker.py` at its agent's request."""

import os
import sys
from pathlib import Path

from panax.cli.standby import become, receive_order
from panax.cluster.node.worker import install_guards


def main() -> int:
    install_guards()
    Path(os.environ["PANAX_TEST_SPARES"], f"spare_{os.getpid()}").touch()
    order = receive_order()
    if order is None:
        return 0
    become(order)
    # As a command of `panax`, whose first word is its name.
    sys.argv = ["pretended_worker.py", *order["arguments"]]
    from pretended_worker import main as worker

    return worker()


if __name__ == "__main__":
    sys.exit(main())
