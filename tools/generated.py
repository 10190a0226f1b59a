"""Pages that a tool writes from the sources: which are out of date, and the command that renews them."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

Pages = dict[Path, str | None]
"""Pages with their new text; None for one that must go."""


def compare(folder: Path, new: Mapping[str, str]) -> Pages:
    """Return the pages of a folder that differ from their new text; None for a page that has none."""
    there = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    changed: Pages = {folder / name: text for name, text in new.items() if there.get(name) != text}
    return changed | {folder / name: None for name in there if name not in new}


def run(tool: str, description: str, outdated: Callable[[Path], Pages]) -> int:
    """Run a tool's command: write the pages, or with `--check` exit with 1 if one is out of date."""
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(prog=f"python -m {tool}", description=description)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = outdated(root)
    for path, text in stale.items():
        print(f"{'not up to date: ' if check else ''}{path.relative_to(root)}")
        if not check:
            path.unlink() if text is None else path.write_text(text, "utf-8")
    return 1 if check and stale else 0
