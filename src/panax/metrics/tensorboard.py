"""TensorBoard's files: training and evaluation as two runs on the same charts, groups in a useful order,
settings, texts."""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .facts import RunFacts
from .film import Frames, encode_animated_png
from .heat_map import Picture, encode_png
from .histogram import Histogram
from .trackers import Tracker

TRAIN, EVALUATION = "train", "evaluation"
"""The two runs that TensorBoard shows, each in a folder."""

COUNT_UNITS = ("tokens", "images", "examples", "transitions", "clicks", "rows")
"""Names of the number of samples that a loss was computed over."""

UPDATE_SCALARS = ("gradient_norm", "learning_rate", "parameter_norm", "skipped", *COUNT_UNITS)
"""Scalars of a training step that describe its update, not its quality."""

GROUPS = {
    "speed": "3 speed",
    "seconds": "4 seconds of a step",
    "memory": "5 memory",
    "data": "6 data",
    "experts": "7 experts",
    "rollout": "8 rollouts",
}

BOOKKEEPING_SETTINGS = (
    "checkpoint",
    "directory",
    "evaluate",
    "hooks",
    "log_every",
    "name",
    "profile",
    "questions",
    "rollback",
    "trackers",
    "verify",
)
"""Settings without influence on the result: they are not columns of TensorBoard's table of
hyperparameters."""


def run_and_tag(name: str) -> tuple[str, str]:
    """Return the run and the tag of a scalar in TensorBoard. TensorBoard sorts groups by name.

    >>> run_and_tag("train/loss"), run_and_tag("evaluation/loss"), run_and_tag("mine/figure")
    (('train', '1 loss/loss'), ('evaluation', '1 loss/loss'), ('train', 'mine/figure'))
    >>> run_and_tag("evaluation/tokens")
    ('evaluation', '2 update/tokens')
    """
    group, _, rest = name.partition("/")
    if group == EVALUATION and rest:
        return EVALUATION, f"{'2 update' if rest in COUNT_UNITS else '1 loss'}/{rest}"
    if group == TRAIN and rest:
        return TRAIN, f"2 update/{rest}" if rest in UPDATE_SCALARS else f"1 loss/{rest}"
    return TRAIN, f"{GROUPS[group]}/{rest}" if group in GROUPS and rest else name


def _is_only_term(name: str, values: Mapping[str, float]) -> bool:
    """Return True if a term is the only one of its loss, and so duplicates its curve.

    >>> values = {"train/loss": 2.0, "train/loss/cross_entropy": 2.0}
    >>> [_is_only_term(name, values) for name in values]
    [False, True]
    >>> _is_only_term("train/loss/cross_entropy", values | {"train/loss/z": 0.0})
    False
    """
    loss_name, _, term = name.rpartition("/")
    if not loss_name.endswith("/loss") or not term or loss_name not in values:
        return False
    return values[name] == values[loss_name] and sum(each.startswith(f"{loss_name}/") for each in values) == 1


class _NoTorch:
    """Import hook that hides torch in one thread; torch takes seconds to import, and tensorboardX only needs
    it for an annotation."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("left out", name=name)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from imports, unless it is imported already."""
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # pyright: ignore[reportArgumentType]


class TensorBoardTracker(Tracker):
    """A run in TensorBoard, written without TensorFlow or torch.

    tensorboardX's writer passes events to a thread by a short queue: if that thread ends, for example because
    the disk is full, the queue fills, and the next scalar blocks forever. Therefore events are written here,
    in the caller's thread, which must not be the training loop's.
    """

    def __init__(self, directory: Path, purge_step: int | None = None):
        """Write to a directory.

        Args:
            purge_step: Hide what an earlier run logged from this step on, after a resume.
        """
        with _without_torch():
            import tensorboardX  # noqa: F401
        self._files = {name: _EventFile(directory / name, purge_step) for name in (TRAIN, EVALUATION)}

    def about(self, run: RunFacts) -> None:
        from tensorboardX.summary import hparams, text

        flat = run.flat()
        learned = {name: value for name, value in flat.items() if name.partition(".")[0] not in BOOKKEEPING_SETTINGS}
        for summary in hparams({"run_id": run.run_id, **learned}, {"1 loss/loss": 0.0}):
            self._files[TRAIN].write(0, summary)
        rows = "".join(f"| {name} | {value} |\n" for name, value in {"run_id": run.run_id, **flat}.items())
        self._files[TRAIN].write(0, text("settings", f"| setting | value |\n|---|---|\n{rows}"))

    def record(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        scalars_by_run: defaultdict[str, list[Any]] = defaultdict(list)
        for name, value in values.items():
            if _is_only_term(name, values):
                continue
            run, tag = run_and_tag(name)
            scalars_by_run[run].append(Summary.Value(tag=tag, simple_value=value))
        for run, scalars in scalars_by_run.items():
            self._files[run].write(step, Summary(value=scalars))

    def picture(self, step: int, name: str, image: Picture) -> None:
        self._image(step, name, image.shape, encode_png(image))

    def film(self, step: int, name: str, frames: Frames, seconds_per_frame: float) -> None:
        # TensorBoard passes an image's bytes to the browser, which plays an animated PNG.
        self._image(step, name, frames.shape[1:], encode_animated_png(frames, seconds_per_frame))

    def _image(self, step: int, name: str, shape: tuple[int, ...], encoded: bytes) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        image = Summary.Image(height=shape[0], width=shape[1], colorspace=3, encoded_image_string=encoded)
        self._files[TRAIN].write(step, Summary(value=[Summary.Value(tag=run_and_tag(name)[1], image=image)]))

    def text(self, step: int, name: str, text: str) -> None:
        from tensorboardX.summary import text as summary_of

        # TensorBoard renders Markdown: a fence preserves lines and indentation.
        fence = "`" * max(3, 1 + _longest_run(text, "`"))
        self._files[TRAIN].write(step, summary_of(name, f"{fence}\n{text}\n{fence}"))

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        from tensorboardX.summary import histogram_raw

        counts, edges = histogram.counts, histogram.edges
        if not counts.sum():
            return
        summary = histogram_raw(
            name, histogram.least, histogram.greatest, float(counts.sum()), histogram.total, histogram.squares,
            edges[1:].tolist(), counts.tolist(),
        )  # fmt: skip
        self._files[TRAIN].write(step, summary)

    def close(self) -> None:
        _all_closed(self._files.values())


FLUSH_SECONDS = 10.0
"""Maximum time until an event is visible."""


class _EventFile:
    """Events of one run, in a file that is opened by the first of them."""

    def __init__(self, directory: Path, purge_step: int | None):
        self._directory = directory
        self._purge_step = purge_step
        self._writer: Any = None
        self._flushed = 0.0

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.flush()
            finally:
                writer.close()

    def write(self, step: int, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        try:
            if self._writer is None:
                self._writer = self._opened()
            self._writer.write(Event(step=step, wall_time=time.time(), summary=summary).SerializeToString())
            if time.monotonic() - self._flushed >= FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError:
            # A reader stops at an incomplete event: later ones go to another file.
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                if writer is not None:
                    writer.close()
            raise

    def _opened(self) -> Any:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        )
        writer = RecordWriter(str(self._directory / name))
        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            first.append(Event(step=self._purge_step, wall_time=time.time(), session_log=start))
            self._purge_step = None
        for event in first:
            writer.write(event.SerializeToString())
        return writer


def _all_closed(files: Iterable[_EventFile]) -> None:
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)


def _longest_run(text: str, letter: str) -> int:
    longest = run = 0
    for each in text:
        run = run + 1 if each == letter else 0
        longest = max(longest, run)
    return longest
