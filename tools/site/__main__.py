"""Build the site of docs/.

python -m tools.site [OUT]

The site is a folder of HTML pages with a search, `site/` by default. Nothing is downloaded. A warning, such as a dead link, is an
error. Links to files outside of docs/ lead to `PANAX_REPOSITORY_URL` if that is set.
"""

import argparse
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("sphinx", "myst_parser", "furo")
"""Modules of the extra `docs`."""


def build(out: Path, processes: int | None = None) -> int:
    """Build the site and return an exit code: 1 if there was a warning."""
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError

    try:
        app = Sphinx(
            srcdir=ROOT / "docs", confdir=ROOT / "docs", outdir=out, doctreedir=out / ".doctrees", buildername="html",
            status=None, warningiserror=True, parallel=processes or os.cpu_count() or 1,
        )  # fmt: skip
        app.build()
    except SphinxError as error:
        print(f"tools.site: {error}", file=sys.stderr)
        return 1
    return app.statuscode


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "site", help="the site's folder (site/)")
    out = parser.parse_args(arguments).out.resolve()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"tools.site: {', '.join(missing)} not installed; run `python3 install.py --extra docs`", file=sys.stderr)
        return 1
    if out.exists() and not out.is_dir():
        print(f"tools.site: {out} is not a folder; name another one", file=sys.stderr)
        return 2
    if out == ROOT or (ROOT / "docs").is_relative_to(out) or out.is_relative_to(ROOT / "docs"):
        print(f"tools.site: {out} contains the pages themselves; name another folder", file=sys.stderr)
        return 2
    begin = time.monotonic()
    code = build(out)
    if code == 0:
        print(f"{out}/index.html: {sum(1 for _ in out.rglob('*.html'))} pages in {time.monotonic() - begin:.0f} s")
    return code


if __name__ == "__main__":
    # A shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("tools.site: stopped; run the same command again")
