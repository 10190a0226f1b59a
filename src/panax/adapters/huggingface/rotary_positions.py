"""Rotary positions in config.json: read from the keys of any version of `transformers`, and written."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...core.errors import RecipeError
from ...layers import DynamicScaling, LinearScaling, LongScaling, Rotary, RotaryScaling, YarnScaling
from .json_values import RefuseFn, WrittenConfig, is_json

LLAMA3_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Fields of `RotaryScaling`, ours to theirs."""

YARN_KEYS = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Fields of `YarnScaling`, ours to theirs."""

SCALINGS: Mapping[str, tuple[type | None, Mapping[str, str]]] = {
    "default": (None, {}),
    "linear": (LinearScaling, {"factor": "factor"}),
    "dynamic": (DynamicScaling, {"factor": "factor"}),
    "llama3": (RotaryScaling, LLAMA3_KEYS),
    "yarn": (YarnScaling, YARN_KEYS),
}
"""`rope_type` to our class, and its fields, ours to theirs."""

LONG = "longrope"
"""The `rope_type` with a factor for each frequency."""

LONG_KEYS = {"short": "short_factor", "long": "long_factor"}
"""Lists of `LongScaling`, ours to theirs."""

ORIGINAL_LENGTH = LLAMA3_KEYS["original_length"]
"""Key of the length at which a model with scaled positions was first trained."""

PARTIAL_ROTARY_KEY = "partial_rotary_factor"
"""Key of the rotated share of a head."""

QUERY_GROWTH_KEY = "llama_4_scaling_beta"
"""Key of the rate of `Rotary.query_growth`, which applies beyond the original length."""

DEFAULT_THETA_KEY = "rope_theta"
"""Key of the base, of `transformers` before version 5."""

DEFAULT_THETA = 10_000.0
"""Default of `transformers` for the base of the wavelengths."""

PLACES = ("rope_scaling", "rope_parameters")
"""Keys of the values, of `transformers` before version 5 and since; the first one that is set counts."""

ROTARY_KEYS = (*PLACES, DEFAULT_THETA_KEY)
"""Keys under which config.json may have the positions."""

ReadOneFn = Callable[[Mapping[str, Any]], Rotary]
"""A config.json with one set of positions to them."""

WriteOneFn = Callable[[Rotary | None], WrittenConfig]
"""One set of positions to the keys from which it is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryMapping:
    """How a family's config.json describes rotary positions.

    Attributes:
        theta: Default of the base.
        theta_key: The key of the base, if a release has it elsewhere than `transformers` before version 5.
        theta_is: True if `theta_key` is a release's name of the base, and `transformers` 5 computes with its own
            key: both must be equal.
        fraction: Default of the rotated share of a head; None if all features of a head are rotated.
        fraction_key: Older name of `partial_rotary_factor`, which is read too.
        inside_only: True if the share is read from `rope_parameters` only.
        interleaved: True if adjacent features form pairs; or the key that decides this.
        scalings: Supported values of `rope_type`.
        scores: True if yarn's `mscale_all_dim` scales the scores (DeepSeek), and not the rotated features.
        grows: True if queries grow with `llama_4_scaling_beta`.
        layers: How layers differ.
    """

    theta: float = DEFAULT_THETA
    theta_key: str | None = None
    theta_is: bool = False
    fraction: float | None = None
    fraction_key: str | None = None
    inside_only: bool = False
    interleaved: bool | str = False
    scalings: tuple[str, ...] = tuple(SCALINGS)
    scores: bool = False
    grows: bool = False
    layers: "LayerRotary | None" = None


Rotaries = tuple[Rotary | None, ...]


class LayerRotary(Protocol):
    """How the layers of one model differ in their rotary positions."""

    def read(
        self,
        raw: Mapping[str, Any],
        windows: Sequence[int],
        read_one: ReadOneFn,
        refuse: RefuseFn,
    ) -> Rotaries:
        """Return each layer's rotary positions.

        Args:
            windows: Each layer's window, 0 for none.
            read_one: Reads a config.json as if all layers were equal.
        """
        ...

    def write(self, rotaries: Rotaries, windows: Sequence[int], write_one: WriteOneFn) -> WrittenConfig:
        """Return the config keys from which `read` restores these positions."""
        ...

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are read in addition to those of all families."""
        ...


def read_rotaries(
    mapping: RotaryMapping, raw: Mapping[str, Any], max_length: int, windows: Sequence[int], refuse: RefuseFn
) -> Rotaries:
    """Return each layer's rotary positions."""

    def read_one(raw: Mapping[str, Any]) -> Rotary:
        return read_rotary(mapping, raw, max_length, refuse)

    if mapping.layers is not None:
        return mapping.layers.read(raw, windows, read_one, refuse)
    return (read_one(raw),) * len(windows)


def write_rotaries(mapping: RotaryMapping, rotaries: Rotaries, windows: Sequence[int]) -> WrittenConfig:
    """Return the keys from which `read_rotaries` reads the same."""

    def write_one(rotary: Rotary | None) -> WrittenConfig:
        return write_rotary(mapping, rotary)

    if mapping.layers is not None:
        return mapping.layers.write(rotaries, windows, write_one)
    if len(set(rotaries)) > 1:
        return {}, ["model.rotaries, expected the same positions in all layers"]
    return write_one(rotaries[0])


def read_rotary(mapping: RotaryMapping, raw: Mapping[str, Any], max_length: int, refuse: RefuseFn) -> Rotary:
    """Read rotary positions from `rope_parameters`, or from `rope_theta` and `rope_scaling`, which versions
    before 5 wrote."""
    key = next((place for place in PLACES if raw.get(place)), PLACES[1])
    inner = raw.get(key) or {}
    if not isinstance(inner, dict) or any(isinstance(value, dict) for value in inner.values()):
        refuse(key, "expected one set of values for all layers")
    theta = raw.get(mapping.theta_key, mapping.theta) if mapping.theta_key and not mapping.theta_is else mapping.theta
    # Of two original lengths `transformers` 5 takes the outer one; of all other values the inner one.
    values = {"rope_theta": theta, ORIGINAL_LENGTH: max_length, **raw, **inner}
    values |= {ORIGINAL_LENGTH: raw[ORIGINAL_LENGTH]} if raw.get(ORIGINAL_LENGTH) is not None else {}
    if mapping.theta_is:
        _check_theta(mapping, raw, inner, values, refuse)
    fraction = _fraction(mapping, raw, inner, key, refuse)
    kind = values.get("rope_type", values.get("type", "default"))
    # Sections of the frequencies for time, height and width: of text the three positions are the same.
    kind = "default" if kind == "mrope" else kind
    if kind not in mapping.scalings:
        refuse(key, f"rope_type={kind!r} is not one of {', '.join(mapping.scalings)}")
    if kind == LONG:
        return _read_long(values, fraction, mapping.interleaved is True, max_length, lambda why: refuse(key, why))
    scaling_class, names = SCALINGS[kind]
    attention_factor = 0.0
    if kind == "yarn":
        values, attention_factor = _read_yarn(mapping, values, lambda why: refuse(key, why))
    growth = inner.get(QUERY_GROWTH_KEY) or 0.0
    if growth and not mapping.grows:
        refuse(key, f"{QUERY_GROWTH_KEY}={growth!r} is not a part of this family")
    values |= {PARTIAL_ROTARY_KEY: fraction, QUERY_GROWTH_KEY: growth}
    numbers = [name for name in names.values() if name != "truncate"]
    for name in ("rope_theta", PARTIAL_ROTARY_KEY, QUERY_GROWTH_KEY, *numbers):
        if not is_json(values.get(name), float):
            refuse(key, f"{name} is {values.get(name)!r}, expected a number")
    interleaved = mapping.interleaved
    if isinstance(interleaved, str):
        interleaved = bool(raw.get(interleaved, True))
    fields: dict[str, Any] = {
        ours: bool(values[theirs]) if theirs == "truncate" else float(values[theirs]) for ours, theirs in names.items()
    }
    if "original_length" in fields:
        fields["original_length"] = int(fields["original_length"])
    if attention_factor:
        fields["attention_factor"] = attention_factor
    try:
        return Rotary(
            theta=float(values["rope_theta"]),
            scaling=None if scaling_class is None else scaling_class(**fields),
            interleaved=interleaved,
            fraction=float(fraction),
            query_growth=float(growth),
            query_length=int(values[ORIGINAL_LENGTH]) if growth else 0,
        )
    except RecipeError as error:
        return refuse(key, str(error))


def _read_long(
    values: Mapping[str, Any], fraction: Any, interleaved: bool, max_length: int, refuse: Callable[[str], Any]
) -> Rotary:
    original, factor = values[ORIGINAL_LENGTH], values.get("factor")
    attention_factor = values.get("attention_factor") or 0.0
    for name, value in (
        ("rope_theta", values["rope_theta"]),
        (PARTIAL_ROTARY_KEY, fraction),
        (ORIGINAL_LENGTH, original),
    ):
        if not is_json(value, float):
            refuse(f"{name} is {value!r}, expected a number")
    lists = {}
    for ours, theirs in LONG_KEYS.items():
        factors = values.get(theirs)
        if not isinstance(factors, list) or not all(is_json(each, float) for each in factors):
            refuse(f"{theirs} is {factors!r}, expected a list of numbers")
        lists[ours] = tuple(float(each) for each in factors or ())
    if (factor is not None and not is_json(factor, float)) or not is_json(attention_factor, float):
        refuse("expected factor and attention_factor to be numbers")
    try:
        scaling = LongScaling(
            **lists,
            original_length=int(original),
            extended_length=max_length if factor is None else round(factor * original),
            attention_factor=float(attention_factor),
        )
        return Rotary(
            theta=float(values["rope_theta"]), scaling=scaling, interleaved=interleaved, fraction=float(fraction)
        )
    except RecipeError as error:
        return refuse(str(error))


def _check_theta(
    mapping: RotaryMapping, raw: Mapping[str, Any], inner: Mapping[str, Any], values: dict[str, Any], refuse: RefuseFn
) -> None:
    key = mapping.theta_key
    assert key is not None
    released = raw.get(key)
    if released is None:
        return
    declared = inner.get("rope_theta", raw.get("rope_theta", released))
    if declared != released:
        refuse(
            key,
            f"but the model's positions have rope_theta={declared!r}. The release was trained with the first, and "
            f"`transformers` 5 computes with the second; make them equal",
        )
    values["rope_theta"] = released


def _fraction(
    mapping: RotaryMapping, raw: Mapping[str, Any], inner: Mapping[str, Any], key: str, refuse: RefuseFn
) -> Any:
    outer = raw.get(PARTIAL_ROTARY_KEY, raw.get(mapping.fraction_key or "", mapping.fraction))
    if mapping.fraction is not None:
        return inner.get(PARTIAL_ROTARY_KEY, mapping.fraction if mapping.inside_only else outer)
    fraction = inner.get(PARTIAL_ROTARY_KEY, 1.0 if outer is None else outer)
    if fraction != 1.0:
        refuse(key, f"{PARTIAL_ROTARY_KEY}={fraction!r}; it turns whole heads")
    return fraction


def _read_yarn(
    mapping: RotaryMapping, values: dict[str, Any], refuse: Callable[[str], Any]
) -> tuple[dict[str, Any], float]:
    """Fill in the defaults of `transformers` for missing values; return the values and the factor of rotated
    features, 0 if it follows from the values."""
    all_dim, attention_factor = values.get("mscale_all_dim") or 0.0, values.get("attention_factor")
    if mapping.scores:
        if attention_factor is not None:
            refuse("attention_factor of yarn is unknown here")
        if all_dim and not values.get("mscale"):
            refuse(f"yarn with mscale_all_dim={all_dim!r} and no mscale is unknown here")
    filled = {
        **values,
        "beta_fast": values.get("beta_fast") or 32,
        "beta_slow": values.get("beta_slow") or 1,
        "truncate": values.get("truncate", True),
        "mscale": values["mscale"] if all_dim and values.get("mscale") else 1.0,
        "mscale_all_dim": all_dim if values.get("mscale") else 0.0,
    }
    if mapping.scores:
        return filled, 0.0
    if attention_factor is None and filled["mscale_all_dim"]:
        try:
            scaling = YarnScaling(
                factor=float(filled["factor"]), mscale=float(filled["mscale"]), mscale_all_dim=float(all_dim)
            )
        except (TypeError, ValueError, RecipeError) as error:
            return refuse(str(error))
        attention_factor = scaling.amplitude
    if attention_factor is not None and not is_json(attention_factor, float):
        refuse(f"attention_factor is {attention_factor!r}, expected a number")
    return filled | {"mscale": 1.0, "mscale_all_dim": 0.0}, float(attention_factor or 0.0)


def write_rotary(mapping: RotaryMapping, rotary: Rotary | None) -> WrittenConfig:
    """Return the keys as versions before 5 of `transformers` wrote them, which later ones read too."""
    if rotary is None:
        return {}, ["model.rotary=None, expected rotary positions"]
    raw: dict[str, Any] = {"rope_theta": rotary.theta, "rope_scaling": None}
    if mapping.theta_key is not None:
        raw[mapping.theta_key] = rotary.theta
    inner, problems = {"rope_type": "default"}, []
    if mapping.fraction is not None:
        raw[mapping.fraction_key or PARTIAL_ROTARY_KEY] = rotary.fraction
        # Some versions read it in this place only.
        inner |= {"rope_theta": rotary.theta, PARTIAL_ROTARY_KEY: rotary.fraction}
    elif rotary.fraction != 1.0:
        problems.append(f"model.rotary.fraction={rotary.fraction}, expected 1 (whole heads are rotated)")
    if isinstance(mapping.interleaved, str):
        raw[mapping.interleaved] = rotary.interleaved
    elif rotary.interleaved != mapping.interleaved:
        layout = "halves are rotated against each other" if rotary.interleaved else "adjacent features are rotated"
        problems.append(f"model.rotary.interleaved={rotary.interleaved}, expected {mapping.interleaved} ({layout})")
    if isinstance(rotary.scaling, LongScaling):
        # The length is that of the extended model, whatever rows it is trained on.
        raw |= {
            "max_position_embeddings": rotary.scaling.extended_length,
            ORIGINAL_LENGTH: rotary.scaling.original_length,
        }
    scaled, wrong = _write_scaling(mapping, rotary)
    problems += wrong
    if rotary.query_growth and not (mapping.grows and _original_length(rotary) == rotary.query_length):
        problems.append(f"model.rotary.query_growth={rotary.query_growth}, expected 0")
    elif rotary.query_growth:
        scaled |= {QUERY_GROWTH_KEY: rotary.query_growth}
    if mapping.fraction is not None:
        raw["rope_parameters"] = {**inner, **scaled}
    if scaled:
        raw["rope_scaling"] = {**inner, **scaled}
    return raw, problems


def _original_length(rotary: Rotary) -> int:
    return getattr(rotary.scaling, "original_length", 0)


def _write_scaling(mapping: RotaryMapping, rotary: Rotary) -> WrittenConfig:
    scaling = rotary.scaling
    if scaling is None:
        return {}, []
    if isinstance(scaling, LongScaling):
        written = {"rope_type": LONG, ORIGINAL_LENGTH: scaling.original_length}
        written |= {theirs: list(getattr(scaling, ours)) for ours, theirs in LONG_KEYS.items()}
        written |= {"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}
        known = LONG in mapping.scalings
        return written, [] if known else [f"model.rotary.scaling={LONG}, expected one of {', '.join(mapping.scalings)}"]
    kind = next(name for name, (scaling_class, _) in SCALINGS.items() if scaling_class is type(scaling))
    names = SCALINGS[kind][1]
    problems: list[str] = []
    written = {"rope_type": kind, **{theirs: getattr(scaling, ours) for ours, theirs in names.items()}}
    if kind not in mapping.scalings:
        problems.append(f"model.rotary.scaling={scaling}, expected one of {', '.join(mapping.scalings)}")
    elif isinstance(scaling, YarnScaling):
        written, problems = _write_yarn(mapping, scaling, written)
    return written, problems


def _write_yarn(mapping: RotaryMapping, scaling: YarnScaling, written: dict[str, Any]) -> WrittenConfig:
    problems = []
    if scaling.truncate:
        del written["truncate"]
    if not scaling.mscale_all_dim and scaling.mscale != 1.0:
        problems.append(f"model.rotary.scaling.mscale={scaling.mscale}, expected 1.0 without mscale_all_dim")
    if not mapping.scores:
        del written["mscale"], written["mscale_all_dim"]
        if scaling.mscale_all_dim:
            problems.append(f"model.rotary.scaling.mscale_all_dim={scaling.mscale_all_dim}, expected 0")
        if scaling.attention_factor:
            written["attention_factor"] = scaling.attention_factor
    elif scaling.attention_factor:
        problems.append(f"model.rotary.scaling.attention_factor={scaling.attention_factor}, expected 0")
    return written, problems
