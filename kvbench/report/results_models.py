"""Say whether planned comparisons come out alike in several models and for several lengths of the prompts.

A *setting* is a model with the protocol of a task, such as the length of its prompts. A comparison belongs to a
question (visible or hidden) and two cells, which their labels and budgets name. Its sign holds together with those of
the other planned comparisons of its part (kvbench.analysis.cell_comparisons), not with those of other parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import Column, format_markdown
from kvbench.report.results_cells import MODELS, Section
from kvbench.report.results_text import format_budget, format_difference, wrap

INTRODUCTION = """\
These comparisons were planned and made in several models, or with several lengths of the prompts. Each number is the
score of the second cell less that of the first, paired by sample, with its 95 % interval. *not shown* follows if its
sign does not hold jointly with those of all planned comparisons of its part. *signs* says *opposite* if two columns
show opposite signs, *same* if all columns show one sign, and *open* otherwise. Columns without a number were not
measured. If several parts made a comparison in one model and length, the part with most samples counts."""
OPPOSITE, SAME, OPEN = "opposite", "same", "open"
Setting = tuple[str, str]  # model, and what else the cells of a section have in common


class Pair(NamedTuple):
    """What is compared.

    Attributes:
        task: The task.
        question: "visible" or "hidden".
        one: The first cell.
        other: The second cell.
    """

    task: str
    question: str
    one: str
    other: str


Comparisons = Mapping[Pair, Mapping[Setting, CellComparison]]


def format_models(sections: Sequence[Section]) -> list[str]:
    """Return sentences and a table about the comparisons of each task in several settings; empty without any."""
    text: list[str] = []
    compared = collect_comparisons(sections)
    for task in dict.fromkeys(pair.task for pair in compared):
        chosen = {pair: found for pair, found in compared.items() if pair.task == task}
        settings = sorted(dict.fromkeys(name for found in chosen.values() for name in found), key=find_place)
        text += [f"{wrap(sentence)}\n" for sentence in describe_agreement(task, chosen, settings)]
        columns = [
            Column("first", "", lambda pair: pair.one),
            Column("second", "", lambda pair: pair.other),
            Column("question", "", lambda pair: pair.question),
            *(Column(" ".join(setting), "", partial(show, chosen, setting)) for setting in settings),
            Column("signs", "", partial(compare_in_all, chosen)),
        ]
        turned = [pair for pair in chosen if compare_in_all(chosen, pair) == OPPOSITE]
        text += [*format_markdown(columns, [*turned, *(pair for pair in chosen if pair not in turned)]), ""]
    return [wrap(INTRODUCTION), "", *text] if text else []


def collect_comparisons(sections: Sequence[Section]) -> Comparisons:
    """Return the planned comparisons that were made in several settings, in the order of the sections."""
    found: dict[Pair, dict[Setting, CellComparison]] = {}
    for section in sorted(sections, key=lambda section: -section.samples):
        lines = {line["hash"]: line for line in section.cells}
        for each in section.planned:
            pair = Pair(section.task, section.question, name(lines[each.one]), name(lines[each.other]))
            found.setdefault(pair, {}).setdefault((section.model, section.protocol[3]), each)
    return {pair: settings for pair, settings in found.items() if len(settings) > 1}


def name(line: Line) -> str:
    """Return the label of a cell and its budget."""
    return f"{line['label']}, {format_budget(line['budget'])}"


def find_place(setting: Setting) -> int:
    """Return the place of a setting's column: that of its model."""
    return MODELS.index(setting[0]) if setting[0] in MODELS else len(MODELS)


def show(compared: Comparisons, setting: Setting, pair: Pair) -> str:
    """Return the difference of a pair in a setting, and whether its sign is not shown."""
    each = compared[pair].get(setting)
    if each is None:
        return ""
    return format_difference(*each.change) + ("" if each.sign else " not shown")


def compare_signs(compared: Iterable[CellComparison]) -> str:
    """Return OPPOSITE if two comparisons have opposite signs, SAME if all have one sign, otherwise OPEN."""
    signs = {each.sign for each in compared}
    return OPPOSITE if {-1, 1} <= signs else OPEN if 0 in signs else SAME


def compare_in_all(compared: Comparisons, pair: Pair) -> str:
    """Compare the signs of a pair in all settings (`compare_signs`)."""
    return compare_signs(compared[pair].values())


def describe_agreement(task: str, compared: Comparisons, settings: Sequence[Setting]) -> list[str]:
    """Return a sentence for each setting but the first, which it is compared with, on the pairs that both have."""
    first, *others = settings
    text = []
    for other in others:
        pairs = {
            pair: compare_signs((found[first], found[other]))
            for pair, found in compared.items()
            if first in found and other in found
        }
        if not pairs:
            continue
        counts = {kind: list(pairs.values()).count(kind) for kind in (SAME, OPPOSITE, OPEN)}
        text.append(
            f"**{describe(task, first)}, and {describe(task, other)}.** Of {len(pairs)} comparisons, the signs are the "
            f"same in {counts[SAME]} and opposite in {counts[OPPOSITE]}; in {counts[OPEN]}, one of them is not shown."
        )
    return text


def describe(task: str, setting: Setting) -> str:
    """Return a setting as the titles of sections name it."""
    model, also = setting
    return f"{model}, {f'{task} {also}'.strip()}"


def describe_turned(sections: Sequence[Section]) -> str:
    """Return a sentence about how many comparisons have opposite signs; empty if none was made in two settings."""
    compared = collect_comparisons(sections)
    if not compared:
        return ""
    signs = [compare_in_all(compared, pair) for pair in compared]
    return (
        "Even among the models and lengths of prompts that were measured, the order of methods changes: of "
        f"{len(signs)} comparisons that were made in several of them, the signs are the same in {signs.count(SAME)} "
        f"and opposite in {signs.count(OPPOSITE)} ([which](results-models-and-lengths.md))."
    )
