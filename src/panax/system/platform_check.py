"""What Panax takes of the operating system."""

import importlib.util

from ..core.errors import PanaxError

UNIX_MODULES = ("fcntl", "grp", "pwd")
"""Python's modules for file locks and users. They are imported where they are used, so that `import panax` works without."""


def check_platform() -> None:
    """See that a run's files can be locked, and told from another user's.

    Raises:
        PanaxError: This is no Unix: Windows outside of WSL, for example.
    """
    missing = [name for name in UNIX_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise PanaxError(
            f"a run needs the file locks and users of Linux or macOS, and this Python lacks {', '.join(missing)}; on Windows, "
            f"run Panax in WSL"
        )
