"""Protection against links that lead out of a folder: a copy contains only the folder's own files."""

from collections.abc import Iterable
from pathlib import Path

from ..core.errors import CheckpointError
from ..stores import LocalStore
from ..system.files import expand_user
from .chunk_reader import MAX_TEXT_BYTES, Checkpoint
from .manifest import MANIFEST_FILE


def reject_symlink_escape(folder: Path, paths: Iterable[Path]) -> None:
    """Check that files are inside a folder. In a snapshot of Hugging Face's cache they may also be in its
    `blobs` folder.

    Raises:
        CheckpointError: A file is reached by a link that leads out of the folder.
    """
    root = folder.resolve()
    # The name itself, not the target: a link called `blobs` leads somewhere else.
    allowed = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in paths:
        target = path.resolve()
        if not any(target.is_relative_to(one) for one in allowed):
            raise CheckpointError(
                f"{path} is, or is below, a link to {target}, outside of {folder}, which is not followed; if it "
                f"belongs there, copy the file in place of the link"
            )


def check_own_files(checkpoint: Checkpoint) -> None:
    """Check the files of a checkpoint on a disk with `reject_symlink_escape`."""
    if isinstance(checkpoint.store, LocalStore):
        folder = expand_user(checkpoint.url)
        reject_symlink_escape(folder, (folder / file for file in (MANIFEST_FILE, *checkpoint.manifest.files)))


def read_texts(folder: Path, pattern: str, excluded: str) -> dict[str, str]:
    """Read the text files in a folder with names that match `pattern`, except `excluded`.

    Raises:
        CheckpointError: A file can't be read, is not text, is too large, or is a link that leads out of the
            folder.
    """
    paths = [path for path in sorted(folder.glob(pattern)) if path.name != excluded]
    reject_symlink_escape(folder, paths)
    texts = {}
    for path in paths:
        try:
            if not path.is_file():
                continue
            size = path.stat().st_size
            if size > MAX_TEXT_BYTES:
                raise CheckpointError(f"{path} has {size:,} bytes; expected a text file of at most {MAX_TEXT_BYTES:,}")
            texts[path.name] = path.read_text(encoding="utf-8")
        except CheckpointError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} can't be read: {error}; expected text in UTF-8") from error
    return texts
