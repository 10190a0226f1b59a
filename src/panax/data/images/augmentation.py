"""Random changes of training images: crop, flip, RandAugment, and mixing with another image.

All randomness depends on (seed, epoch, index of the example), and for mixing on (seed, position in the
order): a resumed run, and any number of processes, see the same images.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from panax.core.errors import RecipeError
from panax.core.validation import Validated

from .mixup import Mixing
from .rand_augment import RandAugment

if TYPE_CHECKING:
    from PIL.Image import Image

Generators = Callable[[int], np.random.Generator]
"""Map from a row of the batch that is read to the random generator of its changes."""

_TRIES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomCrop(Validated):
    """Random crop of the image, scaled to the model's size.

    Source: Going deeper with convolutions (arXiv:1409.4842), section 6.

    Attributes:
        area: Minimum and maximum share of the image's area.
        aspect: Minimum and maximum ratio of the crop's width to its height, drawn uniformly in its logarithm.
    """

    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise RecipeError(f"crop.area={self.area}; expected the least and the largest part, in (0, 1]")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise RecipeError(f"crop.aspect={self.aspect}; expected the least and the largest ratio, above 0")

    def sample_box(self, width: int, height: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw a crop of an image of this size; return its left, upper, right and lower edges."""
        for _ in range(_TRIES):
            area = width * height * generator.uniform(*self.area)
            aspect = math.exp(generator.uniform(math.log(self.aspect[0]), math.log(self.aspect[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, upper = int(generator.integers(width - w + 1)), int(generator.integers(height - h + 1))
                return left, upper, left + w, upper + h
        # A very long image has no crop of this area and ratio: take the largest centered crop with the ratio.
        w = min(width, round(height * self.aspect[1]))
        h = min(height, round(width / self.aspect[0]))
        left, upper = (width - w) // 2, (height - h) // 2
        return left, upper, left + w, upper + h

    def apply(self, image: "Image", size: tuple[int, int], generator: np.random.Generator) -> "Image":
        from PIL import Image

        return image.resize(size, Image.Resampling.BILINEAR, self.sample_box(*image.size, generator))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedCrop(Validated):
    """Random shift of the image by up to `padding` pixels along each side; pixels from outside are black."""

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise RecipeError(f"crop.padding={self.padding}; expected 1 or more; remove crop for none")

    def apply(self, image: "Image", generator: np.random.Generator) -> "Image":
        left, upper = (int(n) - self.padding for n in generator.integers(2 * self.padding + 1, size=2))
        return image.crop((left, upper, left + image.width, upper + image.height))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation(Validated):
    """Random changes of each training image, in this order. Needs Pillow; the leaf `image` holds bytes.

    Attributes:
        crop: A random crop, scaled (`RandomCrop`), or a random shift (`PaddedCrop`); None: the image as
            decoded.
        flip: Probability of a horizontal flip.
        rand_augment: Operations drawn from a list; None for none.
        mixing: Mixing of each image with another one of its batch, and of their labels; None for none.
    """

    crop: RandomCrop | PaddedCrop | None = RandomCrop()
    flip: float = 0.5
    rand_augment: RandAugment | None = None
    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise RecipeError(f"augmentation.flip={self.flip}; expected a share of the images, in [0, 1]")
        if self.crop is None and not self.flip and self.rand_augment is None and self.mixing is None:
            raise RecipeError("the augmentation changes nothing; set one of its fields, or remove it")

    @property
    def has_per_image_changes(self) -> bool:
        """Return True if images are changed one by one, in addition to mixing."""
        return self.crop is not None or self.flip > 0 or self.rand_augment is not None

    @property
    def min_side_fraction(self) -> float:
        """Return the minimum share of an image's side that is scaled to the model's size."""
        return math.sqrt(self.crop.area[0]) if isinstance(self.crop, RandomCrop) else 1.0

    def apply(
        self,
        image: "Image",
        size: tuple[int, int],
        resize: Callable[["Image"], "Image"],
        generator: np.random.Generator,
    ) -> "Image":
        """Return one image as the model's input.

        Args:
            image: The decoded image, of any size.
            size: Target width and height.
            resize: Resizes the image to `size` if it is not cropped.
        """
        from PIL import ImageOps

        if isinstance(self.crop, RandomCrop):
            image = self.crop.apply(image, size, generator)
        else:
            image = resize(image)
            image = image if self.crop is None else self.crop.apply(image, generator)
        if generator.random() < self.flip:
            image = ImageOps.mirror(image)
        return image if self.rand_augment is None else self.rand_augment.apply(image, generator)
