"""Any Python iterable of batches as a source: a list, a generator, a torch DataLoader, a Grain or torchdata
loader."""

import copy
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from panax.core.errors import DataError, RecipeError, describe_type, suggest_name
from panax.core.protocols import Axes, Position, SourcedBatch

_BYTES_KEY = "utf-8 bytes"
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_NARROW = {
    np.dtype(wide): np.dtype(narrow) for wide, narrow in (("i8", "i4"), ("u8", "u4"), ("f8", "f4"), ("c16", "c8"))
}


class _DrawnBatch(NamedTuple):
    """A batch, and the state after it: None if it can't be saved."""

    batch: dict[str, np.ndarray]
    state: Any


class IterableSource:
    """Batches from an iterable. A batch is a mapping of arrays, a tuple or list of them, or one array.

    Arrays are NumPy's, torch's, JAX's, or values that NumPy can convert. 64-bit values become 32-bit, as JAX
    computes; an integer that does not fit is an error. Each batch is copied before the next one is drawn, so
    an iterable may reuse the memory. A short last batch of an epoch is dropped, with one warning, since a
    batch of another shape would trigger a recompilation; held-out data, where every row counts, includes it.

    It resumes exactly if the iterable, or the iterator it makes, has `get_state` and `set_state` (Grain) or
    `state_dict` and `load_state_dict` (torchdata), and its state is made of JSON values (or UTF-8 bytes).
    Otherwise resuming draws the same number of batches again, which reaches the same position only if the
    iterable repeats itself.

    >>> source = IterableSource([{"x": np.zeros((4, 2), np.float32)}])
    >>> source.axes, source.resume
    ({'x': ('batch', None)}, 'replay')
    >>> batches = source.batches()
    >>> next(batches).position, next(batches).position
    ({'epoch': 0, 'index': 1, 'batches': 1}, {'epoch': 1, 'index': 1, 'batches': 2})
    """

    owns_memory = True
    """Nothing writes to a batch after it was yielded: a step need not copy it."""

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        axes: Mapping[str, Axes] | None = None,
        names: Sequence[str] | None = None,
        epochs: int | None = None,
        keep_short_batch: bool = False,
    ) -> None:
        """Wrap `iterable`.

        Args:
            iterable: Yields whole global batches; it is iterated again for each epoch.
            axes: The logical axes of each leaf, `batch` first. None: `batch` and then None for each other
                dimension, with the rank taken from the first batch (it is drawn when the axes are requested,
                and not lost).
            names: Names of the leaves of a batch that is a tuple, a list or one array; None: "0", "1", ...
            epochs: Number of passes over the iterable; None: endless.
            keep_short_batch: Yield a short last batch of an epoch too, as evaluation does for all its data.

        Raises:
            RecipeError: `axes` or `epochs` can't be used.
        """
        for name, leaf_axes in (axes or {}).items():
            if not leaf_axes or leaf_axes[0] != "batch":
                raise RecipeError(f"leaf {name!r} has the axes {leaf_axes}; expected `batch` first")
        if epochs is not None and epochs < 1:
            raise RecipeError(f"epochs={epochs}; expected at least 1")
        self._iterable = iterable
        self._given_axes = None if axes is None else dict(axes)
        self._names = None if names is None else tuple(names)
        self._epochs = epochs
        self._keep_short_batch = keep_short_batch
        self._one_shot = isinstance(iterable, Iterator)
        self._used = False
        self._peeked: tuple[Iterator[Any], _DrawnBatch] | None = None
        self._resume: Literal["exact", "replay"] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._warned = False
        # The state of a one-shot iterator before anything is drawn: the way back to its beginning.
        self._beginning = self._state(iterable) if self._one_shot else None

    @property
    def axes(self) -> Mapping[str, Axes]:
        if self._given_axes is not None:
            return self._given_axes
        if not self._shapes:
            self._peek()
        return {name: ("batch", *(None,) * (len(shape) - 1)) for name, shape in self._shapes.items()}

    @property
    def endless(self) -> bool:
        """Return True if the iterable is started again at its end."""
        return self._epochs is None

    @property
    def resume(self) -> Literal["exact", "replay"]:
        if self._resume is None:
            self._peek()
        assert self._resume is not None
        return self._resume

    def with_short_batch(self) -> "IterableSource":
        """Return a source that also yields a short last batch of an epoch, for evaluation."""
        kept = copy.copy(self)
        kept._keep_short_batch = True
        return kept

    def first_batch(self) -> Mapping[str, np.ndarray]:
        """Return the first batch without consuming it."""
        if self._peeked is None:
            self._peek()
        assert self._peeked is not None
        return self._peeked[1].batch

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on; from the beginning if it is None.

        A position without a usable state is reached by drawing and discarding batches, with a warning.

        Raises:
            DataError: The iterable is empty, ends too early, or yields a value that is not a batch; or
                `position` does not belong to this source.
        """
        if position is None:
            return self._run(0, 0, 0, None)
        place = [position.get(name) for name in ("epoch", "index", "batches")]
        if not all(isinstance(value, int) and value >= 0 for value in place):
            raise DataError(
                f"{dict(position)} is not a position of this source; expected one that came with its batches"
            )
        epoch, index, count = (int(value) for value in place if value is not None)
        if "state" in position and self._has_state():
            return self._run(epoch, index, count, position["state"])
        warnings.warn(
            f"this source can't resume exactly: {count} batches are drawn again and dropped, which continues where the "
            "run stopped only if the source repeats itself; one with get_state and set_state, or state_dict and "
            "load_state_dict, resumes exactly",
            stacklevel=2,
        )
        return self._replay(count)

    def _replay(self, count: int) -> Iterator[SourcedBatch]:
        for drawn in self._run(0, 0, 0, None):
            if count > 0:
                count -= 1
            else:
                yield drawn

    def _run(self, epoch: int, index: int, count: int, state: Any) -> Iterator[SourcedBatch]:
        """Draw epoch after epoch, beginning at `index` of `epoch`, for which the iterable is set to
        `state`."""
        while self._epochs is None or epoch < self._epochs:
            for batch in self._equal_batches(*self._open(state)):
                index, count = index + 1, count + 1
                position = {"epoch": epoch, "index": index, "batches": count}
                if batch.state is not None:
                    position["state"] = batch.state
                yield SourcedBatch(batch.batch, position)
            if index == 0:
                raise DataError("the iterable gives no batch; expected at least one: is it empty, or already used up?")
            epoch, index, state = epoch + 1, 0, None
            if self._one_shot and (self._epochs is None or epoch < self._epochs):
                raise DataError(
                    f"the iterator ended after {count} batches, and an iterator can't begin again; pass something that "
                    "can (a list, a DataLoader, an object with an __iter__ that starts over), one without an end, or epochs=1"
                )

    def _open(self, state: Any) -> tuple[Iterator[Any], _DrawnBatch | None]:
        """Begin an epoch: an iterator, and the batch already drawn from it, if any."""
        peeked, self._peeked = self._peeked, None
        if state is None and peeked is not None:
            return peeked
        if self._one_shot:
            state = self._beginning if state is None and self._used else state
            if self._used and state is None:
                raise DataError("the iterator is already used up, and can't begin again; pass a new one")
            self._used = True
            if state is not None:
                self._set_state(self._iterable, state)
            return iter(self._iterable), None
        on_iterable = _state_methods(self._iterable) is not None
        if state is not None and on_iterable:
            self._set_state(self._iterable, state)
        iterator = iter(self._iterable)
        if state is not None and not on_iterable:
            self._set_state(iterator, state)
        return iterator, None

    def _peek(self) -> None:
        if self._peeked is None:
            iterator, _ = self._open(None)
            for drawn in self._draw(iterator):
                self._peeked = iterator, drawn
                return
            raise DataError("the iterable gives no batch; expected at least one: is it empty, or already used up?")

    def _equal_batches(self, iterator: Iterator[Any], first: _DrawnBatch | None) -> Iterator[_DrawnBatch]:
        """Yield batches of the usual size; a short one at the end is dropped, or yielded if requested."""
        if first is not None:
            yield first
        size = self._batch_size()
        short: _DrawnBatch | None = None
        for batch in self._draw(iterator):
            size = size or self._batch_size()
            rows = _num_rows(batch.batch)
            if short is not None or rows > size:
                wrong = _num_rows((short or batch).batch)
                raise DataError(f"a batch has {wrong} rows, others have {size}; expected the same (drop_last=True)")
            if rows < size:
                short = batch
            else:
                yield batch
        if short is not None and self._keep_short_batch:
            yield short
        elif short is not None and not self._warned:
            self._warned = True
            rows = _num_rows(short.batch)
            warnings.warn(
                f"the last batch of each epoch is dropped: {rows} rows, where others have {size}", stacklevel=2
            )

    def _draw(self, iterator: Iterator[Any]) -> Iterator[_DrawnBatch]:
        holder = self._iterable if _state_methods(self._iterable) is not None else iterator
        for value in iterator:
            batch = self._arrays(value)
            state = self._state(holder)
            if self._resume is None:
                self._resume = "replay" if state is None else "exact"
            yield _DrawnBatch(batch, state)

    def _batch_size(self) -> int:
        return next(iter(self._shapes.values()))[0] if self._shapes else 0

    def _has_state(self) -> bool:
        if self._resume is None:
            self._peek()
        return self._resume == "exact"

    def _state(self, holder: Any) -> Any:
        methods = None if self._resume == "replay" else _state_methods(holder)
        return None if methods is None else _as_json(getattr(holder, methods[0])())

    def _set_state(self, holder: Any, state: Any) -> None:
        methods = _state_methods(holder)
        if methods is None:
            raise DataError(
                f"{describe_type(holder)} can't be set to the saved state; restore with the source that saved it"
            )
        value = state[_BYTES_KEY].encode() if isinstance(state, Mapping) and set(state) == {_BYTES_KEY} else state
        try:
            getattr(holder, methods[1])(value)
        except Exception as error:  # anything that the source raises for a state of another source
            message = f"the source refuses the saved state: {error}; restore with the source that saved it"
            raise DataError(message) from error

    def _arrays(self, value: Any) -> dict[str, np.ndarray]:
        batch = as_batch(value, self._names)
        self._check(batch)
        return batch

    def _check(self, batch: dict[str, np.ndarray]) -> None:
        shapes = {name: leaf.shape for name, leaf in batch.items()}
        if len({shape[0] for shape in shapes.values()}) > 1:
            sizes = ", ".join(f"{name!r}: {shape[0]}" for name, shape in shapes.items())
            raise DataError(f"the leaves of a batch differ in their batch size ({sizes}); expected one first dimension")
        for name in set(self._given_axes or ()) - set(shapes):
            raise DataError(f"axes are given for {name!r}, but a batch has no such leaf: {suggest_name(name, shapes)}")
        for name, shape in shapes.items():
            if self._given_axes is not None and name not in self._given_axes:
                raise DataError(
                    f"leaf {name!r} has no axes: {suggest_name(name, self._given_axes)}; pass axes for every leaf"
                )
            axes = self._given_axes and self._given_axes[name]
            if axes and len(axes) != len(shape):
                raise DataError(
                    f"leaf {name!r} has the shape {shape}, but the axes {axes}; expected one axis a dimension"
                )
        if not self._shapes:
            self._shapes = shapes
        elif set(shapes) != set(self._shapes) or any(len(s) != len(self._shapes[n]) for n, s in shapes.items()):
            raise DataError(f"a batch has the leaves {shapes}; expected those of the first, {self._shapes}")


def _num_rows(batch: dict[str, np.ndarray]) -> int:
    return len(next(iter(batch.values())))


def _state_methods(holder: Any) -> tuple[str, str] | None:
    for pair in _STATE_METHODS:
        if all(callable(getattr(holder, name, None)) for name in pair):
            return pair
    return None


def _as_json(state: Any) -> Any:
    """Return the state as JSON values that reproduce it exactly; None if that is impossible."""
    if isinstance(state, bytes):
        try:
            return {_BYTES_KEY: state.decode()}
        except UnicodeDecodeError:
            return None
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        return None
    return copy if copy == state else None


def as_batch(value: Any, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Convert a batch to named arrays of 32-bit numbers: a mapping, a tuple or list of arrays, or one array;
    of NumPy, torch or JAX.

    The arrays are copies: loaders reuse the memory for the next batch, while a device may still read this
    one.

    Args:
        names: Names of the parts of a tuple or list; "0", "1", ... by default.

    Raises:
        DataError: The value is not a batch.

    >>> as_batch((np.zeros((4, 2)), np.arange(4)))["1"].dtype
    dtype('int32')
    """
    if isinstance(value, Mapping):
        leaves = {str(name): leaf for name, leaf in value.items()}
    else:
        parts = value if isinstance(value, (tuple, list)) else [value]
        names = names or tuple(map(str, range(len(parts))))
        if len(names) != len(parts):
            raise DataError(f"a batch has {len(parts)} parts; expected {len(names)}, named {', '.join(names)}")
        leaves = dict(zip(names, parts, strict=True))
    if not leaves:
        raise DataError("a batch has no leaf; expected a mapping, a tuple or a list of arrays")
    return {name: as_array(leaf, name, owned=True) for name, leaf in leaves.items()}


def as_array(leaf: Any, name: str, *, owned: bool) -> np.ndarray:
    """Convert one leaf to an array of 32-bit numbers.

    Args:
        owned: True to copy the leaf, so that nothing else writes to its memory; False to share the memory if
            possible.

    Raises:
        DataError: The leaf is not an array of numbers with a first dimension, or an integer does not fit in 32
            bits.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        leaf = (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise DataError(f"leaf {name!r} is not an array: {error}; pad its rows to one length") from error
    if array.dtype.kind in "OSUMm":
        raise DataError(f"leaf {name!r} holds {array.dtype} ({type(leaf).__name__}); expected an array of numbers")
    if array.ndim == 0:
        raise DataError(f"leaf {name!r} is a scalar; expected an array with the batch as its first dimension")
    narrow = _NARROW.get(array.dtype, array.dtype)
    if array.dtype != narrow and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(narrow)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            raise DataError(f"leaf {name!r} holds {wrong}, which does not fit {narrow}; hash or shift it to fit")
    return array.astype(narrow, order="C" if owned else "K", copy=owned)
