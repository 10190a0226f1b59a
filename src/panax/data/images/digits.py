"""Real images that are part of a library: scikit-learn's handwritten digits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ...core.validation import Validated
from ..formats.fields import missing_library_error
from ..loading.examples import Arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits(Validated):
    """1,797 handwritten digits, gray, 8 by 8 pixels, as uint8 `image` (batch, 8, 8, 1) and `label` 0 to 9.
    Needs scikit-learn.

    Nothing is downloaded: the images are a part of scikit-learn.

    Source: the test set of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998).
    """

    def open(self, root: Path, max_bad_records: int) -> Arrays:
        """Read the images from the library.

        Raises:
            DataError: The library is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise missing_library_error("scikit-learn", "its digits", "vision") from error
        found: Any = load_digits()
        # 17 gray levels, 0 to 16.
        image = np.rint(found.images[..., None] * (255 / 16)).astype(np.uint8)
        return Arrays({"image": image, "label": found.target.astype(np.int32)}, num_classes=10)
