"""Files that were changed at random: a value or a PanaxError, never another exception, a crash or a hang."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fuzz
from fuzz_formats import FORMATS
from fuzz_mutations import mutate, mutate_json

SEED = 20261122


@pytest.mark.parametrize("format", fuzz.BINARY)
def test_changed_binary_headers_give_a_value_or_a_refusal(format):
    found = fuzz.fuzz(format, SEED, range(100))
    assert not found.findings, "\n".join(map(str, found.findings))
    assert 20 < found.refused < 100 and found.taken > 0


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in fuzz.BINARY])
def test_changed_files_give_a_value_or_a_refusal(format):
    found = fuzz.fuzz(format, SEED, range(20))
    assert not found.findings, "\n".join(map(str, found.findings))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_many_changed_files_give_a_value_or_a_refusal(format):
    found = fuzz.fuzz(format, SEED + 1, range(300))
    assert not found.findings, "\n".join(map(str, found.findings))


def test_a_reader_that_dies_raises_or_hangs_is_found(tmp_path, monkeypatch):
    broken = tmp_path / "fuzz_formats.py"
    broken.write_text(
        "import os, pathlib, time\n"
        "from types import SimpleNamespace\n"
        "from panax.core.errors import DataError\n"
        "class Broken:\n"
        "    case, structure = -1, None\n"
        "    def make(self, folder): (folder / 'a').write_text('a')\n"
        "    def change(self, folder, rng, inner): (folder / 'a').write_text(rng.choice('b'))\n"
        "    def load(self, folder):\n"
        "        if (folder / 'a').read_text() == 'a': return\n"
        "        Broken.case = int(open(COUNT).read() or 0)\n"
        "        open(COUNT, 'w').write(str(Broken.case + 1))\n"
        "        if Broken.case == 0: os.kill(os.getpid(), 11)\n"
        "        if Broken.case == 1: raise KeyError('inner')\n"
        "        if Broken.case == 2: time.sleep(600)\n"
        "        if Broken.case == 3: bytearray(2**34)\n"
        "        if Broken.case == 4: raise DataError('refused')\n"
        "        if Broken.case == 5: b'x' * 2**27\n"
        f"COUNT = {str(tmp_path / 'count')!r}\n"
        "FORMATS = {'broken': Broken()}\n"
    )
    (tmp_path / "count").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.setattr(fuzz, "CASE_SECONDS", 1.0)
    copied = tmp_path / "fuzz.py"
    copied.write_text(Path(fuzz.__file__).read_text())
    monkeypatch.setattr(fuzz, "__file__", str(copied))
    report = fuzz.fuzz("broken", 0, range(7))
    ends = [finding.what.split("\n")[-2 if "Traceback" in finding.what else 0] for finding in report.findings]
    assert ends[:4] == ["dies: SIGSEGV", "KeyError: 'inner'", "hangs: no answer in 1 s", "MemoryError"]
    assert [re.sub(r"1[23]\d MiB", "128 MiB", end) for end in ends[4:]] == ["takes 128 MiB of memory (value)"]
    assert (report.cases, report.refused) == (7, 1)
    assert str(report.findings[0]).endswith("fuzz.py --format broken --seed 0 --case 0")


def test_the_same_seed_makes_the_same_changes():
    import random

    text = b'{"a": [1, 2.5, "x"], "b": {"c": null}}'
    for how in (mutate, mutate_json):
        drawn = [how(text, random.Random(seed)) for seed in range(50)]
        assert drawn == [how(text, random.Random(seed)) for seed in range(50)]
        assert len(set(drawn)) > 40
