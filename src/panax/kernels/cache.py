"""Cache of compiled libraries and measurements on this machine: complete files that only this user can
write."""

import hashlib
from pathlib import Path

from panax.system.cache_directory import user_caches
from panax.system.replacement import replace_file
from panax.system.secure_dir import is_own_file, make_private_folder


def kernels_folder() -> Path:
    """Return the folder of the cache, which no other user may write to.

    Raises:
        OSError: The folder can't be created, or other users may write to it.
    """
    return make_private_folder(user_caches() / "panax" / "kernels")


def is_intact(target: Path) -> bool:
    """Return True if a file belongs to this user alone and is complete, according to the checksum file in its
    folder.

    A power failure after a rename can leave a file that is empty or truncated, which must not be mapped.
    """
    beside = target.with_suffix(".sha256")
    if not (is_own_file(target) and is_own_file(beside)):
        return False
    return beside.read_text(errors="replace") == hashlib.sha256(target.read_bytes()).hexdigest()


def write_intact(target: Path, data: bytes) -> None:
    """Write a file of this user alone and its checksum file, which `is_intact` reads; the checksum first, so
    that a file without its checksum is written again.

    Raises:
        OSError: One of the two files can't be written.
    """
    replace_file(target.with_suffix(".sha256"), hashlib.sha256(data).hexdigest(), private=True)
    replace_file(target, data, private=True)
