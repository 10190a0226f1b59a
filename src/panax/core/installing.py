"""How more is installed into this very environment, for hints: it depends on how this copy of Panax came here."""

import functools
import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "panax-jax"


def install_command(extra: str) -> str:
    """The command that installs one of the extras of pyproject.toml: by a clone's own program where a clone is installed.

    >>> "torch" in install_command("torch")
    True
    """
    origin = _origin()
    clone = Path(unquote(urlsplit(origin).path)) if origin.startswith("file:") else None
    if clone is not None and (clone / "install.py").is_file():
        words = ["python3", str(clone / "install.py"), "--extra", extra]
        if Path(sys.prefix) != clone / ".venv":
            words += ["--venv", sys.prefix]
        return shlex.join(words)
    if clone is not None and clone.is_dir():
        return f"{_pip()} -e {shlex.quote(f'{clone}[{extra}]')}"
    wanted = f"{DISTRIBUTION}[{extra}]" + (f" @ {origin}" if origin else "")
    return f"{_pip()} {shlex.quote(wanted)}"


def package(*names: str) -> str:
    """The command that installs packages of others into this environment.

    >>> package("tensorboard").endswith("pip install tensorboard")
    True
    """
    return f"{_pip()} {shlex.join(names)}"


def _pip() -> str:
    # What `pip` on the terminal's path belongs to is not known.
    python = "python" if os.environ.get("VIRTUAL_ENV") == sys.prefix else sys.executable
    return f"{shlex.quote(python)} -m pip install"


@functools.cache
def _origin() -> str:
    """Where this copy was installed from, as pip has noted it (PEP 610); empty for a package index."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        found = json.loads(text or "{}")
        url = str(found.get("url", "")) if isinstance(found, dict) else ""
    except (importlib.metadata.PackageNotFoundError, ValueError, RecursionError):
        # Run from a folder on the path: its clone, if it is one.
        clone = Path(__file__).parents[3]
        return clone.as_uri() if (clone / "install.py").is_file() else ""
    return url
