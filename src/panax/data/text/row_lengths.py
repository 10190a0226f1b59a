"""Fit of documents into rows, as a line for the user: how many are cut, and how full rows are."""

from collections.abc import Iterator

from .packing import Documents, PackedRows, PaddedRows
from .tokens import TokenStore


def describe_lengths(rows: PackedRows | PaddedRows, documents: Documents, which: str, batch_size: int) -> str:
    """Describe how long documents are compared to a row, how many are cut, and the share of the rows'
    positions that holds tokens.

    Args:
        which: Name of the documents in the message.
        batch_size: Number of rows of a batch, which is as wide as its longest row.
    """
    count, longest = len(documents.lengths), int(documents.lengths.max(initial=0))
    length, tokens = rows.sequence_length, documents.num_tokens
    head = f"{count:,} {which} of {tokens / max(count, 1):,.0f} tokens on average, {longest:,} at most"
    if isinstance(rows, PackedRows):
        filled = tokens / (rows.num_rows * length)
        longer = int((documents.lengths > length).sum())
        going_on = f"; {longer:,} are longer than a row and continue in another" if longer else ""
        return f"{head}; {rows.num_rows:,} rows of {length:,}, {filled:.1%} filled{going_on}"
    parts = [head, f"one a row, {rows.fill_ratio(batch_size):.1%} filled"]
    if rows.num_truncated_documents:
        parts.append(
            f"of {count:,} {which} {rows.num_truncated_documents:,} are longer than {length:,} tokens and cut, with "
            f"{rows.num_truncated_tokens:,} tokens ({rows.num_truncated_tokens / tokens:.1%}) that are never seen"
        )
    if rows.num_documents_without_loss:
        parts.append(f"{rows.num_documents_without_loss:,} have no target with loss left")
    return "; ".join(parts)


def describe_skipped_documents(store: TokenStore) -> Iterator[str]:
    """Yield notes on the documents of a corpus that did not become tokens."""
    if store.num_blank_documents:
        yield f"{store.num_blank_documents:,} documents are blank and skipped"
    if store.num_filtered_documents:
        yield f"{store.num_filtered_documents:,} documents are removed by the filter"
    if store.num_empty_answers:
        yield f"{store.num_empty_answers:,} answers are empty (or null): they teach to end at once"
