"""Save in the background, commit by one rename, keep the last and the best, restore onto any layout.

A checkpoint is a folder `step_00000100` that holds its arrays and, last, its manifest. It is written under another name and
renamed when all of it is on the disk: a folder under its own name is whole. A kill at any moment leaves the checkpoints that
were there, and a partial folder that the next run removes.
"""

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..core.axes import named_leaves
from ..core.errors import CheckpointError, RecipeError
from .arrays import HostArray, copy_to_host, is_key, read_array, write_arrays
from .manifest import ARRAYS, FILE, ArrayEntry, Manifest

PARTIAL = ".partial"
REMOVED = ".removed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved and which are kept.

    Attributes:
        every: Steps between two saves; 0 saves only at the end and when interrupted.
        keep_last: How many of the newest are kept.
        keep_best: How many with the lowest held-out loss are kept besides.
    """

    every: int = 100
    keep_last: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_best < 0 or self.every < 0:
            raise RecipeError(f"{self}: expected every >= 0, keep_last >= 1 and keep_best >= 0")


class Checkpointer:
    """The checkpoints of one run, in one folder. One process writes to it at a time."""

    def __init__(
        self, directory: Path, config: CheckpointConfig | None = None, attachments: Mapping[str, str] | None = None
    ):
        """
        Args:
            attachments: File name to text, put into every checkpoint so that it can be used alone: the model's
                description, the tokenizer.
        """
        self.directory = Path(directory)
        self.attachments = dict(attachments or {})
        self.config = config or CheckpointConfig()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints here, ascending."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                number = path.name.removeprefix("step_")
                if path.name.startswith("step_") and number.isdigit() and (path / FILE).is_file():
                    found.append(int(number))
        return sorted(found)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.directory / f"step_{step:08d}"

    def save(self, tree: Any, step: int, host: Mapping[str, Any], metric: float | None = None) -> None:
        """Copy `tree` to the host and write it in the background.

        Returns when the copy is made: the arrays may then be donated. A save still under way is waited for first.

        Raises:
            CheckpointError: The save before this one failed.
        """
        self.wait()
        arrays = copy_to_host(named_leaves(tree))
        manifest = Manifest(
            step, {name: ArrayEntry(a.shape, a.dtype, a.key_impl) for name, a in arrays.items()}, dict(host), metric
        )
        self._thread = threading.Thread(target=self._write, args=(arrays, manifest), name="panax-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: It failed. The checkpoints before it are untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def remove_partial(self) -> None:
        """Remove what an earlier process left half written."""
        with contextlib.suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                if path.name.startswith("step_") and path.suffix in (PARTIAL, REMOVED):
                    shutil.rmtree(path)

    def _write(self, arrays: Mapping[str, HostArray], manifest: Manifest) -> None:
        target = self.path(manifest.step)
        partial = target.with_suffix(PARTIAL)
        try:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            write_arrays(partial / ARRAYS, arrays)
            for name, text in {**self.attachments, FILE: manifest.to_json()}.items():
                with open(partial / name, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            _flush_folders(partial)
            if target.exists():
                self._remove(target)
            partial.rename(target)
            _flush_folder(self.directory)
            self._prune()
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = self.steps()
            rest = f"the checkpoint of step {kept[-1]} is whole" if kept else "there is no earlier checkpoint"
            self._error = CheckpointError(
                f"saving step {manifest.step} to {self.directory} failed: {error}; {rest}. Free space there or name another "
                f"folder, and run the same command again"
            )

    def _prune(self) -> None:
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        judged = [(metric, step) for step in steps if (metric := Manifest.read(self.path(step)).metric) is not None]
        keep.update(step for _, step in sorted(judged)[: self.config.keep_best])
        for step in steps:
            if step not in keep:
                self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name.
        removed = path.with_suffix(REMOVED)
        if removed.exists():
            shutil.rmtree(removed)
        path.rename(removed)
        shutil.rmtree(removed)

    def latest(self) -> int | None:
        """The step of the newest checkpoint, if there is one."""
        steps = self.steps()
        return steps[-1] if steps else None

    def best(self) -> int | None:
        """The step of the checkpoint with the lowest held-out loss, else of the newest."""
        judged = [(m, s) for s in self.steps() if (m := Manifest.read(self.path(s)).metric) is not None]
        return min(judged)[1] if judged else self.latest()


def restore(path: Path, abstract: Any, shardings: Any, *, part: bool = False) -> tuple[Any, Manifest]:
    """Read a checkpoint, or a part of it, onto the layout of `shardings`.

    Args:
        path: A checkpoint's own folder.
        abstract: A tree of `jax.ShapeDtypeStruct`; its names, shapes and dtypes must be the checkpoint's.
        part: Whether the checkpoint may hold more than `abstract` names; only what is named is read.

    Raises:
        CheckpointError: It is the checkpoint of another model (the first differences are named), or damaged.
    """
    manifest = Manifest.read(path)
    expected = named_leaves(abstract)
    _check_same(path, expected, manifest, part)
    places = named_leaves(shardings)
    leaves = [
        read_array(path / ARRAYS / name, leaf, places[name], manifest.arrays[name].key_impl)
        for name, leaf in expected.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves), manifest


def _check_same(path: Path, expected: Mapping[str, Any], manifest: Manifest, part: bool) -> None:
    problems = [] if part else [f"it also has {name}" for name in manifest.arrays if name not in expected]
    for name, leaf in expected.items():
        entry = manifest.arrays.get(name)
        if entry is None:
            problems.append(f"it has no {name}")
        elif is_key(leaf):
            if entry.key_impl is None:
                problems.append(f"{name} is no random key there")
        elif entry.shape != leaf.shape or entry.dtype != leaf.dtype.name:
            problems.append(
                f"{name} is {entry.dtype}{list(entry.shape)} there and {leaf.dtype.name}{list(leaf.shape)} here"
            )
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{path} is a checkpoint of another model or optimizer: {'; '.join(problems[:3])}{more}. Use the recipe and options "
            f"it was saved with, or another folder for this run"
        )


def _flush_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _flush_folder(Path(folder))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
