"""Mixing of two images: their weighted mean, or a part of one in the other, with labels in the same
shares."""

import dataclasses

import numpy as np
import numpy.typing as npt

from panax.core.errors import RecipeError
from panax.core.validation import Validated

MIXED_LABEL, MIX = "label_mixed", "mix"
"""The added leaves: the other image's label, and the share of the first image."""

_MIX = 0x6D6978


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing(Validated):
    """Mixing of each image with its neighbor in the shuffled batch: by mixup, by CutMix, or by one of the
    two, drawn for each image.

    Sources: mixup (arXiv:1710.09412); CutMix (arXiv:1905.04899).

    Attributes:
        mixup: Both parameters of the Beta distribution of the shares of a weighted mean; 0 for no mixup.
        cutmix: Both parameters of the Beta distribution of the shares of the area; 0 for no CutMix.
        probability: Probability that an image is mixed. The others have the share 1.
    """

    mixup: float = 0.8
    cutmix: float = 0.0
    probability: float = 1.0

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0 or max(self.mixup, self.cutmix) == 0:
            raise RecipeError(
                f"mixing has mixup={self.mixup}, cutmix={self.cutmix}; expected one of them above 0; remove mixing "
                f"for none"
            )
        if not 0 <= self.probability <= 1:
            raise RecipeError(f"mixing.probability={self.probability}; expected a share of the images, in [0, 1]")

    def apply(
        self, image: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], generator: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], float]:
        """Mix an image with another one of its shape (height, width, channel); return the result and the share of
        the first."""
        if generator.random() >= self.probability:
            return image, 1.0
        both = self.mixup > 0 and self.cutmix > 0
        cuts = generator.random() < 0.5 if both else self.cutmix > 0
        if cuts:
            return _paste(image, other, float(generator.beta(self.cutmix, self.cutmix)), generator)
        share = float(generator.beta(self.mixup, self.mixup))
        # Rounded to bytes: an error of at most 1/512 of the range, and a quarter of the data to transfer.
        return np.rint(share * image.astype(np.float32) + (1 - share) * other).astype(np.uint8), share


def _paste(
    image: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], share: float, generator: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], float]:
    """Paste a box of the other image, with a random center and an area of `1 - share` before clipping at the
    edges."""
    height, width = image.shape[:2]
    side = np.sqrt(1 - share)
    spans = []
    for size in (height, width):
        center, length = int(generator.integers(size)), round(size * side)
        first = center - length // 2
        spans.append(slice(max(first, 0), min(first + length, size)))
    image = image.copy()
    image[spans[0], spans[1]] = other[spans[0], spans[1]]
    area = (spans[0].stop - spans[0].start) * (spans[1].stop - spans[1].start)
    return image, 1.0 - area / (height * width)


def mix_partners(rows: npt.NDArray[np.int64], batch_size: int) -> npt.NDArray[np.int64]:
    """Return the row that each row of a batch is mixed with: its neighbor, so that most pairs are on one
    process.

    >>> mix_partners(np.arange(5), 5).tolist()
    [1, 0, 3, 2, 3]
    """
    other = rows ^ 1
    return np.where(other < batch_size, other, np.maximum(rows - 1, 0))


def make_generator(seed: int, position: int) -> np.random.Generator:
    """Return the random generator for mixing at a position in the endless order."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, _MIX], counter=[0, 0, 0, position]))
