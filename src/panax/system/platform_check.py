"""Requirements of Panax on the operating system."""

import importlib.util

from ..core.errors import PanaxError

UNIX_MODULES = ("fcntl", "grp", "pwd")
"""Python's modules for file locks and users. They are imported at first use, so that `import panax` works
without them."""


def check_platform() -> None:
    """Check that a run's files can be locked, and distinguished from another user's.

    Raises:
        PanaxError: The system is not a Unix: Windows outside of WSL, for example.
    """
    missing = [name for name in UNIX_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise PanaxError(
            f"a run needs the file locks and users of Linux or macOS, and this Python lacks {', '.join(missing)}; on Windows, "
            f"run Panax in WSL"
        )
