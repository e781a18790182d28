"""Needle in a haystack: one sentence hidden in a long text, over a grid of lengths and depths.

This is G. Kamradt's pressure test (gkamradt/LLMTest_NeedleInAHaystack 7b90d28), with the variants of KV-cache papers
that conf/task/niah.yaml lists with their sources. A row of the closing table is a length. Every record has `length` and
`depth`, from which `python -m kvbench results grid` makes the grid.

The score is the recall of the needle's keywords in points: the share of the stems of `keywords` that are among the
output's stems. Words and stems are those of rouge-score, so "sitting" recalls "sit". Upstream lets a model judge. KV
papers use rouge-score's ROUGE-1 F of the whole needle, times 10. A wrong answer in the needle's words scores nearly as
much by it, so kvbench keeps it only as `rouge1`, for comparison.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import islice, product

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.axes import parse_axis
from kvbench.tasks.common.dataset_rows import MINIATURE, name_source
from kvbench.tasks.niah.haystack import Passage, load_haystack
from kvbench.tasks.ruler.fit import fit_units
from kvbench.validation import SettingError, require_choice, require_int

CITIES = (
    "Accra", "Athens", "Berlin", "Bogota", "Cairo", "Dakar", "Dublin", "Geneva", "Hanoi", "Helsinki", "Jakarta",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Lyon", "Madrid", "Manila", "Montreal", "Mumbai", "Nairobi",
    "Osaka", "Oslo", "Prague", "Quito", "Riga", "Rome", "Seoul", "Sydney", "Toronto", "Vienna",
)  # fmt: skip


@dataclass(frozen=True)
class Niah:
    """The task. conf/task/niah.yaml describes its settings."""

    needle: str
    keywords: Sequence[str]
    context: str
    question: str
    answer_prefix: str
    chat: bool
    until: Sequence[str]
    new_tokens: int
    lengths: int | Sequence[int] | Mapping[str, int]
    depths: float | Sequence[float] | Mapping[str, float]
    trials: int
    start: str
    align: str
    buffer: int | None
    haystack_path: str | None = None
    seed: int = 0
    limit: int | None = None
    name: str = "niah"

    @property
    def length(self) -> int:
        """The largest of the lengths, in tokens."""
        return max(self._lengths())

    def check(self) -> None:
        """Check the settings and load the haystack. `samples` may still find a length too small for the tokenizer.

        Raises:
            SettingError: A setting is invalid, or the haystack cannot be read.
        """
        for name in ("needle", "context", "question", "answer_prefix"):
            if not isinstance(text := getattr(self, name), str) or not text.strip() and name in ("needle", "question"):
                raise SettingError(f"task.{name}={text}: a text")
        if self.context.count("{haystack}") != 1:
            raise SettingError(f"task.context={self.context!r}: a text with {{haystack}} in it, once")
        self._check_keywords()
        require_choice("task.chat", self.chat, (True, False))
        if not _texts(self.until):
            raise SettingError(f"task.until={self.until}: a list of texts, or []")
        require_int("task.new_tokens", self.new_tokens, 1)
        require_int("task.trials", self.trials, 1)
        require_choice("task.start", self.start, ("random", "beginning"))
        require_choice("task.align", self.align, ("sentence", "word"))
        if self.buffer is not None:
            require_int("task.buffer", self.buffer, 0)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        self._depths()
        prompt = self.context + self.needle + self.question + self.answer_prefix
        least = len(prompt.split()) + self.new_tokens  # no tokenizer makes fewer tokens than there are words
        if min(self._lengths()) < least:
            raise SettingError(f"task.lengths={min(self._lengths())}: at least {least}")
        load_haystack(self.haystack_path)

    def fingerprint(self) -> str:
        """Hash the haystack and the names that a needle may have."""
        return sha256("\0".join([load_haystack(self.haystack_path).text, *CITIES]).encode()).hexdigest()

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples length by length and trial by trial, each trial with all depths."""

        @cache
        def count(piece: str) -> int:
            return len(tokenizer.encode(piece, add_special_tokens=False))

        reserve = template_tokens if self.chat else len(tokenizer.encode("", add_special_tokens=True))
        for length in self._lengths():
            for trial, depth in islice(product(range(self.trials), self._depths()), self.limit):
                yield self._sample(count, tokenizer, reserve, length, depth, trial)

    def reference(self, sample: Sample) -> str:
        """Return the right answer."""
        return ", ".join(sample.answers)

    def score(self, sample: Sample, output: str) -> Graded:
        """Score the recall of the keywords; also `rouge1` (F of the needle times 10) and whether all are there."""
        stems, asked = set(_stems(output)), set(_stems(" ".join(sample.answers)))
        recall = 100 * len(asked & stems) / len(asked)
        rouge = _scorer().score(sample.meta["needle"], output)["rouge1"].fmeasure
        return Graded(recall, output.strip(), {"rouge1": 10 * rouge, "all_keywords": asked <= stems})

    def _sample(
        self, count: Callable[[str], int], tokenizer: Tokenizer, reserve: int, length: int, depth: float, trial: int
    ) -> Sample:
        """Make a sample. `count` counts a word's tokens; `reserve` is the tokens beside the sample's own texts."""
        haystack = load_haystack(self.haystack_path)
        uid = f"{self.name}/{length}/{depth:g}/{trial}"
        rng = random.Random(f"{self.seed}/{uid}")
        drawn = {"{city}": rng.choice(CITIES), "{number}": str(rng.randint(10**6, 10**7 - 1))}
        needle, question, prefix = (_fill(t, drawn) for t in (self.needle, self.question, self.answer_prefix))
        first = rng.choice([0, *haystack.ends[:-1]]) if self.start == "random" else 0
        passage = Passage(haystack, first, count)

        def tokens(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        def document(words: int) -> str:
            return passage.hide(needle, words, passage.place(words, depth, self.align))

        def prompt(words: int) -> str:
            return self.context.replace("{haystack}", document(words)) + question + prefix

        measured, kept = (prompt, reserve + self.new_tokens) if self.buffer is None else (document, self.buffer)
        needed = reserve + tokens(prompt(1)) - tokens(document(1)) + self.new_tokens
        if self.buffer is not None and self.buffer < needed:
            raise SettingError(f"task.buffer={self.buffer}: at least {needed} for template, question and answer")

        def cost(more: int) -> int:
            return tokens(measured(1 + more))

        room = length - kept
        more = fit_units(cost, length, room, max(passage.words(max(room - cost(0), 0)), 1))
        if more is None:
            raise SettingError(f"task.lengths={length}: at least {kept + cost(0)} with this needle and tokenizer")
        words = 1 + more
        place = passage.place(words, depth, self.align)
        return Sample(
            uid,
            f"{self.name}_{length}",
            self.context.replace("{haystack}", document(words)),
            question,
            prefix,
            tuple(_fill(keyword, drawn) for keyword in self.keywords),
            self.new_tokens,
            group=uid if self.start == "random" else uid.rpartition("/")[0],
            chat=self.chat,
            until=tuple(self.until),
            meta={
                "data": name_source(self.haystack_path or MINIATURE),
                "haystack": haystack.origin,
                "length": length,
                "depth": depth,
                "place": round(100 * passage.tokens(place) / passage.tokens(words), 2),
                "needle": needle.strip(),
                "most": {"rouge1": 10.0},
            },
        )

    def _check_keywords(self) -> None:
        if not _texts(self.keywords) or not self.keywords:
            raise SettingError(f"task.keywords={self.keywords}: a list of words of the needle")
        needle_stems = set(_stems(_named(self.needle)))
        for keyword in self.keywords:
            stems = set(_stems(_named(keyword)))
            if not stems or not stems <= needle_stems:
                raise SettingError(
                    f"task.keywords={list(self.keywords)}: words of the needle, which {keyword!r} is not"
                )

    def _lengths(self) -> list[int]:
        return parse_axis("task.lengths", self.lengths, 1)

    def _depths(self) -> list[float]:
        return parse_axis("task.depths", self.depths, 0, 100, fractions=True)


def _fill(text: str, drawn: Mapping[str, str]) -> str:
    for slot, value in drawn.items():
        text = text.replace(slot, value)
    return text


def _named(text: str) -> str:
    """Return the text with one word in each slot."""
    return _fill(text, {"{city}": "aslotforcities", "{number}": "aslotfornumbers"})


def _texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) and v for v in value)


@cache
def _scorer() -> RougeScorer:
    return RougeScorer(["rouge1"], use_stemmer=True)


@cache
def _stemmer() -> DefaultTokenizer:
    return DefaultTokenizer(use_stemmer=True)


def _stems(text: str) -> list[str]:
    """Return rouge-score's stems: words of ASCII letters and digits in lower case, stemmed from four letters on."""
    return _stemmer().tokenize(text)
