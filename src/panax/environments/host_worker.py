"""A process that steps gymnasium's environments for `HostPool`: a line of JSON in, a line out, followed by
arrays as bytes.

Started as `python -m panax.environments.host_worker`. It imports neither jax nor its parent's modules,
unpickles nothing, and does not listen on a port: it ends when its input does.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from panax.environments.host_values import (
    first_observation,
    to_bool_flag,
    to_device_observation,
    to_float_reward,
    to_host_action,
)

from ..system import json_reader
from ..system.children import end_with_parent

MAX_LINE_BYTES = 1 << 24
"""Maximum size of a message's line: seeds of all environments, or an error's message."""

MAX_MESSAGE_BYTES = 1 << 34
"""Maximum size of one array."""


class EnvironmentWorker:
    """Several environments of one kind.

    Attributes:
        environments: gymnasium's environments.
    """

    def __init__(self, asked: Mapping[str, Any]):
        import gymnasium

        self.environments = [
            gymnasium.make(asked["id"], disable_env_checker=True, **asked["settings"]) for _ in range(asked["count"])
        ]

    def describe_spaces(self) -> dict[str, Any]:
        """Return the spaces of observations and actions, as JSON."""
        first = self.environments[0]
        return {"observation": space_to_json(first.observation_space), "action": space_to_json(first.action_space)}

    def reset(self, seeds: Sequence[int]) -> list[np.ndarray]:
        """Begin an episode in each environment; return the first observations."""
        return [np.stack([first_observation(each, seed) for each, seed in zip(self.environments, seeds)])]

    def step(self, actions: np.ndarray, seeds: Sequence[int]) -> list[np.ndarray]:
        """Take one step; return the observations before and after the resets that followed, rewards, and both
        flags."""
        rows = []
        for environment, action, seed in zip(self.environments, actions, seeds):
            observation, reward, *flags, _ = environment.step(to_host_action(environment.action_space, action))
            if len(flags) != 2:
                raise TypeError(
                    f"step returned {len(flags) + 3} values; expected observation, reward, terminated, truncated, info"
                )
            # A copy: the environment may overwrite its array when it resets.
            led_to = to_device_observation(environment.observation_space, observation)
            reward, terminated, truncated = (
                to_float_reward(reward),
                to_bool_flag("terminated", flags[0]),
                to_bool_flag("truncated", flags[1]),
            )
            current = first_observation(environment, seed) if terminated or truncated else led_to
            rows.append((led_to, current, reward, terminated, truncated))
        return [np.stack(column) for column in zip(*rows)]

    def try_out(self) -> list[np.ndarray]:
        """Reset the first environment and take a step with an action drawn from its space; raises its
        errors."""
        only = EnvironmentWorker.__new__(EnvironmentWorker)
        only.environments = self.environments[:1]
        only.reset([0])
        environment = only.environments[0]
        environment.action_space.seed(0)
        return only.step(np.asarray(environment.action_space.sample())[None], [0])

    def close(self) -> None:
        for environment in self.environments:
            with contextlib.suppress(Exception):
                environment.close()


def space_to_json(space: Any) -> dict[str, Any]:
    """Serialize a space to JSON; `kind` names its type."""
    kind = type(space).__name__
    if kind == "Discrete":
        return {"kind": kind, "count": int(space.n), "start": int(space.start)}
    if kind == "Box":
        low, high = (np.asarray(bound, np.float64).ravel().tolist() for bound in (space.low, space.high))
        return {"kind": kind, "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.name}
    return {"kind": kind}


def encode_message(head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[Any]:
    """Return a line that describes the content, and the arrays' bytes, as buffers."""
    about = [{"shape": list(array.shape), "dtype": array.dtype.name} for array in arrays]
    line = json.dumps({**head, "arrays": about}).encode() + b"\n"
    return [line, *(np.ascontiguousarray(array).tobytes() for array in arrays)]


def parse_message(line: bytes) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...]]]]:
    """Parse a message's line; return its content, and the dtypes and shapes of the arrays that follow.

    Raises:
        ValueError: The line is invalid, or announces invalid arrays.
    """
    head = json_reader.parse_as(dict, line, constants=True)
    try:
        arrays = [(np.dtype(str(each["dtype"])), tuple(map(int, each["shape"]))) for each in head.pop("arrays")]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it announces arrays by {error!r}; expected dtype and shape of each") from error
    for dtype, shape in arrays:
        if dtype.hasobject or min(shape, default=0) < 0 or num_bytes(dtype, shape) > MAX_MESSAGE_BYTES:
            raise ValueError(f"an array of {dtype}, shape {shape}, can't be sent")
    return head, arrays


def num_bytes(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of an array."""
    return dtype.itemsize * math.prod(shape)


def _write(out: IO[bytes], head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    for part in encode_message(head, arrays):
        out.write(part)
    out.flush()


def _read(source: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]]:
    line = source.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError
    head, arrays = parse_message(line)
    values = []
    for dtype, shape in arrays:
        data = source.read(num_bytes(dtype, shape))
        if len(data) != num_bytes(dtype, shape):
            raise EOFError
        values.append(np.frombuffer(data, dtype).reshape(shape))
    return head, values


def _serve(source: IO[bytes], out: IO[bytes]) -> None:
    worker: EnvironmentWorker | None = None
    with contextlib.suppress(EOFError):
        while True:
            request, arrays = _read(source)
            try:
                if worker is None:
                    worker = EnvironmentWorker(request)
                    _write(out, {"ok": True, **worker.describe_spaces()})
                elif request["do"] == "try":
                    _write(out, {"ok": True}, worker.try_out())
                elif request["do"] == "reset":
                    _write(out, {"ok": True}, worker.reset(request["seeds"]))
                else:
                    _write(out, {"ok": True}, worker.step(arrays[0], request["seeds"]))
            except Exception as error:  # any error of an environment is one message to the parent
                reason = " ".join(str(error).split())
                _write(out, {"ok": False, "error": f"{type(error).__name__}: {reason}"})
    if worker is not None:
        worker.close()


if __name__ == "__main__":
    # An environment's output goes to stderr: stdout is the channel.
    end_with_parent()
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
