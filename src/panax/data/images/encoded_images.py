"""Encoded images as examples: read by index, decoded by Pillow in threads, all of one size."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes
from panax.core.validation import Validated

from ..files.bounds import describe_oversize
from ..files.files import BadRecordError, fingerprint
from ..formats.fields import missing_library_error
from ..loading.examples import BadRecordLog, hash_integers, hash_names
from ..tables.categories import parse_number
from ..text.corpus import BadRecord
from .augmentation import Augmentation, Generators

if TYPE_CHECKING:
    from PIL.Image import Image

_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "La", "RGBa")
_MODES = {1: "L", 3: "RGB"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats to decode, by Pillow's names. Some of its other decoders start programs (EPS starts
Ghostscript)."""

_PIXELS, _MOST_PIXELS = 89_478_485, 178_956_970
"""Number of pixels from which Pillow warns, and from which it refuses."""

_MOST_CLASSES = 10**6
"""Labels beyond this are not classes that could be listed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDecoder(Validated):
    """Conversion of images to arrays. Needs Pillow (`pip install 'panax-jax[vision]'`).

    Attributes:
        size: Height and width of the array, in pixels.
        fit: "crop": scaled to cover the square, with the excess cut off on both sides; "pad": scaled to fit
            into it, with a black border; "stretch": both sides scaled independently.
        channels: 3 for red, green and blue; 1 for gray.
        max_pixels: An image with more pixels is a bad record and not decoded; at most Pillow's limit,
            178,956,970.
        classes: Class names in the order of the label indices: those of the data that a model was trained on.
            A label that is not among them is an error. (): the labels that occur.
    """

    size: int = 224
    fit: Literal["crop", "pad", "stretch"] = "crop"
    channels: Literal[1, 3] = 3
    max_pixels: int = _PIXELS
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RecipeError(f"size={self.size}; expected at least 1 pixel")
        if self.fit not in ("crop", "pad", "stretch") or self.channels not in _MODES:
            raise RecipeError(
                f"fit={self.fit!r}, channels={self.channels}; expected crop, pad or stretch, and 1 or 3 channels"
            )

        if not 0 < self.max_pixels <= _MOST_PIXELS:
            raise RecipeError(
                f"max_pixels={self.max_pixels}; expected 1 to {_MOST_PIXELS}, the most that Pillow decodes"
            )
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise RecipeError(f"classes names {twice!r} twice; expected each class once, in the order of its number")

    def decode(self, data: bytes, where: str) -> npt.NDArray[np.uint8]:
        """Decode an image to an array (height, width, channel).

        Raises:
            BadRecordError: Pillow can't read the image, it is truncated, or it has more than 8 bits per channel.
        """
        return self.to_array(self.resize(self.open_image(data, where)))

    def open_image(self, data: bytes, where: str, min_side_fraction: float = 1.0) -> "Image":
        """Decode an image at its original size; a JPEG no larger than needed.

        Args:
            min_side_fraction: Minimum share of a side that will be scaled to `size`.

        Raises:
            BadRecordError: As `decode`.
        """
        from PIL import Image, UnidentifiedImageError

        min_side = math.ceil(self.size / min_side_fraction)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                pixels = image.width * image.height
                if pixels > self.max_pixels:
                    size = describe_oversize(pixels, self.max_pixels, "max_pixels", unit="pixels")
                    raise BadRecordError(where, f"an image of {image.width} by {image.height}, {size}")
                image.draft(_MODES[self.channels], (min_side, min_side))  # a JPEG is downscaled while it is decoded
                image.load()
                if image.mode not in _EIGHT_BITS:
                    raise BadRecordError(where, f"an image of mode {image.mode!r}; expected 8 bits a channel")
                return _upright(image).convert(_MODES[self.channels])
        except BadRecordError:
            raise
        except UnidentifiedImageError:
            formats = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            raise BadRecordError(
                where, f"no image that can be decoded; expected {formats}: convert it, or remove it"
            ) from None
        except Exception as error:  # Pillow's decoders raise arbitrary errors for damaged files
            reason = str(error) or type(error).__name__
            raise BadRecordError(where, f"no image that can be decoded ({reason}); repair it, or remove it") from None

    def resize(self, image: "Image") -> "Image":
        """Resize the image to `size` according to `fit`."""
        from PIL import Image, ImageOps

        square, bilinear = (self.size, self.size), Image.Resampling.BILINEAR
        if image.size == square:
            return image
        match self.fit:
            case "crop":
                return ImageOps.fit(image, square, bilinear)
            case "pad":
                return ImageOps.pad(image, square, bilinear)
            case _:
                return image.resize(square, bilinear)

    def to_array(self, image: "Image") -> npt.NDArray[np.uint8]:
        return np.asarray(image, np.uint8).reshape(self.size, self.size, self.channels)


def _upright(image: "Image") -> "Image":
    """Rotate an image according to its EXIF orientation, as every viewer does."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a camera's metadata may be damaged although the image is not
        return image


@runtime_checkable
class EncodedImages(Protocol):
    """Encoded images by index; readable from several threads.

    Attributes:
        labels: The label of each image; None if they have none.
        fingerprint: A hash that changes when the images do.
    """

    labels: npt.NDArray[np.int32] | None
    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, number: int) -> bytes: ...

    def name(self, number: int) -> str:
        """Return an image's name for messages; independent of images added later."""
        ...


class Images:
    """Images as examples: `image`, uint8 (batch, height, width, channel), and `label`, int32 (batch), if
    there are labels.

    An image that can't be decoded is a bad record, replaced by the next image that can be, the same in each epoch.

    Attributes:
        classes: Class names by label index.
        notes: Notes for the user on the files.
    """

    owns_memory = True  # of batches read: nothing else writes to them

    def __init__(
        self,
        encoded: EncodedImages,
        decoding: ImageDecoder,
        skipped: BadRecordLog,
        *,
        classes: Sequence[str] = (),
        numbers: npt.NDArray[np.int64] | None = None,
        notes: Sequence[str] = (),
        label_map: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Wrap encoded images.

        Args:
            classes: Class names by label index.
            numbers: Indices into `encoded`; None: all.
            label_map: Map from a label of `encoded` to its index in `classes`; None: the identity.
        """
        try:
            import PIL.Image
        except ImportError as error:
            raise missing_library_error("Pillow", "decoding images", "vision") from error
        PIL.Image.init()  # loads its plug-ins once, not in each thread
        self.classes = tuple(classes)
        self.notes = tuple(notes)
        self._label_map = label_map
        self._encoded = encoded
        self._decoding = decoding
        self._skipped = skipped
        self._numbers = np.arange(len(encoded)) if numbers is None else numbers
        self.num_examples = len(self._numbers)
        if not self.num_examples:
            raise DataError("there is no image; expected at least one")
        self.axes: Mapping[str, Axes] = {"image": ("batch", None, None, None)}
        if encoded.labels is not None:
            self.axes = {**self.axes, "label": ("batch",)}
        # Size limits do not change the images' content.
        named = {field.name for field in dataclasses.fields(decoding)} - {"max_pixels", "max_record_bytes", "classes"}
        settings = [getattr(decoding, field.name) for field in dataclasses.fields(decoding) if field.name in named]
        parts = (encoded.fingerprint, *settings, hash_integers(self._numbers))
        if label_map is not None:
            parts = (*parts, *self.classes)
        self.fingerprint = fingerprint("images", *parts)
        self._bad: set[int] = set()

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        """Decode some of the images.

        Raises:
            DataError: There are more bad records than the limit, or no image can be decoded.
        """
        return self._read(numbers, lambda row, data, where: self._decoding.decode(data, where))

    def read_augmented(
        self, numbers: npt.NDArray[np.int64], augmentation: Augmentation, generators: Generators
    ) -> dict[str, np.ndarray]:
        """Decode some of the images and augment each.

        Args:
            generators: Map from a row of the batch that is read to its random generator.

        Raises:
            DataError: As `read`.
        """
        decoding = self._decoding
        size = (decoding.size, decoding.size)

        def one(row: int, data: bytes, where: str) -> np.ndarray:
            image = decoding.open_image(data, where, augmentation.min_side_fraction)
            return decoding.to_array(augmentation.apply(image, size, decoding.resize, generators(row)))

        return self._read(numbers, one)

    def _read(
        self, numbers: npt.NDArray[np.int64], decode: Callable[[int, bytes, str], np.ndarray]
    ) -> dict[str, np.ndarray]:
        decoding = self._decoding
        images = np.empty((len(numbers), decoding.size, decoding.size, decoding.channels), np.uint8)
        labels = np.zeros(len(numbers), np.int32)

        def one(row: int) -> None:
            images[row], labels[row] = self._example(int(numbers[row]), lambda data, where: decode(row, data, where))

        for _ in self._pool.map(one, range(len(numbers))):
            pass
        return {"image": images} | ({} if self._encoded.labels is None else {"label": labels})

    @property
    def num_classes(self) -> int | None:
        """Return the number of classes; None if unknown."""
        return len(self.classes) or None

    def keys(self) -> npt.NDArray[np.uint64]:
        return hash_names(map(self._encoded.name, self._numbers.tolist()))

    def take(self, numbers: npt.NDArray[np.int64]) -> "Images":
        chosen = self._numbers[numbers]
        return self._with(numbers=chosen)

    def _with(self, **changed: Any) -> "Images":
        fields = {"classes": self.classes, "numbers": self._numbers, "notes": self.notes, "label_map": self._label_map}
        return Images(self._encoded, self._decoding, self._skipped, **{**fields, **changed})

    def with_classes(self, classes: Sequence[str], origin: str) -> "Images":
        """Return the same images with labels indexed by `classes`, which may contain more than occur here.

        Args:
            origin: Origin of the classes, for messages.

        Raises:
            DataError: A label that occurs here is not among `classes`, or the class names of the labels are
                unknown.
        """
        if self._encoded.labels is None or tuple(classes) == self.classes:
            return self
        if not self.classes:
            raise DataError(f"the meaning of these images' labels is unknown; expected {origin}: {_listed(classes)}")
        index_by_name = {name: number for number, name in enumerate(classes)}
        labels = self._encoded.labels[self._numbers]
        unique_labels = np.unique(labels if self._label_map is None else self._label_map[labels]).tolist()
        unknown = [self.classes[label] for label in unique_labels if self.classes[label] not in index_by_name]
        if unknown:
            raise DataError(
                f"the images have the classes {_listed(self.classes)}, of which {_listed(unknown)} "
                f"{'is' if len(unknown) == 1 else 'are'} not among {origin}: {_listed(classes)}. Remove them, or train "
                f"on them"
            )
        new_indices = np.array([index_by_name.get(name, -1) for name in self.classes], np.int32)
        return self._with(
            classes=tuple(classes), label_map=new_indices if self._label_map is None else new_indices[self._label_map]
        )

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(os.cpu_count() or 1, 32), thread_name_prefix="panax-images")

    def _example(self, at: int, decode: Callable[[bytes, str], np.ndarray]) -> tuple[np.ndarray, int]:
        for position in range(at, at + self.num_examples):
            number = int(self._numbers[position % self.num_examples])
            if number in self._bad:
                continue
            name = self._encoded.name(number)
            try:
                image = decode(self._encoded.read(number), name)
            except BadRecordError as error:
                self._skipped.add(BadRecord(error.where, error.reason))
                self._bad.add(number)
                continue
            label = 0 if self._encoded.labels is None else int(self._encoded.labels[number])
            return image, label if self._label_map is None else int(self._label_map[label])
        raise DataError(f"none of the {self.num_examples} images can be decoded; expected at least one")


def number_classes(labels: Sequence[str]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Assign indices to labels: the labels themselves if all are whole numbers from 0, else by the order of
    their names, with numbers ordered by value.

    >>> number_classes(["10", "2"])[0].tolist(), number_classes(["dog", "cat", "dog"])
    ([10, 2], (array([1, 0, 1], dtype=int32), ('cat', 'dog')))
    >>> number_classes(["10.0", "2.0", "-1"])[1]
    ('-1', '2.0', '10.0')
    """
    names = sorted(set(labels), key=_order)
    if all(name.isascii() and name.isdigit() and len(name) < 10 for name in names):
        numbers = np.array([int(label) for label in labels], np.int32)
        largest = int(numbers.max(initial=0))
        return numbers, tuple(map(str, range(largest + 1))) if largest < _MOST_CLASSES else ()
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[label] for label in labels], np.int32), tuple(names)


def _order(name: str) -> tuple[float, str]:
    number = parse_number(name)
    return (number, name) if math.isfinite(number) else (math.inf, name)


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
