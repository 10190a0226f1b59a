"""Sliding windows in config.json: one length, and the layers that have it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .json_values import RefuseFn, WrittenConfig, is_json

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowMapping:
    """How a family's config.json describes sliding windows.

    Attributes:
        absent: Default of `sliding_window`; None for no window.
        sliding: Returns True if a layer (its index, config.json) has a window, if `layer_types` is absent.
        listed: True if the family has `layer_types`; otherwise all layers have the window, or none.
        switch: The key without which, or with False, no layer has a window.
        beside: Returns further keys to write, from the number of layers.
        keys: The keys that `sliding` reads.
        length_key: Key of the length.
        word: Value of `layer_types` for a layer with a window.
        needs: Length that is written if no layer has a window, for families that can't be built without one.
    """

    absent: int | None = None
    sliding: Callable[[int, Mapping[str, Any]], bool] = lambda layer, raw: True
    listed: bool = True
    switch: str | None = None
    beside: Callable[[int], dict[str, Any]] = lambda num_layers: {}
    keys: tuple[str, ...] = ()
    needs: int | None = None
    length_key: str = "sliding_window"
    word: str = SLIDING

    def read(self, raw: Mapping[str, Any], num_layers: int, refuse: RefuseFn) -> tuple[int, ...]:
        """Return each layer's window, 0 if the layer attends to all previous positions."""
        closed = self.switch is not None and not raw.get(self.switch)
        window: Any = None if closed else raw.get(self.length_key, self.absent)
        kinds = raw.get("layer_types") if self.listed else None
        if kinds is None:
            slides = [window is not None and self.sliding(layer, raw) for layer in range(num_layers)]
            kinds = [self.word if one else FULL for one in slides]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            refuse("layer_types", f"expected a list of {num_layers}, one for each layer")
        for kind in kinds:
            if kind not in (FULL, self.word):
                refuse("layer_types", f"{kind!r} is not one of {FULL}, {self.word}")
        if self.word not in kinds:
            return (0,) * num_layers
        length = self._length(window, refuse)
        return tuple(length if kind == self.word else 0 for kind in kinds)

    def _length(self, window: Any, refuse: RefuseFn) -> int:
        if not is_json(window, int) or window <= 0:
            refuse(self.length_key, f"there are layers of {self.word}; expected the window's length")
        return window

    def write(self, windows: Sequence[int]) -> WrittenConfig:
        """Return the keys from which `read` reads the same windows."""
        lengths = sorted(set(windows) - {0})
        if len(lengths) > 1:
            return {}, [f"model.windows={lengths}, expected one length for all layers"]
        raw: dict[str, Any] = {self.length_key: lengths[0] if lengths else self.needs, **self.beside(len(windows))}
        if self.listed:
            raw["layer_types"] = [self.word if window else FULL for window in windows]
        elif lengths and 0 in windows:
            return {}, [f"model.windows={tuple(windows)}, expected a window in all layers or in none"]
        if self.switch is not None:
            raw[self.switch] = bool(lengths)
        return raw, []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoWindows(WindowMapping):
    """No layer of the family has a window."""

    def read(self, raw: Mapping[str, Any], num_layers: int, refuse: RefuseFn) -> tuple[int, ...]:
        return (0,) * num_layers

    def write(self, windows: Sequence[int]) -> WrittenConfig:
        lengths = sorted(set(windows) - {0})
        return {}, [f"model.windows={lengths}, expected no sliding windows"] if lengths else []


NO_WINDOWS = _NoWindows()

ONE_WINDOW = WindowMapping(listed=False)
"""All layers have the window, or none (Mistral)."""


def every_nth_full(n: int, key: str | None = None, **more: Any) -> WindowMapping:
    """Return the mapping of a family in which every n-th layer attends to all positions by default.

    Args:
        key: The key of config.json that replaces `n`.
    """

    def sliding(layer: int, raw: Mapping[str, Any]) -> bool:
        period = raw.get(key, n) if key else n
        return bool((layer + 1) % period) if type(period) is int and period > 0 else False

    return WindowMapping(sliding=sliding, keys=(key,) if key else (), **more)
