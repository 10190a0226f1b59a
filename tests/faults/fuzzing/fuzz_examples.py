"""Images, tables, weights, tokenizers and configurations, to be fuzzed."""

import gzip
import io
import json
import random
import zipfile
import zlib
from pathlib import Path

import numpy as np
from fuzz_base import IMAGES, TEXTS, any_file, consume
from fuzz_mutations import mutate, mutate_json
from fuzz_own import load_checkpoint, resealed

from panax.checkpoint.conversion import import_tensors
from panax.data import ImageFolder, ParquetImages, Table, TextFiles
from panax.data.tables.click_arrays import ClickArrays
from panax.data.text.tokenizer import PretrainedTokenizer
from panax.stores import LocalStore

# Images and tables


def an_image(kind: str) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (24, 30, 3), dtype=np.uint8))
    file = io.BytesIO()
    (image.convert("P") if kind == "gif" else image).save(file, kind)
    return file.getvalue()


def make_images(folder: Path) -> None:
    for kind in IMAGES:
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / f"{kind}.{kind}").write_bytes(an_image(kind))
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"a/{kind}.{kind},{kind}\n" for kind in IMAGES))


def load_images(folder: Path) -> None:
    for label in ("folder", str(folder / "labels.csv")):
        consume(ImageFolder(path=str(folder), label=label, size=8, max_pixels=10**7).open(folder / "cache", 100))


def change_image(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "a" / "png.png"
    data = bytearray(mutate(path.read_bytes(), rng))
    at = 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 8 + size
        if end + 4 > len(data):
            break
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    path.write_bytes(data)


def make_parquet_images(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"image": {"bytes": an_image(kind), "path": kind}, "label": i} for i, kind in enumerate(IMAGES)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", compression="none")


def load_parquet_images(folder: Path) -> None:
    images = ParquetImages(paths=(str(folder / "a.parquet"),), size=8, max_pixels=10**7, max_record_bytes=2**22)
    consume(images.open(folder / "cache", 100))


def make_csv(folder: Path) -> None:
    (folder / "a.csv").write_text("a,b,c\n" + "".join(f'{i}.5,{i},"c {i}"\n' for i in range(50)))


def load_csv(folder: Path, suffix: str = "csv") -> None:
    table = Table(paths=(str(folder / f"a.{suffix}"),), numeric=("a",), categorical=("c",), label="b", hash_buckets=9)
    consume(table.open(folder / "cache", 10**6))


def make_csv_gz(folder: Path) -> None:
    make_csv(folder)
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    (folder / "a.csv").unlink()


def make_table_cache(folder: Path) -> None:
    make_csv(folder)
    load_csv(folder)


def change_table_cache(folder: Path, rng: random.Random, inner: bool) -> None:
    (cache,) = folder.glob("cache/table-*")
    resealed(lambda where: where / "header.json")(cache, rng, inner)


def make_npz(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", a=np.arange(50.0), b=np.arange(50), c=np.array([f"c {i}" for i in range(50)]))


def change_npz(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "a.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    members[name] = mutate(members[name], rng)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def make_clicks(folder: Path) -> None:
    np.save(folder / "day_0_dense.npy", np.ones((50, 3), np.float32))
    np.save(folder / "day_0_labels.npy", np.arange(50, dtype=np.int32) % 2)
    many = {str(column): np.arange(100, dtype=np.int32).reshape(50, 2) for column in range(2)}
    np.savez(folder / "day_0_sparse_multi_hot.npz", **many)  # pyright: ignore[reportArgumentType]


def load_clicks(folder: Path) -> None:
    consume(ClickArrays(path=str(folder), rows=(100, 100)).open(folder / "cache", 100))


# Weights, configurations and tokenizers


def make_safetensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones((8, 4), np.float32), "s": np.array(3, np.int64)}, folder / "model.safetensors")
    save_file({"b": np.ones(4, np.float16)}, folder / "more.safetensors")
    where = {"w": "model.safetensors", "s": "model.safetensors", "b": "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


def load_safetensors(folder: Path) -> None:
    import_tensors(folder, LocalStore(folder / "out"))
    load_checkpoint(folder / "out")


def change_safetensors(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def make_tokenizer(folder: Path) -> None:
    from panax.data.text.tokenizer import BytePairTokenizer

    (folder / "a.txt").write_text("\n".join(TEXTS))
    tokenizer = BytePairTokenizer(vocab_size=300).train(TextFiles(paths=(str(folder / "a.txt"),)))
    (folder / "a.txt").unlink()
    tokenizer.save(folder)


def load_tokenizer(folder: Path) -> None:
    tokenizer = PretrainedTokenizer(path=str(folder)).load()
    tokenizer.decode(tokenizer.encode(TEXTS[3]))
    tokenizer.encode_batch(TEXTS)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


def make_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def load_config(folder: Path) -> None:
    from panax.adapters.huggingface import config_from

    config_from(folder)
