"""Phone book look-up: a list of names and numbers, and a question for the number of one name or several.

The task is that of Jelassi et al. 2024 ("Repeat After Me", arXiv 2402.01032). Among KV-cache papers, KeyDiff's appendix
uses it (arXiv 2504.15364, Table 17: 100 to 3500 entries in ten even steps, five books of each size, the share of exact
answers). KeyDiff states neither the wording nor the unit of the sizes. That the unit is entries is [derived] from the
sizes, and the wording is ours.

Each book has its own generator, seeded by (seed, size, position, trial). It draws different names from the syllables of
synthetic_prose, and different numbers. The score is the share of the asked numbers that the output holds: their digits
in order, with nothing but a separator between two groups, and no digit before or after.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice, product

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.axes import parse_axis
from kvbench.tasks.common.dataset_rows import MINIATURE
from kvbench.tasks.common.synthetic_prose import ENDS, STARTS, draw_short_name
from kvbench.tasks.ruler.fit import fit_units
from kvbench.tasks.ruler.templates import RenderedPrompt, Wording, load_wordings
from kvbench.validation import SettingError, require_choice, require_int

MOST = 100_000  # entries of a book: few enough that different names are drawn fast


@dataclass(frozen=True)
class Book:
    """How entries and questions are written.

    Attributes:
        entry: Template of an entry, with {key} and {value}.
        groups: The smallest and the largest value of each group of a number's digits; "-" separates groups.
        one: The question for one {query}.
        many: The question for several.
        new_tokens: The most tokens of one number.
    """

    entry: str
    groups: tuple[tuple[int, int], ...]
    one: Wording
    many: Wording
    new_tokens: int

    def number(self, rng: random.Random) -> str:
        """Draw a number."""
        return "-".join(f"{rng.randint(least, most):0{len(str(most))}}" for least, most in self.groups)


PHONES = Book(
    entry="{key}: {value}",
    groups=((200, 999), (200, 999), (0, 9999)),
    one=Wording(
        "This is a phone book.\n\n{context}\n\nWhat is the phone number of {query}?", " The phone number of {query} is"
    ),
    many=Wording(
        "This is a phone book.\n\n{context}\n\nWhat are the phone numbers of {query}?",
        " The phone numbers of {query} are",
    ),
    new_tokens=24,
)


def make_needle_book() -> Book:
    """Return RULER's multikey needles as entries: the embedded model has learned to look these up."""
    wordings = load_wordings()
    return Book(wordings.needle, ((10**6, 10**7 - 1),), wordings.niah.singular(), wordings.niah, new_tokens=16)


@dataclass(frozen=True)
class Phonebook:
    """The task. conf/task/phonebook.yaml describes its settings."""

    sizes: int | Sequence[int] | Mapping[str, int]
    size_of: str
    positions: float | Sequence[float] | Mapping[str, float] | None
    trials: int
    asked: int
    wording: str
    seed: int = 0
    limit: int | None = None
    name: str = "phonebook"

    @property
    def length(self) -> int | None:
        """The largest size, if sizes are in tokens."""
        return max(self._sizes()) if self.size_of == "tokens" else None

    def check(self) -> None:
        """Check the settings. This needs no tokenizer, so `samples` may still find a size in tokens too small.

        Raises:
            SettingError: A setting is invalid.
        """
        require_choice("task.size_of", self.size_of, ("entries", "tokens"))
        require_choice("task.wording", self.wording, ("book", "needles"))
        require_int("task.trials", self.trials, 1)
        require_int("task.asked", self.asked, 1)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        if self.asked > 1 and self.positions is not None:
            raise SettingError(f"task.asked={self.asked}: 1 where task.positions says where the entry stands")
        self._positions()
        least = self.asked if self.size_of == "entries" else self.asked * self._wording().new_tokens
        if min(self._sizes()) < least:
            raise SettingError(f"task.sizes={min(self._sizes())}: at least {least} {self.size_of}")
        if self.size_of == "entries" and max(self._sizes()) > MOST:
            raise SettingError(f"task.sizes={max(self._sizes())}: at most {MOST} entries")

    def fingerprint(self) -> str:
        """Hash the syllables of names and the wording."""
        return sha256(repr((STARTS, ENDS, self._wording())).encode()).hexdigest()

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples size by size and trial by trial, each trial with all positions."""
        for size in self._sizes():
            for trial, position in islice(product(range(self.trials), self._positions()), self.limit):
                yield self._sample(tokenizer, template_tokens, longest, size, position, trial)

    def reference(self, sample: Sample) -> str:
        """Return the right answer."""
        return ", ".join(sample.answers)

    def score(self, sample: Sample, output: str) -> Graded:
        """Score the share of the numbers that the output holds; also whether it holds all."""
        hits = [_number(answer).search(output) is not None for answer in sample.answers]
        return Graded(100 * sum(hits) / len(hits), output.strip(), {"all_numbers": all(hits)})

    def _sample(
        self, tokenizer: Tokenizer, template_tokens: int, longest: int, size: int, position: float | None, trial: int
    ) -> Sample:
        wording, new_tokens = self._wording(), self.asked * self._wording().new_tokens
        where = "random" if position is None else f"{position:g}"
        uid = f"{self.name}/{size}/{where}/{trial}"

        def drawn(entries: int) -> tuple[RenderedPrompt, list[int]]:
            """Return the prompt, and the places of the entries that are asked."""
            places = random.Random(f"{self.seed}/{uid}/asked").sample(range(entries), self.asked)
            if position is not None:
                places = [round((entries - 1) * position / 100)]
            book = _book(entries, wording, random.Random(f"{self.seed}/{uid}"))
            names, numbers = zip(*(book[place] for place in places), strict=True)
            asked = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
            lines = (wording.entry.format(type_needle_v="numbers", key=name, value=number) for name, number in book)
            kind, said = ("number", wording.one) if len(names) == 1 else ("numbers", wording.many)
            return said.render("\n".join(lines), numbers, type_needle_v=kind, query=asked), places

        def cost(more: int) -> int:
            prompt = drawn(self.asked + more)[0].prompt
            return len(tokenizer.encode(prompt, add_special_tokens=False)) + template_tokens + new_tokens

        if self.size_of == "tokens":
            more = fit_units(cost, MOST - self.asked, size, max((size - cost(0)) // wording.new_tokens, 1))
            if more is None:
                raise SettingError(f"task.sizes={size}: at least {cost(0)} tokens with this tokenizer")
            entries = self.asked + more
        elif (needed := cost(size - self.asked)) > longest:
            raise SettingError(f"task.sizes={size}: {needed} tokens with this tokenizer, the model takes {longest}")
        else:
            entries = size
        rendered, places = drawn(entries)
        return Sample(
            uid,
            f"{self.name}_{size}",
            rendered.context,
            rendered.question,
            rendered.answer_prefix,
            rendered.answers,
            new_tokens,
            group=uid,
            meta={"length": size, "depth": position, "entries": entries, "places": places}
            | ({"data": MINIATURE} if self.wording == "needles" else {}),
        )

    def _wording(self) -> Book:
        return PHONES if self.wording == "book" else make_needle_book()

    def _sizes(self) -> list[int]:
        return parse_axis("task.sizes", self.sizes, 1)

    def _positions(self) -> list[float | None]:
        return (
            [None]
            if self.positions is None
            else [*parse_axis("task.positions", self.positions, 0, 100, fractions=True)]
        )


def _book(entries: int, wording: Book, rng: random.Random) -> list[tuple[str, str]]:
    """Draw different names with different numbers. A longer book of the same generator begins with the shorter one."""
    names: dict[str, None] = {}
    numbers: dict[str, None] = {}
    while len(names) < entries:
        names[f"{draw_short_name(rng)} {draw_short_name(rng)}"] = None
        while len(numbers) < len(names):
            numbers[wording.number(rng)] = None
    return list(zip(names, numbers, strict=True))


def _number(number: str) -> re.Pattern[str]:
    """Match the number's digits, its groups separated by a dash, blanks, dots and brackets, or not at all."""
    return re.compile(r"(?<!\d)" + r"[-–.\s()]{0,2}".join(number.split("-")) + r"(?!\d)")
