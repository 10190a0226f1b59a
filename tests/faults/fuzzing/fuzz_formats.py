"""The formats that are fuzzed: how a small file of each is made, read whole, and changed below its checksums."""

import gzip

from fuzz_base import Format, any_file, texts, within
from fuzz_examples import (
    change_image,
    change_npz,
    change_safetensors,
    change_table_cache,
    load_clicks,
    load_config,
    load_csv,
    load_images,
    load_parquet_images,
    load_safetensors,
    load_tokenizer,
    make_clicks,
    make_config,
    make_csv,
    make_csv_gz,
    make_images,
    make_npz,
    make_parquet_images,
    make_safetensors,
    make_table_cache,
    make_tokenizer,
)
from fuzz_own import (
    change_checkpoint,
    change_part,
    load_checkpoint,
    load_packed,
    load_parts,
    load_tokens,
    make_checkpoint,
    make_flat,
    make_megatron,
    make_packed,
    make_parts,
    make_tokens,
    resealed,
    train,
)
from fuzz_structure import change_chunk, change_npz_fields, change_offsets, change_parquet, change_tar, in_file
from fuzz_texts import (
    change_lines,
    change_mds,
    change_records,
    change_shard,
    load_arrow,
    load_mds,
    load_parquet,
    load_records,
    load_shard,
    make_arrow,
    make_dataset,
    make_jsonl,
    make_jsonl_gz,
    make_mds,
    make_parquet,
    make_records,
    make_shard,
    make_text,
)

from panax.data import Jsonl, TextFiles, TokenFile
from panax.data.formats.mds import Mds
from panax.data.formats.megatron import MegatronTokens
from panax.data.formats.records import HuggingFaceDisk

FORMATS: dict[str, Format] = {
    "manifest": Format(make_checkpoint, load_checkpoint, change_checkpoint),
    "parts": Format(make_parts, load_parts, change_part),
    "tokens": Format(make_tokens, load_tokens, resealed(lambda folder: folder / "t" / "header.json")),
    "flat": Format(
        make_flat, lambda f: train(TokenFile(path=str(f / "a.bin"), dtype="uint16", end_of_document=7), f), any_file
    ),
    "megatron": Format(make_megatron, lambda f: train(MegatronTokens(path=str(f / "a")), f), any_file),
    "packed": Format(make_packed, load_packed, resealed(lambda folder: folder / "header.json")),
    "table_cache": Format(make_table_cache, load_csv, change_table_cache),
    "text": Format(make_text, texts(lambda f: TextFiles(paths=(str(f / "a.txt"),), separator="\n\n")), any_file),
    "jsonl": Format(make_jsonl, texts(lambda f: Jsonl(paths=(str(f / "a.jsonl"),))), change_lines),
    "jsonl_gz": Format(
        make_jsonl_gz,
        texts(lambda f: Jsonl(paths=(str(f / "a.jsonl.gz"),))),
        within(gzip.decompress, gzip.compress),
    ),
    "arrow": Format(make_arrow(), load_arrow, any_file),
    "arrow_stream": Format(make_arrow(stream=True), load_arrow, any_file),
    "arrow_zstd": Format(make_arrow(compression="zstd"), load_arrow, any_file),
    "parquet": Format(make_parquet, load_parquet, any_file, change_parquet),
    "dataset": Format(make_dataset, texts(lambda f: HuggingFaceDisk(path=str(f / "d"))), any_file),
    "mds": Format(make_mds("mds_plain"), load_mds, change_mds, in_file("*.mds", change_offsets)),
    "mds_zstd": Format(make_mds("mds_zstd"), texts(lambda f: Mds(path=str(f), max_shard_bytes=2**26)), change_mds),
    "webdataset": Format(make_shard, load_shard, change_shard, in_file("a.tar", change_tar)),
    "array_record": Format(make_records, load_records, change_records, in_file("*.array_record", change_chunk)),
    "images": Format(make_images, load_images, change_image),
    "parquet_images": Format(make_parquet_images, load_parquet_images, any_file, change_parquet),
    "csv": Format(make_csv, load_csv, any_file),
    "csv_gz": Format(make_csv_gz, lambda f: load_csv(f, "csv.gz"), within(gzip.decompress, gzip.compress)),
    "npz": Format(make_npz, lambda f: load_csv(f, "npz"), change_npz, change_npz_fields),
    "clicks": Format(make_clicks, load_clicks, any_file, change_npz_fields),
    "safetensors": Format(make_safetensors, load_safetensors, change_safetensors),
    "tokenizer": Format(make_tokenizer, load_tokenizer, any_file),
    "config": Format(make_config, load_config, any_file),
}
