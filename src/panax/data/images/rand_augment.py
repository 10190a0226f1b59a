"""RandAugment: a few operations for each image, drawn from a list of fourteen, all implemented by Pillow."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from panax.core.errors import RecipeError
from panax.core.validation import Validated

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MAGNITUDE = 30
"""Maximum magnitude."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandAugment(Validated):
    """Random changes of each image by `operations` of fourteen, drawn with equal probability, all at one
    magnitude.

    Identity, shears and shifts along both sides, rotation, brightness, color, contrast, sharpness,
    posterizing, solarizing, automatic contrast and equalizing; directions are drawn at random. Pixels from
    outside are black.

    Source: RandAugment (arXiv:1909.13719), section 3, with the ranges of torchvision's implementation.

    Attributes:
        operations: Number of operations applied in sequence.
        magnitude: From 0, for hardly any change, to 30.
    """

    operations: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        if self.operations < 1 or not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise RecipeError(
                f"rand_augment has operations={self.operations}, magnitude={self.magnitude}; expected 1 or more, and "
                f"0 to {MAX_MAGNITUDE}; remove it for none"
            )

    def apply(self, image: "Image", generator: np.random.Generator) -> "Image":
        """Apply randomly drawn operations to an image."""
        names = list(OPERATIONS)
        for number in generator.integers(len(names), size=self.operations):
            image = self.apply_operation(image, names[number], sign=1 if generator.random() < 0.5 else -1)
        return image

    def apply_operation(self, image: "Image", name: str, sign: int = 1) -> "Image":
        """Apply one operation of `OPERATIONS` in one direction."""
        return OPERATIONS[name](image, self.magnitude / MAX_MAGNITUDE, sign)


def _affine(image: "Image", coefficients: tuple[float | int, ...]) -> "Image":
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


def _enhance(which: str) -> Callable[["Image", float, int], "Image"]:
    def change(image: "Image", level: float, sign: int) -> "Image":
        from PIL import ImageEnhance

        enhancer: Any = getattr(ImageEnhance, which)
        return enhancer(image).enhance(1.0 + sign * 0.9 * level)

    return change


def _rotated(image: "Image", level: float, sign: int) -> "Image":
    from PIL import Image

    return image.rotate(sign * 30.0 * level, Image.Resampling.BILINEAR)


def _of_ops(name: str, argument: Callable[[float], int] | None = None) -> Callable[["Image", float, int], "Image"]:
    def change(image: "Image", level: float, sign: int) -> "Image":
        from PIL import ImageOps

        function: Any = getattr(ImageOps, name)
        return function(image) if argument is None else function(image, argument(level))

    return change


_SHIFT = 150 / 331
"""Largest shift as a fraction of the side, as for AutoAugment's images."""

OPERATIONS: dict[str, Callable[["Image", float, int], "Image"]] = {
    "identity": lambda image, level, sign: image,
    "shear_x": lambda image, level, sign: _affine(image, (1, sign * 0.3 * level, 0, 0, 1, 0)),
    "shear_y": lambda image, level, sign: _affine(image, (1, 0, 0, sign * 0.3 * level, 1, 0)),
    "translate_x": lambda image, level, sign: _affine(image, (1, 0, sign * _SHIFT * level * image.width, 0, 1, 0)),
    "translate_y": lambda image, level, sign: _affine(image, (1, 0, 0, 0, 1, sign * _SHIFT * level * image.height)),
    "rotate": _rotated,
    "brightness": _enhance("Brightness"),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "sharpness": _enhance("Sharpness"),
    "posterize": _of_ops("posterize", lambda level: 8 - round(4 * level)),
    "solarize": _of_ops("solarize", lambda level: round(256 * (1 - level))),
    "autocontrast": _of_ops("autocontrast"),
    "equalize": _of_ops("equalize"),
}
"""Operations by name: functions of (image, magnitude in [0, 1], direction) that return the image."""
