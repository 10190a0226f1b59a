"""Specification of an embedding table with rows that are assigned to keys during training."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GrowingVocab:
    """A table with rows assigned to the keys in the data; a vocabulary in the model state stores the
    assignment.

    A key is 64 bits, as two uint32 words; two zeros mean no key. Rows are grouped into blocks of `ways`, and
    a key's hash selects its block.

    Attributes:
        table: Name of the parameter.
        vocabulary: Name of the vocabulary in the model state. It is a mapping of `keys`, uint32 (row, 2), the
            key of each row, and `asked`, int32 (row), the last step in which it was requested, -1 if the row
            is free.
        leaves: Leaves of the batch that hold keys, uint32 (batch, ids, 2); a step receives row ids in their
            place.
        ways: Rows per block.
        idle_steps: A key may lose its row to a new one after it was not requested for more than this many
            steps.
        scale: Initial values of a row are uniform in [-`scale`, `scale`].
    """

    table: str
    vocabulary: str
    leaves: tuple[str, ...]
    ways: int
    idle_steps: int
    scale: float
