"""Say whether planned comparisons come out alike in several models and for several lengths of the prompts.

A *setting* is a model with the protocol of a task, such as the length of its prompts. A comparison belongs to a
question (visible or hidden) and two cells, which their labels and budgets name. Its sign holds together with those of
the other planned comparisons of its part (kvbench.analysis.cell_comparisons), not with those of other parts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import Column, format_markdown, format_number
from kvbench.report.results_cells import MODELS, Section
from kvbench.report.results_text import format_budget, format_difference, join_words, say_percent, wrap

INTRODUCTION = """\
Planned comparisons that were made in several models, or with several lengths of the prompts. Each number is the score
of the second cell less that of the first, paired by sample, with its 95 % interval. *not shown*: the sign does not pass
the joint test of all planned comparisons of its part (Holm's procedure), even if the interval excludes 0. *signs* says
*opposite* if two columns show opposite signs, *same* if all columns show one sign, and *open* otherwise. What was not
measured is empty. The signs of one part hold together with 95 % confidence, those of several parts with less. Of
several parts that made a comparison in one model and length, the part with most samples counts. Parts have other
samples, and where the full cache scores little, differences are small and hardly shown. If two cells of a pair differ
by more than {spread} in their bytes, both shares stand behind the difference."""
ONE_LENGTH = (
    "No model was measured with several lengths yet (part longer), so nothing here separates length from model."
)
OPPOSITE, SAME, OPEN = "opposite", "same", "open"
Setting = tuple[str, str]  # model, and what else the cells of a section have in common


class Pair(NamedTuple):
    """What is compared.

    Attributes:
        task: The task.
        question: "visible" or "hidden".
        one: The first cell, with its budget.
        other: The second cell, likewise.
    """

    task: str
    question: str
    one: str
    other: str


class Measured(NamedTuple):
    """A comparison in a setting.

    Attributes:
        comparison: The comparison.
        one: The line of its first cell.
        other: That of the second cell.
        section: Their section.
    """

    comparison: CellComparison
    one: Line
    other: Line
    section: Section


Comparisons = Mapping[Pair, Mapping[Setting, Measured]]


def format_models(sections: Sequence[Section]) -> list[str]:
    """Return sentences and tables about the comparisons of each task in several settings; empty without any."""
    text: list[str] = []
    compared = collect_comparisons(sections)
    for task, question in dict.fromkeys((pair.task, pair.question) for pair in compared):
        chosen = {pair: found for pair, found in compared.items() if (pair.task, pair.question) == (task, question)}
        settings = list_settings(chosen)
        text += [wrap(f"**{task}, question {question}.** {describe_full(chosen, settings)}"), ""]
        columns = [
            Column("first", "", lambda pair: pair.one),
            Column("second", "", lambda pair: pair.other),
            *(Column(" ".join(setting), "", partial(show, chosen, setting)) for setting in settings),
            Column("signs", "", partial(compare_in_all, chosen)),
        ]
        turned = [pair for pair in chosen if compare_in_all(chosen, pair) == OPPOSITE]
        text += [*format_markdown(columns, [*turned, *(pair for pair in chosen if pair not in turned)]), ""]
    if not text:
        return []
    settings = list_settings(compared)
    agreement = [f"* {wrap(sentence, '  ')}" for sentence in describe_agreement(compared, settings)]
    lengths = [] if len({model for model, _ in settings}) < len(settings) else [f"{wrap(ONE_LENGTH)}\n"]
    return [wrap(INTRODUCTION.format(spread=say_percent(EQUAL))), "", *lengths, *agreement, "", *text]


def collect_comparisons(sections: Sequence[Section]) -> Comparisons:
    """Return the planned comparisons that were made in several settings, those with the question visible first."""
    found: dict[Pair, dict[Setting, Measured]] = {}
    for section in sorted(sections, key=lambda section: (section.question == "hidden", -section.samples)):
        lines = {line["hash"]: line for line in section.cells}
        for each in section.planned:
            one, other = lines[each.one], lines[each.other]
            pair = Pair(section.task, section.question, name(one), name(other))
            setting = section.model, section.protocol[3]
            found.setdefault(pair, {}).setdefault(setting, Measured(each, one, other, section))
    return {pair: settings for pair, settings in found.items() if len(settings) > 1}


def name(line: Line) -> str:
    """Return the label of a cell and its budget."""
    return f"{line['label']}, {format_budget(line['budget'])}"


def list_settings(compared: Comparisons) -> list[Setting]:
    """Return the settings of comparisons: by the model, those of MODELS first, and by the numbers of the protocol."""

    def find_place(setting: Setting) -> tuple[int, list[int]]:
        model, also = setting
        place = MODELS.index(model) if model in MODELS else len(MODELS)
        return place, [int(number) for number in re.findall(r"\d+", also)]

    return sorted(dict.fromkeys(setting for found in compared.values() for setting in found), key=find_place)


def describe_full(compared: Comparisons, settings: Sequence[Setting]) -> str:
    """Return a sentence about the full caches of the settings and their samples."""
    sections = {setting: each.section for found in compared.values() for setting, each in found.items()}
    scores = [
        f"{format_number(sections[setting].full['score'])} ({' '.join(setting)}, part {sections[setting].part}, "
        f"{sections[setting].samples:,} samples a cell)"
        for setting in settings
    ]
    return f"The full cache scores {join_words(scores, 'and')}."


def show(compared: Comparisons, setting: Setting, pair: Pair) -> str:
    """Return the difference of a pair in a setting, its bytes if they differ, and whether its sign is not shown."""
    each = compared[pair].get(setting)
    if each is None:
        return ""
    shares = [line["bytes_held"] for line in (each.one, each.other)]
    held = f", {' and '.join(map(say_percent, shares))}" if max(shares) > (1 + EQUAL) * min(shares) else ""
    return f"{format_difference(*each.comparison.change)}{held}{'' if each.comparison.sign else ', not shown'}"


def compare_signs(compared: Iterable[Measured]) -> str:
    """Return OPPOSITE if two comparisons have opposite signs, SAME if all have one sign, otherwise OPEN."""
    signs = {each.comparison.sign for each in compared}
    return OPPOSITE if {-1, 1} <= signs else OPEN if 0 in signs else SAME


def compare_in_all(compared: Comparisons, pair: Pair) -> str:
    """Compare the signs of a pair in all settings (`compare_signs`)."""
    return compare_signs(compared[pair].values())


def count_signs(kinds: Sequence[str]) -> str:
    """Return how many comparisons have the same sign, opposite signs, or one that is not shown."""
    return (
        f"the signs are the same in {kinds.count(SAME)} and opposite in {kinds.count(OPPOSITE)}; in "
        f"{kinds.count(OPEN)}, at least one is not shown"
    )


def describe_agreement(compared: Comparisons, settings: Sequence[Setting]) -> list[str]:
    """Return a sentence for each two settings about the pairs that both have, and one about all."""
    text = []
    for one, other in combinations(settings, 2):
        both = [found for found in compared.values() if one in found and other in found]
        kinds = [compare_signs((found[one], found[other])) for found in both]
        if kinds:
            text.append(f"{' '.join(one)} and {' '.join(other)}: of {len(kinds)} comparisons, {count_signs(kinds)}.")
    kinds = [compare_in_all(compared, pair) for pair in compared]
    if len(text) > 1:
        text.append(f"All of them: of {len(kinds)} comparisons, {count_signs(kinds)}.")
    return text


def describe_turned(sections: Sequence[Section]) -> str:
    """Return a sentence about how many comparisons have opposite signs; empty if none was made in two settings."""
    compared = collect_comparisons(sections)
    if not compared:
        return ""
    kinds = [compare_in_all(compared, pair) for pair in compared]
    settings = list_settings(compared)
    where = "models" if len({model for model, _ in settings}) == len(settings) else "models and lengths"
    return (
        f"Even in these {where}, it changes which of two methods scores more at one budget: of {len(kinds)} planned "
        f"comparisons that were made in several of them, {count_signs(kinds)} "
        "([which](results-models-and-lengths.md))."
    )
