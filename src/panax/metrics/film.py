"""Films, as animated PNGs for any browser, and as one picture with frames side by side. Drawn with numpy
alone."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from .heat_map import Picture, png_chunk, png_rows

GAP = 4
"""White pixels between the frames of a sheet."""

Frames = UInt8[np.ndarray, "frame height width 3"]


def encode_animated_png(frames: Frames, seconds_per_frame: float) -> bytes:
    """Encode a film that repeats endlessly; programs without support for animation show its first frame.

    Each frame contains only the rectangle that differs from the previous one.

    Source: Portable Network Graphics (PNG) Specification (Third Edition), section 11.3.2.7, "APNG".
    """
    count, height, width, _ = frames.shape
    milliseconds = max(1, min(65_535, round(1000 * seconds_per_frame)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [png_chunk(b"IHDR", header), png_chunk(b"acTL", struct.pack(">II", count, 0))]
    number = 0
    for place, frame in enumerate(frames):
        top, left, piece = (0, 0, frame) if place == 0 else _changed(frames[place - 1], frame)
        control = struct.pack(">IIIIIHHBB", number, piece.shape[1], piece.shape[0], left, top, milliseconds, 1000, 0, 0)
        parts.append(png_chunk(b"fcTL", control))
        number += 1
        data = zlib.compress(png_rows(piece))
        if place == 0:
            parts.append(png_chunk(b"IDAT", data))
        else:
            parts.append(png_chunk(b"fdAT", struct.pack(">I", number) + data))
            number += 1
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, png_chunk(b"IEND", b"")])


def contact_sheet(frames: Frames, columns: int = 6, max_frames: int = 24) -> UInt8[np.ndarray, "rows columns 3"]:
    """Arrange frames in rows, from the first to the last; of more than `max_frames`, that many at equal distances."""
    chosen = frames[_evenly(len(frames), max_frames)]
    rows = -(-len(chosen) // columns)
    height, width = (size + GAP for size in chosen.shape[1:3])
    canvas = np.full((rows * height - GAP, min(columns, len(chosen)) * width - GAP, 3), 255, np.uint8)
    for place, frame in enumerate(chosen):
        row, column = divmod(place, columns)
        canvas[row * height : row * height + height - GAP, column * width : column * width + width - GAP] = frame
    return canvas


def _evenly(count: int, max_frames: int) -> Sequence[int]:
    return range(count) if count <= max_frames else np.linspace(0, count - 1, max_frames).round().astype(int).tolist()


def _changed(before: Picture, after: Picture) -> tuple[int, int, UInt8[np.ndarray, "rows columns 3"]]:
    """Return the upper left corner of the rectangle that differs, and its content; one pixel if nothing
    differs."""
    differs = (before != after).any(axis=-1)
    if not differs.any():
        return 0, 0, after[:1, :1]
    rows, columns = (np.flatnonzero(differs.any(axis=axis)) for axis in (1, 0))
    top, left = int(rows[0]), int(columns[0])
    return top, left, after[top : rows[-1] + 1, left : columns[-1] + 1]
