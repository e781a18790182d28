"""Say whether planned comparisons come out alike in several models and for several lengths of the prompts.

A *place* is a model with the protocol of a task, such as the length of its prompts. A comparison belongs to a question
(visible or hidden) and two cells, which their labels and budgets name. Its sign holds together with those of the other
planned comparisons of its part (kvbench.analysis.cell_comparisons), not with those of other parts.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import Column, format_markdown, format_number
from kvbench.report.results_cells import MODELS, Section, find_numbers, is_full, name_settings
from kvbench.report.results_text import (
    format_change,
    format_difference,
    join_words,
    label_with_budget,
    say_percent,
    wrap,
)
from kvbench.store.runs import count_things

INTRODUCTION = """\
Planned comparisons that were made in several models, or with several lengths of the prompts. Where the bytes of the two
cells of a pair differ by more than {spread}, both shares stand behind the difference, and the counts of signs leave
this difference out. Each number is the score of the second cell less that of the first, paired by sample, with its 95 %
interval. *not shown*: the sign does not pass the joint test of all planned comparisons of its part (Holm's procedure),
even if the interval excludes 0. *signs* says *opposite* if two columns show opposite signs, *same* if all columns show
one sign, and *open* otherwise. It is empty if fewer than two columns count. What was not measured is empty, too. The
signs of one part hold together with 95 % confidence, those of several parts with less. Of several parts that made a
comparison in one model and length, the part with most samples counts. Parts have other samples, and where the full
cache scores little, differences are small and hardly shown."""
ONE_LENGTH = (
    "No planned comparison was made at several lengths of one model yet, so differences between columns may come from "
    "the model or the length."
)
SCORES_BY_LENGTH = """\
Cells that were measured with several lengths of the prompts. *diff* is the difference from the full cache on the same
samples, with its 95 % interval. Of several parts that measured a cell, the one with most samples counts. Each length
has samples of its own, so scores in a row are not paired. Where the full cache scores less, there is less to lose."""
LENGTH = re.compile(r"length (\d+)")  # what a protocol says of the prompts
OPPOSITE, SAME, OPEN = "opposite", "same", "open"
IN_ALL = "The last row counts each pair once, also those that were compared at several lengths of one model only."


class Place(NamedTuple):
    """A model with a task and what else the cells of a section have in common, such as the length of its prompts."""

    model: str
    task: str
    also: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


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
    """A comparison in a place.

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

    @property
    def is_matched(self) -> bool:
        """Whether the bytes of its cells differ by at most EQUAL."""
        shares = [line["bytes_held"] for line in (self.one, self.other)]
        return bool(max(shares) <= (1 + EQUAL) * min(shares))


Comparisons = Mapping[Pair, Mapping[Place, Measured]]


def format_models(sections: Sequence[Section]) -> list[str]:
    """Return sentences and tables about the comparisons of each task in several places; empty without any."""
    text: list[str] = []
    compared = collect_comparisons(sections)
    matched = keep_matched(compared)
    for task, question in dict.fromkeys((pair.task, pair.question) for pair in compared):
        chosen = {pair: found for pair, found in compared.items() if (pair.task, pair.question) == (task, question)}
        places = list_places(chosen)
        text += [wrap(f"**{task}, question {question}.** {describe_full(chosen, places)}"), ""]
        columns = [
            Column("first", "", lambda pair: pair.one),
            Column("second", "", lambda pair: pair.other),
            *(Column(str(place), "", partial(show, chosen, place)) for place in places),
            Column("signs", "", partial(compare_in_all, matched)),
        ]
        order = [OPPOSITE, SAME, OPEN, ""]
        ordered = sorted(chosen, key=lambda pair: order.index(compare_in_all(matched, pair)))
        text += [*format_markdown(columns, ordered), ""]
    if not text:
        return []
    lengths = [] if vary_lengths(list_places(compared)) else [f"{wrap(ONE_LENGTH)}\n"]
    introduction = wrap(INTRODUCTION.format(spread=say_percent(EQUAL)))
    return [introduction, "", *lengths, *format_agreement(matched), "", *text]


def format_lengths(sections: Sequence[Section]) -> list[str]:
    """Return tables of scores by the length of the prompts, for cells with several lengths; empty without any."""
    text: list[str] = []
    for (model, task, question), by_length in find_lengths(sections).items():
        cells = {cell: lines for cell, lines in by_length.items() if len(lines) > 1}
        lengths = sorted({length for lines in cells.values() for length in lines})
        columns = [Column("cell", "", name_row)]
        for length in lengths:
            columns += [
                Column(
                    f"{length:,} score", "", partial(show_length, length, lambda line: format_number(line["score"]))
                ),
                Column(f"{length:,} diff", "", partial(show_length, length, partial(format_change, name="difference"))),
            ]
        rows = sorted(cells.values(), key=lambda lines: -lines[min(lines)]["score"])
        text += [f"**{model}, {task}, question {question}.**", "", *format_markdown(columns, rows), ""]
    return [wrap(SCORES_BY_LENGTH), "", *text[:-1]] if text else []


def name_row(lines: Mapping[int, Line]) -> str:
    """Return the label of a cell, with its budget unless it is the full cache."""
    line = next(iter(lines.values()))
    return line["label"] if is_full(line) else label_with_budget(line)


def find_lengths(
    sections: Sequence[Section],
) -> dict[tuple[str, str, str], dict[tuple[str, float | None], dict[int, Line]]]:
    """Return model, task and question -> label and budget of a cell -> length of its prompts -> its line.

    Of several parts that measured a cell, the one with most samples counts. Models, tasks and questions that were
    measured with one length are left out.
    """
    found: dict[tuple[str, str, str], dict[tuple[str, float | None], dict[int, Line]]] = defaultdict(dict)
    for section in sorted(sections, key=lambda section: (section.question == "hidden", -section.samples)):
        if length := LENGTH.fullmatch(section.protocol[3]):
            for line in section.cells:
                cells = found[section.model, section.task, section.question]
                cells.setdefault(name_settings(line), {}).setdefault(int(length[1]), line)
    return {place: cells for place, cells in found.items() if any(len(lines) > 1 for lines in cells.values())}


def show_length(length: int, write: Callable[[Line], str], lines: Mapping[int, Line]) -> str:
    """Return what is written of a cell's line for a length; nothing if that was not measured."""
    return write(lines[length]) if length in lines else ""


def collect_comparisons(sections: Sequence[Section]) -> Comparisons:
    """Return the planned comparisons that were made in several places, those with the question visible first."""
    found: dict[Pair, dict[Place, Measured]] = {}
    for section in sorted(sections, key=lambda section: (section.question == "hidden", -section.samples)):
        lines = {line["hash"]: line for line in section.cells}
        for each in section.planned:
            one, other = lines[each.one], lines[each.other]
            pair = Pair(section.task, section.question, label_with_budget(one), label_with_budget(other))
            place = Place(section.model, section.task, section.protocol[3])
            found.setdefault(pair, {}).setdefault(place, Measured(each, one, other, section))
    return {pair: places for pair, places in found.items() if len(places) > 1}


def keep_matched(compared: Comparisons) -> Comparisons:
    """Return the comparisons whose cells hold equal bytes, of the pairs that have several such."""
    matched = {pair: {at: each for at, each in found.items() if each.is_matched} for pair, found in compared.items()}
    return {pair: found for pair, found in matched.items() if len(found) > 1}


def list_places(compared: Comparisons) -> list[Place]:
    """Return the places of comparisons: by the model, those of MODELS first, then by the numbers of the protocol."""

    def find_rank(place: Place) -> tuple[int, list[int]]:
        rank = MODELS.index(place.model) if place.model in MODELS else len(MODELS)
        return rank, find_numbers(place.also)

    return sorted(dict.fromkeys(place for found in compared.values() for place in found), key=find_rank)


def vary_lengths(places: Sequence[Place]) -> bool:
    """Return whether a model has several places of one task."""
    return len({(place.model, place.task) for place in places}) < len(places)


def describe_full(compared: Comparisons, places: Sequence[Place]) -> str:
    """Return a sentence about the full caches behind the columns of a table, and their samples."""
    sections = {
        (place, each.section.part): each.section
        for place in places
        for found in compared.values()
        if (each := found.get(place))
    }
    scores = [
        f"{format_number(section.full['score'])} ({place}, part {part}, {section.samples:,} samples a cell)"
        for (place, part), section in sections.items()
    ]
    return f"The full cache scores {join_words(scores, 'and')}."


def show(compared: Comparisons, place: Place, pair: Pair) -> str:
    """Return the difference of a pair in a place, its bytes if they differ, and whether its sign is not shown."""
    each = compared[pair].get(place)
    if each is None:
        return ""
    shares = [say_percent(line["bytes_held"]) for line in (each.one, each.other)]
    held = "" if each.is_matched else f", {' and '.join(shares)}"
    return f"{format_difference(*each.comparison.change)}{held}{'' if each.comparison.sign else ', not shown'}"


def compare_signs(compared: Iterable[Measured]) -> str:
    """Return OPPOSITE if two comparisons have opposite signs, SAME if all have one sign, otherwise OPEN."""
    signs = {each.comparison.sign for each in compared}
    return OPPOSITE if {-1, 1} <= signs else OPEN if 0 in signs else SAME


def compare_in_all(compared: Comparisons, pair: Pair) -> str:
    """Compare the signs of a pair in all places (`compare_signs`); nothing if it is not compared."""
    return compare_signs(compared[pair].values()) if pair in compared else ""


def say_agreement(kinds: Sequence[str]) -> str:
    """Return how many comparisons have the same sign, opposite signs, or one that is not shown."""
    return (
        f"of {count_things(len(kinds), 'planned comparison')} at equal bytes, the signs are the same in "
        f"{kinds.count(SAME)} and opposite in {kinds.count(OPPOSITE)}; in {kinds.count(OPEN)}, at least one is not "
        "shown"
    )


def format_agreement(compared: Comparisons) -> list[str]:
    """Return a table with a row for each two places that have common comparisons, and one for all if these are several.

    Of several lengths that two models could be compared at, the ones with most common comparisons are taken.
    """
    found = {
        pair: [each for each in compared.values() if set(pair) <= each.keys()]
        for pair in combinations(list_places(compared), 2)
    }
    most: dict[tuple[str, str, str], int] = {}
    for (one, other), both in found.items():
        models = one.model, other.model, one.task
        most[models] = max(most.get(models, 1), len(both))
    rows = [
        (str(one), str(other), [compare_signs((each[one], each[other])) for each in both])
        for (one, other), both in found.items()
        if both and (one.model == other.model or len(both) == most[one.model, other.model, one.task])
    ]
    said = [f"{wrap(IN_ALL)}\n"] if len(rows) > 1 else []
    if said:
        rows.append(("all columns", "", [compare_in_all(compared, pair) for pair in compared]))
    columns = [
        Column("one column", "", lambda row: row[0]),
        Column("other column", "", lambda row: row[1]),
        Column("comparisons", "", lambda row: str(len(row[2]))),
        *(Column(kind, "", partial(count_kind, kind)) for kind in (SAME, OPPOSITE, OPEN)),
    ]
    return [*said, *format_markdown(columns, rows)]


def count_kind(kind: str, row: tuple[str, str, Sequence[str]]) -> str:
    """Return how many comparisons of a row of `format_agreement` are of a kind."""
    return str(row[2].count(kind))


def describe_turned(sections: Sequence[Section], link: str = "") -> str:
    """Return sentences about how many comparisons have opposite signs in several models, and for several lengths.

    Only comparisons at equal bytes count. A model stands for the length with most samples. The result is empty if
    no comparison was made in two places.

    Args:
        sections: All sections of the study.
        link: What stands before the last full stop, with a space before it.
    """
    of_models, of_lengths = [], []
    for found in keep_matched(collect_comparisons(sections)).values():
        by_model: dict[str, list[Measured]] = defaultdict(list)
        for place, each in found.items():
            by_model[place.model].append(each)
        if len(by_model) > 1:
            of_models.append(
                compare_signs(max(some, key=lambda each: each.section.samples) for some in by_model.values())
            )
        of_lengths += [compare_signs(some) for some in by_model.values() if len(some) > 1]
    texts = []
    if of_models:
        turned = "Even between these models, the better of two cells changes: "
        texts.append(f"{turned if OPPOSITE in of_models else 'Between these models: '}{say_agreement(of_models)}")
    if of_lengths:
        texts.append(f"Between prompts of several lengths, {say_agreement(of_lengths)}")
    return f"{'. '.join(texts)}{link}." if texts else ""
