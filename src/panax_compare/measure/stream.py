"""Real batches for columns that train to a loss, in a form that every column supports, as arrays on disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from panax.core.errors import DataError, RecipeError
from panax.data.formats.npy_header import map_npy
from panax.system import json_reader

from ..workload.compared_work import Batch

if TYPE_CHECKING:
    from panax.run.opened_data import OpenedData

TRAIN, HELD_OUT, STREAM = "train", "held_out", "stream.json"
MOST_HELD_OUT = 64
"""Maximum number of held-out batches that are evaluated."""


class Stream:
    """Batches in a folder, read on demand.

    Attributes:
        batch_size: Rows of a batch.
        length: Number of batches; a column that takes more starts from the beginning again.
    """

    def __init__(self, folder: str | Path, part: str):
        """Open the batches of a folder.

        Args:
            part: `TRAIN_COMMAND` or `HELD_OUT`.

        Raises:
            DataError: The folder has no batches.
        """
        self.folder = Path(folder)
        try:
            facts = json_reader.read(self.folder / STREAM, constants=True)
            self.batch_size = int(facts["batch_size"])
            self._leaves = {name: map_npy(self.folder / f"{part}.{name}.npy", name) for name in facts["leaves"]}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} holds no batches to train on: {error}; remove it, and compare again") from error
        self.length = min(len(leaf) for leaf in self._leaves.values()) // self.batch_size

    def __getitem__(self, number: int) -> Batch:
        """Return batch `number`, modulo the number of batches."""
        first = number % self.length * self.batch_size
        return {name: np.array(leaf[first : first + self.batch_size]) for name, leaf in self._leaves.items()}


def make_stream(work: str, opened: "OpenedData", folder: Path, *, batch_size: int, length: int, steps: int) -> None:
    """Write the rows of a source for `steps` steps, and its held-out rows.

    Text is cut into rows of `length` adjacent tokens without padding or masks, the form that all columns
    support; a row may begin in the middle of a document, and the end of one document is followed by the next.

    Args:
        work: Name of the work, for errors.
        opened: The data, as returned by `panax.run.preparation.open_data`.
        length: Tokens of a row; not used for images.

    Raises:
        RecipeError: The source has leaves that other columns don't support, or no held-out data.
        DataError: The source can't be read, or is smaller than one batch.
    """
    if opened.held_out is None:
        raise RecipeError(f"{work!r} has no held-out data, so there is no held-out loss to reach; pass held_out= data")
    leaves: list[str] = []
    for part, source, max_batches in ((TRAIN, opened.train, steps), (HELD_OUT, opened.held_out, MOST_HELD_OUT)):
        rows = _rows(work, (loaded.batch for loaded in source.batches()), length)
        leaves = _written(folder, part, rows, max_batches * batch_size)
        count = len(map_npy(folder / f"{part}.{leaves[0]}.npy", leaves[0]))
        if count < batch_size:
            raise DataError(
                f"{work!r} has {count} rows for {part.replace('_', '-')}, fewer than a batch of {batch_size}; set "
                f"--batch-size to {count} or fewer"
            )
    (folder / STREAM).write_text(json.dumps({"batch_size": batch_size, "leaves": leaves}) + "\n", encoding="utf-8")


def _rows(name: str, batches: Iterator[Any], length: int) -> Iterator[Batch]:
    """Yield blocks of rows in the form that columns support."""
    left = np.zeros(0, np.int32)
    for batch in batches:
        if "tokens" in batch:
            tokens = batch["tokens"]
            is_token = batch["segment"] > 0 if "segment" in batch else np.ones(tokens.shape, bool)
            left = np.concatenate([left, tokens[is_token].astype(np.int32)])
            count = (len(left) - 1) // length
            if count > 0:
                used = count * length
                yield {
                    "tokens": left[:used].reshape(count, length),
                    "targets": left[1 : used + 1].reshape(count, length),
                }
                left = left[used:]
        elif batch.keys() >= {"image", "label"} and "label_mixed" not in batch:
            image = batch["image"]
            scaled = image.astype(np.float32) / np.float32(127.5) - 1 if image.dtype == np.uint8 else image
            yield {"image": np.asarray(scaled, np.float32), "label": batch["label"].astype(np.int32)}
        else:
            raise RecipeError(
                f"{name!r} has batches of {', '.join(sorted(batch))}; other columns take tokens, or image and label, of "
                f"images that are not mixed"
            )


def _written(folder: Path, part: str, blocks: Iterator[Batch], max_rows: int) -> list[str]:
    """Write at most `max_rows` rows, an array for each leaf; return the leaves' names."""
    collected: dict[str, list[np.ndarray]] = {}
    rows = 0
    for block in blocks:
        for name, leaf in block.items():
            collected.setdefault(name, []).append(leaf)
        rows += len(next(iter(block.values())))
        if rows >= max_rows:
            break
    if not collected:
        raise DataError(f"the source has no row for {part.replace('_', '-')}; provide more data")
    for name, leaves in collected.items():
        np.save(folder / f"{part}.{name}.npy", np.concatenate(leaves)[:max_rows], allow_pickle=False)
    return sorted(collected)
