"""RULER: 13 synthetic long-context tasks at any length (arXiv 2404.06654; NVIDIA/RULER c3f5e3b, scripts/).

Templates, parameters, token limits and metrics are upstream's, also where lm-eval's port differs. Drawing is separate
from rendering: `draw_sample` makes all random choices of a sample, and `render_sample` makes the prompt from them. Each
sample has its own generator, seeded by (seed, subtask, length, index), so it depends neither on the other samples nor
on the other subtasks. Every sample satisfies

    tokens(prompt) + template_tokens + max_new_tokens <= length

where template_tokens counts twice for cwe, because its solved example is a turn of its own under a chat template. The
setting `fit` decides how closely a sample comes to `length`:

* `fill` gives each sample as many units of haystack as fit.
* `upstream` follows upstream's scripts. One search per subtask, on draws of its own, chooses a size for all samples,
  and a sample that is too long loses a whole step of units.

A step is 500 words of an essay, 25 lines (niah), 10 sentences (vt), words (cwe) or documents (qa), or
1/32 of the length (fwe); below 4096 tokens 5 lines or sentences. So upstream's prompts are shorter: they fill 59 to
100 % of 2048 tokens and 79 to 100 % of 4096.

`upstream` differs from the scripts where the scripts fail:

* They draw the smallest size again without end. kvbench refuses the length after 100 draws.
* They never end when a step takes a question's own documents (qa) or leaves too few sentences (vt). kvbench keeps the
  documents and sentences that the sample needs.
* They take words from a longer list when cwe needs more than wonderwords has, at about 128k tokens. kvbench does not
  have that list, so its prompts stay shorter.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.sample_cache import hash_parts, hash_tokenizer, read_or_make
from kvbench.tasks.ruler.family import Family
from kvbench.tasks.ruler.fit import fit_units, step_down
from kvbench.tasks.ruler.niah import NIAH
from kvbench.tasks.ruler.qa import QA
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.ruler.texts import RulerTexts, load_texts
from kvbench.tasks.ruler.variable_tracking import VT
from kvbench.tasks.ruler.word_counts import WORDS
from kvbench.threads import map_in_threads
from kvbench.validation import SettingError, require_choice, require_int, require_length, resolve_subtasks

FAMILIES: tuple[Family, ...] = (*NIAH, *VT, *WORDS, *QA)
SUBTASKS = tuple(family.name for family in FAMILIES)
GENERATORS = ("synthetic_prose.py", "synthetic_qa.py")  # of tasks/common
UPSTREAM = "upstream"
FITS = ("fill", UPSTREAM)
Least = Callable[[int], int]  # index of a sample -> tokens of its shortest prompt
Fitted = Callable[[int], tuple[int, dict[str, Any]]]  # index of a sample -> its units and draws
Make = Callable[[int], Sample]  # index of a sample -> the sample


def draw_sample(
    subtask: str, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int
) -> dict[str, Any]:
    """Make all random choices of a sample.

    Args:
        subtask: Name of the subtask.
        units: Units of haystack.
        rng: The sample's generator.
        texts: The texts to draw from.
        length: Tokens of prompt and answer. It decides parameters of cwe and fwe, as in upstream.
        fixed: ``index``, the number of the sample, decides the question of qa (drawn without it); ``example`` is the
            number of noise sentences of vt's example (15 without it).

    Returns:
        The choices as plain JSON values.
    """
    return _find_family(subtask).draw(units, rng, texts, length, **fixed)


def render_sample(subtask: str, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
    """Render the prompt of these draws, byte for byte as upstream does; no randomness."""
    return _find_family(subtask).render(draws, texts)


def count_least_units(subtask: str, texts: RulerTexts, length: int, index: int = 0) -> int:
    """Return the fewest units with which a sample can be drawn."""
    return _find_family(subtask).least(texts, length, index)


@dataclass(frozen=True)
class Ruler:
    """The task. conf/task/ruler.yaml describes its settings."""

    samples: InitVar[int]  # kept as `per_subtask`, because `samples` is the protocol's method
    name: str = "ruler"
    length: int = 2048
    subtasks: str | Sequence[str] = "all"
    fit: str = "fill"
    haystack_path: str | None = None
    qa_path: str | None = None
    seed: int = 0
    limit: int | None = None
    cache: str | None = "results/samples"
    per_subtask: int = field(init=False)
    subtask_names: ClassVar[tuple[str, ...]] = SUBTASKS

    def __post_init__(self, samples: int) -> None:
        object.__setattr__(self, "per_subtask", samples)

    def check(self) -> None:
        """Check the settings. Only a tokenizer shows which subtasks fit into the length: `samples` refuses the others.

        Raises:
            SettingError: A setting is invalid, or a file cannot be used.
        """
        require_int("task.length", self.length, 1)
        require_int("task.samples", self.per_subtask, 1)
        require_choice("task.fit", self.fit, FITS)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        self._chosen(), self._texts()

    def fingerprint(self) -> str:
        """Hash the texts and the prompt strings."""
        return hash_parts(self._texts().fingerprint, load_wordings().fingerprint())

    def count_samples(self) -> dict[str, int]:
        """Return the number of samples of each subtask."""
        return dict.fromkeys(self._chosen(), self._count)

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples subtask by subtask. A few are drawn ahead. The cache keeps those that were yielded.

        Raises:
            SettingError: A subtask does not fit into the length. The message names all that do not, and those that do.
        """
        texts, count = self._texts(), self._count
        folder = Path(__file__).parent
        sources = sorted([*folder.glob("*.py"), *map((folder.parent / "common").joinpath, GENERATORS)])
        made_of = (self.fingerprint(), hash_tokenizer(tokenizer), *(file.read_text("utf-8") for file in sources))
        chat = bool(getattr(tokenizer, "chat_template", None))
        needs, makers = {}, []
        for family in map(_find_family, self._chosen()):
            reserved = template_tokens * (family.turns if chat else 1)
            key = hash_parts(family.name, str(self.length), self.fit, str(self.seed), str(reserved), *made_of)
            path = Path(self.cache, f"{key}.jsonl") if self.cache else None
            least, make = self._maker(family, texts, tokenizer, reserved)
            # What is in the cache fits. Upstream's sizes come from a long search, so one sample stands for the others.
            tried = 0 if path and path.is_file() else 1 if self.fit == UPSTREAM else count
            needs[family.name] = max(map_in_threads(least, range(tried)), default=0) + reserved + family.new_tokens
            makers.append((family.name, path, make))
        require_length("task.length", self.length, self.length, needs, self._why)
        for name, path, make in makers:
            yield from read_or_make(path, f"{name}/{self.length}", count, make)

    def score(self, sample: Sample, output: str) -> Graded:
        """Score by string_match_all, the share of the references in the output, or string_match_part, any of them."""
        answer = re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()
        hits = [reference.lower() in answer.lower() for reference in sample.answers]
        share = any(hits) if _find_family(sample.subtask).any_answer else sum(hits) / len(hits)
        return Graded(100.0 * share, answer)

    def reference(self, sample: Sample) -> str:
        """Return the right answer: all references, or the first one if any of them is enough."""
        return sample.answers[0] if _find_family(sample.subtask).any_answer else ", ".join(sample.answers)

    @property
    def _count(self) -> int:
        return self.per_subtask if self.limit is None else min(self.per_subtask, self.limit)

    def _chosen(self) -> list[str]:
        return resolve_subtasks("task.subtasks", self.subtasks, SUBTASKS)

    def _texts(self) -> RulerTexts:
        return load_texts(self.haystack_path, self.qa_path)

    def _maker(self, family: Family, texts: RulerTexts, tokenizer: Tokenizer, reserved: int) -> tuple[Least, Make]:
        """Return the functions that size and make sample `index`. `reserved` counts the chat template's tokens."""
        room = self.length - reserved - family.new_tokens

        def tokens(prompt: str) -> int:
            return len(tokenizer.encode(prompt, add_special_tokens=False))

        least, fitted = (self._upstream if self.fit == UPSTREAM else self._fill)(family, texts, tokens, room)

        def make(index: int) -> Sample:
            units, draws = fitted(index)
            prompt, uid = family.render(draws, texts), f"{family.name}/{self.length}/{index}"
            return Sample(
                uid,
                family.name,
                prompt.context,
                prompt.question,
                prompt.answer_prefix,
                prompt.answers,
                family.new_tokens,
                group=uid,
                meta={"units": units, **family.meta(draws, texts)},
                solved=prompt.solved,
            )

        return least, make

    def _fill(self, family: Family, texts: RulerTexts, tokens: Callable[[str], int], room: int) -> tuple[Least, Fitted]:
        """Give each sample as many units as fit. All sizes of a sample are tried with the same draws."""
        fixed, step = family.fixed(tokens), family.step(self.length)

        def drawn(index: int, steps: int) -> tuple[int, dict[str, Any]]:
            units = family.least(texts, self.length, index) + steps * step
            rng = self._generator(family, index)
            return units, family.draw(units, rng, texts, self.length, index=index, **fixed)

        @cache
        def least(index: int) -> int:
            return tokens(family.render(drawn(index, 0)[1], texts).prompt)

        def fitted(index: int) -> tuple[int, dict[str, Any]]:
            def cost(steps: int) -> int:
                return tokens(family.render(drawn(index, steps)[1], texts).prompt) if steps else least(index)

            most = family.most(texts) - family.least(texts, self.length, index)
            steps = fit_units(cost, most // step, room)
            if steps is None:
                raise self._too_short(family, self.length - room + least(index))
            return drawn(index, steps)

        return least, fitted

    def _upstream(
        self, family: Family, texts: RulerTexts, tokens: Callable[[str], int], room: int
    ) -> tuple[Least, Fitted]:
        """Give samples the units of upstream's scripts: one search for all samples, then steps down for each."""
        reserved = self.length - family.new_tokens - room  # upstream counts the chat template in the prompt

        @cache
        def chosen() -> tuple[int, dict[str, int]]:
            rng = self._generator(family, "fit")
            fixed, shown = family.shown(tokens, rng)

            def cost(units: int) -> int:
                if units > family.most(texts):
                    return self.length + 1
                generator = rng if family.redraws else self._generator(family, "fit")
                draws = family.draw(units, generator, texts, self.length, index=0, **fixed)
                return reserved + tokens(family.sized(draws, texts))

            return family.size(cost, self.length, self.length - family.new_tokens - shown), fixed

        def tried(index: int) -> tuple[int, int, dict[str, Any]]:
            """Return the tokens of the shortest prompt, and the units and draws of the last one."""
            (first, fixed), step, shortest = chosen(), family.increment(self.length), sys.maxsize
            rng = self._generator(family, index)
            for units in step_down(first, step, family.floor(texts, index)):
                generator = rng if family.redraws else self._generator(family, index)
                draws = family.draw(units, generator, texts, self.length, index=index, **fixed)
                shortest = min(shortest, tokens(family.render(draws, texts).prompt))
                if shortest <= room:
                    break
            return shortest, units, draws

        def fitted(index: int) -> tuple[int, dict[str, Any]]:
            shortest, units, draws = tried(index)
            if shortest > room:
                raise self._too_short(family, self.length - room + shortest)
            return units, draws

        return lambda index: tried(index)[0], fitted

    def _generator(self, family: Family, of: int | str) -> random.Random:
        """Return the generator of a sample, by its index, or of the search before all samples, ``fit``."""
        return random.Random(f"{self.seed}/{family.name}/{self.length}/{of}")

    def _too_short(self, family: Family, needed: int) -> SettingError:
        return SettingError(f"task.length={self.length}: at least {needed} for {family.name} {self._why}")

    @property
    def _why(self) -> str:
        """What a message says behind the tokens that a subtask needs."""
        return "with this tokenizer" + (", as task.fit=upstream draws it" if self.fit == UPSTREAM else "")


def _find_family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
