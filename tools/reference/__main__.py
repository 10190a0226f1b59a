"""Write the API reference from the sources.

python -m tools.reference           writes docs/reference
python -m tools.reference --check   exits with 1 if a page is not up to date
"""

import argparse
import sys
from pathlib import Path

from .collect import collect
from .pages import FOLDER, pages

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = outdated(ROOT)
    for path, text in stale.items():
        print(f"{'not up to date: ' if check else ''}{path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.unlink() if text is None else path.write_text(text, "utf-8")
    return 1 if check and stale else 0


def outdated(root: Path) -> dict[Path, str | None]:
    """Return the pages that differ from the sources, with their new text; None for a page of a room that exports nothing."""
    folder = root / FOLDER
    new = pages(collect(root / "src"))
    there = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    changed: dict[Path, str | None] = {folder / name: text for name, text in new.items() if there.get(name) != text}
    return changed | {folder / name: None for name in there if name not in new}


if __name__ == "__main__":
    sys.exit(main())
