"""A peer that answers with something else than a list gives an error of the store, whatever its content."""

import pytest

from panax.core.errors import StoreError
from panax.stores.peer import PeerStore


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[1]", b'[["a"]]', b'[["../a", 1]]', b'[["a", "x"]]', b"[" * 50_000, b'[["a", 1e400]]', b"\xff"],
)
def test_a_strange_answer_is_an_error_of_the_store(answer, monkeypatch):
    store = PeerStore.__new__(PeerStore)
    store.url = "http://peer"
    monkeypatch.setattr(store, "_ask", lambda *args: answer)
    with pytest.raises(StoreError):
        store.list()
    if answer not in (b"[1]", b'[["a"]]', b'[["../a", 1]]', b'[["a", "x"]]'):
        with pytest.raises(StoreError, match="sent no valid list"):
            store.folders()
