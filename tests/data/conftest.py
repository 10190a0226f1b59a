"""Small token files, made from lists."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from panax.data import Documents, TokenStore, TokenWriter, open_tokens, split

END = 999
MakeStore = Callable[..., TokenStore]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Write documents (lists of ids, without their end) and open them; `prompts` counts tokens without loss."""

    def make(documents: Sequence[Sequence[int]], prompts: Sequence[int] | None = None) -> TokenStore:
        directory = tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}"
        with TokenWriter(directory, vocab_size=1000, end_of_document=END) as writer:
            for document, prompt in zip(documents, prompts or [0] * len(documents), strict=True):
                writer.append(document, num_prompt_tokens=prompt)
        return open_tokens(directory)

    return make


@pytest.fixture
def make_documents(make_store: MakeStore) -> Callable[..., Documents]:
    """Documents of the given lengths (their ends included), each token of which is met once only: 0, 1, 2, ..."""

    def make(lengths: Sequence[int]) -> Documents:
        ids = iter(range(END))
        store = make_store([[next(ids) for _ in range(length - 1)] for length in lengths])
        return split(store, 0)[0]

    return make


@pytest.fixture
def many_documents(make_documents: Callable[..., Documents]) -> Documents:
    return make_documents(np.random.default_rng(0).integers(1, 40, 37).tolist())
