"""Where a run's scalars go: a JSONL log, TensorBoard, and whatever a user adds."""

import abc
import contextlib
import errno
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .heat_map import Picture, png
from .lane import Lane
from .throughput import Peak


class Tracker(abc.ABC):
    """Takes the scalars of a step.

    Its methods are called one after the other, by a thread that reports alone. An exception in one is a warning, and no more.
    """

    def begin(self, first_step: int, num_steps: int, peak: Peak) -> None:  # noqa: B027
        """Training begins at `first_step` of `num_steps`; `peak` is what model FLOPs utilisation divides by."""

    @abc.abstractmethod
    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of `step`, all under their final names, for example `train/loss`."""

    def picture(self, step: int, name: str, image: Picture) -> None:  # noqa: B027
        """Take a picture, if this is a place for pictures."""

    def close(self) -> None:  # noqa: B027
        """Flush; no more calls follow."""


class JsonlTracker(Tracker):
    """One JSON object a line, written at once: what a script reads, and what is left after a crash."""

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[bytes] | None = None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN; a strict reader must be able to read every line.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, **clean}).encode() + b"\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            # Half a line would spoil the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoardTracker(Tracker):
    """TensorBoard scalars as event files of tensorboardX, which needs neither TensorFlow nor torch.

    Its own writer hands events to a thread by a short queue: where that thread ends, as at a full disk, the queue fills, and the
    next scalar waits for ever. So events are written here, in the caller's thread, whose caller must not be the training loop.
    """

    flush_seconds = 10.0

    def __init__(self, directory: Path, purge_step: int | None = None):
        """
        Args:
            purge_step: Hide what an earlier run logged from this step on, after a resume.
        """
        self._directory = directory
        self._purge_step = purge_step
        self._writer: Any = None
        self._flushed = 0.0

    def record(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._write(step, Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in values.items()]))

    def picture(self, step: int, name: str, image: Picture) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        height, width, _ = image.shape
        encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(image))
        self._write(step, Summary(value=[Summary.Value(tag=name, image=encoded)]))

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.flush()
            finally:
                writer.close()

    def _write(self, step: int, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        try:
            if self._writer is None:
                self._writer = self._opened()
            self._writer.write(Event(step=step, wall_time=time.time(), summary=summary).SerializeToString())
            if time.monotonic() - self._flushed >= self.flush_seconds:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError:
            # A reader stops at half an event: what comes later goes to another file.
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


class Trackers(Tracker):
    """Several trackers as one, each called in its lane: whatever becomes of one, the caller is neither held up nor told."""

    def __init__(self, trackers: Iterable[tuple[Tracker, Lane]]):
        self._trackers = tuple(trackers)

    def begin(self, first_step: int, num_steps: int, peak: Peak) -> None:
        self._put("begin", first_step, num_steps, peak)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._put("record", step, dict(values))

    def picture(self, step: int, name: str, image: Picture) -> None:
        self._put("picture", step, name, image)

    def close(self) -> None:
        self._put("close")

    def _put(self, method: str, *arguments: Any) -> None:
        for tracker, lane in self._trackers:
            lane.put(getattr(tracker, method), *arguments)
