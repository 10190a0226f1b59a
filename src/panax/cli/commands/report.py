"""`panax report`: a run, or several side by side, as one page."""

import argparse
from collections.abc import Sequence

from ...metrics.report import report as written
from ..parser import Parser

ABOUT = """\
Write one self-contained HTML page about a run: curves, throughput, where the
time went, every incident with its cause and cost, layout, device-hours and
their price, energy if devices report it, environment, how to reproduce it.
Two or more runs are shown side by side. Only the files in the runs' folders
are read, also during a run."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    arguments = Parser(prog="panax report", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder: runs/NAME")
    arguments.add_argument(
        "--rate", type=float, metavar="PRICE", help="of an hour of one device; without it there are no prices"
    )
    arguments.add_argument("--currency", default="USD", help="in which the rate is (%(default)s)")
    arguments.add_argument(
        "--output",
        metavar="FILE",
        help="the page (report.html in the run's folder; of several runs, comparison.html in the first one's)",
    )
    return arguments


def report(arguments: Sequence[str]) -> int:
    """Write the page, and print its path."""
    asked = parser().parse_args(arguments)
    print(written(*asked.runs, rate=asked.rate, currency=asked.currency, output=asked.output))
    return 0
