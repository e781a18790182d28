"""Fewer words for lm-eval's copy of RULER."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import wonderwords


@contextmanager
def use_few_words() -> Iterator[None]:
    """lm-eval pairs all adjectives with all nouns when its module is imported: 6 million keys, 9 seconds."""

    class Few(wonderwords.RandomWord):
        def __init__(self) -> None:
            super().__init__(enhanced_prefixes=False)  # tries of all words, which lm-eval does not ask
            self._categories |= {"nouns": self._categories["nouns"][:100]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", Few)
        yield
    sys.modules.pop("lm_eval.tasks.ruler.prepare_niah", None)
