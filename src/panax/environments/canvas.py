"""Lines, circles and rectangles on a picture, drawn with NumPy, for pictures of environments.

Positions are (row, column) in pixels, from the upper left corner.
"""

import numpy as np

from .environment import Frame

Number = float | int
Point = tuple[Number, Number]
Color = tuple[int, int, int]

WHITE, PALE, DARK = (255, 255, 255), (200, 200, 200), (60, 60, 60)
RED, BLUE, GREEN, YELLOW = (200, 70, 60), (50, 110, 180), (60, 150, 90), (230, 190, 60)


def blank_frame(height: int, width: int) -> Frame:
    """Return a white picture."""
    return np.full((height, width, 3), 255, np.uint8)


def fill_rectangle(frame: Frame, upper_left: Point, lower_right: Point, color: Color) -> None:
    """Color the pixels between two corners."""
    (top, left), (bottom, right) = (tuple(max(0, round(each)) for each in place) for place in (upper_left, lower_right))
    frame[top:bottom, left:right] = color


def fill_circle(frame: Frame, center: Point, radius: Number, color: Color) -> None:
    """Color the pixels within `radius` of the center."""
    row, column = _pixels(frame)
    frame[(row - center[0]) ** 2 + (column - center[1]) ** 2 <= radius**2] = color


def fill_line(frame: Frame, start: Point, end: Point, width: Number, color: Color) -> None:
    """Color the pixels within half of `width` of the line between two places."""
    row, column = _pixels(frame)
    along = (end[0] - start[0], end[1] - start[1])
    squared = along[0] ** 2 + along[1] ** 2
    share = ((row - start[0]) * along[0] + (column - start[1]) * along[1]) / max(squared, 1e-9)
    share = np.clip(share, 0.0, 1.0)
    away = (row - start[0] - share * along[0]) ** 2 + (column - start[1] - share * along[1]) ** 2
    frame[away <= (width / 2) ** 2] = color


def _pixels(frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(frame.shape[0])[:, None], np.arange(frame.shape[1])[None]
