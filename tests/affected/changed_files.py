"""The files that differ from a commit: committed, uncommitted and untracked changes together."""

from pathlib import Path
from typing import NamedTuple

from checkouts import git


class Changes(NamedTuple):
    """Changed paths, relative to the root.

    Attributes:
        base: The commit that the tree is compared with.
        changed: Files that exist and differ, or are new.
        deleted: Files that no longer exist; a renamed file counts as a deleted and a new one.
    """

    base: str
    changed: tuple[str, ...]
    deleted: tuple[str, ...]


def default_base(root: Path) -> str:
    """The commit from which this work began.

    The merge base with main's upstream, or with main if it has none; HEAD~1 on main itself.
    """
    head = git(root, "rev-parse", "HEAD").strip()
    for name in ("main@{upstream}", "main"):
        try:
            base = git(root, "merge-base", "HEAD", name).strip()
        except RuntimeError:
            continue
        if base != head or name != "main":
            return base
    try:
        return git(root, "rev-parse", "--verify", "HEAD~1").strip()
    except RuntimeError:
        return head


def changes_since(root: Path, base: str | None = None) -> Changes:
    """Compare the working tree with `base`.

    Raises:
        RuntimeError: `base` is not a commit, or `root` is not a git checkout.
    """
    base = git(root, "rev-parse", "--verify", f"{base}^{{commit}}").strip() if base else default_base(root)
    fields = git(root, "diff", "--name-status", "--no-renames", "-z", base).split("\0")
    states = dict(zip(fields[1::2], fields[0::2]))
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    present = {path for path in [*states, *untracked] if path and (root / path).exists()}
    return Changes(base, tuple(sorted(present)), tuple(sorted(states.keys() - present)))
