"""Commands that pictures are made with: `panax`, scripts of the repository, and a browser."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PANAX_", "XLA_"))},
    "JAX_PLATFORMS": "cpu",
}


class PictureError(Exception):
    """A picture can't be made; the message says why."""


def run(command: Sequence[str]) -> None:
    """Run a command of Python's in the repository, without its output.

    Raises:
        PictureError: It failed.
    """
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise PictureError(f"`{' '.join(command)}` ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")


@contextmanager
def background(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of Python's in the repository, and terminate it at the end of the block if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def screenshot(page: Path, picture: Path, *, width: int, height: int) -> None:
    """Write the top of an HTML page, as a browser without a window shows it, to a PNG file.

    Args:
        width: Of the window in pixels.
        height: Of the window in pixels; the rest of the page is cut off.

    Raises:
        PictureError: No browser is installed, or it fails.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise PictureError(f"no browser is installed; expected one of {', '.join(BROWSERS)}")
    # Without a sandbox, which containers rarely allow: the page is our own and loads nothing.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    done = subprocess.run([browser, *flags, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True)
    if done.returncode or not picture.exists():
        raise PictureError(f"{browser} can't draw {page}: {done.stderr[-500:]}")
