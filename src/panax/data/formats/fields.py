"""Documents from records with named fields: the text, or the prompt and the answer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from panax.core.errors import DataError, RecipeError

from ...core.install_hints import install_command
from ..files.files import BadRecordError
from ..text.corpus import BadRecord, Document


class Fields(NamedTuple):
    """The fields that hold a document: `text`, or `prompt` (without loss) and `answer` (with loss)."""

    text: str
    prompt: str | None = None
    answer: str | None = None

    def check(self, default: str = "text") -> None:
        """Check that `prompt` and `answer` are set together, and without a `text`, which would have no effect.

        Raises:
            RecipeError: The fields contradict each other.
        """
        if (self.prompt is None) != (self.answer is None):
            given, other = ("prompt", "answer") if self.answer is None else ("answer", "prompt")
            raise RecipeError(f"{given}= is given without {other}=; pass both, or only text=")
        if self.prompt is not None and self.text != default:
            raise RecipeError(f"text={self.text!r} has no effect with prompt= and answer=; pass either")

    def check_unused(self, beside: str) -> None:
        """Raise a RecipeError if a field is named that has no effect."""
        if self != Fields("text"):
            raise RecipeError(f"text=, prompt= and answer= have no effect with {beside}; remove them")

    @property
    def names(self) -> list[str]:
        """Return the names of the fields that are read."""
        return [self.text] if self.prompt is None or self.answer is None else [self.prompt, self.answer]

    def check_present(self, present: Sequence[str], where: str) -> None:
        """Raise a DataError if a table lacks a field."""
        for name in self.names:
            if name not in present and name.partition(".")[0] not in present:
                error = describe_missing_field(name, present, where)
                raise DataError(str(error))

    def document(self, record: Mapping[str, Any], where: str) -> Document | BadRecord:
        """Convert a record to a document; a null field counts as blank."""
        try:
            if self.prompt is None or self.answer is None:
                return Document(_text_of(record, self.text, where), where=where)
            prompt = _text_of(record, self.prompt, where)
            return Document(_text_of(record, self.answer, where), prompt=prompt, where=where)
        except BadRecordError as error:
            return BadRecord(error.where, error.reason)


def _text_of(record: Mapping[str, Any], name: str, where: str) -> str:
    value = _value_of(record, name, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise BadRecordError(where, f"field {name!r} is of type {kind}; expected text: name another field")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise BadRecordError(where, f"field {name!r} holds {half}, half of a character; repair the text") from None
    return value


def _value_of(record: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a record's field, or the nested field of a path (`message.content`)."""
    holder: Any = record
    left = name.split(".")
    while True:
        # A name may itself contain dots: the longest existing name wins.
        cut = next((cut for cut in range(len(left), 0, -1) if ".".join(left[:cut]) in holder), 0)
        if not cut:
            raise describe_missing_field(name, list(record), where)
        key, left = ".".join(left[:cut]), left[cut:]
        if key in getattr(holder, "twice", ()):
            # A record with a duplicate name is ambiguous.
            raise BadRecordError(
                where, f"field {key!r} stands twice in the record; expected it once: repair the record"
            )
        holder = holder[key]
        if not left or holder is None:
            return holder
        if not isinstance(holder, Mapping):
            kind = type(holder).__name__
            raise BadRecordError(where, f"field {key!r} of {name!r} is of type {kind}; expected an object with fields")


def describe_missing_field(name: str, present: Sequence[str], where: str) -> BadRecordError:
    """Return the error for a record that lacks a field."""
    known = ", ".join(map(repr, present)) or "none at all"
    return BadRecordError(
        where,
        f"no field {name!r}; it has {known}: name the field with text= (--data.corpus.text), or prompt= and answer= (`panax "
        f"evaluate` takes --text, or --prompt and --answer)",
    )


def missing_library_error(package: str, feature: str, extra: str) -> DataError:
    """Return the error for a missing library of an optional feature."""
    return DataError(f"{feature} needs {package}, which can't be imported; run: {install_command(extra)}")
