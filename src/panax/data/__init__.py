"""Data: corpora, tokenizers, packing, examples, sources and prefetching. The result is a
`panax.core.Source`.
"""

from .chats.chats import Chats
from .formats.array_record import ArrayRecord
from .formats.arrow import Arrow
from .formats.mds import Mds
from .formats.megatron import MegatronTokens
from .formats.records import HuggingFaceDisk, Jsonl, Parquet
from .formats.webdataset import WebDataset
from .images.augmentation import Augmentation, PaddedCrop, RandomCrop
from .images.digits import Digits
from .images.images import ImageFolder, ParquetImages, WebDatasetImages
from .images.mixup import Mixing
from .images.rand_augment import RandAugment
from .loading.batch_ramp import BatchRamp
from .loading.buckets import BucketedSource
from .loading.example_data import ExampleData, OpenedExamples
from .loading.example_source import ExampleSource
from .loading.examples import Arrays, ExampleFiles, Examples, split_by_hash, split_by_time
from .loading.iterable import IterableSource
from .loading.prefetch import PrefetchIterator, prefetch
from .loading.preview import format_batch
from .loading.row_numbers import RowNumbers
from .mixtures.mixture import Mixture, MixtureComponent
from .mixtures.mixture_source import ConcatRows, MixedSource
from .preferences.labeled_answers import LabeledAnswers
from .preferences.preferences import Preferences
from .preferences.reference import ReferenceLogProbabilities
from .tables.bags import Bag, Calendar, CountVocabulary, HashBuckets, HashedIds, IntegerIds
from .tables.click_arrays import ClickArrays, ClickExamples
from .tables.criteo import Criteo
from .tables.sequences import SequenceExamples, Sequences
from .tables.synthetic_clicks import SyntheticClicks, SyntheticExamples
from .tables.table import Table
from .text.concat import ConcatCorpus
from .text.corpus import BadRecord, Corpus, Document, PythonLibrary, TextFiles
from .text.filtered_corpus import FilteredCorpus
from .text.packing import Documents, PackedRows, PaddedRows
from .text.paths import make_corpus
from .text.record_checks import RecordLimits
from .text.text import OpenedPart, OpenedText, TextData, split
from .text.token_file import TokenFile
from .text.token_source import Accounting, DocumentCounts, PackedSource, RowSource
from .text.tokenization import open_corpus, write_tokens
from .text.tokenizer import BytePairTokenizer, PretrainedTokenizer, Tokenizer
from .text.tokens import TokenStore, TokenWriter, open_tokens

__all__ = [
    "Accounting", "ArrayRecord", "Arrays", "Arrow", "Augmentation", "BadRecord", "Bag", "BatchRamp", "BucketedSource",
    "BytePairTokenizer", "Calendar", "Chats", "ClickArrays", "ClickExamples", "ConcatCorpus", "ConcatRows", "Corpus",
    "CountVocabulary", "Criteo", "Digits", "Document", "DocumentCounts", "Documents", "ExampleData", "ExampleFiles",
    "ExampleSource", "Examples", "FilteredCorpus", "HashBuckets", "HashedIds", "HuggingFaceDisk", "ImageFolder",
    "IntegerIds", "IterableSource", "Jsonl", "LabeledAnswers", "Mds", "MegatronTokens", "MixedSource", "Mixing", "Mixture",
    "MixtureComponent", "OpenedExamples", "OpenedPart", "OpenedText", "PackedRows", "PackedSource", "PaddedCrop",
    "PaddedRows", "Parquet", "ParquetImages", "Preferences", "PrefetchIterator", "PretrainedTokenizer", "PythonLibrary",
    "RandAugment", "RandomCrop", "RecordLimits", "ReferenceLogProbabilities", "RowNumbers", "RowSource",
    "SequenceExamples", "Sequences", "SyntheticClicks", "SyntheticExamples", "Table", "TextData", "TextFiles",
    "TokenFile", "TokenStore", "TokenWriter", "Tokenizer", "WebDataset", "WebDatasetImages", "format_batch",
    "make_corpus", "open_corpus", "open_tokens", "prefetch", "split", "split_by_hash", "split_by_time", "write_tokens",
]  # fmt: skip
