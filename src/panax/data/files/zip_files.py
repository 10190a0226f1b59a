"""Zip archives from untrusted sources: every defect is reported as a `BadZipFile`."""

import struct
import zipfile
from pathlib import Path


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open an archive and read its list of members.

    Raises:
        zipfile.BadZipFile: The file is not a zip archive, or has an unsupported version.
        OSError: The file can't be read.
    """
    try:
        return zipfile.ZipFile(path)
    except (NotImplementedError, ValueError, IndexError, OverflowError, struct.error) as error:
        # An unknown version of the format, a name in an invalid encoding, a field outside its range.
        raise zipfile.BadZipFile(str(error)) from error
