"""`RunFacts`: facts on the run that a tracker receives before it begins."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

Setting = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """A run's name, id and settings.

    Attributes:
        name: The experiment's name.
        run_id: Id that does not change when the run is resumed, but differs between runs of the same
            experiment.
        folder: Folder of the run's logs.
        settings: The experiment as nested mappings of JSON values.
    """

    name: str
    run_id: str
    folder: str
    settings: Mapping[str, Any]

    def flat(self) -> dict[str, Setting]:
        """Return the settings by their dotted names, as on the command line.

        >>> RunFacts("a", "1", "runs/a", {"type": "Experiment", "optimizer": {"type": "AdamW", "beta": [0.9, 0.95]}}).flat()
        {'optimizer': 'AdamW', 'optimizer.beta': '0.9, 0.95'}
        """
        return dict(_flat(self.settings, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, Mapping):
        if name and "type" in value:
            yield name, str(value["type"])
        for key, inner in value.items():
            if key != "type":
                yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, bool | int | float | str):
        yield name, value
    elif isinstance(value, list | tuple) and not any(isinstance(each, Mapping) for each in value):
        yield name, ", ".join(map(str, value))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{number}")
