"""Make the pictures of the pages again, each from runs on this machine.

python -m tools.pictures             makes all: some ten minutes on two cores
python -m tools.pictures NAME ...    makes these: mixture, report, three-kills

Pictures of tutorials are outputs of their code: `python -m tools.tutorials`.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

from .commands import PictureError
from .mixture import draw_mixture
from .report_page import draw_report
from .three_kills import draw_three_kills

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


class Subject(NamedTuple):
    """Runs that pictures are made from.

    Attributes:
        draw: Function from an empty folder for runs to the pictures, by file name.
        files: These file names.
    """

    draw: Callable[[Path], dict[str, bytes]]
    files: tuple[str, ...]


SUBJECTS = {
    "mixture": Subject(draw_mixture, ("moe-quickstart.svg", "expert-load.png")),
    "report": Subject(draw_report, ("report.png",)),
    "three-kills": Subject(draw_three_kills, ("three-kills.svg",)),
}


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is 1 if a run or a picture fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUBJECTS)} (default: all)")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"no picture is named {', '.join(unknown)}; expected {', '.join(SUBJECTS)}")
    # So that runs end with the command; a shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in names or SUBJECTS:
        try:
            with tempfile.TemporaryDirectory(prefix="panax-pictures-") as folder:
                pictures = SUBJECTS[name].draw(Path(folder))
        except PictureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{name}: interrupted; nothing of it was written", file=sys.stderr)
            return 130
        for file, content in pictures.items():
            (IMAGES / file).write_bytes(content)
            print((IMAGES / file).relative_to(ROOT), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
