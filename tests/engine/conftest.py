"""Answers of these tests are read ahead by few tokens, so that a short answer reaches what a long one does."""

import pytest

from kvbench.engine import appended_rows, generation, graph_decoding, method_view, read_rows
from tests.support.answer_paths import CHUNK


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    for module in (appended_rows, generation, graph_decoding, method_view, read_rows):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
