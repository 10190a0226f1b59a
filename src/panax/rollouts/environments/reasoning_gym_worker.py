"""reasoning-gym's side of `ReasoningGym`: generates records, and scores answers in the processes of a `RewardPool`.

Started as `python -m panax.rollouts.environments.reasoning_gym_worker`, it reads a request as JSON and writes records
as JSON. The seed of Python's hashes is 0 in each process that imports this: some questions depend on the order of sets.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import xxhash

from ...core.errors import PanaxError, RecipeError, suggest_name
from ...core.install_hints import install_command
from ...system import json_reader
from ..rewards.stock import record_field

# Imported here, so that the first answer's time limit does not cover it.
_factory: Any = importlib.import_module("reasoning_gym.factory") if importlib.util.find_spec("reasoning_gym") else None

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score_reasoning(answer: str, record: Mapping[str, Any]) -> float:
    """Return reasoning-gym's score of an answer, from 0 to 1.

    The answer is the text of the last `<answer>...</answer>`, or the whole text if it has none, without white space
    at its ends.

    Args:
        record: Record of a `ReasoningGym`.

    Raises:
        ValueError: The record is not one of a `ReasoningGym`, or another version of reasoning-gym made it.
    """
    source = record_field(record, "reasoning_gym")
    text = json.dumps(source["task"], sort_keys=True)
    entry = _entry(text, source["index"])
    if _digest(entry["question"]) != source["digest"]:
        raise ValueError(
            f"reasoning-gym generates another question {source['index']} of {source['task']['name']} than the record has; "
            f"take the version of reasoning-gym that generated the prompts"
        )
    tagged = _TAGGED.findall(answer)
    final = (tagged[-1] if tagged else answer).strip()
    return float(_data_set(text).score_answer(final, entry))


def make_records(task: Mapping[str, Any], start: int, stop: int) -> list[dict[str, Any]]:
    """Generate the records of a range of prompts.

    Args:
        task: `name`, `size`, `seed`, and `settings` of a data set.

    Raises:
        RecipeError: reasoning-gym does not know the task or a setting.
    """
    text = json.dumps(dict(task), sort_keys=True)
    records = []
    for index in range(start, stop):
        entry = _data_set(text)[index]
        source = {"task": dict(task), "index": index, "digest": _digest(entry["question"])}
        answer = entry["answer"]
        answer = answer if answer is None or isinstance(answer, bool | int | float | str) else str(answer)
        records.append({"prompt": entry["question"], "answer": answer, "reasoning_gym": source})
    return records


def _digest(question: str) -> str:
    return xxhash.xxh3_64_hexdigest(question.encode())


@functools.lru_cache(maxsize=8)
def _data_set(text: str) -> Any:
    task = json_reader.parse_as(dict, text)
    if _factory is None:
        raise RecipeError(f"this needs reasoning-gym, which is not installed; run: {install_command('rl')}")
    if task["name"] not in _factory.DATASETS:
        raise RecipeError(
            f"reasoning-gym has no task {task['name']!r}; {suggest_name(task['name'], _factory.DATASETS)}"
        )
    try:
        return _factory.create_dataset(task["name"], size=task["size"], seed=task["seed"], **task["settings"])
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise RecipeError(f"reasoning-gym refuses the settings: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _entry(text: str, index: int) -> Any:
    return _data_set(text)[index]


if __name__ == "__main__":
    # The library prints while it generates: stdout is the channel.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json_reader.parse_as(dict, sys.stdin.read())
    try:
        reply: dict[str, Any] = {"records": make_records(request["task"], *request["indices"])}
    except PanaxError as error:
        reply = {"error": str(error)}
    channel.write(json.dumps(reply))
    channel.close()
