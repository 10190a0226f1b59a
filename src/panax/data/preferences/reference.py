"""Log-probabilities of a reference model, one for each token of a token file, in a file beside it."""

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from panax.core.errors import DataError

from ...system.files import expand_user
from ..files.files import fingerprint
from ..text.tokens import TokenStore

_VALUES = "log_probabilities"


@dataclasses.dataclass(frozen=True, eq=False)
class ReferenceLogProbabilities:
    """Log-probabilities of the tokens with loss, given those before them in their document.

    Attributes:
        values: One for each token of the file, float32; NaN for tokens without loss.
        content: The token file's hash.
        weights: A description of the reference model's weights: their fingerprint.
    """

    values: npt.NDArray[np.float32]
    content: str
    weights: str

    @property
    def fingerprint(self) -> str:
        return fingerprint("reference", self.content, self.weights)

    def save(self, path: str | Path) -> None:
        """Write the file, in the format of safetensors."""
        save_file({_VALUES: self.values}, expand_user(path), {"content": self.content, "weights": self.weights})


def load_reference(path: str | Path, store: TokenStore) -> ReferenceLogProbabilities:
    """Read the file of `ReferenceLogProbabilities.save`.

    Raises:
        DataError: The file can't be read, or is of other tokens.
    """
    try:
        with safe_open(expand_user(path), "numpy") as file:
            described = file.metadata() or {}
            reference = ReferenceLogProbabilities(file.get_tensor(_VALUES), described["content"], described["weights"])
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(
            f"{path} does not hold reference log-probabilities ({error}); compute them again with panax.add_reference"
        ) from error
    if reference.content != store.content or reference.values.shape != (len(store.tokens),):
        raise DataError(
            f"{path} holds reference log-probabilities of other tokens: the corpus, its tokenizer or its chat template have "
            f"changed since; compute them again with panax.add_reference"
        )
    return reference
