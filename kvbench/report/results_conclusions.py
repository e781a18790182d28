"""Draw the conclusions of docs/results.md from the lines of a study, each by a rule that does not know the outcome.

A conclusion stands on one section: of the first model of MODELS that was measured with its question (visible or
hidden), on the protocol with most answers, there the sections with most samples a cell, of these the one with a budget
nearest to the level, and of these the one with most cells. What the lines do not show is said to be not shown; what was
not measured is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.analysis.joint_signs import find_margin, sign_known_intervals
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import format_number
from kvbench.report.results_cells import (
    ALL,
    EVICTING,
    LONG_TASKS,
    MODELS,
    POINT,
    TURN_TASKS,
    TWICE,
    BytesPair,
    Section,
    count_signs,
    count_with_files,
    describe_protocol,
    is_kept,
    list_budgets,
    list_leaders,
    pair_equal_bytes,
    sort_by_score,
    split_classes,
)
from kvbench.report.results_text import (
    count_cells,
    format_budget,
    format_change,
    format_difference,
    format_score_interval,
    join_words,
    name_cell,
    say_percent,
)

LEVEL = 0.2  # share of the bytes at which methods are compared
ALONE = "Each cell is judged by its own interval, so of 40 cells that truly lose as much, one is counted by chance."
FEW = 3  # cells that may be the best and are still named


class Column(NamedTuple):
    """The evicting cells of a budget that hold like bytes.

    Attributes:
        section: Their section.
        budget: Their budget.
        cells: The cells.
        leaders: Those that may be the best of them.
    """

    section: Section
    budget: float | int
    cells: list[Line]
    leaders: list[Line]

    @property
    def share(self) -> str:
        """The mean share of the bytes that the cells hold."""
        return say_percent(sum(line["bytes_held"] for line in self.cells) / len(self.cells))


@dataclass(frozen=True)
class Conclusion:
    """A conclusion.

    Attributes:
        headline: What is concluded, in a sentence.
        text: The numbers and intervals behind it.
        cells: The cells that they stand on.
    """

    headline: str
    text: str
    cells: str

    def write(self) -> str:
        """Return the conclusion as a paragraph."""
        return f"**{self.headline}** {self.text} *({self.cells})*"


def draw_conclusions(sections: Sequence[Section], margin: float) -> list[Conclusion]:
    """Return the conclusions that the sections allow, at most five.

    Args:
        sections: All sections of the study.
        margin: Points by which a cell that is no worse than the full cache may score less.
    """
    rules: list[Callable[[Sequence[Section], float], Conclusion | None]] = [
        conclude_best,
        conclude_hidden,
        conclude_codecs,
        conclude_no_worse,
        conclude_long,
    ]
    drawn = [rule(sections, margin) for rule in rules]
    return [conclusion for conclusion in drawn if conclusion is not None]


def choose_protocol(sections: Sequence[Section]) -> list[Section]:
    """Return the sections of the main protocol: that of the first model with most answers.

    Tasks with long answers or several turns have conclusions of their own and are left out.
    """
    for model in (*MODELS, *dict.fromkeys(section.model for section in sections)):
        answers: dict[tuple[str, str], int] = {}
        for section in sections:
            if section.model == model and section.task not in (*LONG_TASKS, *TURN_TASKS):
                protocol = section.task, section.protocol[3]
                answers[protocol] = answers.get(protocol, 0) + sum(line["n"] for line in section.cells)
        if answers:
            main = max(answers, key=lambda protocol: answers[protocol])
            return [section for section in sections if section.model == model and section.protocol[1::2] == main]
    return []


def choose_column(sections: Sequence[Section], level: float = LEVEL, reach: float | None = None) -> Column | None:
    """Return the column of evicting cells that a statement about a share of the bytes stands on; None without any.

    Args:
        sections: Sections of one protocol and question.
        level: The share.
        reach: Part of the level by which the bytes may differ from it; None takes the nearest there are.
    """
    columns = []
    for section in sections:
        evicting = section.list_cells(EVICTING)
        for budget in list_budgets(evicting):
            for cells in split_classes([line for line in evicting if line["budget"] == budget]):
                away = abs(sum(line["bytes_held"] for line in cells) / len(cells) - level)
                if len(cells) > 1 and (reach is None or away <= reach * level):
                    columns.append((section.samples, -round(away, 2), len(cells), section, budget, cells))
    if not columns:
        return None
    *_, section, budget, cells = max(columns, key=lambda column: column[:3])
    return Column(section, budget, cells, list_leaders(cells))


def choose_question(sections: Sequence[Section], question: str) -> list[Section]:
    """Return the sections of the main protocol of those with this question."""
    return choose_protocol([section for section in sections if section.question == question])


def name_leaders(column: Column) -> str:
    """Return which cells of a column may be its best, as the end of a sentence about a share of the bytes."""
    names, count = [name_cell(line) for line in column.leaders], len(column.cells)
    if len(names) == 1:
        return f"{names[0]} scores most of {count} cells"
    if len(names) <= FEW:
        return f"{join_words(names, 'or')} scores most of {count} cells, and the samples do not tell which"
    return f"no best method can be named: any of {len(names)} of {count} cells may be it"


def describe_best(column: Column) -> str:
    """Return the score of the highest cell of a column, how many others are not the best, and the best that reads once.

    That is the best of the methods that read each prompt once, if the highest cell's method reads it twice.
    """
    best, full = column.leaders[0], column.section.full
    less = len(column.cells) - len(column.leaders)
    name = "It" if len(column.leaders) == 1 else name_cell(best)
    text = (
        f"{name} scores {format_score_interval(best)}, {format_change(best, 'difference')} against the full cache's "
        f"{format_number(full['score'])}; {count_cells(less)} shown not to be the best."
    )
    once = list_leaders([line for line in column.cells if line["method"] not in TWICE])
    if best["method"] in TWICE and once:
        text += f" It reads each prompt twice; {name_cell(once[0])} has the highest score of those that read it once, "
        text += f"{format_score_interval(once[0])}."
    return text


def name_place(section: Section, cells: str) -> str:
    """Return the part, the protocol and the cells that a conclusion stands on."""
    return f"part {section.part}, {describe_protocol(section.protocol)}, {section.samples} samples a cell: {cells}"


def conclude_best(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude which method scores most at LEVEL of the bytes while the question is visible."""
    column = choose_column(choose_question(sections, "visible"))
    if column is None:
        return None
    return Conclusion(
        f"With {column.share} of the bytes and the question in sight, {name_leaders(column)}.",
        describe_best(column),
        name_place(column.section, f"raw rows, budget {format_budget(column.budget)}"),
    )


def conclude_hidden(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude what it costs to cut the cache before the question is known."""
    compared = [
        section
        for section in sections
        if any(line["question_gain"] is not None for line in section.list_cells(EVICTING))
    ]
    column = choose_column(choose_question(compared, "hidden"))
    changed = [line for line in column.cells if line["question_gain"] is not None] if column else []
    if column is None or not changed:
        return None
    signs = count_signs(changed, "question_gain")
    most = min(changed, key=lambda line: (line["question_gain"], line["label"]))
    rise = f" and rise in {signs[1]}" if signs[1] else ""
    others = f" In {signs[0]} no change is shown." if signs[0] else ""
    return Conclusion(
        f"Cutting the cache before the question is known lowers the score in {signs[-1]} of {len(changed)} cells"
        f"{rise} (jointly at 95 %).",
        f"{name_cell(most)} changes most: {format_change(most, 'question_gain')}.{others} "
        f"With {column.share} of the bytes, {name_leaders(column)}. {describe_best(column)}",
        name_place(column.section, f"raw rows, budget {format_budget(column.budget)}"),
    )


def conclude_codecs(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude whether many rows in a codec score more than fewer raw rows of the same method and bytes.

    It stands on another protocol only if the main one has no pairs.
    """
    main = choose_question(sections, "visible")
    paired = [(section, pairs) for section in sections if (pairs := pair_equal_bytes(section))]
    if not paired:
        return None
    section, pairs = max(paired, key=lambda entry: (entry[0] in main, entry[0].samples, len(entry[1])))
    count = len(pairs)
    signs = [pair.sign for pair in pairs]
    more, less = signs.count(1), signs.count(-1)
    most = max(pairs, key=lambda pair: pair.change[0])
    least = min(pairs, key=lambda pair: pair.change[0])
    return Conclusion(
        f"At equal bytes, rows in a codec beat fewer raw rows of the same method in {more} of {count} pairs, and lose "
        f"in {less} (jointly at 95 %).",
        f"The gain is largest for {describe_pair(most)}, and smallest for {describe_pair(least)}.",
        name_place(section, "pairs whose bytes differ by at most 5 %"),
    )


def describe_pair(pair: BytesPair) -> str:
    """Return the two cells of a pair, their bytes and the difference of their scores."""
    coded, raw = pair.coded, pair.raw
    rows = [format_budget(line["budget"]) for line in (coded, raw)]
    return (
        f"{name_cell(coded)} with {rows[0]} of the rows against {rows[1]} raw ones, at "
        f"{say_percent(coded['bytes_held'])} of the bytes: {format_difference(*pair.change)}"
    )


def conclude_no_worse(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude with how few bytes a cell is shown to be no worse than the full cache."""
    nearest = find_fewest_bytes(choose_question(sections, "visible"), margin)
    if nearest is None:
        return None
    line, section, shown, count = nearest
    bound = f"{find_margin(section.full['score'], margin):.1f} points"
    share = say_percent(line["bytes_held"])
    files = (
        f" ({say_percent(count_with_files(line))} with its file)" if count_with_files(line) > line["bytes_held"] else ""
    )
    scores = f"{format_score_interval(line)}, {format_change(line, 'difference')} against the full cache"
    if shown:
        headline = f"{share} of the bytes can be enough: {name_cell(line)} is shown to lose at most {bound}."
        text = f"It scores {scores}{files}. So do {shown} of {count} cells that hold fewer bytes than the full cache."
    else:
        headline = f"No cell that holds fewer bytes than the full cache is shown to lose at most {bound}."
        text = f"That takes a whole interval above -{bound}, so some of them may lose less all the same. "
        text += f"Of {count} cells, {name_cell(line)} with {share} of the bytes{files} comes nearest: {scores}."
    return Conclusion(headline, f"{text} {ALONE}", name_place(section, name_budget(line)))


def find_fewest_bytes(sections: Sequence[Section], margin: float) -> tuple[Line, Section, int, int] | None:
    """Find the cell that holds the fewest bytes and is shown to be no worse than the full cache.

    Returns:
        The cell, or if none is shown to be so, the one whose interval comes nearest; its section; how many cells are
        shown to be so, and how many cells hold fewer bytes than the full cache. None if no cell does.
    """
    smaller = [
        (line, section)
        for section in sections
        for line in section.list_cells(EVICTING, POINT)
        if line["bytes_held"] < ALL and line["low"] is not None
    ]
    if not smaller:
        return None
    kept = [(line, section) for line, section in smaller if is_kept(line, section.full, margin)]
    if kept:
        line, section = min(kept, key=lambda entry: (entry[0]["bytes_held"], -entry[0]["low"]))
    else:
        line, section = max(smaller, key=lambda entry: (entry[0]["low"], -entry[0]["bytes_held"]))
    return line, section, len(kept), len(smaller)


def conclude_long(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude what cutting costs where answers are long, and where a context gets several questions."""
    heads, texts, cells = [], [], []
    for words, tasks, question in (("long answers", LONG_TASKS, "visible"), ("several turns", TURN_TASKS, "hidden")):
        section = choose_task(sections, tasks, question) or choose_task(sections, tasks)
        smaller = list_smaller(section) if section else []
        if section is None or not smaller:
            continue
        less = sign_losses(smaller).count(-1)
        undecided = count_undecided(section, smaller, margin)
        rest = f" ({undecided} undecided)" if undecided else ""
        heads.append(f"in {less} of {len(smaller)} cells with {words}{rest}")
        texts.append(describe_smaller(section, smaller, margin))
        cells.append(name_place(section, "cells with fewer bytes than the full cache"))
    if not heads:
        return None
    headline = f"Scores are shown to fall {join_words(heads, 'and')} (jointly at 95 % each)."
    return Conclusion(headline, " ".join(texts), "; ".join(cells))


def choose_task(sections: Sequence[Section], tasks: Sequence[str], question: str = "visible") -> Section | None:
    """Return the section of some tasks that a statement stands on, of the first model that has one."""
    for model in (*MODELS, *dict.fromkeys(section.model for section in sections)):
        alike = [each for each in sections if (each.model, each.question) == (model, question)]
        known = [section for section in alike if section.task in tasks]
        if known:
            return max(known, key=lambda section: (section.samples, len(section.cells)))
    return None


def list_smaller(section: Section) -> list[Line]:
    """Return the cells that hold fewer bytes than the full cache."""
    return [line for line in section.list_cells(EVICTING, POINT) if line["bytes_held"] < ALL]


def sign_losses(cells: Sequence[Line]) -> list[int]:
    """Return -1, 1 or 0: whether each cell is jointly shown to score less or more than the full cache, or neither."""
    return sign_known_intervals([(line["difference"], line["low"], line["high"]) for line in cells])


def describe_smaller(section: Section, smaller: Sequence[Line], margin: float) -> str:
    """Return the full cache's score, how many cells score less or as much, and the highest score of a cell."""
    best, full = sort_by_score(smaller)[0], section.full
    bound = find_margin(full["score"], margin)
    kept = sum(is_kept(line, full, margin) for line in smaller)
    less = sign_losses(smaller).count(-1)
    undecided = count_undecided(section, smaller, margin)
    rest = f" For {undecided} of them neither is shown." if undecided else ""
    return (
        f"On `{section.task}` the full cache scores {format_score_interval(full)}. Of {len(smaller)} cells with fewer "
        f"bytes, {less} {'is' if less == 1 else 'are'} shown to score less, and {count_cells(kept)} shown to lose at "
        f"most {bound:.1f} points.{rest} {name_cell(best)} with {say_percent(best['bytes_held'])} of the bytes scores "
        f"most: {format_score_interval(best)}."
    )


def count_undecided(section: Section, smaller: Sequence[Line], margin: float) -> int:
    """Return how many cells are shown neither to score less than the full cache nor to be no worse."""
    signs = sign_losses(smaller)
    return sum(sign >= 0 and not is_kept(line, section.full, margin) for line, sign in zip(smaller, signs, strict=True))


def name_budget(line: Line) -> str:
    """Return a cell with its budget."""
    return f"{name_cell(line)}, budget {format_budget(line['budget'])}"
