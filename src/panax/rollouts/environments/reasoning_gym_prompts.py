"""`ReasoningGym`: prompts of the package reasoning-gym, generated in another process."""

import dataclasses
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import DataError, RecipeError
from ...core.install_hints import install_command
from ...core.validation import Validated
from ...system import json_reader
from ...system.children import run_command
from ..prompts import Prompts

Setting = bool | int | float | str | list | tuple
"""Value of a setting of a task; lists are stored as tuples."""

_AT_ONCE = 1000
_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym(Validated):
    """Prompts of one of reasoning-gym's tasks, such as `chain_sum`, as a sequence of records.

    A record has the fields `prompt`, `answer` (None if a task has no single answer) and `reasoning_gym`, by which
    the reward `score_reasoning` finds the whole entry again. The prompts are the same in every process: some of them
    depend on the order of sets, so another process generates them, with a fixed seed of hashes. Some tasks' prompts
    depend on `size` too.

    Attributes:
        name: Name registered with reasoning-gym.
        size: Number of prompts.
        seed: Seed of the prompts.
        settings: The task's own settings, such as `max_terms`.
    """

    name: str
    size: int = 1000
    seed: int = 0
    settings: Mapping[str, Setting] | tuple[tuple[str, Setting], ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RecipeError(f"ReasoningGym.size={self.size}: expected at least 1")
        pairs = sorted((name, _as_tuple(value)) for name, value in dict(self.settings).items())
        object.__setattr__(self, "settings", tuple(pairs))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.records[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.records)

    @functools.cached_property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """Generate all records; later uses return the same.

        Raises:
            RecipeError: reasoning-gym can't be imported, or does not know the task or a setting.
            DataError: A prompt can't be generated.
        """
        self._check_library()
        # A set in a module's code has another order when the module is compiled than when it is read back: the first process
        # compiles, and generates none.
        self._generate(0, 0)
        records: list[Mapping[str, Any]] = []
        for start in range(0, self.size, _AT_ONCE):
            records += self._generate(start, min(start + _AT_ONCE, self.size))
        return tuple(records)

    def open(self, root: Path, max_bad_records: int) -> Prompts:
        """Generate all prompts.

        Args:
            root: Folder for cached results; not used.
            max_bad_records: Not used: a task's prompts are its own.

        Raises:
            RecipeError, DataError: As `records`.
        """
        return Prompts(self.records)

    def _check_library(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise RecipeError(f"ReasoningGym needs reasoning-gym, which is not installed; run: {install_command('rl')}")

    def _generate(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        request = {
            "task": {"name": self.name, "size": self.size, "seed": self.seed, "settings": dict(self.settings)},
            "indices": [start, stop],
        }
        command = [sys.executable, "-P", "-m", "panax.rollouts.environments.reasoning_gym_worker"]
        folders = [*(folder or os.getcwd() for folder in sys.path), str(Path(__file__).parents[3])]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(folders)}
        try:
            done = run_command(command, _SECONDS, environment=environment, input_text=json.dumps(request))
        except TimeoutError as error:
            raise DataError(
                f"reasoning-gym generated no {stop - start} prompts of {self.name} within {_SECONDS:g} seconds; choose "
                f"settings of an easier task"
            ) from error
        try:
            reply = json_reader.parse_as(dict, done.output)
        except json_reader.JsonError as error:
            last = done.errors.strip().splitlines()[-1:]
            raise DataError(
                f"the process that generates prompts of {self.name} ended with exit code {done.code}: "
                f"{last[0] if last else error}"
            ) from error
        if "error" in reply:
            raise RecipeError(f"ReasoningGym.name={self.name!r}, settings={dict(self.settings)}: {reply['error']}")
        return reply["records"]


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value
