"""How layers of one model differ in their rotary positions, in config.json."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ...layers import Rotary
from .json_values import WrittenConfig, is_json
from .rotary_positions import ROTARY_KEYS, ReadOneFn, RefuseFn, Rotaries, WriteOneFn
from .sliding_windows import FULL, SLIDING


@dataclasses.dataclass(frozen=True)
class ByLayerType:
    """A set of values for the layers with a sliding window, and one for the others (Gemma 3, OLMo 3).

    Versions before 5 of `transformers` wrote the base of the layers without a window as `rope_theta`, and their
    scaling as `rope_scaling`.

    Attributes:
        sliding_key: The key of the base of layers with a window in those versions.
        sliding_theta: Its default.
    """

    sliding_key: str = ""
    sliding_theta: float = 10_000.0

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.sliding_key,) if self.sliding_key else ()

    def read(
        self,
        raw: Mapping[str, Any],
        windows: Sequence[int],
        read_one: ReadOneFn,
        refuse: RefuseFn,
    ) -> Rotaries:
        inner = raw.get("rope_parameters") or {}
        if not isinstance(inner, dict) or inner.keys() - {FULL, SLIDING}:
            refuse("rope_parameters", f"expected values for {FULL} and {SLIDING}")
        outside = {key: value for key, value in raw.items() if key not in ROTARY_KEYS}
        theta = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
        full = {**outside, **theta, "rope_parameters": {**(inner.get(FULL) or {}), **(raw.get("rope_scaling") or {})}}
        local = {"rope_theta": raw.get(self.sliding_key, self.sliding_theta), **(inner.get(SLIDING) or {})}
        sliding = {**outside, "rope_parameters": local}
        of_full, of_sliding = read_one(full), read_one(sliding)
        return tuple(of_sliding if window else of_full for window in windows)

    def write(self, rotaries: Rotaries, windows: Sequence[int], write_one: WriteOneFn) -> WrittenConfig:
        of_full = {rotary for rotary, window in zip(rotaries, windows, strict=True) if not window}
        of_sliding = {rotary for rotary, window in zip(rotaries, windows, strict=True) if window}
        if len(of_full) > 1 or len(of_sliding) > 1:
            return {}, ["model.rotaries, expected the same positions in all layers with a window, and in all without"]
        full, problems = write_one(next(iter(of_full or of_sliding)))
        sliding, wrong = write_one(next(iter(of_sliding or of_full)))
        if sliding.get("rope_scaling") and self.sliding_key:
            wrong = [*wrong, "model.rotaries, expected unscaled positions in layers with a window"]
        keys = {"rope_theta": full.get("rope_theta"), "rope_scaling": full.get("rope_scaling")}
        keys |= {self.sliding_key: sliding.get("rope_theta")} if self.sliding_key else {}
        inner = {FULL: _inner(full), SLIDING: _inner(sliding)}
        return keys | {"rope_parameters": inner}, [*problems, *wrong]


def _inner(written: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": written.get("rope_theta"), **(written.get("rope_scaling") or {})}


@dataclasses.dataclass(frozen=True)
class SlidingOnly:
    """Rotary positions in the layers with a sliding window only, or in all if no layer has one (EXAONE 4).

    Attributes:
        always: True if layers without a window have none in any case (Cohere 2).
    """

    always: bool = False
    keys: tuple[str, ...] = ()

    def read(
        self,
        raw: Mapping[str, Any],
        windows: Sequence[int],
        read_one: ReadOneFn,
        refuse: RefuseFn,
    ) -> Rotaries:
        rotary = read_one(raw)
        everywhere = not self.always and raw.get("sliding_window", 1) is None
        return tuple(rotary if everywhere or window else None for window in windows)

    def write(self, rotaries: Rotaries, windows: Sequence[int], write_one: WriteOneFn) -> WrittenConfig:
        everywhere = not self.always and not any(windows)
        used = {rotary for rotary, window in zip(rotaries, windows, strict=True) if everywhere or window}
        unused = {rotary for rotary, window in zip(rotaries, windows, strict=True) if not (everywhere or window)}
        keys, problems = write_one(next(iter(used), Rotary()))
        if len(used) > 1 or unused - {None}:
            problems = [*problems, "model.rotaries, expected positions in the layers with a window only"]
        return keys, problems


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list of the layers with rotary positions (SmolLM 3): `no_rope_layers` is 1 for a layer with
    them; by default every `no_rope_layer_interval`-th layer has none."""

    keys: tuple[str, ...] = ("no_rope_layers", "no_rope_layer_interval")

    def read(
        self,
        raw: Mapping[str, Any],
        windows: Sequence[int],
        read_one: ReadOneFn,
        refuse: RefuseFn,
    ) -> Rotaries:
        listed, every = raw.get("no_rope_layers"), raw.get("no_rope_layer_interval", 4)
        if listed is None:
            if type(every) is not int or every < 1:
                refuse("no_rope_layer_interval", "expected a positive number of layers")
            listed = [int((layer + 1) % every != 0) for layer in range(len(windows))]
        if not isinstance(listed, list) or len(listed) != len(windows) or not all(one in (0, 1) for one in listed):
            refuse("no_rope_layers", f"expected a list of {len(windows)}, 0 or 1 for each layer")
        rotary = read_one(raw)
        return tuple(rotary if one else None for one in listed)

    def write(self, rotaries: Rotaries, windows: Sequence[int], write_one: WriteOneFn) -> WrittenConfig:
        used = {rotary for rotary in rotaries if rotary is not None}
        keys, problems = write_one(next(iter(used), Rotary()))
        if len(used) > 1:
            problems = [*problems, "model.rotaries, expected the same positions in all layers that have any"]
        return keys | {"no_rope_layers": [int(rotary is not None) for rotary in rotaries]}, problems


@dataclasses.dataclass(frozen=True)
class ListedOrGrowing(Listed):
    """A list of the layers with rotary positions, as of SmolLM 3; in the others queries grow with their position (Llama 4):
    they are multiplied by `1 + attn_scale * ln(1 + floor((position + 1) / floor_scale))` if `attn_temperature_tuning`."""

    keys: tuple[str, ...] = (*Listed.keys, "attn_temperature_tuning", "attn_scale", "floor_scale")

    def read(
        self,
        raw: Mapping[str, Any],
        windows: Sequence[int],
        read_one: ReadOneFn,
        refuse: RefuseFn,
    ) -> Rotaries:
        tuned, rate, length = (raw.get(key, absent) for key, absent in _GROWTH.items())
        for key, value, kind in zip(_GROWTH, (tuned, rate, length), (bool, float, int)):
            if not is_json(value, kind):
                refuse(key, f"expected a value of type {kind.__name__}")
        growing = None
        if tuned:
            try:
                growing = Rotary(fraction=0.0, query_growth=float(rate), query_length=length, query_first=1)
            except RecipeError as error:
                refuse("attn_scale", str(error))
        # An empty list is none.
        rotaries = super().read({**raw, "no_rope_layers": raw.get("no_rope_layers") or None}, windows, read_one, refuse)
        return tuple(growing if rotary is None else rotary for rotary in rotaries)

    def write(self, rotaries: Rotaries, windows: Sequence[int], write_one: WriteOneFn) -> WrittenConfig:
        growing = {rotary for rotary in rotaries if rotary is not None and rotary.fraction == 0.0}
        plain = tuple(None if rotary in growing else rotary for rotary in rotaries)
        raw, problems = super().write(plain, windows, write_one)
        one = next(iter(growing), Rotary(fraction=0.0, query_growth=0.1, query_length=8192, query_first=1))
        # Without such layers the setting has no effect.
        if len(growing) > 1 or one.query_first != 1 or (growing and None in rotaries):
            problems = [
                *problems,
                "model.rotaries, expected layers without positions to grow alike, from 1 on, or not at all",
            ]
        tuned = None not in rotaries
        return raw | dict(zip(_GROWTH, (tuned, one.query_growth, one.query_length))), problems


_GROWTH = {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192}
"""Keys of the growth of queries, and their defaults."""
