"""Click logs as MLPerf's arrays: `day_0_dense.npy`, `day_0_sparse.npy` or `day_0_sparse_multi_hot.npz`,
`day_0_labels.npy`."""

import dataclasses
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes
from panax.core.validation import Validated
from panax.system.files import expand_user

from ..files.files import fingerprint, read_error, stat_files
from ..files.memory_map import check_mapped
from ..formats.npy_header import find_member_offset, map_npy
from ..loading.examples import hash_integers, hash_names
from .bags import LARGEST_ID
from .criteo import LEAVES

_FILES = re.compile(r"(.+)_(dense|labels|sparse)\.npy|(.+)_sparse_multi_hot\.npz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickArrays(Validated):
    """A folder of MLPerf's arrays, read in place without a copy. The rows of all parts are concatenated,
    ordered by name.

    A batch has `label` float32, `numeric` float32 (batch, columns), as stored, and `c1`, `c2`, ..., int32
    (batch, ids).

    Attributes:
        path: The folder.
        parts: The parts to read, such as ("day_0", "day_1"); () for all.
        rows: Number of ids of each categorical column, one entry per column.
        modulo: Take ids of `rows` or more modulo `rows`, as the reference does; otherwise they are an error.
    """

    path: str
    parts: tuple[str, ...] = ()
    rows: tuple[int, ...]
    modulo: bool = False

    def __post_init__(self) -> None:
        if not self.rows or not all(1 <= each <= LARGEST_ID for each in self.rows):
            raise RecipeError(f"rows={self.rows}; expected 1 to {LARGEST_ID} for each column of categories")

    def open(self, root: Path, max_bad_records: int) -> "ClickExamples":
        """Open the parts.

        Raises:
            DataError: A file is missing, can't be read, or has another shape than the others.
        """
        folder = expand_user(self.path)
        if not folder.is_dir():
            raise DataError(f"{self.path} is not a directory; expected MLPerf's arrays, such as day_0_dense.npy")
        part_names = {match[1] or match[3] for file in folder.iterdir() if (match := _FILES.fullmatch(file.name))}
        names = self.parts or tuple(
            sorted(part_names, key=lambda name: [int(d) if d.isdigit() else d for d in re.split(r"(\d+)", name)])
        )
        if not names:
            raise DataError(
                f"{self.path} holds no arrays; expected PART_dense.npy, PART_sparse.npy and PART_labels.npy"
            )
        opened = [_Part.open(folder, name, len(self.rows)) for name in names]
        shapes = {(part.numeric.shape[1], *(ids.shape[1] for ids in part.ids)) for part in opened}
        if len(shapes) > 1:
            raise DataError(
                f"{self.path}: the parts {', '.join(names)} have different numbers of columns, or ids in a bag"
            )
        marks = [*stat_files([path for part in opened for path in part.paths])]
        return ClickExamples(opened, self.rows, self.modulo, fingerprint("clicks", self.rows, self.modulo, marks))


class _Part(NamedTuple):
    label: npt.NDArray
    numeric: npt.NDArray
    ids: list[npt.NDArray]
    paths: list[Path]
    first: int = 0

    @classmethod
    def open(cls, folder: Path, name: str, columns: int) -> "_Part":
        dense, labels, single, many = (
            folder / f"{name}_{what}" for what in ("dense.npy", "labels.npy", "sparse.npy", "sparse_multi_hot.npz")
        )
        numeric, label = _array(dense, 2), _array(labels, 0).reshape(-1)
        if many.exists():
            ids, path = [_member(many, str(column)) for column in range(columns)], many
        else:
            square, path = _array(single, 2), single
            if square.shape[1] != columns:
                raise DataError(
                    f"{single} has {square.shape[1]} columns, and rows= has {columns} numbers; pass one for each"
                )
            ids = [square[:, column : column + 1] for column in range(columns)]
        lengths = {len(array) for array in (numeric, label, *ids)}
        if len(lengths) > 1:
            raise DataError(f"{folder / name}: the files have {sorted(lengths)} rows; expected the same number in each")
        return cls(label, numeric, ids, [dense, labels, path])


def _array(path: Path, dims: int) -> npt.NDArray:
    try:
        array = map_npy(path, path.name)
    except (OSError, ValueError) as error:
        raise read_error(path, error) from error
    if array.dtype.kind not in "fiu" or (dims and array.ndim != dims):
        raise DataError(f"{path} is not an array of numbers of {dims} dimensions; expected MLPerf's")
    return array


def _member(path: Path, name: str) -> npt.NDArray:
    """Memory-map an array of an `.npz` that is not compressed, in place."""
    try:
        array = map_npy(path, f"array {name!r}", find_member_offset(path, f"{name}.npy"))
        if array.dtype.kind not in "iu" or array.ndim != 2 or not array.flags.c_contiguous:
            raise ValueError(
                f"array {name!r} is {array.dtype} {array.shape}; expected whole numbers (rows, ids), row by row"
            )
        return array
    except (OSError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile) as error:
        raise read_error(path, error) from error


class ClickExamples:
    """The rows of all parts; see `ClickArrays`."""

    owns_memory = True  # of batches read: nothing else writes to them

    def __init__(
        self,
        parts: list[_Part],
        rows: tuple[int, ...],
        modulo: bool,
        content: str,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._parts, self._rows, self._modulo, self._content = parts, rows, modulo, content
        self._starts = np.cumsum([0, *(len(part.label) for part in parts)])
        self._numbers = numbers
        self.num_examples = int(self._starts[-1]) if numbers is None else len(numbers)
        self._leaves = [*LEAVES, *(f"c{at}" for at in range(len(LEAVES) + 1, len(rows) + 1))][: len(rows)]
        self.axes: Mapping[str, Axes] = {
            "label": ("batch",),
            **dict.fromkeys(("numeric", *self._leaves), ("batch", None)),
        }
        self.num_ids: Mapping[str, int] = dict(zip(self._leaves, rows, strict=True))
        chosen = "" if numbers is None else hash_integers(numbers)
        self.fingerprint = fingerprint("click_examples", content, chosen)

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        rows = numbers if self._numbers is None else self._numbers[numbers]
        first = self._parts[0]
        out: dict[str, np.ndarray] = {
            "label": np.empty(len(rows), np.float32),
            "numeric": np.empty((len(rows), first.numeric.shape[1]), np.float32),
            **{leaf: np.empty((len(rows), ids.shape[1]), np.int32) for leaf, ids in zip(self._leaves, first.ids)},
        }
        of_part = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            part, at = self._parts[number], np.flatnonzero(of_part == number)
            part_rows = rows[at] - self._starts[number]
            check_mapped(part.label, part.numeric, *part.ids)
            out["label"][at], out["numeric"][at] = part.label[part_rows], part.numeric[part_rows]
            for column, leaf in enumerate(self._leaves):
                out[leaf][at] = self._checked(part.ids[column][part_rows], part_rows, column, part)
        return out

    def _checked(self, ids: npt.NDArray, part_rows: npt.NDArray[np.int64], column: int, part: _Part) -> npt.NDArray:
        num_rows = self._rows[column]
        # NaN and fractions are rejected too, if ids are stored as floats.
        right = (ids >= 0) & (ids == np.floor(ids)) & np.isfinite(ids)
        wrong = ~(right if self._modulo else right & (ids < num_rows))
        if wrong.any():
            row, place = np.argwhere(wrong)[0].tolist()
            hint = ", or modulo=True" if right[row, place] else ""
            raise DataError(
                f"{part.paths[2]}, row {int(part_rows[row])}: column {self._leaves[column]!r} holds {ids[row, place]}; "
                f"expected a whole number from 0 to {num_rows - 1} (rows={num_rows}){hint}"
            )
        # In 64 bits: a narrow type may not represent the modulus.
        return ids.astype(np.uint64) % np.uint64(num_rows) if self._modulo else ids

    def keys(self) -> npt.NDArray[np.uint64]:
        numbers = np.arange(self.num_examples) if self._numbers is None else self._numbers
        return hash_names(map(str, numbers.tolist()))

    def take(self, numbers: npt.NDArray[np.int64]) -> "ClickExamples":
        rows = numbers if self._numbers is None else self._numbers[numbers]
        return ClickExamples(self._parts, self._rows, self._modulo, self._content, rows)

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """Return the row indices as times: parts are days, so the latest rows are the last ones."""
        return (np.arange(self.num_examples) if self._numbers is None else self._numbers).astype(np.float64)
