"""Archives of strangers: whatever is wrong with one, it is a `BadZipFile`."""

import struct
import zipfile
from pathlib import Path


def open_zip(path: Path) -> zipfile.ZipFile:
    """An archive, with its list of members read.

    Raises:
        zipfile.BadZipFile: It is not a zip archive, or has an unsupported version.
        OSError: The file can't be read.
    """
    try:
        return zipfile.ZipFile(path)
    except (NotImplementedError, ValueError, IndexError, OverflowError, struct.error) as error:
        # A version of the format that there is not, a name in no encoding, a field outside its range.
        raise zipfile.BadZipFile(str(error)) from error
