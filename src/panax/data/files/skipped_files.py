"""Report of the files of a folder that are not read: files are selected by kind, and users should know which
are skipped."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from panax.stores import is_remote
from panax.system.files import expand_user

from .files import DataFile, find_files

_SHOWN = 6
_OF_A_FOLDER = re.compile(r"(.+)/\*\*/\*[^*?/\[\]]*")


def describe_skipped_files(paths: Sequence[str], files: Iterable[DataFile]) -> tuple[str, ...]:
    """Describe for each folder which files are read and which are not, by ending and count; one line each.

    Args:
        paths: The configured paths: folders, or all files of one ending below a folder (`texts/**/*.txt`);
            other globs are explicit and not described.
        files: The files that are read.
    """
    read_names = {file.name for file in files}
    roots = dict.fromkeys(root for path in paths if (root := _root(path)) is not None)
    return tuple(line for root in roots if (line := _line(root, read_names)) is not None)


def describe_skipped_corpus_files(corpus: Any) -> tuple[str, ...]:
    """Describe the skipped files of a text corpus with paths; of a corpus of several corpora, those of all
    corpora together."""
    paths: list[str] = []
    files: list[DataFile] = []
    for each in _parts(corpus):
        paths += each.paths
        files += each.files()
    return describe_skipped_files(paths, files)


def _parts(corpus: Any) -> Iterator[Any]:
    held = getattr(corpus, "corpora", None) or ([corpus.corpus] if hasattr(corpus, "corpus") else [])
    if hasattr(corpus, "paths") and callable(getattr(corpus, "files", None)):
        yield corpus
    for each in held:
        yield from _parts(each)


def _root(path: str) -> str | None:
    match = _OF_A_FOLDER.fullmatch(path)
    if match is not None:
        # Undo `glob.escape` on a folder's name.
        path = re.sub(r"\[([*?\[])\]", r"\1", match[1])
    if is_remote(path):
        return None if glob.has_magic(path) else path.rstrip("/")
    folder = expand_user(path)
    return str(folder) if folder.is_dir() else None


def _line(root: str, read_names: set[str]) -> str | None:
    """Describe which files of a folder are read and which are not."""
    if root in read_names:
        return None
    read: Counter[str] = Counter()
    others: Counter[str] = Counter()
    hidden, links = 0, []
    if is_remote(root):
        for file in find_files((root,), ("**/*",)):
            (read if file.name in read_names else others)[_ending(file.name)] += 1
    else:
        for name, is_hidden in _walk(root, links):
            if name in read_names:
                read[_ending(name)] += 1
            elif is_hidden:
                hidden += 1
            else:
                others[_ending(name)] += 1
    parts = [_counted(others)] if others else []
    parts += [f"{hidden:,} hidden"] if hidden else []
    parts += [f"folders that are links ({', '.join(sorted(links)[:_SHOWN])})"] if links else []
    return f"{root}: {sum(read.values()):,} files are read ({_counted(read)}); left out: {', '.join(parts) or 'none'}"


def _walk(root: str, links: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield each file's path, and True if it is hidden; linked folders are listed in `links`, not
    followed."""
    for folder, inside, names in os.walk(root):
        below = Path(folder).relative_to(root)
        links += [str(below / name) for name in inside if os.path.islink(os.path.join(folder, name))]
        is_hidden = any(part.startswith(".") for part in below.parts)
        yield from ((os.path.join(folder, name), is_hidden or name.startswith(".")) for name in names)


def _counted(endings: "Counter[str]") -> str:
    shown = sorted(endings.items(), key=lambda each: (-each[1], each[0]))[:_SHOWN]
    parts = [f"{count:,} {f'of {ending}' if ending else 'without an ending'}" for ending, count in shown]
    more = sum(endings.values()) - sum(count for _, count in shown)
    return ", ".join([*parts, *([f"{more:,} of other endings"] if more else [])])


def _ending(name: str) -> str:
    path = PurePosixPath(name)
    return (
        "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".bz2", ".xz", ".zst", ".zstd", ".zip") else path.suffix
    )
