"""Data: corpora, tokenizers, packing, sources, and drawing ahead. What comes out is a `panax.core.Source`."""

from .buckets import Bucketed
from .corpus import Corpus, Document, PythonLibrary, TextFiles
from .iterable import IterableSource
from .loader import Prefetched, prefetch
from .packing import Documents, PackedRows, PaddedRows
from .records import HuggingFaceDisk, Jsonl, Parquet
from .source import PackedSource
from .text import OpenedText, TextData, split
from .tokenising import open_corpus, write_tokens
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Tokenizer
from .tokens import TokenFile, TokenStore, TokenWriter, open_tokens

__all__ = [
    "Bucketed", "BytePairTokenizer", "Corpus", "Document", "Documents", "HuggingFaceDisk", "IterableSource", "Jsonl",
    "OpenedText", "PackedRows", "PackedSource", "PaddedRows", "Parquet", "Prefetched", "PretrainedTokenizer",
    "PythonLibrary", "TextData", "TextFiles", "TokenFile", "TokenStore", "TokenWriter", "Tokenizer", "open_corpus",
    "open_tokens", "prefetch", "split", "write_tokens",
]  # fmt: skip
