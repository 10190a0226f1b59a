"""A corpus of Arrow files: the IPC format, as a file (Feather) or as a stream, one record batch at a time."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ...core.validation import Validated
from ..files.bounds import MAX_RECORD_BYTES, check_positive
from ..files.files import DataFile, cache_identity, find_files, fingerprint, open_each_local, read_error
from ..text.corpus import BadRecord, Document
from .columns import ARROW_ERRORS, read_documents
from .fields import Fields, missing_library_error
from .ipc_sizes import check_ipc_sizes

_PATTERNS = ("**/*.arrow", "**/*.feather", "**/*.ipc", "**/*.arrows")
_MAGIC = b"ARROW1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow(Validated):
    """Arrow IPC files and streams, read one record batch at a time. Needs pyarrow (`pip install
    'panax-jax[parquet]'`).

    Attributes:
        paths: Files, directories (searched for `.arrow`, `.arrows`, `.feather` and `.ipc`) or globs, also of
            object
            stores.
        text: The column that holds the document.
        prompt: The column with the text before the answer, which carries no loss; needs `answer`.
        answer: The column with the text to learn; needs `prompt`.
        max_record_bytes: A larger value is a bad record.
        max_batch_bytes: A compressed record batch with a larger decompressed size is an error, raised before
            decompression.
    """

    paths: tuple[str, ...]
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    max_batch_bytes: int = 2**31

    def __post_init__(self) -> None:
        self._fields.check()
        check_positive(self, "max_record_bytes", "max_batch_bytes")

    def documents(self) -> Iterator[Document | BadRecord]:
        files = self.files()
        try:
            import pyarrow as arrow
        except ImportError as error:
            raise missing_library_error("pyarrow", "an Arrow corpus", "parquet") from error
        for name, path in open_each_local(files):
            check_ipc_sizes(path, name, self.max_batch_bytes, "max_batch_bytes")
            try:
                with arrow.memory_map(str(path)) as file:
                    row = 0
                    for batch in _batches(file, self._fields, name):
                        yield from read_documents(batch, self._fields, name, row, self.max_record_bytes)
                        row += batch.num_rows
            except (*ARROW_ERRORS, arrow.ArrowException) as error:
                raise read_error(name, error) from error

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return find_files(self.paths, _PATTERNS)

    def fingerprint(self) -> str:
        return fingerprint("arrow", self.text, self.prompt, self.answer, *cache_identity(self.files()))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


def _batches(file: Any, fields: Fields, name: str) -> Iterator[Any]:
    """Yield the record batches of a file or a stream, with only the columns of `fields`."""
    from pyarrow import ipc

    is_file = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    opened = ipc.open_file if is_file else ipc.open_stream
    schema = opened(file).schema
    fields.check_present(schema.names, name)
    file.seek(0)
    options = ipc.IpcReadOptions(included_fields=_places(schema, fields.names))
    reader = opened(file, options=options)
    if is_file:
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from reader


def _places(schema: Any, names: Sequence[str]) -> list[int]:
    """Return the indices of the columns that hold these fields, each once."""
    columns = (name if name in schema.names else name.partition(".")[0] for name in names)
    return [schema.get_field_index(column) for column in dict.fromkeys(columns)]
