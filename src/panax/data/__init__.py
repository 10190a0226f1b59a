"""Data: corpora, tokenizers, packing, examples, sources and prefetching. The result is a
`panax.core.Source`.
"""

from .array_record import ArrayRecord
from .arrow import Arrow
from .augmentation import Augmentation, PaddedCrop, RandomCrop
from .bags import Bag, Calendar, CountVocabulary, Hashed, HashedIds, IntegerIds
from .buckets import Bucketed
from .checked import Limits
from .click_arrays import ClickArrays, ClickExamples
from .corpus import BadRecord, Corpus, Document, PythonLibrary, TextFiles
from .criteo import Criteo
from .digits import Digits
from .example_data import ExampleData, OpenedExamples
from .example_source import ExampleSource
from .examples import Arrays, ExampleFiles, Examples, divide, split_by_time
from .filtered import Filtered
from .images import ImageFolder, ParquetImages, WebDatasetImages
from .iterable import IterableSource
from .joined import ConcatCorpus
from .loader import Prefetched, prefetch
from .mds import Mds
from .megatron import MegatronTokens
from .mixed import JoinedRows, MixedSource
from .mixing import Mixing
from .mixture import Mixture, MixtureComponent
from .packing import Documents, PackedRows, PaddedRows
from .paths import corpus_of
from .ramped import BatchRamp
from .rand_augment import RandAugment
from .records import HuggingFaceDisk, Jsonl, Parquet
from .row_numbers import RowNumbers
from .sequences import SequenceExamples, Sequences
from .showing import batch_lines
from .source import Accounting, DocumentCounts, PackedSource, RowSource
from .synthetic_clicks import SyntheticClicks, SyntheticExamples
from .table import Table
from .text import OpenedPart, OpenedText, TextData, split
from .token_file import TokenFile
from .tokenising import open_corpus, write_tokens
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Tokenizer
from .tokens import TokenStore, TokenWriter, open_tokens
from .webdataset import WebDataset

__all__ = [
    "Accounting", "ArrayRecord", "Arrays", "Arrow", "Augmentation", "BadRecord", "Bag", "BatchRamp", "Bucketed",
    "BytePairTokenizer", "Calendar", "ClickArrays", "ClickExamples", "ConcatCorpus", "Corpus", "CountVocabulary", "Criteo",
    "Digits", "Document", "DocumentCounts", "Documents", "ExampleData", "ExampleFiles", "ExampleSource", "Examples",
    "Filtered", "Hashed", "HashedIds", "HuggingFaceDisk", "ImageFolder", "IntegerIds", "IterableSource", "JoinedRows",
    "Jsonl", "Limits", "Mds", "MegatronTokens", "MixedSource", "Mixing", "Mixture", "MixtureComponent", "OpenedExamples",
    "OpenedPart", "OpenedText", "PackedRows", "PackedSource", "PaddedCrop", "PaddedRows", "Parquet", "ParquetImages",
    "Prefetched", "PretrainedTokenizer", "PythonLibrary", "RandAugment", "RandomCrop", "RowNumbers", "RowSource",
    "SequenceExamples", "Sequences", "SyntheticClicks", "SyntheticExamples", "Table", "TextData", "TextFiles", "TokenFile",
    "TokenStore", "TokenWriter", "Tokenizer", "WebDataset", "WebDatasetImages", "batch_lines", "corpus_of", "divide",
    "open_corpus", "open_tokens", "prefetch", "split", "split_by_time", "write_tokens",
]  # fmt: skip
