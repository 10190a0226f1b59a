"""Environments of the package verifiers (its `MultiTurnEnv`, versions 0.1): prompts, replies and scores.

`python -m panax.rollouts.environments.verifiers_worker NAME '{"setting": 1}' > prompts.jsonl` writes records with prompts.
`reply_verifiers` is the function of a `TextEnvironment`, and `score_verifiers` that of a `Reward`.

An environment's own entries of the state have to be JSON: any process may be asked next. It gets the model's turns as text, so
that those that read tool calls of a client's response are not supported.
"""

import asyncio
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ...system import json_reader
from ..rewards.stock import record_field
from .turns import Message, Reply

# Imported here, so that the first answer's time limit does not cover it.
_library: Any = importlib.import_module("verifiers") if importlib.util.find_spec("verifiers") else None

FIELD = "verifiers"
"""Field of a record with the environment, its settings, and the row of its data set."""

_MADE_HERE = frozenset({
    "input", "task", "prompt", "answer", "info", "example_id", "completion", "trajectory", "trajectory_id", "is_completed",
    "is_truncated", "stop_condition", "reward", "advantage", "metrics", "timing", "error", "final_env_response", "tool_defs",
    "client", "model", "sampling_args", "usage", "usage_tracker",
})  # fmt: skip
"""Entries of a state that are made again for each call."""


def reply_verifiers(messages: Sequence[Message], record: Mapping[str, Any], state: Any) -> Reply:
    """Return the reply of a record's environment: that of its `env_response`, unless one of its conditions ends the episode.

    Raises:
        RecipeError: verifiers can't be imported.
        TypeError: An entry of the environment's state is not JSON.
    """
    return asyncio.run(_reply(messages, record, state))


def score_verifiers(answer: str, record: Mapping[str, Any], episode: Mapping[str, Any]) -> float:
    """Return the score of an episode by the environment's rubric, all of its rewards by their weights.

    Raises:
        RecipeError: verifiers can't be imported.
    """
    state = _make_state(episode["messages"], record, episode["state"])
    asyncio.run(_open(record).rubric.score_rollout(state))
    return float(state["reward"])


def make_records(name: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each row of an environment's data set.

    Raises:
        RecipeError: verifiers can't be imported.
    """
    source = {"environment": name, "settings": dict(settings)}
    for row in _load(name, json.dumps(settings, sort_keys=True)).get_dataset():
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(_to_message, prompt))
        yield {"prompt": messages, "answer": row.get("answer"), FIELD: source | {"row": {**row, "prompt": messages}}}


async def _reply(messages: Sequence[Message], record: Mapping[str, Any], own: Any) -> Reply:
    environment, state = _open(record), _make_state(messages, record, own)
    if own is None:
        # Some versions return the state, others change it.
        state = await environment.setup_state(state) or state
    if await environment.is_completed(state):
        return Reply([], _read_own(state), is_over=True)
    replies = await environment.env_response(_normalize(messages), state)
    replies = [{"role": "user", "content": replies}] if isinstance(replies, str) else list(map(_to_message, replies))
    return Reply(replies, _read_own(state), state.get("final_env_response") is not None or not replies)


def _make_state(messages: Sequence[Message], record: Mapping[str, Any], added: Any) -> Any:
    """Return an environment's state after the last of these messages.

    Args:
        added: The entries that the environment has added; None at first.
    """
    types, row = importlib.import_module("verifiers.types"), record_field(record, FIELD)["row"]
    begin = len(row["prompt"])
    state = types.State(input=dict(row))
    turns = [place for place, message in enumerate(messages) if place >= begin and message["role"] == "assistant"]
    steps = [
        {
            "prompt": _normalize(messages[:place]), "completion": _normalize(messages[place : place + 1]), "response": None,
            "tokens": None, "reward": None, "advantage": None, "is_truncated": False, "trajectory_id": "", "extras": {},
        }
        for place in turns
    ]  # fmt: skip
    made = {
        "task": row.get("task", "default"), "completion": _normalize(messages[begin:]), "trajectory": steps,
        "trajectory_id": "", "is_completed": False, "is_truncated": False, "error": None, "final_env_response": None,
        "reward": None, "metrics": None, "tool_defs": [], "timing": getattr(types, "RolloutTiming", dict)(),
    }  # fmt: skip
    for name, value in {**made, "prompt": _normalize(row["prompt"]), **(added or {})}.items():
        state[name] = value
    return state


def _read_own(state: Any) -> dict[str, Any]:
    own = {name: state[name] for name in state if name not in _MADE_HERE}
    for name, value in own.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"state[{name!r}] of the environment is not JSON: {error}") from None
    return own


def _normalize(messages: Sequence[Message]) -> Any:
    """Return messages in the form that the library gives to environments."""
    plain = [dict(message) for message in messages]
    if importlib.util.find_spec("verifiers.utils") is None:
        return plain
    tools = importlib.import_module("verifiers.utils.message_utils")
    normalize = getattr(tools, "maybe_normalize_messages", None)
    return plain if normalize is None else normalize(plain, field_name="messages")


def _to_message(message: Any) -> Message:
    fields = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return {"role": fields["role"], "content": str(fields.get("content") or "")}


def _open(record: Mapping[str, Any]) -> Any:
    source = record_field(record, FIELD)
    return _load(source["environment"], json.dumps(source["settings"], sort_keys=True))


@functools.lru_cache(maxsize=8)
def _load(name: str, settings: str) -> Any:
    if _library is None:
        raise RecipeError(
            "this needs the package verifiers, version 0.1, which is not installed; run: pip install 'verifiers<0.2'"
        )
    return _library.load_environment(name, **json_reader.parse_as(dict, settings))


if __name__ == "__main__":
    # Libraries print: stdout is for the records.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json_reader.parse_as(dict, sys.argv[2]) if len(sys.argv) > 2 else {}
    for line in make_records(sys.argv[1], given):
        output.write(json.dumps(line) + "\n")
    output.close()
