"""Where a run's scalars go: a JSONL log, TensorBoard, and whatever a user adds."""

import abc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .heat_map import Picture, png
from .throughput import Peak


class Tracker(abc.ABC):
    """Takes the scalars of a step. Called from the loop: it must not wait for devices."""

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
    """One JSON object a line, flushed at once: what a script reads, and what is left after a crash."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def record(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN; a strict reader must be able to read every line.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker(Tracker):
    """TensorBoard scalars through tensorboardX, which needs neither TensorFlow nor torch."""

    def __init__(self, directory: Path, purge_step: int | None = None):
        """
        Args:
            purge_step: Hide what an earlier run logged from this step on, after a resume.
        """
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, image: Picture) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        height, width, _ = image.shape
        encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(image))
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=encoded)]), step)

    def close(self) -> None:
        self._writer.close()


class Trackers(Tracker):
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = tuple(trackers)

    def begin(self, first_step: int, num_steps: int, peak: Peak) -> None:
        for tracker in self._trackers:
            tracker.begin(first_step, num_steps, peak)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.record(step, values)

    def picture(self, step: int, name: str, image: Picture) -> None:
        for tracker in self._trackers:
            tracker.picture(step, name, image)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
