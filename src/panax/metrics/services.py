"""Further destinations of a run's reports: a CSV file, Weights & Biases, MLflow. The two services are
imported when they are used."""

import contextlib
import csv
import dataclasses
import inspect
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import RecipeError
from ..core.install_hints import install_command
from ..system import files
from ..system.files import expand_user
from ..system.lock import open_locked
from ..system.replacement import replacement
from .facts import RunFacts
from .heat_map import Picture, encode_png
from .histogram import Histogram
from .trackers import Tracker

MLFLOW_PARAMS = 100
"""Maximum number of settings that MLflow accepts at once."""


def import_service(name: str, extra: str) -> Any:
    """Import an optional library.

    Raises:
        RecipeError: The library is not installed; the message explains how to install it.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(f"{name} is not installed; install it with: {install_command(extra)}") from error


LOCK_SECONDS = 30.0
"""Time that a run waits for others that write to the same table."""


@dataclasses.dataclass
class CsvTracker(Tracker):
    """A table with a row for each report; a training report and an evaluation of one step are two rows.

    Attributes:
        path: The file, which several runs may share, distinguished by the column `run`. Empty for
            `metrics.csv` in the run's folder. A resumed run replaces its rows of the steps that it repeats.
    """

    path: str = ""

    def __post_init__(self) -> None:
        self._columns: list[str] = []
        self._run = ""
        self._file = Path(self.path or "metrics.csv")

    def about(self, run: RunFacts) -> None:
        self._run = run.run_id
        self._file = expand_user(self.path) if self.path else Path(run.folder) / "metrics.csv"

    def begin(self, first_step: int, num_steps: int, peak: Any) -> None:
        with self._lock_table():
            self._rewrite(lambda row: row["run"] != self._run or int(row["step"]) <= first_step)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: repr(float(value)) for name, value in values.items() if name not in ("run", "step")}
        row = {"run": self._run, "step": str(step), **numbers}
        with self._lock_table():
            # Another run may have added columns meanwhile.
            self._columns = self._header() if self._file.exists() else []
            new = [name for name in row if name not in self._columns]
            if new:
                self._rewrite(lambda row: True, new)
            with open(self._file, "ab+", buffering=0) as table:
                files.trim_partial_line(table)
                text = io.StringIO(newline="")
                csv.DictWriter(text, self._columns, restval="").writerow(row)
                table.write(text.getvalue().encode())

    @contextlib.contextmanager
    def _lock_table(self) -> Iterator[None]:
        """Lock the table against other runs.

        Raises:
            OSError: Another run has held the lock for `LOCK_SECONDS`, or the table can't be written.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if not self.path:  # in the run's folder, which is locked
            yield
            return
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                lock = open_locked(self._file.with_name(f".{self._file.name}.lock"))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(f"another run has held {self._file} for {LOCK_SECONDS:g} s") from None
                time.sleep(0.005)
        with lock:
            yield

    def _header(self) -> list[str]:
        with open(self._file, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _rewrite(self, keep: Callable[[Mapping[str, str]], bool], new: Sequence[str] = ()) -> None:
        """Rewrite the table with the rows to retain, and new columns; a crash leaves the old table or the new
        one."""
        columns, rows = ["run", "step"], []
        if self._file.exists():
            with open(self._file, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                columns = list(reader.fieldnames or columns)
                if columns[:2] != ["run", "step"]:
                    raise OSError(
                        f"{self._file} is not a table of runs: it begins with {columns[:2]}; choose another path"
                    )
                rows = [row for row in reader if (row["step"] or "").isdigit() and keep(row)]
        self._columns = [*columns, *(name for name in new if name not in columns)]
        with replacement(self._file) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


@dataclasses.dataclass
class WandbTracker(Tracker):
    """A run in Weights & Biases; a resumed run continues the same one.

    Attributes:
        project: The project's name.
        entity: A user or a team; empty for the account's default.
        mode: `online`, `offline` (a folder that `wandb sync` uploads), or empty for the environment's
            setting.
    """

    project: str = "panax"
    entity: str = ""
    mode: str = ""
    close_seconds = 60.0

    def __post_init__(self) -> None:
        if self.mode not in ("", "online", "offline", "disabled"):
            raise RecipeError(f"WandbTracker.mode={self.mode!r}; expected online, offline, disabled or nothing")
        self._wandb: Any = None
        self._run: Any = None

    def about(self, run: RunFacts) -> None:
        self._wandb = import_service("wandb", "wandb")
        around = os.environ.get("WANDB_MODE", "online")
        mode = self.mode or around
        if mode == "online" and around != "online":
            raise RecipeError(f"WandbTracker.mode is online and $WANDB_MODE is {around}; change one of them")
        if mode == "online" and not _has_key(self._wandb):
            # It would ask for one, and wait.
            raise RecipeError("Weights & Biases has no API key; run `wandb login`, or set WandbTracker(mode='offline')")
        self._run = self._wandb.init(
            project=self.project, entity=self.entity or None, name=run.name, id=run.run_id, resume="allow",
            mode=mode, dir=run.folder, config=dict(run.settings),
            settings=self._wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        # Steps repeated by a resumed run would otherwise be dropped.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def picture(self, step: int, name: str, image: Picture) -> None:
        self._log(step, {name: self._wandb.Image(image)})

    def text(self, step: int, name: str, text: str) -> None:
        import html

        self._log(step, {name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def histogram(self, step: int, name: str, histogram: Histogram) -> None:
        shown = self._wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._log(step, {name: shown})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _has_key(wandb: Any) -> bool:
    """Return True if the user is logged in to Weights & Biases, without a prompt."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    # Newer versions warn about this; remove it when wandb>=0.31 is required.
    return bool(wandb.api.api_key)


@dataclasses.dataclass
class MlflowTracker(Tracker):
    """A run in MLflow; a resumed run continues the same one.

    Attributes:
        experiment: The MLflow experiment, created if it does not exist.
        tracking_uri: The server's address, or a database file as `sqlite:///runs/mlflow.db`; empty for the
            environment's setting. Also a folder, if $MLFLOW_ALLOW_FILE_STORE is true.
    """

    experiment: str = "panax"
    tracking_uri: str = ""
    close_seconds = 60.0

    def __post_init__(self) -> None:
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def about(self, run: RunFacts) -> None:
        mlflow = import_service("mlflow", "mlflow")
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri or None)
        experiment = client.get_experiment_by_name(self.experiment)
        place = client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        # The id consists of letters and digits: it needs no quoting.
        before = client.search_runs([place], f"tags.`panax.run_id` = '{run.run_id}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
        else:
            self._run_id = client.create_run(place, run_name=run.name, tags={"panax.run_id": run.run_id}).info.run_id
            params = [mlflow.entities.Param(_mlflow_name(name), str(value)[:500]) for name, value in run.flat().items()]
            for first in range(0, len(params), MLFLOW_PARAMS):
                client.log_batch(self._run_id, params=params[first : first + MLFLOW_PARAMS])
        client.update_run(self._run_id, status="RUNNING")
        self._client, self._metric = client, mlflow.entities.Metric

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if self._client is not None:
            now = int(time.time() * 1000)
            finite = {_mlflow_name(name): float(value) for name, value in values.items() if math.isfinite(value)}
            self._client.log_batch(
                self._run_id, [self._metric(name, value, now, step) for name, value in finite.items()]
            )

    def picture(self, step: int, name: str, image: Picture) -> None:
        import tempfile

        if self._client is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{step:08d}.png"
                path.write_bytes(encode_png(image))
                self._client.log_artifact(self._run_id, str(path), _mlflow_name(name))

    def text(self, step: int, name: str, text: str) -> None:
        if self._client is not None:
            self._client.log_text(self._run_id, text, f"{_mlflow_name(name)}/{step:08d}.txt")

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """Convert a name to one that MLflow accepts: at most one folder, since its file store can't hold both
    `a/b` and `a/b/c`.

    >>> _mlflow_name("train/loss/cross entropy (mean)")
    'train/loss.cross entropy _mean_'
    """
    group, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. /]", "_", group + slash + rest.replace("/", "."))
