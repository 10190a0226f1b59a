"""Install commands for this environment, used in hints; they depend on how Panax was installed."""

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
    """Return the command that installs an extra of pyproject.toml; a clone's install script if a clone is
    installed.

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
    requirement = f"{DISTRIBUTION}[{extra}]" + (f" @ {origin}" if origin else "")
    return f"{_pip()} {shlex.quote(requirement)}"


def package_install_command(*names: str) -> str:
    """Return the command that installs third-party packages into this environment.

    >>> package_install_command("tensorboard").endswith("pip install tensorboard")
    True
    """
    return f"{_pip()} {shlex.join(names)}"


def _pip() -> str:
    # `pip` on the PATH may belong to another environment.
    python = "python" if os.environ.get("VIRTUAL_ENV") == sys.prefix else sys.executable
    return f"{shlex.quote(python)} -m pip install"


@functools.cache
def _origin() -> str:
    """Return the URL that this copy was installed from, as recorded by pip (PEP 610); empty for a package
    index.
    """
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        record = json.loads(text or "{}")
        url = str(record.get("url", "")) if isinstance(record, dict) else ""
    except (importlib.metadata.PackageNotFoundError, ValueError, RecursionError):
        # Imported from a directory on sys.path: return it if it is a clone.
        clone = Path(__file__).parents[3]
        return clone.as_uri() if (clone / "install.py").is_file() else ""
    return url
