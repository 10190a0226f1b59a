"""git, and temporary checkouts of commits."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """Run git and return its output.

    Raises:
        RuntimeError: git failed; the message holds what it printed.
    """
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


@contextlib.contextmanager
def checkout(root: Path, commit: str | None) -> Iterator[Path]:
    """A temporary worktree of a commit, removed at the end; `root` itself for None.

    Raises:
        RuntimeError: There is no such commit.
    """
    if commit is None:
        yield root
        return
    full = git(root, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="panax-commit-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        try:
            git(root, "worktree", "add", "--detach", "--quiet", str(tree), full)
            yield tree
        finally:
            with contextlib.suppress(RuntimeError):
                git(root, "worktree", "remove", "--force", str(tree))
            # What a killed command left of its own folder.
            git(root, "worktree", "prune")
