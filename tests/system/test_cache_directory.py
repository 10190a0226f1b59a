"""Where caches are, of a user without a name or a home too."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from panax.kernels.cache import kernels_folder
from panax.system.cache_directory import cache_directory


@pytest.fixture
def nameless(tmp_path, monkeypatch):
    """As a container that runs under a number: OpenShift, `docker run --user 12345`."""

    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "PANAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


def test_a_user_without_a_home_has_caches_and_no_folder_of_a_tilde(nameless, monkeypatch):
    expected = nameless / "temporary" / f"caches-of-{os.getuid()}" / "panax"
    assert cache_directory() == expected and kernels_folder() == expected / "kernels"
    assert expected.stat().st_mode & 0o022 == 0 and not (nameless / "~").exists()
    monkeypatch.setenv("PANAX_CACHE", "named")
    assert cache_directory() == Path("named")
