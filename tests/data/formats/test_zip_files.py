"""A damaged archive is refused, whatever Python's reader raises."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

import panax.data
from panax.data.files.zip_files import open_zip

SOURCE = Path(panax.data.__file__).parents[1]
CENTRAL = b"PK\x01\x02"


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (6, b"\xfe\x00"),  # the version that is needed
        (8, b"\x00\x08"),  # the name is UTF-8, and is not
    ],
    ids=["version", "name"],
)
def test_whatever_is_wrong_is_one_error(offset, value, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(3))
    data = bytearray(path.read_bytes())
    place = data.index(CENTRAL)
    data[place + offset : place + offset + 2] = value
    data[place + 46] = 0xFF
    path.write_bytes(data)
    with pytest.raises(zipfile.BadZipFile):
        open_zip(path)


def test_archives_are_opened_by_one_function():
    for path in SOURCE.rglob("*.py"):
        assert path.name == "zip_files.py" or "zipfile.ZipFile(" not in path.read_text(encoding="utf-8"), path
