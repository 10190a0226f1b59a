"""The cache of what is compiled and measured on this machine: whole files of this user's alone."""

import hashlib
import os
import tempfile
from pathlib import Path

from panax.system.cache_directory import user_caches
from panax.system.secure_dir import is_own_file, make_private_folder


def kernels_folder() -> Path:
    """The folder of what is compiled and measured here, which nobody else may write to.

    Raises:
        OSError: It can't be made, or others may write to it.
    """
    return make_private_folder(user_caches() / "panax" / "kernels")


def is_intact(target: Path) -> bool:
    """Whether a file is this user's alone and is what was written: its checksum lies beside it.

    A power failure after a rename can leave a file that is empty or cut short, which must not be mapped.
    """
    beside = target.with_suffix(".sha256")
    if not (is_own_file(target) and is_own_file(beside)):
        return False
    return beside.read_text(errors="replace") == hashlib.sha256(target.read_bytes()).hexdigest()


def write_atomically(target: Path, data: bytes) -> None:
    """Write a file of this user's alone that appears with all its bytes, or not at all."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
