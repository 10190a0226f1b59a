"""Data: corpora, tokenizers, packing, examples, sources, and drawing ahead. What comes out is a `panax.core.Source`."""

from .array_record import ArrayRecord
from .arrow import Arrow
from .buckets import Bucketed
from .checked import Limits
from .corpus import BadRecord, Corpus, Document, PythonLibrary, TextFiles
from .example_data import ExampleData, OpenedExamples
from .example_source import ExampleSource
from .examples import Arrays, ExampleFiles, Examples, divide
from .filtered import Filtered
from .images import ImageFolder, ParquetImages, WebDatasetImages
from .iterable import IterableSource
from .loader import Prefetched, prefetch
from .mds import Mds
from .megatron import MegatronTokens
from .mixed import JoinedRows, MixedSource
from .mixture import Mixture, Part
from .packing import Documents, PackedRows, PaddedRows
from .records import HuggingFaceDisk, Jsonl, Parquet
from .source import Accounting, PackedSource, RowSource, Seen
from .table import Table
from .text import OpenedPart, OpenedText, TextData, split
from .tokenising import open_corpus, write_tokens
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Tokenizer
from .tokens import TokenFile, TokenStore, TokenWriter, open_tokens
from .webdataset import WebDataset

__all__ = [
    "Accounting", "ArrayRecord", "Arrays", "Arrow", "BadRecord", "Bucketed", "BytePairTokenizer", "Corpus",
    "Document", "Documents", "ExampleData", "ExampleFiles", "ExampleSource", "Examples", "Filtered",
    "HuggingFaceDisk", "ImageFolder", "IterableSource", "JoinedRows", "Jsonl", "Limits", "Mds", "MegatronTokens",
    "MixedSource", "Mixture", "OpenedExamples", "OpenedPart", "OpenedText", "PackedRows", "PackedSource",
    "PaddedRows", "Parquet", "ParquetImages", "Part", "Prefetched", "PretrainedTokenizer", "PythonLibrary",
    "RowSource", "Seen", "Table", "TextData", "TextFiles", "TokenFile", "TokenStore", "TokenWriter", "Tokenizer",
    "WebDataset", "WebDatasetImages", "divide", "open_corpus", "open_tokens", "prefetch", "split", "write_tokens",
]  # fmt: skip
