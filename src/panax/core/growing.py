"""What a task says of a table whose rows are given out while it is trained."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Growing:
    """A table whose rows belong to whatever keys the data bring: a vocabulary in the model state says which row is whose.

    A key is 64 bits, two words of uint32, and two zeros are none. The rows are blocks of `ways`; a key's hash names its block.

    Attributes:
        table: The parameter's name.
        vocabulary: What the vocabulary is called in the model state, a mapping: `keys`, uint32 (row, 2), whose each row is, and
            `asked`, int32 (row), the step in which it was asked for last, -1 where it is nobody's.
        leaves: Of the batch, those that hold keys, uint32 (batch, ids, 2); a step sees row numbers in their place.
        ways: Rows of a block.
        idle_steps: A key loses its row to a new one once it was not asked for in more steps than these.
        scale: The first numbers of a row are uniform from -`scale` to `scale`.
    """

    table: str
    vocabulary: str
    leaves: tuple[str, ...]
    ways: int
    idle_steps: int
    scale: float
