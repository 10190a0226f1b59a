"""A device that computes wrongly, for the tests of checked steps: results of compiled steps are changed from outside."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rollback_run import Line

from panax.train import CompiledStep

Flip = Callable[[np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class LineWithState(Line):
    """The line, with a state of its own."""

    def init(self, key):
        return super().init(key)[0], {"mean": jnp.zeros((8,))}

    def state_axes(self, state):
        return {"mean": ("embed",)}

    def loss(self, params, state, batch, key, train):
        found = super().loss(params, {}, batch, key, train)
        mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
        return found._replace(state={"mean": mean})


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def lowest_bit(values: np.ndarray) -> None:
    _bytes(values)[0] ^= 1


def lowest_bit_of_the_last(values: np.ndarray) -> None:
    _bytes(values)[-values.dtype.itemsize] ^= 1


def sign(values: np.ndarray) -> None:
    """Of a zero too."""
    _bytes(values)[values.dtype.itemsize - 1] ^= 0x80


FLIPS = (lowest_bit, lowest_bit_of_the_last, sign)


@dataclasses.dataclass
class Sick:
    """Changes what one device gives, in the executions of a step that `errs` names: patched in place of `CompiledStep.__call__`.

    Attributes:
        device: By its number among all.
        leaf: A part of the name of the leaves that are changed.
        flip: Changes the device's values in place.
        errs: Told the number of a step and how often it was executed before; whether the device errs then.
        seen: The numbers of the steps in which it did.
    """

    device: int
    leaf: str
    flip: Flip
    errs: Callable[[int, int], bool]
    seen: list[int] = dataclasses.field(default_factory=list)

    def patch(self, monkeypatch: Any) -> None:
        original, executed = CompiledStep.__call__, dict[int, int]()

        def __call__(step, state, batch):
            number = int(np.asarray(state.step.addressable_data(0))) + 1
            result = original(step, state, batch)
            before = executed.get(number, 0)
            executed[number] = before + 1
            if not self.errs(number, before):
                return result
            self.seen.append(number)
            return changed(result, self.leaf, self.device, self.flip)

        monkeypatch.setattr(CompiledStep, "__call__", __call__)


def changed(result: Any, leaf: str, device: int, flip: Flip) -> Any:
    """The state and scalars of a step, with the values that one device has of some leaves changed."""
    count = 0

    def change(path: Any, array: jax.Array) -> jax.Array:
        nonlocal count
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # A step gives a state and its scalars.
        if leaf not in (f"scalars{name[1:]}" if name.startswith("1.") else name):
            return array
        shards = []
        for shard in array.addressable_shards:
            data = shard.data
            if shard.device.id == device:
                values = np.array(data)
                flip(values)
                data = jax.device_put(values, shard.device)
            shards.append(data)
        count += 1
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    actual = jax.tree_util.tree_map_with_path(change, result)
    assert count, f"nothing is called {leaf}"
    return actual
