"""Load the texts of RULER's samples: word lists, an essay and two sets of questions.

`load_texts` reads the official data from a path or, if the path is `hub`, from the hub. Without a path, the generators
synthetic_prose and synthetic_qa make the essay and the questions offline, and `haystack` and `qa` say "generated".
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
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
    """The texts from which samples are drawn.

    Attributes:
        nouns: Nouns of wonderwords.
        adjectives: Adjectives of wonderwords.
        pool: Different nouns, adjectives and verbs, sorted.
        words: The essay's words.
        squad: Questions in SQuAD's way.
        hotpot: Questions in HotpotQA's way.
        haystack: Origin of the essay: ``generated``, ``file:<hash>`` or ``hub:<hash>``.
        qa: Origin of the questions, likewise.
        sentences: What finds the ends of sentences: ``regex`` or ``punkt:<hash>``.
    """

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    pool: tuple[str, ...]
    words: tuple[str, ...]
    squad: QuestionSet
    hotpot: QuestionSet
    haystack: str
    qa: str
    sentences: str = "regex"

    @cached_property
    def pieces(self) -> tuple[tuple[str, ...], list[int], list[int]]:
        """Split the essay into pieces.

        A piece is a word. Punkt may end a sentence inside a word ("so.[1]"); then the word is two pieces, because
        upstream puts a blank there.

        Returns:
            The pieces; the number of pieces before each word and, at the end, of all; and the number of pieces up to
            the end of each sentence.
        """
        if self.sentences == "regex":
            closed = [i for i, word in enumerate(self.words[:-1], 1) if ends_sentence(word)]
            return self.words, list(range(len(self.words) + 1)), [*closed, len(self.words)]
        punkt = load_punkt()
        assert punkt is not None  # `sentences` says that Punkt was there
        split, _ = punkt
        ends = iter(split(" ".join([*self.words, self.words[0]])))  # the essay may be repeated
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
        """Return the number of pieces up to the end of each sentence."""
        return self.pieces[2]

    def essay(self, units: int) -> tuple[tuple[str, ...], list[int]]:
        """Return the pieces of the first `units` words, and the number of pieces up to the end of each sentence.

        The essay is repeated if it is too short.
        """
        pieces, before, ends = self.pieces
        whole, rest = divmod(units, len(self.words))
        if whole:
            ends = [end + i * len(pieces) for i in range(whole + 1) for end in ends]
        return pieces * whole + pieces[: before[rest]], ends

    @cached_property
    def fingerprint(self) -> str:
        """Hash all texts."""
        texts = {field.name: getattr(self, field.name) for field in fields(self)}
        return hashlib.sha256(json.dumps(texts, default=asdict).encode()).hexdigest()


@cache
def load_texts(haystack_path: str | None = None, qa_path: str | None = None) -> RulerTexts:
    """Load all texts.

    Args:
        haystack_path: Path of the essay, ``hub``, or None to generate it.
        qa_path: Folder of the questions, ``hub``, or None to generate them.

    Raises:
        SettingError: A file cannot be used. The message names the setting.
    """
    nouns, adjectives, verbs = (_load_word_list(name) for name in ("noun", "adjective", "verb"))
    words, haystack = (
        (synthetic_prose.write_words(), "generated") if haystack_path is None else _load_essay(haystack_path)
    )
    squad, hotpot, qa = load_questions(qa_path)
    pool = tuple(sorted({*nouns, *adjectives, *verbs}))
    # The regular expression finds all sentences of generated prose. Its prompts are thus the same on every machine.
    punkt = None if haystack_path is None else load_punkt()
    sentences = f"punkt:{punkt[1]}" if punkt else "regex"
    return RulerTexts(nouns, adjectives, pool, tuple(words), squad, hotpot, haystack, qa, sentences)


def _load_word_list(name: str) -> tuple[str, ...]:
    text = files("wonderwords.assets").joinpath(f"{name}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


def _load_essay(path: str) -> tuple[list[str], str]:
    """Load the words of a text file, of upstream's PaulGrahamEssays.json or of the hub's essays, and their origin."""
    if path == "hub":
        raw = " ".join(fetch_column("task.haystack_path", ESSAYS, "text")).encode()
        return raw.decode().split(), f"hub:{short_hash(raw)}"
    text, raw = read_text_file(path)
    return text.split(), f"file:{short_hash(raw)}"


def read_text_file(path: str) -> tuple[str, bytes]:
    """Read a text file, or the key `text` of JSON such as upstream's PaulGrahamEssays.json; also return the bytes."""
    raw = read_source("task.haystack_path", path, Path(path))
    try:
        text = raw.decode("utf-8")
        text = json.loads(text)["text"] if path.endswith(".json") else text
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError(f"task.haystack_path={path}: UTF-8 text, or JSON with the key text ({error!r})") from None
    if not isinstance(text, str) or not text.split():
        raise SettingError(f"task.haystack_path={path}: the file is empty; give a text of some thousand words")
    return text, raw
