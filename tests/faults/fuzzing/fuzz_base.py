"""What all formats that are fuzzed have: how any file is changed, and how texts and examples are read whole."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fuzz_mutations import mutate, mutate_json

Change = Callable[[Path, random.Random, bool], None]

TEXTS = [f"text {i}: the oak, the ash and über {'x' * (i * 7 % 50)}" for i in range(40)]
IMAGES = ("jpeg", "png", "webp", "bmp", "gif", "tiff", "ppm")
FIXTURES = Path(__file__).parents[2] / "data" / "sources" / "fixtures"


class Format(NamedTuple):
    """A format.

    Attributes:
        make: Writes files into an empty folder.
        load: Reads all of them; raises a PanaxError if they can't be used.
        change: Changes one of them; below its outer checksum, or with that made again, where the last argument is true.
        structure: Changes fields of the format itself, and keeps the rest well-formed; every second case.
    """

    make: Callable[[Path], None]
    load: Callable[[Path], None]
    change: Change
    structure: Change | None = None


def any_file(folder: Path, rng: random.Random, inner: bool) -> None:
    """Change the bytes of a file; of JSON its values, too."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(paths)
    how = mutate_json if path.suffix == ".json" else mutate
    path.write_bytes(how(path.read_bytes(), rng))


def within(unpack: Callable[[bytes], bytes], repack: Callable[[bytes], bytes], how: Change = any_file) -> Change:
    """Change the decompressed content of a file, or the file itself."""

    def change(folder: Path, rng: random.Random, inner: bool) -> None:
        if not inner:
            return how(folder, rng, inner)
        path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        path.write_bytes(repack(mutate(unpack(path.read_bytes()), rng)))

    return change


def consume(examples) -> None:
    """Draw a few batches of examples."""
    numbers = np.arange(min(examples.num_examples, 8))
    examples.read(numbers)
    examples.keys()


def texts(corpus_of: Callable[[Path], object]) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        corpus = corpus_of(folder)
        for _ in corpus.documents():  # type: ignore[attr-defined]
            pass
        corpus.fingerprint()  # type: ignore[attr-defined]

    return load
