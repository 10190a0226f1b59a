"""Heat map of values over rows and columns, drawn with numpy alone."""

import struct
import zlib

import numpy as np
from jaxtyping import Bool, Float, UInt8

from ..core.monitors import HeatMap

Picture = UInt8[np.ndarray, "height width 3"]
Mask = Bool[np.ndarray, "height width"]

WHITE, INK = np.array([255.0, 255.0, 255.0]), np.array([60.0, 60.0, 60.0])
RED, BLUE = np.array([178.0, 24.0, 43.0]), np.array([33.0, 102.0, 172.0])

WIDTH = 512
"""Total width of the cells in pixels, if that leaves each one between 4 and 36."""

SCALE = 2
"""Pixels of a letter's dot."""

LINE, GAP = 14, 8
"""Line height of text, and the margin around it."""

MIN_NUMBERED_CELL = 30
"""Minimum size in pixels of cells that contain their number."""

GLYPHS = {
    "0": "####.##.##.####", "1": ".#.##..#..#.###", "2": "###..#####..###", "3": "###..####..####", "4": "#.##.####..#..#",
    "5": "####..###..####", "6": "####..####.####", "7": "###..#..#..#..#", "8": "####.#####.####", "9": "####.####..####",
    "a": ".#.#.#####.##.#", "b": "##.#.###.#.###.", "c": ".###..#..#...##", "d": "##.#.##.##.###.", "e": "####..####..###",
    "f": "####..##.#..#..", "g": ".###..#.##.#.##", "h": "#.##.#####.##.#", "i": "###.#..#..#.###", "j": "..#..#..##.#.#.",
    "k": "#.##.###.#.##.#", "l": "#..#..#..#..###", "m": "#.#####.##.##.#", "n": "##.#.##.##.##.#", "o": "####.##.##.####",
    "p": "####.#####..#..", "q": ".#.#.##.####.##", "r": "##.#.###.#.##.#", "s": ".###...#...###.", "t": "###.#..#..#..#.",
    "u": "#.##.##.##.####", "v": "#.##.##.##.#.#.", "w": "#.##.##.#####.#", "x": "#.##.#.#.#.##.#", "y": "#.##.#.#..#..#.",
    "z": "###..#.#.#..###", ".": ".............#.", "+": "....#.###.#....", "/": "..#..#.#.#..#..", " ": "...............",
}  # fmt: skip


def heat_map(figures: HeatMap) -> Picture:
    """Draw the rows and columns of these values, with a legend of the colors.

    White is the mean load of a row, blue no load, red twice the mean and more. Names are written in small
    Latin letters; others are left blank.
    """
    rows, columns = figures.values.shape
    cell = int(np.clip(WIDTH // columns, 4, 36))
    names = [_text(str(name)) for name in (*figures.rows, figures.row)]
    left, top = max(mask.shape[1] for mask in names) + 2 * GAP, 2 * LINE + GAP
    below, right = top + max(rows * cell, 5 * LINE), left + columns * cell
    canvas = np.tile(WHITE, (below + GAP, right + 2 * GAP + 4 * LINE, 1))
    _write(canvas, figures.column, GAP, left)
    _write(canvas, figures.row, GAP + LINE, GAP)
    canvas[top : top + rows * cell, left:right] = _cells(figures.values, cell)
    row_stride = -(-LINE // cell)
    for row in range(0, rows, row_stride):
        _write(canvas, str(figures.rows[row]), top + row * cell + max(0, cell - LINE) // 2, GAP)
    column_stride = -(-(_text(str(columns - 1)).shape[1] + GAP) // cell)
    for column in range(0, columns, column_stride):
        _write(canvas, str(column), GAP + LINE, left + column * cell + cell // 3)
    _legend(canvas[top:below, right + 2 * GAP :])
    _write(canvas, "load/mean", GAP, min(right + 2 * GAP, canvas.shape[1] - _text("load/mean").shape[1] - 2))
    return canvas.astype(np.uint8)


def _colors(loads: Float[np.ndarray, "height width"]) -> Float[np.ndarray, "height width 3"]:
    above, short = np.clip(loads - 1.0, 0.0, 1.0)[..., None], np.clip(1.0 - loads, 0.0, 1.0)[..., None]
    return WHITE - above * (WHITE - RED) - short * (WHITE - BLUE)


def _cells(loads: Float[np.ndarray, "row column"], cell: int) -> Float[np.ndarray, "height width 3"]:
    image = np.kron(_colors(loads), np.ones((cell, cell, 1)))
    if cell > 4:
        image[cell - 1 :: cell] = image[:, cell - 1 :: cell] = 200.0
    if cell >= MIN_NUMBERED_CELL:
        for (row, column), load in np.ndenumerate(loads):
            top, left = row * cell + (cell - LINE) // 2 + 1, column * cell + GAP - 2
            _write(image, f"{load:.1f}", top, left, light=bool(abs(load - 1) > 0.6))
    return image


def _legend(canvas: Float[np.ndarray, "height width 3"]) -> None:
    """Draw the colors from no load, at the bottom, to twice the mean, at the top."""
    height = canvas.shape[0]
    canvas[:, :LINE] = _colors(np.linspace(2.0, 0.0, height)[:, None])
    for label, at in (("2+", 0), ("1", (height - LINE) // 2 + 2), ("0", height - LINE + 4)):
        _write(canvas, label, at, LINE + GAP)


def _write(canvas: Float[np.ndarray, "height width 3"], text: str, top: int, left: int, light: bool = False) -> None:
    mask = _text(text)
    canvas[top : top + mask.shape[0], left : left + mask.shape[1]][mask] = WHITE if light else INK


def _text(text: str) -> Mask:
    letters = [np.array([dot == "#" for dot in GLYPHS.get(letter, GLYPHS[" "])]).reshape(5, 3) for letter in text]
    spaced = np.concatenate([np.pad(letter, ((0, 0), (0, 1))) for letter in letters], axis=1)[:, :-1]
    return np.kron(spaced, np.ones((SCALE, SCALE), bool))


def encode_png(image: Picture) -> bytes:
    """Encode a picture in the Portable Network Graphics format (RFC 2083)."""
    height, width, _ = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(png_rows(image))
    parts = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", data), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file, with its length and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_rows(image: Picture) -> bytes:
    """Return the lines of a picture, each preceded by its filter type, 0 for none."""
    height = image.shape[0]
    return np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1).tobytes()
