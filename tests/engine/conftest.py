"""Answers of these tests are read ahead by few tokens, so that a short answer reaches what a long one does."""

import pytest

from kvbench.engine import generation, graph_decoding, packed_rows, quota_rows, read_rows
from tests.support.answer_paths import CHUNK


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    for module in (generation, graph_decoding, packed_rows, quota_rows, read_rows):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
