"""A process that steps gymnasium's environments for `HostPool`: a line of JSON in, a line out, arrays as bytes behind it.

Started as `python -m panax.environments.host_worker`. It imports neither jax nor what its parent has in memory, unpickles
nothing, and listens nowhere: it ends when its input does.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np


class Worker:
    """Some environments of one kind.

    Attributes:
        environments: gymnasium's.
    """

    def __init__(self, asked: Mapping[str, Any]):
        import gymnasium

        self.environments = [
            gymnasium.make(asked["id"], disable_env_checker=True, **asked["settings"]) for _ in range(asked["count"])
        ]

    def spaces(self) -> dict[str, Any]:
        """What observations and actions are, as JSON."""
        first = self.environments[0]
        return {"observation": described(first.observation_space), "action": described(first.action_space)}

    def reset(self, seeds: Sequence[int]) -> list[np.ndarray]:
        """First observations."""
        return [np.stack([each.reset(seed=seed)[0] for each, seed in zip(self.environments, seeds)])]

    def step(self, actions: np.ndarray, seeds: Sequence[int]) -> list[np.ndarray]:
        """What the steps led to, what is seen after the resets that followed, rewards, and both flags."""
        rows = []
        for environment, action, seed in zip(self.environments, actions, seeds):
            led_to, reward, terminated, truncated, _ = environment.step(action if action.ndim else int(action))
            now = environment.reset(seed=seed)[0] if terminated or truncated else led_to
            rows.append((led_to, now, np.float32(reward), bool(terminated), bool(truncated)))
        return [np.stack(column) for column in zip(*rows)]

    def close(self) -> None:
        for environment in self.environments:
            with contextlib.suppress(Exception):
                environment.close()


def described(space: Any) -> dict[str, Any]:
    """A space as JSON; `kind` says which one."""
    kind = type(space).__name__
    if kind == "Discrete":
        return {"kind": kind, "count": int(space.n), "start": int(space.start)}
    if kind == "Box":
        low, high = (np.asarray(bound, np.float64).ravel().tolist() for bound in (space.low, space.high))
        return {"kind": kind, "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.name}
    return {"kind": kind}


def write(out: IO[bytes], head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """A line that says what follows, and the arrays' bytes."""
    about = [{"shape": list(array.shape), "dtype": array.dtype.name} for array in arrays]
    out.write(json.dumps({**head, "arrays": about}).encode() + b"\n")
    for array in arrays:
        out.write(np.ascontiguousarray(array).tobytes())
    out.flush()


def read(source: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What `write` wrote.

    Raises:
        EOFError: The other side has ended.
    """
    line = source.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    head = json.loads(line)
    return head, [_array(source, about) for about in head.pop("arrays")]


def _array(source: IO[bytes], about: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(about["dtype"])
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} can't be sent")
    size = dtype.itemsize * int(np.prod(about["shape"]))
    data = source.read(size)
    if len(data) != size:
        raise EOFError
    return np.frombuffer(data, dtype).reshape(about["shape"])


def _serve(source: IO[bytes], out: IO[bytes]) -> None:
    worker: Worker | None = None
    with contextlib.suppress(EOFError):
        while True:
            asked, arrays = read(source)
            try:
                if worker is None:
                    worker = Worker(asked)
                    write(out, {"ok": True, **worker.spaces()})
                elif asked["do"] == "reset":
                    write(out, {"ok": True}, worker.reset(asked["seeds"]))
                else:
                    write(out, {"ok": True}, worker.step(arrays[0], asked["seeds"]))
            except Exception as error:  # Whatever an environment raises is one message to the parent.
                said = " ".join(str(error).split())
                write(out, {"ok": False, "error": f"{type(error).__name__}: {said}"})
    if worker is not None:
        worker.close()


if __name__ == "__main__":
    # What an environment prints goes to stderr: stdout is the channel.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
