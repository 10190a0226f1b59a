"""Prepare a release: checks, distributions, a trial in a fresh environment, and a signed tag.

    python -m tools.release check           what is in the way, if anything
    python -m tools.release build DIST      checks, builds into DIST, and tries the wheel
    python -m tools.release tag             checks, and makes the signed tag with the section of the changelog

Nothing is uploaded. RELEASING.md has the whole list.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from .checks import changelog_section, problems, read_version
from .distributions import build, content_problems, try_wheel

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run one step of a release."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="print what is in the way of a release")
    building = commands.add_parser("build", help="build the distributions and try the wheel")
    building.add_argument("folder", type=Path, metavar="DIST", help="an empty folder for the distributions")
    building.add_argument("--unready", action="store_true", help="build although checks fail, to try the script")
    commands.add_parser("tag", help="make the signed tag")
    options = parser.parse_args(arguments)

    found = list(problems(ROOT))
    for problem in found:
        print(f"not ready: {problem}", file=sys.stderr)
    if found and not (options.command == "build" and options.unready):
        return 1
    version = read_version(ROOT)
    if options.command == "check":
        print(f"{version} is ready")
    elif options.command == "build":
        distributions = build(ROOT, options.folder)
        wrong = [problem for each in distributions for problem in content_problems(each)]
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 1
        try_wheel(next(each for each in distributions if each.suffix == ".whl"), version)
        print("\n".join(str(each) for each in distributions))
    else:
        return tag(version)
    return 0


def tag(version: str) -> int:
    """Make the signed tag of a version; git explains what it lacks for signing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as message:
        message.write(f"Panax {version}\n\n{changelog_section(ROOT, version)[1]}\n")
        message.flush()
        # The headings of a changelog begin with "#", which git would take for comments.
        command = ["git", "tag", "--sign", f"v{version}", "--cleanup=verbatim", "--file", message.name]
        return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
