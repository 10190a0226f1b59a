"""Assignment of a node's GPUs to its workers."""

import glob
import os
from collections.abc import Mapping

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def list_visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs of this machine that processes may use, by their CUDA names; none if JAX is set to use
    the CPU.

    >>> list_visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5"})
    ['4', '5']
    >>> list_visible_gpus({"CUDA_VISIBLE_DEVICES": "4", "JAX_PLATFORMS": "cpu"})
    []
    """
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    if VISIBLE_VARIABLE in environment:
        return [name for name in environment[VISIBLE_VARIABLE].split(",") if name not in ("", "-1")]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def assign_gpus(local: int, count: int, gpus: list[str]) -> dict[str, str]:
    """Return the environment variable that gives one of a node's workers its GPUs: an equal share each, in
    order.

    >>> assign_gpus(1, 2, ["0", "1", "2", "3"]), assign_gpus(0, 1, ["0", "1"]), assign_gpus(0, 2, [])
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, {}, {})
    """
    if count == 1 or len(gpus) < count:
        return {}
    share = len(gpus) // count
    return {VISIBLE_VARIABLE: ",".join(gpus[local * share : (local + 1) * share])}
