"""Readable form of a batch: its leaves, its rows as text with marks for tokens without loss, its labels."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.text import Text

from ...system.terminal_text import align_columns
from ..text.tokenizer import Tokenizer

MARKS = ("<<", ">>")
"""Marks of tokens without loss."""

STYLE_MARKS = ("\ufdd0", "\ufdd1")
"""Marks that no text holds, for `grey_out`."""

LEGEND = (
    " carries no loss; --- marks the end or cut of a document; the first token",
    "of a document is never predicted",
)
WIDTH = 80
_MOST_LINES = 24
_MOST_LABELS = 24


def format_batch(
    batch: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    rows: int = 3,
    classes: Sequence[str] = (),
    marks: tuple[str, str] = MARKS,
) -> list[str]:
    """Format a batch in lines of at most 80 columns: each leaf with shape, dtype and range; tokens, or
    labels, counted; the first rows of tokens.

    Args:
        batch: A source's batch.
        tokenizer: Tokenizer of its leaf `tokens`; None shows ids.
        rows: Number of rows to show.
        classes: Class names by label index; () shows indices.
        marks: Texts before and after tokens without loss.

    >>> print("\\n".join(format_batch({"label": np.array([1, 0, 1], np.int32)})))
    leaf   shape  dtype  least  most  mean
    label  3      int32      0     1  0.67
    labels: 0: 1, 1: 2
    """
    leaves = {name: np.asarray(leaf) for name, leaf in batch.items()}
    lines = _table(leaves)
    tokens = leaves.get("tokens")
    if tokens is not None and tokens.ndim == 2 and np.issubdtype(tokens.dtype, np.integer):
        lines += _counted(leaves)
        if rows > 0:
            lines += ["", f"{marks[0]}{'gray' if marks == STYLE_MARKS else ' '}{marks[1]}{LEGEND[0]}", LEGEND[1]]
        for row in range(min(rows, len(tokens))):
            lines += _row(
                row, {name: leaf[row] for name, leaf in leaves.items() if leaf.shape == tokens.shape}, tokenizer, marks
            )
    elif "loss_mask" in leaves:
        masked = int((leaves["loss_mask"] == 0).sum())
        lines.append(
            f"{masked} of {leaves['loss_mask'].size} rows are padding ({masked / max(leaves['loss_mask'].size, 1):.1%})"
        )
    label = leaves.get("label", leaves.get("labels"))
    if label is not None and label.ndim == 1 and np.issubdtype(label.dtype, np.integer):
        values, counts = np.unique(label, return_counts=True)
        names = {value: str(value) for value in values[:_MOST_LABELS].tolist()}
        # If classes are numbers, these are their names already.
        names |= {
            value: f"{value} ({classes[value]})"
            for value in names
            if classes[value : value + 1] not in ((), (str(value),))
        }
        counts_text = ", ".join(f"{name}: {count}" for name, count in zip(names.values(), counts.tolist()))
        more = f", and {len(values) - _MOST_LABELS} more" if len(values) > _MOST_LABELS else ""
        lines += _wrapped(f"labels: {counts_text}{more}", "        ")
    return lines


def _table(leaves: Mapping[str, np.ndarray]) -> list[str]:
    rows = [("leaf", "shape", "dtype", "least", "most", "mean")]
    for name, leaf in leaves.items():
        shape = " x ".join(map(str, leaf.shape)) or "one number"
        rows.append((name, shape, str(leaf.dtype), *_range(leaf)))
    return align_columns(rows, left=3)


def _range(leaf: np.ndarray) -> tuple[str, str, str]:
    if not leaf.size or not (np.issubdtype(leaf.dtype, np.number) or leaf.dtype.kind == "b"):
        return "", "", ""
    values = leaf if leaf.dtype.kind in "iub" else leaf.astype(np.float32)
    least, most = (_number(value) for value in (values.min(), values.max()))
    return least, most, f"{values.mean(dtype=np.float64):.4g}" if leaf.dtype.kind == "f" else f"{values.mean():.2f}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, np.floating) else str(int(value))


def _counted(leaves: Mapping[str, np.ndarray]) -> list[str]:
    """Count the whole batch's tokens, those with loss, padding and documents."""
    tokens = leaves["tokens"]
    segment = leaves.get("segment", np.ones_like(tokens))
    padding = int((segment == 0).sum())
    parts = [f"{tokens.size:,} positions", f"{padding:,} padding ({padding / tokens.size:.1%})"]
    if "loss_mask" in leaves:
        trained = int((leaves["loss_mask"] != 0).sum())
        parts.insert(1, f"{trained:,} with loss ({trained / tokens.size:.1%})")
    documents = sum(len(list(_documents(row))) for row in segment)
    return _wrapped(f"{', '.join(parts)}; {documents:,} documents or parts of some", "")


def _documents(segment: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each document of a row."""
    borders = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(segment)]
    for begin, end in itertools.pairwise(borders):
        if segment[begin] != 0:
            yield begin, end


def _row(number: int, row: Mapping[str, np.ndarray], tokenizer: Tokenizer | None, marks: tuple[str, str]) -> list[str]:
    tokens = row["tokens"]
    segment, mask = row.get("segment", np.ones_like(tokens)), row.get("loss_mask", np.ones(len(tokens)))
    targets = row.get("targets")
    lines = [f"--- row {number}: {int((mask != 0).sum())} of {len(tokens)} positions with loss"]
    for begin, end in _documents(segment):
        ids = [*tokens[begin:end].tolist(), *([] if targets is None else [int(targets[end - 1])])]
        # Each target's loss is marked at the position of the token before it.
        learnt = [False, *(mask[begin:end] != 0).tolist()][: len(ids)]
        if len(learnt) > 1 and learnt[1]:
            learnt[0] = True
        if targets is not None and not learnt[-1] and ids[-1] == 0:
            del ids[-1], learnt[-1]  # the position after a truncated row is not a token
        text = "".join(
            _text(ids[place], tokenizer) if flag else f"{marks[0]}{_text(ids[place], tokenizer)}{marks[1]}"
            for flag, place in _runs(learnt)
        )
        lines += [*(part for line in text.split("\n") for part in _wrapped(line, "")), "---"]
    padding = int((segment == 0).sum())
    if padding:
        lines.append(f"{padding} positions of padding")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines"]
    return lines


def grey_out(lines: Sequence[str], style: str = "dim") -> list[Text]:
    """Return lines with `STYLE_MARKS` as styled text: the parts between the marks, also over several lines, in `style`.

    >>> grey_out(["a\ufdd0b", "c\ufdd1d"])[1].spans
    [Span(0, 1, 'dim')]
    """
    styled, gray = [], False
    for line in lines:
        text = Text()
        for part in re.split("([\ufdd0\ufdd1])", line):
            if part in STYLE_MARKS and part:
                gray = part == STYLE_MARKS[0]
            else:
                text.append(part, style if gray else None)
        styled.append(text)
    return styled


def _runs(flags: Sequence[bool]) -> Iterator[tuple[bool, slice]]:
    place = 0
    for flag, group in itertools.groupby(flags):
        length = len(list(group))
        yield flag, slice(place, place + length)
        place += length


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """Decode ids, with characters that would move a terminal's cursor escaped."""
    if tokenizer is None:
        return " ".join(map(str, ids)) + " "
    text = tokenizer.decode(ids).replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _wrapped(line: str, indent: str) -> list[str]:
    if cell_len(line) <= WIDTH:
        return [line]
    words, lines, current_line = line.split(" "), [], ""
    for word in words:
        longer = f"{current_line} {word}" if current_line else word
        if cell_len(longer) <= WIDTH:
            current_line = longer
            continue
        lines += [current_line] if current_line else []
        *full, current_line = chop_cells(indent + word, WIDTH)
        lines += full
    return [*lines, current_line]
