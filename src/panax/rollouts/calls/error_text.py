"""Errors of called functions as text, whatever their classes do."""

import traceback
from pathlib import Path

_MAX_ERROR_CHARACTERS = 500


def describe_error(error: BaseException, file: str = "") -> str:
    """Describe an error, with the line of `file` that raised it or called what did."""
    try:
        message = _clip(" ".join(str(error).split()))
    except BaseException as second:  # an exception with a broken __str__
        message = f"(its message can't be shown: {type(second).__name__})"
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if each.filename == file), None)
    where = f" ({Path(frame.filename).name}, line {frame.lineno})" if frame else ""
    name = type(error).__name__
    return f"{name}: {message}{where}" if message else f"{name}{where}"


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:_MAX_ERROR_CHARACTERS]}..."
