"""Two hundred conversations of each published template, as in transformers."""

import pytest
from chats.test_templates import TEMPLATES, check_equal


@pytest.mark.parametrize("name", TEMPLATES)
def test_two_hundred_conversations(name, monkeypatch):
    check_equal(name, 200, monkeypatch)
