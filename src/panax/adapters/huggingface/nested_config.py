"""Nested fields of `DecoderConfig`: mixture, latent and rotary, from config.json and into it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ...layers import Rotary, RotaryScaling, YarnScaling
from ...layers.moe.moe_config import MoE
from ...models import DecoderConfig
from .family import LATENT_KEYS, LLAMA3_KEYS, YARN_KEYS, Family, MoEMapping

RefuseFn = Callable[[str, str], Any]
"""Function that raises an error about a key, with the reason."""

WrittenConfig = tuple[dict[str, Any], list[str]]
"""A part of config.json, and the problems that it can't express."""

TRAINING_ONLY = ("balance", "balance_scope", "z_loss", "jitter", "capacity", "buffer", "bias_rate")
"""Fields of `MoE` that change no logits of a model that drops no token; like dropout, not part of a
release."""

ORIGINAL_LENGTH = LLAMA3_KEYS["original_length"]
"""Key of the length at which a model with scaled positions was first trained."""

PARTIAL_ROTARY_KEY = "partial_rotary_factor"
"""Key of the rotated share of a head; families with it list the default of `transformers`."""

DEFAULT_THETA = 10_000.0
"""Default of `transformers` for the base of the wavelengths."""


def read_mixture(mixture: MoEMapping, raw: Mapping[str, Any], num_layers: int, refuse: RefuseFn) -> dict[str, Any]:
    """Return the fields of the mixture that config.json describes."""
    fields = dict(mixture.always)
    for field, key in mixture.keys.items():
        named = mixture.other_names.get(key, key) if key not in raw else key
        kind = type(getattr(MoE(), field))
        if key in mixture.values:
            fields[field] = _translated(raw, key, mixture, refuse)
        else:
            fields[field] = kind(_checked(raw, named, mixture.absent[key], kind, refuse))
    if mixture.shared is not None:
        fields["shared"] = _checked(raw, mixture.shared, mixture.absent[mixture.shared], int, refuse) * fields["ffn"]
    if mixture.dense is not None:
        dense = raw.get(mixture.dense) or []
        if dense != list(range(len(dense))) or len(dense) > num_layers:
            refuse(mixture.dense, "expected the first layers only: 0, 1, 2, ...")
        fields["first_dense"] = len(dense)
    if fields["groups"] == 1:
        fields["active_groups"] = 1
    return fields


def _translated(raw: Mapping[str, Any], key: str, mixture: MoEMapping, refuse: RefuseFn) -> Any:
    """Return our value for theirs."""
    value = raw.get(key, mixture.absent[key])
    for theirs, ours in mixture.values[key]:
        if value == theirs and not isinstance(value, bool):
            return ours
    return refuse(key, f"expected one of {', '.join(repr(theirs) for theirs, _ in mixture.values[key])}")


def write_mixture(mixture: MoEMapping, config: DecoderConfig) -> WrittenConfig:
    """Return the keys from which `read_mixture` reads the same mixture."""
    moe = config.feed_forward
    if moe is None:
        return {}, ["model.feed_forward=None, expected a mixture"]
    has = complete_moe_fields(config)
    raw = {key: has[field] for field, key in mixture.keys.items()}
    raw |= {key: next(a for a, b in pairs if b == raw[key]) for key, pairs in mixture.values.items()}
    expected = {**mixture.always, "choice": "token", "capacity": None, "gated": True}
    if "ffn" not in mixture.keys:
        expected["ffn"] = config.ffn
    if mixture.dense is not None:
        raw[mixture.dense] = list(range(moe.first_dense))
    elif "first_dense" not in mixture.keys:
        expected["first_dense"] = 0
    problems = [
        f"model.feed_forward.{name}={has[name]!r}, expected {value!r}"
        for name, value in expected.items()
        if has[name] != value
    ]
    if mixture.shared is not None:
        raw[mixture.shared], rest = divmod(moe.shared, has["ffn"])
        if rest or not moe.shared:
            problems.append(f"model.feed_forward.shared={moe.shared}, expected a multiple of an expert's {has['ffn']}")
    return raw, problems


def complete_moe_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a decoder's mixture, with those that it leaves to the decoder filled in."""
    moe = config.feed_forward
    assert moe is not None
    gated = config.gated if moe.gated is None else moe.gated
    fields = {**vars(moe), "ffn": moe.ffn or config.ffn, "gated": gated}
    return fields | ({"active_groups": 1, "group_score": "best_two"} if moe.groups == 1 else {})


def read_latent(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Return the fields of `Latent`; all are needed."""
    return {
        field: _checked(raw, key, None, int, refuse, none=0 if field == "q_rank" else None)
        for field, key in LATENT_KEYS.items()
    }


def write_latent(config: DecoderConfig) -> WrittenConfig:
    """Return the keys from which `read_latent` reads the same fields."""
    if config.latent is None:
        return {}, ["model.latent=None, expected latent attention"]
    raw = {key: getattr(config.latent, field) for field, key in LATENT_KEYS.items()}
    raw[LATENT_KEYS["q_rank"]] = config.latent.q_rank or None
    return raw | {"num_key_value_heads": config.heads}, []


def read_rotary(family: Family, raw: Mapping[str, Any], max_length: int, refuse: RefuseFn) -> Rotary:
    """Read rotary positions from `rope_parameters`, or from `rope_theta` and `rope_scaling`, which versions
    before 5 wrote."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    values = raw.get(key) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        refuse(key, "expected one set of values for all layers")
    theta = family.absent.get("rope_theta", DEFAULT_THETA)
    outer = {"rope_theta": theta, ORIGINAL_LENGTH: max_length, **raw}
    # Of two original lengths `transformers` 5 takes the outer one; of all other values the inner one.
    values = {**outer, **values, **({ORIGINAL_LENGTH: raw[ORIGINAL_LENGTH]} if ORIGINAL_LENGTH in raw else {})}
    family_theta = None if family.theta is None else raw.get(family.theta)
    if family.theta is not None and family_theta is not None:
        said = (raw.get(key) or {}).get("rope_theta", raw.get("rope_theta", family_theta))
        if said != family_theta:
            refuse(
                family.theta,
                f"but the model's positions have rope_theta={said!r}. The release was trained with the first, and "
                f"`transformers` 5 computes with the second; make them equal",
            )
        values["rope_theta"] = family_theta
    partial = family.absent.get(PARTIAL_ROTARY_KEY)
    if partial is not None:
        # Such a family has it in this place only.
        fraction = (raw.get(key) or {}).get(PARTIAL_ROTARY_KEY, partial)
    elif (fraction := values.get(PARTIAL_ROTARY_KEY, 1.0)) != 1.0:
        refuse(key, f"{PARTIAL_ROTARY_KEY}={fraction!r}; it turns whole heads")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in family.scalings:
        refuse(key, f"rope_type={kind!r} is not one of {', '.join(family.scalings)}")
    if kind == "yarn":
        values = _of_yarn(values, lambda why: refuse(key, why))
    names = {"default": {}, "llama3": LLAMA3_KEYS, "yarn": YARN_KEYS}[kind]
    values[PARTIAL_ROTARY_KEY] = fraction
    for name in ("rope_theta", PARTIAL_ROTARY_KEY, *names.values()):
        if not is_json(values.get(name), float):
            refuse(key, f"{name} is {values.get(name)!r}, expected a number")
    fields: dict[str, Any] = {ours: float(values[theirs]) for ours, theirs in names.items()}
    interleaved = family.latent and bool(raw.get("rope_interleave", True))
    try:
        scaling = None
        if kind != "default":
            fields["original_length"] = int(fields["original_length"])
            scaling = RotaryScaling(**fields) if kind == "llama3" else YarnScaling(**fields)
        theta = float(values["rope_theta"])
        return Rotary(theta=theta, scaling=scaling, interleaved=interleaved, fraction=float(fraction))
    except RecipeError as error:
        return refuse(key, str(error))


def _of_yarn(values: dict[str, Any], refuse: Callable[[str], Any]) -> dict[str, Any]:
    """Fill in the defaults of `transformers` for missing values."""
    if values.get("attention_factor") is not None or not values.get("truncate", True):
        refuse("attention_factor and truncate=False of yarn are unknown here")
    all_dim = values.get("mscale_all_dim") or 0.0
    if all_dim and not values.get("mscale"):
        refuse(f"yarn with mscale_all_dim={all_dim!r} and no mscale is unknown here")
    return {
        **values,
        "beta_fast": values.get("beta_fast") or 32,
        "beta_slow": values.get("beta_slow") or 1,
        "mscale": values["mscale"] if all_dim else 1.0,
        "mscale_all_dim": all_dim,
    }


def write_rotary(family: Family, rotary: Rotary | None) -> WrittenConfig:
    """Return the keys as versions before 5 of `transformers` wrote them, which later ones read too."""
    if "rotary" in family.always:
        return {}, []
    if rotary is None:
        return {}, ["model.rotary=None, expected rotary positions"]
    raw: dict[str, Any] = {"rope_theta": rotary.theta, "rope_scaling": None}
    if family.theta is not None:
        raw[family.theta] = rotary.theta
    problems = []
    if PARTIAL_ROTARY_KEY in family.absent:
        raw["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": rotary.theta,
            PARTIAL_ROTARY_KEY: rotary.fraction,
        }
    elif rotary.fraction != 1.0:
        problems.append(f"model.rotary.fraction={rotary.fraction}, expected 1 (whole heads are rotated)")
    if family.latent:
        raw["rope_interleave"] = rotary.interleaved
    elif rotary.interleaved:
        problems.append("model.rotary.interleaved=True, expected False (halves are rotated against each other)")
    scaling = rotary.scaling
    if scaling is not None:
        kind, names = ("yarn", YARN_KEYS) if isinstance(scaling, YarnScaling) else ("llama3", LLAMA3_KEYS)
        raw["rope_scaling"] = {"rope_type": kind, **{theirs: getattr(scaling, ours) for ours, theirs in names.items()}}
        if kind not in family.scalings:
            problems.append(f"model.rotary.scaling={scaling}, expected one of {', '.join(family.scalings)}")
        elif isinstance(scaling, YarnScaling) and not scaling.mscale_all_dim and scaling.mscale != 1.0:
            problems.append(f"model.rotary.scaling.mscale={scaling.mscale}, expected 1.0 without mscale_all_dim")
    return raw, problems


def _checked(raw: Mapping[str, Any], key: str, absent: Any, kind: type, refuse: RefuseFn, none: Any = None) -> Any:
    value = raw.get(key, absent)
    value = none if value is None else value
    if not is_json(value, kind):
        refuse(key, f"expected a value of type {kind.__name__}")
    return value


def is_json(value: Any, kind: type) -> bool:
    """Return True if a JSON value is of this type: an int is a float too, but a bool is not a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def flatten_keys(raw: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """Move the values inside the objects at these keys to the top level, under dotted names.

    >>> flatten_keys({"a": 1, "b": {"c": {"d": 2}}}, ["b"])
    {'a': 1, 'b.c.d': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if key in nested and isinstance(value, dict):
            inside = flatten_keys(value, [name for name, inner in value.items() if isinstance(inner, dict)])
            flat |= {f"{key}.{name}": inner for name, inner in inside.items()}
        else:
            flat[key] = value
    return flat


def unflatten_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten_keys`.

    >>> unflatten_keys({"a": 1, "b.c.d": 2})
    {'a': 1, 'b': {'c': {'d': 2}}}
    """
    raw: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, name = key.split(".")
        inside = raw
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[name] = value
    return raw
