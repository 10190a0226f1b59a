"""Destinations of a run's reports: the interface, a JSONL log, and a combination of several."""

import abc
import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from ..system import files
from .background import BackgroundReporter
from .facts import RunFacts
from .film import Frames, contact_sheet
from .heat_map import Picture
from .histogram import Histogram
from .throughput import Peak


class Tracker(abc.ABC):
    """Destination of a run's reports: scalars, text, pictures, histograms.

    Only `record` must be implemented. A separate thread for each tracker calls its methods in order, so a
    slow one blocks nothing. An exception causes a warning, and training continues.
    """

    close_seconds: float = 10.0
    """Time that the end of a run waits for this tracker."""

    def about(self, run: RunFacts) -> None:  # noqa: B027
        """Receive the run's name, id and settings; called once, before `begin`."""

    def begin(self, first_step: int, num_steps: int, peak: Peak | None) -> None:  # noqa: B027
        """Begin training at `first_step` of `num_steps`; `peak` is the denominator of model FLOPs
        utilization, if the task reports its FLOPs."""

    @abc.abstractmethod
    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of `step`, all under their final names, for example `train/loss`."""

    def picture(self, step: int, name: str, image: Picture) -> None:  # noqa: B027
        """Record a picture, if pictures are supported."""

    def film(self, step: int, name: str, frames: Frames, seconds_per_frame: float) -> None:
        """Record a film; by default as a picture of its frames side by side."""
        self.picture(step, name, contact_sheet(frames))

    def text(self, step: int, name: str, text: str) -> None:  # noqa: B027
        """Record a text, such as a sample, if texts are supported."""

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:  # noqa: B027
        """Record a histogram, if histograms are supported."""

    def close(self) -> None:  # noqa: B027
        """Flush; no more calls follow."""


class JsonlTracker(Tracker):
    """One JSON object per line, written at once: for scripts, and for the time after a crash."""

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[bytes] | None = None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN; a strict reader must be able to read every line.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        for name in ("step", "at"):  # the line's own names
            clean.pop(name, None)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"step": step, "at": at, **clean}).encode() + b"\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab+", buffering=0)  # noqa: SIM115
            # A run that resumes after a power failure.
            files.trim_partial_line(self._file)
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            # A partial line would spoil the next one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Trackers(Tracker):
    """Several trackers as one, each called by its reporter: the caller is never blocked, and not notified of
    failures."""

    def __init__(self, trackers: Iterable[tuple[Tracker, BackgroundReporter]]):
        self._trackers = tuple(trackers)

    def about(self, run: RunFacts) -> None:
        self._put("about", run)

    def begin(self, first_step: int, num_steps: int, peak: Peak | None) -> None:
        self._put("begin", first_step, num_steps, peak)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._put("record", step, dict(values))

    def picture(self, step: int, name: str, image: Picture) -> None:
        self._put("picture", step, name, image)

    def film(self, step: int, name: str, frames: Frames, seconds_per_frame: float) -> None:
        self._put("film", step, name, frames, seconds_per_frame)

    def text(self, step: int, name: str, text: str) -> None:
        self._put("text", step, name, text)

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        self._put("histogram", step, name, histogram)

    def close(self) -> None:
        self._put("close")

    def _put(self, method: str, *arguments: Any) -> None:
        for tracker, lane in self._trackers:
            lane.put(getattr(tracker, method), *arguments)
