"""Data: corpora, tokenizers, packing, sources, and drawing ahead. What comes out is a `panax.core.Source`."""

from .buckets import Bucketed
from .checked import Limits
from .corpus import BadRecord, Corpus, Document, PythonLibrary, TextFiles
from .filtered import Filtered
from .iterable import IterableSource
from .loader import Prefetched, prefetch
from .mixed import JoinedRows, MixedSource
from .mixture import Mixture, Part
from .packing import Documents, PackedRows, PaddedRows
from .records import HuggingFaceDisk, Jsonl, Parquet
from .source import Accounting, PackedSource, RowSource, Seen
from .text import OpenedPart, OpenedText, TextData, split
from .tokenising import open_corpus, write_tokens
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Tokenizer
from .tokens import TokenFile, TokenStore, TokenWriter, open_tokens

__all__ = [
    "Accounting", "BadRecord", "Bucketed", "BytePairTokenizer", "Corpus", "Document", "Documents", "Filtered",
    "HuggingFaceDisk", "IterableSource", "JoinedRows", "Jsonl", "Limits", "MixedSource", "Mixture", "OpenedPart",
    "OpenedText", "PackedRows", "PackedSource", "PaddedRows", "Parquet", "Part", "Prefetched", "PretrainedTokenizer",
    "PythonLibrary", "RowSource", "Seen", "TextData", "TextFiles", "TokenFile", "TokenStore", "TokenWriter",
    "Tokenizer", "open_corpus", "open_tokens", "prefetch", "split", "write_tokens",
]  # fmt: skip
