"""`panax simulate`: goodput at N devices from measured stage times and a failure rate, and the best
checkpoint interval."""

import argparse
from collections.abc import Sequence

from ...plan.goodput import simulate as simulated
from ...plan.goodput.fleet import FAILURES_PER_DEVICE_DAY
from ...plan.goodput.terminal import format_goodput
from ..parser import Parser

ABOUT = """\
Estimate the share of its time that a run on N devices trains, and how often
it should save. Stage times are those of RUN, a measured run's folder: each of
them can be set, and without RUN all up to --first-step must be. Times are in
seconds."""

STAGES = {
    "step": "one training step",
    "every": "steps between two checkpoints",
    "stall": "a checkpoint holds training up",
    "detect": "from a failure until it is known",
    "teardown": "ending the remaining processes",
    "restart": "starting all processes, until they have joined",
    "restore": "reading the checkpoint",
    "first-step": "compiling and taking the first step",
    "commit": "from a stall's end until the checkpoint can be restored (0)",
    "data-wait": "waiting for data, in each step (0)",
    "evaluation": "evaluation, in each step on average (0)",
    "copy-every": "steps between two copies in the memory of hosts (none)",
    "copy-stall": "a copy holds training up (0)",
    "restart-per-doubling": "added to restart for each doubling of devices (0)",
    "measured-devices": "devices that the times were measured on",
}
FLEET = {
    "failures-per-device-day": f"failures of a device in a day ({FAILURES_PER_DEVICE_DAY:g}: Llama 3's)",
    "devices-per-host": "devices that a failure of a host takes away (8)",
    "days": "how long the run lasts (30)",
    "planned-stops-per-day": "stops that save first (0)",
    "planned-stop": "such a stop (teardown to first step)",
    "replacement": "until a lost host is replaced (0)",
    "copies-lost": "chance that a failure destroys copies in memory",
}
COUNTS = {"every", "copy-every", "measured-devices", "devices-per-host"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    arguments = Parser(prog="panax simulate", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run", nargs="?", metavar="RUN", help="a measured run's folder: runs/NAME")
    arguments.add_argument("--devices", type=int, required=True, metavar="N", help="how many the run is to use")
    arguments.add_argument("--json", action="store_true", help="print all figures as JSON")
    arguments.add_argument("--output", metavar="FILE", help="write a page with curves")
    arguments.add_argument("--lives", type=int, default=64, help="runs to simulate (%(default)s)")
    arguments.add_argument("--seed", type=int, default=0, help="of the simulated runs (%(default)s)")
    for title, flags in (("stage times", STAGES), ("the fleet", FLEET)):
        group = arguments.add_argument_group(title)
        for name, help_text in flags.items():
            kind, metavar = (int, "N") if name in COUNTS else (float, "X")
            group.add_argument(f"--{name}", type=kind, metavar=metavar, help=help_text)
    group.add_argument(
        "--shrinks", action="store_true", default=None, help="continue on fewer devices until the host is back"
    )
    return arguments


def simulate(arguments: Sequence[str]) -> int:
    """Print the results."""
    asked = vars(parser().parse_args(arguments))
    as_json = asked.pop("json")
    result = simulated(asked.pop("run"), **asked)
    if as_json:
        print(result.to_json())
        return 0
    print("\n".join(format_goodput(result)))
    if asked["output"]:
        print(f"\npage            {asked['output']}")
    return 0
