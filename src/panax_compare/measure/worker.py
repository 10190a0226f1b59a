"""One column in a separate process: reads commands as lines of JSON, and answers each with one line."""

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from panax.system import json_reader

from ..columns import RunningColumn, find_column
from ..workload.compared_work import Batch, ComparedWork, read_work
from .cores import usable_cores
from .job import ColumnJob, read_loopback_bytes
from .stream import HELD_OUT, TRAIN, Stream


def serve(find_recipe: Callable[[str], Any]) -> None:
    """Answer commands until standard input ends. Output that libraries print is redirected to standard
    error."""
    ColumnJob.from_environment().pin_cores()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: dict[str, Any] = {}
    for line in sys.stdin:
        command = json_reader.parse(line, constants=True)
        try:
            answer = _answer(command, worker, find_recipe)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(command: dict[str, Any], worker: dict[str, Any], find_recipe: Callable[[str], Any]) -> dict[str, Any]:
    action = command.pop("do")
    if action == "make":
        return _make(command, find_recipe)
    if action == "published":
        return _published(**command)
    if action == "prepare":
        worker["column"] = PreparedColumn(**command)
        return worker["column"].about()
    return getattr(worker["column"], action)(**command)


def _make(command: dict[str, Any], find_recipe: Callable[[str], Any]) -> dict[str, Any]:
    from ..workload.fixtures import make_work
    from ..workload.settings import Settings

    settings = Settings(**{**command["settings"], "columns": tuple(command["settings"]["columns"])})
    make_work(settings, Path(command["folder"]), find_recipe, command.get("stream_steps", 0))
    return {}


def _published(side: str, folder: str, flaws: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """Run one side of a published comparison, in one variant."""
    module = importlib.import_module(f"panax_compare.columns.{side}.published_{side}")
    return module.train(read_work(folder), tuple(flaws), steps, rounds)


class PreparedColumn:
    """A column with a built model; its methods are the commands after "prepare"."""

    def __init__(self, column: str, folder: str):
        self.column = find_column(column)
        self.work: ComparedWork = read_work(folder)
        start = time.perf_counter()
        self.running: RunningColumn = self.column.prepare(self.work)
        self.batches = [self.running.put(batch) for batch in self.work.batches()]
        self.prepare_seconds = time.perf_counter() - start
        self.taken = 0
        self._streams: dict[str, Stream] = {}

    def about(self) -> dict[str, Any]:
        """Describe the device and the software."""
        return {
            "device": self.running.device,
            "cores": usable_cores(),
            "prepare_seconds": self.prepare_seconds,
            "tracing_seconds": self.running.tracing_seconds,
            "notes": list(self.running.notes),
            "versions": _versions(self.column.requires),
        }

    def _step(self) -> Any:
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        return self.running.step(batch)

    def losses(self, steps: int) -> dict[str, Any]:
        """Take the first steps one at a time: return their losses and times, and the time of the first
        one."""
        losses, seconds, first_at = [], [], 0.0
        for n in range(steps):
            start = time.perf_counter()
            loss = self._step()
            self.running.wait(loss)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
            first_at = first_at if n else time.monotonic()
        return {"losses": losses, "seconds": seconds, "first_at": first_at}

    def time_steps(self, steps: int) -> dict[str, Any]:
        """Take steps as training does, without waiting for each; one step before the clock starts refills the
        caches."""
        loss = self._step()
        self.running.wait(loss)
        before, cpu, sent = time.perf_counter(), _cpu_seconds(), read_loopback_bytes()
        for _ in range(steps):
            loss = self._step()
        self.running.wait(loss)
        seconds = time.perf_counter() - before
        answer: dict[str, Any] = {"seconds": seconds / steps, "cpu_seconds": (_cpu_seconds() - cpu) / steps}
        answer["loss"] = float(loss)
        answer |= self._sent(sent, steps)
        return answer

    def advance(self, steps: int) -> dict[str, Any]:
        """Train on the next of the recipe's batches."""
        stream = self._stream(TRAIN)
        start, cpu, loss = time.perf_counter(), _cpu_seconds(), None
        for _ in range(steps):
            loss = self.running.step(self.running.put(stream[self.taken]))
            self.taken += 1
        assert loss is not None
        self.running.wait(loss)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": _cpu_seconds() - cpu,
            "loss": float(loss),
        }

    def held_out(self) -> dict[str, Any]:
        """Return the mean loss of the recipe's held-out data, without training on it."""
        stream = self._stream(HELD_OUT)
        start = time.perf_counter()
        losses = [float(self.running.evaluate(self.running.put(stream[n]))) for n in range(stream.length)]
        return {"held_out": float(np.mean(losses)), "seconds": time.perf_counter() - start}

    def _stream(self, part: str) -> Stream:
        if part not in self._streams:
            self._streams[part] = Stream(self.work.folder, part)
        return self._streams[part]

    def _sent(self, before: int | None, steps: int) -> dict[str, Any]:
        """Return the bytes that a process sent in a step: as counted by the column, or the loopback's, shared
        equally."""
        if self.running.sent_bytes is not None:
            return {"sent_bytes": self.running.sent_bytes(), "sent_by": "program"}
        after, processes = read_loopback_bytes(), ColumnJob.from_environment().processes
        if processes == 1 or before is None or after is None or self.running.device != "cpu":
            return {}
        return {"sent_bytes": (after - before) // (steps * processes), "sent_by": "loopback"}

    def memory(self) -> dict[str, Any]:
        """Return the peak memory: of the device, or, on a CPU, of this process."""
        peak = self.running.peak_bytes()
        return {"device_bytes": peak, "resident_bytes": _peak_resident_bytes()}

    def product(self) -> dict[str, Any]:
        """Measure the speed of a large matmul in this framework, and the peak rate of the processor."""
        return {"flops_per_second": self.running.product(), "registers": self.running.registers()}

    def probe(self) -> dict[str, Any]:
        """Try a batch with one row fewer, twice, and a batch with labels that don't fit. The state is not
        needed afterwards."""
        batch = self.work.batches()[0]
        fewer = {name: leaf[:-1] for name, leaf in batch.items()}
        label = "label" if "label" in batch else "targets"
        wrong = {**batch, label: batch[label][:-1]}
        return {"another_shape": [self._try(fewer), self._try(fewer)], "wrong": [self._try(wrong)]}

    def _try(self, batch: Batch) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            loss = self.running.step(self.running.put(batch))
            self.running.wait(loss)
            finite = bool(np.isfinite(float(loss)))
            return {"seconds": time.perf_counter() - start, "finite": finite}
        except Exception as error:
            message = str(error).strip().splitlines() or [""]
            names_own_file = any("/columns/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
            return {
                "seconds": time.perf_counter() - start,
                "error": f"{type(error).__name__}: {message[0]}"[:400],
                "frames": len(traceback.extract_tb(error.__traceback__)),
                "names_own_file": names_own_file,
            }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_resident_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # KiB, and bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _versions(modules: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in modules:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
