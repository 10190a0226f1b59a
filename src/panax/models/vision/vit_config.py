"""The vision transformer's config and published sizes."""

import dataclasses
from typing import Literal

from ...core.errors import RecipeError, suggest_name
from ...core.validation import Validated
from ...layers.feed_forward import Activation

Pooling = Literal["class_token", "mean"]

Size = Literal["Ti", "S", "B", "L", "H"]

_SIZES: dict[str, tuple[int, int, int]] = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
}
"""Width, layers and heads. B, L and H: "An Image is Worth 16x16 Words" (arXiv:2010.11929), table 1; Ti and S: DeiT
(arXiv:2012.12877), table 1."""

HALF = (0.5,)
"""Mean and standard deviation of each channel with which released vision transformers normalize images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig(Validated):
    """A vision transformer: patches as tokens, a pre-norm encoder, pooling and a classification head.

    Attributes:
        num_classes: Number of classes; 0 takes the data's.
        image_size: Height and width of an image, in pixels.
        channels: 3 for red, green and blue; 1 for gray.
        patch: Height and width of a patch, in pixels.
        embed: Width of the residual stream.
        ffn: Width of the feed-forward layer.
        pooling: Input of the head: a learned token that attends to all patches, or the mean over the patches.
        attention_bias: True if queries, keys and values have biases.
        dropout: Dropout rate of the embedding and of each sub-layer's output.
        mean: Mean of the pixels, from 0 (black) to 1 (white); one value for all channels, or one per channel.
        std: Standard deviation of the pixels, in the same form. Images of bytes are normalized to
            `(pixel / 255 - mean) / std`; images of floats are used unchanged.
    """

    num_classes: int = 0
    image_size: int = 224
    channels: int = 3
    patch: int = 16
    embed: int = 768
    num_layers: int = 12
    heads: int = 12
    ffn: int = 3072
    pooling: Pooling = "class_token"
    activation: Activation = "gelu"
    norm_epsilon: float = 1e-6
    attention_bias: bool = True
    dropout: float = 0.0
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF

    def __post_init__(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise RecipeError(message)

        for name in ("image_size", "channels", "patch", "embed", "num_layers", "heads", "ffn"):
            require(getattr(self, name) > 0, f"model.{name}={getattr(self, name)}; expected a positive number")
        require(self.norm_epsilon > 0.0, f"model.norm_epsilon={self.norm_epsilon}; expected a small positive number")
        require(
            self.num_classes >= 0,
            f"model.num_classes={self.num_classes}; expected a positive number, or 0 for the data's",
        )
        require(
            self.image_size % self.patch == 0,
            f"model.image_size={self.image_size} is not divisible by patch={self.patch}; use a patch that divides it",
        )
        require(
            self.embed % self.heads == 0,
            f"model.embed={self.embed} is not divisible by heads={self.heads}; change one",
        )
        require(
            self.pooling in ("class_token", "mean"),
            f"model.pooling={self.pooling!r}; expected class_token or mean",
        )
        require(0.0 <= self.dropout < 1.0, f"model.dropout={self.dropout}; expected a rate in [0, 1)")
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(
                len(values) in (1, self.channels),
                f"model.{name}={values}; expected one number for all channels, or {self.channels}, one for each",
            )
        require(min(self.std) > 0, f"model.std={self.std}; expected positive numbers: pixels are divided by them")

    @classmethod
    def of_size(
        cls,
        size: Size | str,
        *,
        patch: int = 16,
        image_size: int = 224,
        num_classes: int = 1000,
        pooling: Pooling = "class_token",
    ) -> "VitConfig":
        """Return the config of a published size.

        Raises:
            RecipeError: The size does not exist.

        >>> VitConfig.of_size("B").num_tokens, VitConfig.of_size("H", patch=14, pooling="mean").num_tokens
        (197, 256)
        """
        if size not in _SIZES:
            raise RecipeError(f"size={size!r} is not a vision transformer's; {suggest_name(size, _SIZES)}")
        embed, num_layers, heads = _SIZES[size]
        return cls(
            num_classes=num_classes,
            image_size=image_size,
            patch=patch,
            embed=embed,
            num_layers=num_layers,
            heads=heads,
            ffn=4 * embed,
            pooling=pooling,
        )

    @property
    def num_patches(self) -> int:
        """Number of patches of an image.

        >>> VitConfig(image_size=224, patch=16).num_patches
        196
        """
        return (self.image_size // self.patch) ** 2

    @property
    def has_class_token(self) -> bool:
        """True if a learned token is pooled, instead of the mean over the patches."""
        return self.pooling == "class_token"

    @property
    def num_tokens(self) -> int:
        """Number of positions in the encoder: the patches, plus the class token if pooled from it."""
        return self.num_patches + self.has_class_token
