"""Widths of the narrower decoder on which hyperparameters were tuned (muP)."""

import dataclasses
from typing import TYPE_CHECKING

from ...core.errors import RecipeError
from ...core.validation import Validated

if TYPE_CHECKING:
    from .config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseWidth(Validated):
    """Widths of a muP base model that otherwise equals the trained decoder; 0 keeps the decoder's. See
    `train.mup`.

    >>> from panax.models import DecoderConfig
    >>> BaseWidth(embed=64, heads=2, ffn=256).of(DecoderConfig(embed=256, heads=8, ffn=1024)).embed
    64
    """

    embed: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise RecipeError(
                    f"task.base.{field.name}={getattr(self, field.name)}; expected a width, or 0 for the model's"
                )

    def of(self, model: "DecoderConfig") -> "DecoderConfig":
        """Return `model` with these widths."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(model, **{name: size for name, size in given.items() if size})

    def check(self, model: "DecoderConfig") -> None:
        """Check that muP has a rule for every parameter of `model`.

        Raises:
            RecipeError: The base has the model's widths, or the model has a feature without a muP rule.
        """
        narrow = self.of(model)
        if narrow == model:
            raise RecipeError(
                "task.base has the model's widths, so it changes nothing; pass narrower ones, or remove it"
            )
        mixers = {kind.mixer for kind in model.kinds} - {"attention"}
        if mixers:
            raise RecipeError(f"task.base: muP has no rule for {', '.join(sorted(mixers))}; remove task.base")
        if model.tied:
            raise RecipeError(
                "task.base: a table that is embedding and head has two rules; set task.model.tied to False, or remove "
                "task.base"
            )
        if model.embed_scale:
            raise RecipeError(
                "task.base: task.model.embed_scale grows embeddings with the width, which muP does not; set it to False, or "
                "remove task.base"
            )
        if model.head_sizes:
            raise RecipeError("task.base: muP has no rule for heads of several widths; remove head_sizes or task.base")
        if model.head_size != narrow.head_size:
            scale = model.head_size**2 / narrow.head_size
            if model.query_scale != scale:
                raise RecipeError(
                    f"task.base: heads grow from {narrow.head_size} to {model.head_size}, and scores are to fall with the width "
                    f"of a head; set task.model.query_scale to {scale:g}, or give both models the same head_dim"
                )
