"""Execute tutorials, and write the outputs into their pages and notebooks.

python -m tools.tutorials              executes the pages with code that changed, and writes what is not up to date
python -m tools.tutorials NAME ...     executes these
python -m tools.tutorials --check      exits with 1 if a page and its notebook do not agree; executes nothing
"""

import argparse
import signal
import sys
from pathlib import Path

import nbformat

from .source import TutorialError, find_pages
from .tutorial import outdated, renew

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is 1 if something is not up to date or fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.tutorials", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages to execute, such as text (default: by changes)")
    parser.add_argument("--check", action="store_true", help="only list what is not up to date")
    options = parser.parse_args(arguments)
    pages = {path.stem: path for path in find_pages(ROOT)}
    if unknown := [name for name in options.names if name not in pages]:
        parser.error(f"no tutorial is named {', '.join(unknown)}; expected {', '.join(pages)}")
    # So that the kernel ends with the command; a shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stale = 0
    for name in options.names or pages:
        try:
            if options.check:
                for path in outdated(pages[name], ROOT):
                    stale += 1
                    print(f"not up to date: {path.relative_to(ROOT)}")
            else:
                for path in renew(pages[name], ROOT, execute_always=bool(options.names)):
                    print(path.relative_to(ROOT))
        except (TutorialError, nbformat.ValidationError) as error:
            print(f"{name}: {error}".replace(f"{ROOT}/", ""), file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{name}: interrupted; nothing of it was written", file=sys.stderr)
            return 130
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
