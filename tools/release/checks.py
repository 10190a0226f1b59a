"""What must hold before a version is released, and the text of its section in the changelog."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def read_version(root: Path) -> str:
    """Return the version: the sources have it in one place, from which the distribution takes it."""
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "src/panax/__init__.py").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit('src/panax/__init__.py: expected a line `__version__ = "X.Y.Z"`')
    return found[1]


def changelog_section(root: Path, version: str) -> tuple[str | None, str]:
    """Return the date and the text of a version's section in CHANGELOG.md; (None, "") if there is no section."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    headings = list(_HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if heading[1] == version:
            end = headings[number + 1].start() if number + 1 < len(headings) else len(text)
            return heading[2], text[heading.end() : end].strip()
    return None, ""


def problems(root: Path) -> Iterator[str]:
    """Yield what is in the way of a release, each with what to do."""
    version = read_version(root)
    if not _VERSION.fullmatch(version):
        yield f"the version is {version!r}; expected three numbers, as 0.2.0 or 0.2.0rc1, in src/panax/__init__.py"
    if changes := git(root, "status", "--porcelain"):
        yield f"the working tree has {len(changes.splitlines())} changes; commit them, or remove them"
    if (branch := git(root, "rev-parse", "--abbrev-ref", "HEAD")) != "main":
        yield f"the branch is {branch}; a release is made from main"
    if git(root, "tag", "--list", f"v{version}"):
        yield f"there is a tag v{version} already; raise __version__ in src/panax/__init__.py"
    date, text = changelog_section(root, version)
    if not text:
        yield f"CHANGELOG.md has no section [{version}]; rename [Unreleased] to it, and begin a new [Unreleased]"
    elif date is None or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        yield f"the section [{version}] of CHANGELOG.md has the date {date!r}; expected one like 2026-11-28"
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text("utf-8"):
        yield f"CITATION.cff names another version; write `version: {version}`"


def git(root: Path, *arguments: str) -> str:
    """Run git and return its output."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
