"""Selection of a corpus by path: a file's content and name decide which corpus reads it."""

import dataclasses
import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from panax.core.errors import DataError, RecipeError
from panax.stores import is_remote
from panax.system.files import expand_user

from ..chats.chats import Chats
from ..chats.layouts import find_layout, is_chat_record
from ..files.decompression import SUFFIXES, read_first_bytes
from ..files.files import DataFile, find_files, read_error
from ..files.magic import HEADER_BYTES, detect_compression, detect_format
from ..formats.array_record import ArrayRecord
from ..formats.arrow import Arrow
from ..formats.columns import ARROW_ERRORS
from ..formats.json_records import first_character, is_json_records
from ..formats.mds import Mds
from ..formats.megatron import MegatronTokens
from ..formats.records import HuggingFaceDisk, Jsonl, Parquet
from ..formats.webdataset import WebDataset
from ..preferences.answer_records import LABELED, is_labeled_record
from ..preferences.labeled_answers import LabeledAnswers
from ..preferences.pair_records import ANSWERS, is_pair_record
from ..preferences.preferences import Preferences
from .concat import ConcatCorpus
from .corpus import TextFiles
from .filtered_corpus import PlainCorpus
from .token_file import TokenFile
from .tokens import HEADER

RECORD_PATTERNS: dict[type, tuple[str, ...]] = {
    Jsonl: tuple(f"{lines}{end}" for lines in (".jsonl", ".ndjson") for end in ("", *SUFFIXES))
    + tuple(f".json{end}" for end in SUFFIXES),
    Parquet: (".parquet",),
    Arrow: (".arrow", ".arrows", ".feather", ".ipc"),
    ArrayRecord: (".array_record",),
    WebDataset: (".tar", *(f".tar{end}" for end in SUFFIXES), ".tgz"),
    MegatronTokens: (".bin", ".idx"),
}
"""File name endings of each corpus."""

TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".log", ".srt", ".html", ".htm", ".xml", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".cs", ".rs",
    ".go", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".css", ".sh", ".bash", ".sql", ".rb", ".php", ".lua",
    ".jl", ".hs", ".ml", ".swift", ".r", ".R", ".m", ".pl", ".f90",
))  # fmt: skip
"""File name endings of plain text files, one text each."""

READABLE_FORMATS = (
    "texts (.txt, .md, .py, ...), JSON records (.jsonl, .json.gz, ...), .parquet, .arrow, .array_record, .tar "
    "or token files"
)
_PLAIN_TEXTS = frozenset((".txt", ".text"))
"""Ambiguous endings: the content decides if such a file holds records. Code files are not checked, since code
may begin like JSON."""

_LOOKED_AT = 1000
"""Number of files of each ending that are inspected; the others are classified by their ending."""

_OF_BYTES: dict[str, type] = {"Parquet": Parquet, "Arrow": Arrow}


def make_corpus(
    *paths: str | Path,
    text: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    chats: bool = True,
) -> PlainCorpus:
    """Return the corpus that reads these files, folders or globs, local or in an object store.

    A file's format is detected from its first bytes if possible (JSON records, Parquet, Arrow, compression),
    else from its ending. Files of a folder that match neither are skipped, which a run reports. Files of
    several kinds are read one kind after the other, if each kind has a separate path.

    Args:
        text: The field of records that holds the document; by default the format's usual one.
        prompt: The field with the text before the answer, which carries no loss; needs `answer`.
        answer: The field with the text to learn; needs `prompt`.
        chats: True if records of conversations are read as such (`Chats`), pairs of answers as `Preferences` and labeled ones as
            `LabeledAnswers`, unless fields are named.

    Raises:
        DataError: A path does not exist, holds nothing or several kinds of files, or no corpus reads it.
        RecipeError: There is no path, a token file is combined with other paths, or a field is named for data
            without fields.

    >>> import sysconfig
    >>> type(make_corpus(sysconfig.get_path("stdlib") + "/json/*.py")).__name__
    'TextFiles'
    """
    fields = {
        name: field for name, field in (("text", text), ("prompt", prompt), ("answer", answer)) if field is not None
    }
    if not paths:
        raise RecipeError("no path is given; expected files, folders or globs")
    wrong = [path for path in paths if not isinstance(path, str | Path) or not str(path)]
    if wrong:
        raise RecipeError(f"{wrong[0]!r} is not a path; expected the name of a file or folder, or a glob")
    corpora: list[Any] = []
    read: dict[type, list[str]] = {}
    for path in dict.fromkeys(map(str, paths)):
        reader = _choose_corpus(path, chats=chats and not fields)
        if isinstance(reader, tuple):
            read.setdefault(reader[0], []).extend(reader[1])
        else:
            corpora.append(reader)
    corpora += [kind(paths=tuple(names)) for kind, names in read.items()]
    if fields:
        with_fields = [each for each in corpora if hasattr(each, "answer")]
        if not with_fields:
            raise RecipeError(
                f"{', '.join(f'{name}=' for name in fields)} names a field, and {paths[0]} holds no records"
            )
        corpora = [dataclasses.replace(each, **fields) if each in with_fields else each for each in corpora]
    if len(corpora) == 1:
        return corpora[0]
    if any(isinstance(each, Preferences | LabeledAnswers) for each in corpora):
        raise RecipeError(
            "some of these files have pairs of answers, or labeled ones, which train alone; pass files of one kind"
        )
    tokens = next((each for each in corpora if isinstance(each, TokenFile)), None)
    if tokens is not None:
        raise RecipeError(
            f"{tokens.path} holds tokens, which can't be joined with other paths; pass it alone, or write a recipe with a Mixture"
        )
    return ConcatCorpus(corpora=tuple(corpora))


def _choose_corpus(path: str, *, chats: bool = True) -> Any:
    """Return a corpus, or the corpus type that reads the path together with others of its kind, and the paths
    for it.

    Args:
        chats: True if records with messages are conversations; else their fields are named.
    """
    folder = not is_remote(path) and expand_user(path).is_dir()
    if folder and not any(expand_user(path).rglob("*")):
        raise DataError(f"the folder {path} is empty; expected {READABLE_FORMATS} in it")
    files = find_files((path,), ("**/*",))
    single = len(files) == 1 and files[0].name.rstrip("/").endswith(PurePosixPath(path).name)
    many = folder or (is_remote(path) and not single and not glob.has_magic(path))
    if many and (prepared := _prepared_folder(path, files)) is not None:
        return prepared
    kind_of = _types_by_file(files, single=not many, chats=chats)
    kinds = Counter(kind_of.values())
    unknown = kinds.pop(None, 0)
    if not kinds:
        return _read_unknown(path, files)
    if len(kinds) > 1:
        raise DataError(
            f"{path} holds {_counted(kinds, kind_of)}; expected one kind. Name the files to use, each as a separate "
            f"path: "
            + ", ".join(
                _globs(path, _recognized(files, kind_of)) if many else sorted({f"*{_end(file)}" for file in files})
            )
        )
    if unknown and not many:
        other = next(name for name, kind in kind_of.items() if kind is None)
        raise DataError(
            f"{path} matches {other}, and nothing here reads it; expected {READABLE_FORMATS}: use a narrower glob"
        )
    kind = next(iter(kinds))
    assert kind is not None
    if kind is MegatronTokens:
        return _tokens(path, files)
    known = _recognized(files, kind_of)
    return kind, _paths_for(kind, path, known) if many else [path]


def _recognized(files: Sequence[DataFile], kind_of: Mapping[str, type | None]) -> list[DataFile]:
    return [file for file in files if kind_of[file.name] is not None]


def _paths_for(kind: Any, path: str, files: Sequence[DataFile]) -> list[str]:
    """Return paths by which a corpus reads exactly these files of a folder: the folder, globs of some
    endings, or each file."""
    names = {file.name for file in files}
    for paths in ([path], _globs(path, files)):
        try:
            read_names = {file.name for file in kind(paths=tuple(paths)).files()}
        except DataError:
            continue
        if read_names == names:
            return paths
    return [file.name for file in files]


def _prepared_folder(path: str, files: Sequence[DataFile]) -> Any:
    """Return the corpus for a folder that another program or Panax wrote as a whole; None for other
    folders."""
    names = {PurePosixPath(file.name).name for file in files}
    at_top = {file.name.removeprefix(path.rstrip("/") + "/") for file in files}
    if {HEADER, "tokens.bin"} <= at_top:
        return TokenFile(path=path)
    if "index.json" in at_top and any(".mds" in name for name in names):
        return Mds(path=path)
    if "dataset_dict.json" in at_top or {"dataset_info.json", "state.json"} <= at_top:
        return HuggingFaceDisk(path=path)
    return None


def _tokens(path: str, files: Sequence[DataFile]) -> TokenFile:
    stems = {file.name.removesuffix(".bin").removesuffix(".idx") for file in files}
    if len(stems) > 1:
        raise DataError(
            f"{path} holds {len(stems)} token files; name one of them, or write a recipe with a Mixture of them"
        )
    stem = stems.pop()
    if not is_remote(stem):
        if stem.endswith("tokens") and Path(stem).with_name(HEADER).is_file():
            return TokenFile(path=f"{stem}.bin")
        if not Path(f"{stem}.idx").is_file():
            raise DataError(
                f"{stem}.bin is a flat file of ids, or something else: it does not state the width of an id. A recipe "
                f"does: TokenFile(path='{stem}.bin', dtype='uint16', end_of_document=...)"
            )
    return MegatronTokens(path=stem)


def _read_unknown(path: str, files: Sequence[DataFile]) -> tuple[type, list[str]]:
    """Return text files if the first file is text, whatever its name."""
    first = files[0]
    begin = b"" if first.remote is not None else _begin(first)
    if first.remote is None and _is_text(begin):
        if first_character(begin) == b"{" and _end(first).lower() == ".json":
            raise DataError(
                f"{path} holds one JSON object over several lines, which is not text to train on; expected records: an object on "
                f"each line, or one array of objects"
            )
        return TextFiles, [path]
    ends = ", ".join(sorted({_end(file) or "no suffix" for file in files})[:6])
    what = "is not text" if len(files) == 1 else f"holds {len(files)} files ({ends}), and the first is not text"
    kind = detect_format(begin)
    packed = f" It is of the format {kind}." if kind is not None else ""
    raise DataError(f"{path} {what}; expected {READABLE_FORMATS}.{packed}")


def _begin(file: DataFile) -> bytes:
    try:
        with open(file.name, "rb") as opened:
            return opened.read(HEADER_BYTES)
    except OSError as error:
        raise read_error(file.name, error) from error


def _is_text(begin: bytes) -> bool:
    if b"\0" in begin:
        return False
    try:
        begin.decode("utf-8")
    except UnicodeDecodeError as error:
        # The last character may be truncated.
        return error.start > 0 and error.start >= len(begin) - 3 and len(begin) == HEADER_BYTES
    return True


def _end(file: DataFile) -> str:
    name = PurePosixPath(file.name)
    return "".join(name.suffixes[-2:]) if name.suffix.lower() in SUFFIXES else name.suffix


def _types_by_file(files: Sequence[DataFile], *, single: bool, chats: bool) -> dict[str, type | None]:
    """Return the corpus type that reads each file, by file name; None if no type does."""
    looked_at: Counter[str] = Counter()
    kinds: dict[str, type | None] = {}
    for file in files:
        end = _end(file).lower()
        named = _type_of_suffix(end)
        looked_at[end] += 1
        if file.remote is not None:
            # A single named file is intended as data; among others, a .json file usually describes a data set
            # instead of containing one.
            kinds[file.name] = Jsonl if named is None and single and end == ".json" else named
        else:
            is_code = named is TextFiles and end not in _PLAIN_TEXTS
            by_name = is_code or named in (WebDataset, MegatronTokens, ArrayRecord) or looked_at[end] > _LOOKED_AT
            kind = named if by_name else _type_of_content(file, named)
            kinds[file.name] = _conversation_type(file, kind) or kind if chats and kind in (Jsonl, Parquet) else kind
    return kinds


def _type_of_suffix(end: str) -> type | None:
    return (
        TextFiles
        if end in TEXT_SUFFIXES
        else next((kind for kind, ends in RECORD_PATTERNS.items() if end in ends), None)
    )


def _type_of_content(file: DataFile, named: type | None) -> type | None:
    """Return the corpus type that reads a file, by its first bytes; by its name if they are inconclusive."""
    begin = _begin(file)
    if (kind := _OF_BYTES.get(detect_format(begin) or "")) is not None:
        return kind
    if detect_compression(begin) is not None:
        if named is Jsonl:
            return named
        try:
            begin = read_first_bytes(file.local, file.name)
        except DataError:
            return None
        return Jsonl if is_json_records(begin) else None
    return Jsonl if is_json_records(begin) else named


def _conversation_type(file: DataFile, kind: type | None) -> type | None:
    """Return the corpus type of conversations or of pairs of answers that reads a local file, by its first records or by its
    columns; None for other records."""
    if kind is Jsonl:
        try:
            begin = read_first_bytes(file.local, file.name)
        except DataError:
            return None
        if is_pair_record(begin):
            return Preferences
        return LabeledAnswers if is_labeled_record(begin) else Chats if is_chat_record(begin) else None
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        return None
    try:
        names = set(parquet.read_schema(file.name).names)
    except (*ARROW_ERRORS, arrow.ArrowException):  # a damaged file, which its reader reports
        return None
    if names >= set(ANSWERS):
        return Preferences
    return LabeledAnswers if names >= set(LABELED) else Chats if find_layout(names) is not None else None


def _globs(path: str, files: Sequence[DataFile]) -> list[str]:
    ends = sorted({_end(file) for file in files})
    root = path.rstrip("/") if is_remote(path) else glob.escape(path.rstrip("/"))
    return [f"{root}/**/*{end}" for end in ends]


def _counted(kinds: "Counter[type | None]", kind_of: Mapping[str, type | None]) -> str:
    def ends(kind: type | None) -> str:
        return "/".join(sorted({_end(DataFile(name)) for name, each in kind_of.items() if each is kind}))

    return " and ".join(f"{count} of {ends(kind)}" for kind, count in kinds.items())
