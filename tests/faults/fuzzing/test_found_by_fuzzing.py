"""Findings of the fuzzer, one small case of each kind."""

import dataclasses
import json
import shutil
import zipfile

import numpy as np
import pytest
from fuzz_base import FIXTURES
from fuzz_examples import CONFIG, make_tokenizer
from fuzz_own import make_checkpoint, make_packed
from fuzz_texts import make_arrow

from panax.adapters.huggingface import config_from
from panax.checkpoint.manifest import MANIFEST_FILE, Manifest, merge_manifests
from panax.core import CheckpointError, DataError, RecipeError
from panax.core.errors import PanaxError
from panax.data import Table
from panax.data.files.checksums import compute_checksum, compute_seal
from panax.data.files.packed_files import PackedFiles
from panax.data.formats.arrow import Arrow
from panax.data.formats.mds import Mds
from panax.data.text.tokenizer import PretrainedTokenizer, _panics_are_errors

DEEP = "[" * 100_000


def test_parts_of_other_arrays_are_refused(tmp_path):
    make_checkpoint(tmp_path)
    part = Manifest.from_json((tmp_path / MANIFEST_FILE).read_bytes(), "here")
    fewer = {name: entry for name, entry in part.arrays.items() if name != "params.b"}
    other = part.arrays | {"params.b": dataclasses.replace(part.arrays["params.b"], dtype="int32")}
    for arrays in (fewer, other):
        for pair in (
            (part, dataclasses.replace(part, arrays=arrays)),
            (dataclasses.replace(part, arrays=arrays), part),
        ):
            with pytest.raises(CheckpointError, match=r"the parts of processes differ in params\.b"):
                merge_manifests(pair)


@pytest.mark.parametrize(
    ("file", "dtype", "value", "says"),
    [
        ("names.bin", "u1", 255, "the name of record 0 is damaged"),
        ("offsets.bin", "<i8", 2**40, "don't rise from 0"),
        ("offsets.bin", "<i8", -1, "don't rise from 0"),
        ("labels.bin", "<i4", 3, "a label is not in 0 to 2"),
        ("labels.bin", "<i4", -1, "a label is not in 0 to 2"),
    ],
)
def test_records_that_are_sealed_and_wrong_are_refused(tmp_path, file, dtype, value, says):
    make_packed(tmp_path)
    values = np.fromfile(tmp_path / file, dtype)
    values[0] = value
    values.tofile(tmp_path / file)
    header = json.loads((tmp_path / "header.json").read_text())
    header["checksums"][file] = compute_checksum(tmp_path / file)
    (tmp_path / "header.json").write_text(json.dumps(header | {"seal": compute_seal(header)}))
    with pytest.raises(DataError, match=says):
        PackedFiles(tmp_path).name(0)


def test_a_footer_that_points_at_nothing_is_refused(tmp_path):
    make_arrow()(tmp_path)
    path = tmp_path / "a.arrow"
    data = bytearray(path.read_bytes())
    first = data.index(b"\xff\xff\xff\xff", 16)
    data[first : first + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.arrow can't be read"):
        list(Arrow(paths=(str(path),)).documents())


@pytest.mark.parametrize(
    "change",
    [
        {"column_encodings": [7] * 9},
        {"column_names": [None] * 9},
        {"column_sizes": ["a"] * 9},
        {"samples": "3"},
        {"raw_data": {"basename": "shard.00000.mds", "bytes": 1e9, "hashes": {}}},
    ],
)
def test_an_index_of_other_types_is_refused(tmp_path, change):
    shutil.copytree(FIXTURES / "mds_plain", tmp_path / "mds")
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    index["shards"][0] |= change
    (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json is not an index of MDS shards"):
        list(Mds(path=str(tmp_path / "mds")).documents())


def test_json_without_an_end_is_refused_wherever_it_stands(tmp_path):
    make_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json", "index.json", "config.json"):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(PanaxError, match=name.replace(".", r"\.")):
            if name == "index.json":
                list(Mds(path=str(tmp_path)).documents())
            elif name == "config.json":
                config_from(tmp_path)
            else:
                PretrainedTokenizer(path=str(tmp_path)).load()


def test_a_header_of_an_array_that_is_no_python_is_refused(tmp_path):
    header = b"{'descr': '<f4', 'shape': (\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match=r"a\.npz is not an \.npz file that can be read"):
        Table(paths=(str(tmp_path / "a.npz"),), numeric=("a",)).open(tmp_path / "cache", 0)


@pytest.mark.parametrize("added", [False, True])
def test_an_id_of_a_token_beyond_any_vocabulary_is_refused(tmp_path, added):
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if added:
        tokenizer["added_tokens"][0]["id"] = 2**31 - 1
    else:
        tokenizer["model"]["vocab"]["x"] = 2**31 - 1
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(
        DataError, match=r"tokenizer\.json has a token of the id 2,147,483,647; expected ids below 16,777,216"
    ):
        PretrainedTokenizer(path=str(tmp_path)).load()


def test_a_panic_of_the_tokenizers_library_is_an_error(tmp_path):
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "über" * 9
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=r"tokenizer\.json is "):
        PretrainedTokenizer(path=str(tmp_path)).load()
    panic = type("PanicException", (BaseException,), {})  # as pyo3 makes it
    says = "a is damaged: the tokenizers library fails with out of range"
    with pytest.raises(DataError, match=says), _panics_are_errors("a is damaged"):
        raise panic("out of range")
    with pytest.raises(KeyboardInterrupt), _panics_are_errors("a"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "change",
    [{"architectures": 7, "model_type": None}, {"hidden_act": ["silu"]}, {"hidden_act": {}}, {"factor": 1e999}],
)
def test_values_of_other_types_in_a_configuration_are_refused(tmp_path, change):
    raw = CONFIG | change
    if "factor" in change:
        raw = CONFIG | {"rope_scaling": CONFIG["rope_scaling"] | {"original_max_position_embeddings": float("inf")}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(RecipeError, match=r"config\.json"):
        config_from(tmp_path)


def test_a_footer_whose_statistics_contradict_each_other_does_not_end_the_process():
    import fuzz

    assert not fuzz.fuzz("parquet", 12, [21]).findings
