"""Families of models: tables that map the keys of config.json and the tensors to Panax's."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...models import DecoderConfig
from .json_values import RefuseFn, WrittenConfig
from .pattern import Pattern
from .rotary_positions import RotaryMapping
from .sliding_windows import NO_WINDOWS, WindowMapping

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Activations, theirs to ours."""

HEAD_NAME = "lm_head.weight"
"""Name of the head in every family."""

CompleteFn = Callable[[Mapping[str, Any], RefuseFn], Mapping[str, Any]]
"""(config.json, refuse) to the completed one."""

ReadFn = Callable[[Mapping[str, Any], RefuseFn], dict[str, Any]]
"""(config.json, refuse) to fields of a configuration."""

WriteFn = Callable[[Any], WrittenConfig]
"""Writes keys of config.json from a configuration of the family's own class, with the reasons if they can't express it."""

_COMPUTED = {"kv_heads", "head_dim", "query_scale", "windows", "rotary", "rotaries", "feed_forward", "latent"}
"""Fields with a mapping of their own, or that follow from others."""

_FREE = {"vocab_multiple", "dropout"}
"""Fields that are not part of a release."""


class TensorSource(NamedTuple):
    """Source of a parameter in the files.

    Attributes:
        name: The tensor's name, with "{layer}" in place of the layer's number, and "{expert}" if each expert
            has a tensor.
        pattern: How its dimensions are composed.
        part: Index among the concatenated parameters, if the pattern contains a number.
    """

    name: str
    pattern: Pattern
    part: int = 0


VaryingFn = Callable[[Any], Mapping[str, TensorSource]]
"""A configuration of the family's own class to sources of parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEMapping:
    """The part of `MoE` that a family expresses.

    Attributes:
        always: Fields of `MoE` that have this value in every member; a field in neither table has its
            default.
        keys: Field to the key of config.json with the same meaning.
        absent: Default of `transformers` for a key that config.json lacks.
        other_names: Keys that some versions of `transformers` write instead.
        values: Key to pairs of values, theirs and ours, if they are not the same.
        shared: The key with the number of shared experts, each as wide as the others.
        dense: The key with the indices of layers that are dense.
        sparse: The key with a word for each layer, "dense" or "sparse".
        optional: True if members without a mixture are of the same family.
        bias: Source of the selection biases, which are not a parameter but model state.
    """

    always: Mapping[str, Any]
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: Mapping[str, tuple[tuple[Any, Any], ...]] = dataclasses.field(default_factory=dict)
    shared: str | None = None
    dense: str | None = None
    sparse: str | None = None
    optional: bool = False
    bias: TensorSource = TensorSource("model.layers.{layer}.mlp.gate.e_score_correction_bias", Pattern("router"))  # noqa: RUF009


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of `transformers`, and the part of `DecoderConfig` that it expresses.

    Attributes:
        title: Name of the models for readers.
        prefix: Prefix of all names but the head's; files of the bare model lack it.
        fields: Fields of `DecoderConfig` that have this value in every member. A field in neither this nor
            `keys` has its default, unless a mapping or `read` gives it.
        keys: Field to the key of config.json with the same meaning.
        absent: Default of `transformers` for a key that config.json lacks.
        only: Keys that change the computation, and their values that the decoder supports.
        activation_names: Ours to theirs, if it is not the one that most families write.
        rotary: How rotary positions are described; None if `fields` has the setting.
        windows: How sliding windows are described.
        mixture: Mapping of the mixture, for a family with experts.
        latent: True if the family has latent attention.
        also: Other values of `model_type` with the same meaning.
        predicts_more: True if files may have layers past the last, which predict further tokens: they are
            ignored.
        nested: Keys with values that are objects; "outer.inner" is a key inside one.
        token_ids: Token ids that `transformers` requires, if the tokenizer has none.
        preferred: False if a configuration is written as another family's that expresses it too.
        needed: Fields that may be None, but not in a member of this family.
        whole_heads: True if `transformers` rejects a member with a width that its heads don't divide, even
            with a `head_dim`.
        weights: Parameter name, with "layers." for a block's position in its stack, to its source.
        varying: Returns further sources, if a parameter's tensor has another name or form in some configurations.
        buffers: Tensors with names that match are not parameters; older files contain them.
        carried: Tensors with names that match are not computed, and are exported unchanged: layers that predict further
            tokens, under separate names.
        config: The class of settings that it expresses, `DecoderConfig` or one that extends it.
        complete: Fills in the keys that `transformers` derives from others, or rejects them.
        computed: Fields that `read` returns.
        read_keys: Keys that `read` or `complete` alone reads, which may be absent.
        read: (config.json, a function that rejects a key with a reason) to the fields that the tables lack.
        write: A configuration to the keys that the tables lack, and to the problems that config.json can't
            express.
    """

    model_type: str
    title: str
    architecture: str
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    weights: Mapping[str, TensorSource]
    prefix: str = "model."
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    config: type[DecoderConfig] = DecoderConfig
    complete: CompleteFn | None = None
    computed: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()
    read: ReadFn | None = None
    write: WriteFn | None = None
    activation_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rotary: RotaryMapping | None = None
    windows: WindowMapping = NO_WINDOWS
    mixture: MoEMapping | None = None
    latent: bool = False
    also: tuple[str, ...] = ()
    predicts_more: bool = False
    nested: tuple[str, ...] = ()
    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    preferred: bool = True
    needed: tuple[str, ...] = ()
    whole_heads: bool = False
    varying: VaryingFn | None = None
    buffers: re.Pattern = re.compile(r"\.rotary_emb\.inv_freq$")
    carried: re.Pattern | None = None

    @functools.cached_property
    def always(self) -> dict[str, Any]:
        """Fields that have this value in every member."""
        computed = {*_COMPUTED, *_FREE, *self.computed, *self.keys} - self.fields.keys()
        fixed = {field.name: field.default for field in dataclasses.fields(self.config) if field.name not in computed}
        without = {"rotary": self.rotary, "latent": self.latent or None, "feed_forward": self.mixture}
        unused = {name: getattr(DecoderConfig, name) for name, mapping in without.items() if mapping is None}
        return fixed | unused | dict(self.fields)

    @property
    def extra_keys(self) -> set[str]:
        """Keys that mappings read in addition to those in `keys`."""
        mixture, layers = self.mixture, None if self.rotary is None else self.rotary.layers
        found = {self.windows.length_key, *self.windows.keys, *self.read_keys} | (
            set() if layers is None else {*layers.keys}
        )
        if mixture is not None:
            found |= {*mixture.keys.values(), *mixture.absent, *mixture.other_names.values()}
        return found

    def sources(self, config: DecoderConfig) -> Mapping[str, TensorSource]:
        """Return the source of each parameter of a model with this configuration."""
        return self.weights if self.varying is None else {**self.weights, **self.varying(config)}

    def is_carried(self, name: str) -> bool:
        """Return True if a tensor is not computed, and is exported unchanged."""
        return self.carried is not None and self.carried.search(name) is not None

    @property
    def head(self) -> str:
        """Name of the output head's tensor; empty for a family without one, such as a vision transformer."""
        source = self.weights.get("head.table")
        return "" if source is None else source.name
