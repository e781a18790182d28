"""Draw the conclusions of docs/results.md from the lines of a study, each by a rule that does not know the outcome.

A conclusion stands on one section: of the first model of MODELS that was measured with its question (visible or
hidden), on the protocol with most answers. Which method is the best is said of the most cells that were compared at the
level, and what another part measured of these on more samples is said beside it. Other conclusions take the section
with most samples a cell. What the lines do not show is said to be not shown; what was not measured is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import NamedTuple

from kvbench.analysis.byte_classes import SPREAD
from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.joint_signs import find_margin
from kvbench.analysis.result_lines import OF_ALL, Line
from kvbench.analysis.text_table import format_number, format_range
from kvbench.analysis.turn_scores import TurnScores
from kvbench.report.results_cells import (
    ALL,
    EVICTING,
    LONG_TASKS,
    POINT,
    SEEDS,
    TURN_TASKS,
    TWICE,
    BytesPair,
    Section,
    Spread,
    count_with_files,
    describe_protocol,
    find_numbers,
    find_spreads,
    is_beaten_by,
    is_decided,
    is_kept,
    list_leaders,
    list_models,
    name_settings,
    pair_equal_bytes,
    sign_cells,
    sort_by_score,
)
from kvbench.report.results_models import (
    OPEN,
    OPPOSITE,
    SAME,
    collect_comparisons,
    compare_signs,
    keep_matched,
    list_places,
)
from kvbench.report.results_text import (
    describe_losses,
    format_budget,
    format_change,
    format_difference,
    format_score_interval,
    join_words,
    name_cell,
    say_lose,
    say_percent,
)
from kvbench.store.runs import count_things

CHANCE = "random"  # method that keeps rows by chance
LEVEL = 0.2  # share of the bytes at which methods are compared
REACH = 0.15  # part of a level by which the bytes of its cells may differ from it
ALONE = (
    "Each cell is judged by its own interval: a cell that truly loses {bound} passes by luck in about 3 of 100 "
    "studies, and one of many cells does so more often."
)
KINDS = ("method", "codec")
FEW = 3  # cells that may be the best and are still named
MANY = 12  # cells that change and are still named


class Column(NamedTuple):
    """The evicting cells of a budget that hold similar bytes.

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
        """The share of the bytes that the first leader holds."""
        return say_percent(self.leaders[0]["bytes_held"])


@dataclass(frozen=True)
class Conclusion:
    """A conclusion.

    Attributes:
        headline: What is concluded, in a sentence.
        first: The numbers and intervals behind it that a reader must know.
        cells: The cells that they stand on.
        more: The other ones, with a space before them.
    """

    headline: str
    first: str
    cells: str
    more: str = ""

    @property
    def text(self) -> str:
        """All numbers and intervals behind it."""
        return f"{self.first}{self.more}"

    def write(self, short: bool = False) -> str:
        """Return the conclusion as a paragraph, with all numbers or, if it is to be short, with the first ones."""
        return f"**{self.headline}** *({self.cells})* {self.first if short else self.text}"


def choose_protocol(sections: Sequence[Section]) -> list[Section]:
    """Return the sections of the main protocol: that of the first model with most answers.

    Tasks with long answers or several turns have conclusions of their own and are left out.
    """
    for model in list_models(sections):
        answers: dict[tuple[str, str], int] = {}
        for section in sections:
            if section.model == model and section.task not in (*LONG_TASKS, *TURN_TASKS):
                protocol = section.task, section.protocol[3]
                answers[protocol] = answers.get(protocol, 0) + sum(line["n"] for line in section.cells)
        if answers:
            main = max(answers, key=lambda protocol: answers[protocol])
            return [section for section in sections if section.model == model and section.protocol[1::2] == main]
    return []


def choose_column(
    sections: Sequence[Section], level: float = LEVEL, near: bool = False, budget: float | None = None
) -> Column | None:
    """Return the column of evicting cells that a statement about a share of the bytes stands on; None without any.

    Of those whose bytes differ from the level by at most REACH of it, this is the one with most cells, and of these the
    one with most samples.

    Args:
        sections: Sections of one protocol and question.
        level: The share.
        near: Whether the bytes must be as near. Otherwise the nearest there are will do.
        budget: The budget of the cells; None takes any.
    """
    columns = []
    for section in sections:
        for cells in section.list_classes():
            if budget not in (None, cells[0]["budget"]):
                continue
            away = abs(sum(line["bytes_held"] for line in cells) / len(cells) - level)
            if len(cells) < 2 or is_beaten(cells, section.list_cells(EVICTING)):
                continue
            beyond = max(away - REACH * level, 0.0)
            if not (near and beyond):
                order = (-round(beyond, 9), len(cells), section.samples, -round(away, 2))
                columns.append((order, section, cells))
    if not columns:
        return None
    _, section, cells = max(columns, key=lambda column: column[0])
    return Column(section, cells[0]["budget"], cells, list_leaders(cells))


def is_beaten(cells: Sequence[Line], evicting: Sequence[Line]) -> bool:
    """Return whether a cell beside a class scores clearly more than its best one and holds hardly more bytes.

    Such a class ends between cells of similar bytes, and its best cell is nothing to recommend.
    """
    best = list_leaders(cells)[0]
    most = (1 + SPREAD) * best["bytes_held"]
    others = [line for line in evicting if line not in cells and line["bytes_held"] <= most]
    return any(line["score_low"] > best["score_high"] for line in others)


def choose_question(sections: Sequence[Section], question: str) -> list[Section]:
    """Return the sections of the main protocol of those with this question."""
    return choose_protocol([section for section in sections if section.question == question])


def name_leaders(column: Column) -> str:
    """Return which cells of a column may be its best, as the end of a sentence about a share of the bytes."""
    names, count = [name_cell(line) for line in column.leaders], f"the {len(column.cells)} cells compared"
    if len(names) == 1:
        return f"{names[0]} has the highest score of {count}"
    if len(names) <= FEW:
        return f"{join_words(names, 'or')} has the highest score of {count}, and the samples do not tell which"
    return f"no best method can be named: any of {len(names)} of {count} may be it"


def describe_best(column: Column, sections: Sequence[Section]) -> tuple[str, str]:
    """Return what a user may choose for the bytes of a column, and what else is known of it, with a space before it.

    The first are the highest cell of the column and, if its method reads each prompt twice, the best of those that read
    it once. The second says how many others score less, and names a cell with a codec that scores more than this at the
    same bytes, and a cell that scores more in another part of `sections`.
    """
    best, full = column.leaders[0], column.section.full
    less = len(column.cells) - len(column.leaders)
    name = "It" if len(column.leaders) == 1 else name_cell(best)
    text = (
        f"{name} scores {format_score_interval(best)}. The difference from the full cache's "
        f"{format_number(full['score'])} is {format_change(best, 'difference')}."
    )
    once, _ = choose_once(column)
    if best["method"] in TWICE and once:
        text += f" {say_twice(column.leaders)} each prompt twice, which [takes time](results-cost.md)."
        text += f" Of the raw rows of methods that read it once, {describe_leaders(once)}"
        share = say_percent(once[0]["bytes_held"])
        text += "." if share == column.share else f", with {share} of the bytes."
    others = f"{less} of the {len(column.cells)} cells are"
    if less == 1:
        others = "The other one is"
    elif len(column.leaders) <= FEW:
        others = f"All {len(column.cells)} cells but {name_cells(column.leaders)} are"
    more = f" {others} shown not to be the best (jointly at 95 %)." if less else ""
    coded, section = find_best_coded(column, sections, least=(1 - EQUAL) * best["bytes_held"])
    if coded is not None and section is not None and coded["score"] > (once or column.leaders)[0]["score"]:
        place = "" if section is column.section else f" (on other samples, in {name_part(section)})"
        more += (
            f" With a codec, {name_cell(coded)} scores {format_score_interval(coded)} at nearly the same bytes{place}."
        )
    more += describe_cutting(column.cells) + describe_elsewhere(column, sections)
    return text, more + describe_repeated(column, [*column.leaders, *once], sections)


def say_twice(leaders: Sequence[Line]) -> str:
    """Return which of some cells read each prompt twice, and the verb, as the beginning of a sentence."""
    reading = [line for line in leaders if line["method"] in TWICE]
    return f"{name_cells(reading)} read{'s' if len(reading) == 1 else ''}"


def describe_repeated(column: Column, cells: Sequence[Line], sections: Sequence[Section]) -> str:
    """Return what the section with most samples of a column's protocol measured of some of its cells.

    A space stands before it. It is empty if no other section has more samples, or if there are more than FEW cells.
    """
    own = column.section
    alike = [each for each in sections if each.protocol == own.protocol and each.subtasks == own.subtasks]
    other = max(alike, key=lambda section: section.samples)
    several = {name_settings(line): line for line in cells}.values()
    found = [known for line in several if (known := other.find_cell(line))]
    if other.samples <= own.samples or not 0 < len(found) <= FEW:
        return ""
    told = [
        f"{name_cell(line)} scores {format_score_interval(line)}, {format_change(line, 'difference')} against the full "
        "cache"
        for line in found
    ]
    return f" On {other.samples:,} other samples, in {name_part(other)}, {join_words(told, 'and')}."


def describe_cutting(cells: Sequence[Line]) -> str:
    """Return which cells also cut the cache while they answer, with a space before it; nothing without any."""
    cutting = [name_cell(line) for line in sort_by_score(cells) if line["decoding"]]
    named = join_words(cutting, "and") if 0 < len(cutting) <= FEW else f"{len(cutting)} of the {len(cells)} cells"
    return f" {named} also cut{'s' if len(cutting) == 1 else ''} the cache while answering." if cutting else ""


def describe_elsewhere(column: Column, sections: Sequence[Section]) -> str:
    """Return the cell that scores most of those that another part measured at the settings and bytes of a column.

    Parts are not compared with each other, so it is empty unless that cell's score is above all of the column.
    """
    best, labels = column.leaders[0], {line["label"] for line in column.cells}
    others = [
        (line["score"], section.part, line, section)
        for section in sections
        if section is not column.section and section.protocol == column.section.protocol
        if section.subtasks == column.section.subtasks
        for line in section.list_cells(EVICTING)
        if line["label"] not in labels and abs(line["bytes_held"] / best["bytes_held"] - 1) <= EQUAL
    ]
    *_, line, section = max(others, default=(0.0, "", best, column.section), key=lambda other: other[:2])
    if line["score"] <= best["score"]:
        return ""
    known = section.find_cell(best)
    beside = f", and {name_cell(known)} {format_score_interval(known)}" if known else ""
    return (
        f" Part {section.part} has other cells of the same task and length: {name_cell(line)} scores "
        f"{format_score_interval(line)} there{beside}."
    )


def choose_once(column: Column) -> tuple[list[Line], int]:
    """Return the cells that may be the best of those that read each prompt once, and how many were compared.

    They are of the class of the one that scores most of all that hold hardly more bytes than the column, which may be
    another class than the column: it can end between cells of similar bytes.
    """
    most = (1 + SPREAD) * column.leaders[0]["bytes_held"]
    classes = [[line for line in cells if line["method"] not in TWICE] for cells in column.section.list_classes()]
    known = sort_by_score(line for cells in classes for line in cells if line["bytes_held"] <= most)
    if not known:
        return [], 0
    [once] = [cells for cells in classes if known[0] in cells]
    return list_leaders(once), len(once)


def describe_leaders(leaders: Sequence[Line]) -> str:
    """Return which cells may be the best of some, and the score of the first, as the end of a sentence."""
    first, names = leaders[0], [name_cell(line) for line in leaders]
    if len(leaders) > FEW:
        return f"any of {len(leaders)} may be the best, such as {names[0]}: {format_score_interval(first)}"
    if len(leaders) > 1:
        score = f"{names[0]}: {format_score_interval(first)}"
        return f"{join_words(names, 'or')} is the best, and the samples do not tell which ({score})"
    file = ", which needs a [file made for the model](files-for-methods.md),"
    needs = file if count_with_files(first) > first["bytes_held"] else ""
    return f"{names[0]}{needs} has the highest score: {format_score_interval(first)}"


def find_best_coded(
    column: Column, sections: Sequence[Section], least: float = 0.0, reached: float = 0.0
) -> tuple[Line, Section] | tuple[None, None]:
    """Return the cell with a codec that reads each prompt once and scores most at the bytes of a column.

    Args:
        column: The column. The cell may hold as many bytes as its first leader, and a little more.
        sections: The sections whose cells are looked at, if they have the column's protocol and subtasks.
        least: Share of the bytes that the cell holds at least.
        reached: A score that its interval reaches.

    Returns:
        The cell and its section; (None, None) if there is none. Of cells whose intervals reach the highest score, it is
        the one with the fewest bytes or, of several with similar bytes, the highest score.
    """
    most = (1 + EQUAL) * column.leaders[0]["bytes_held"]
    own = column.section
    coded = [
        (line, section)
        for section in sections
        if section.protocol == own.protocol and section.subtasks == own.subtasks
        for line in list_coded(section)
        if least <= line["bytes_held"] <= most and line["score_high"] >= reached
    ]
    highest = max((line["score"] for line, _ in coded), default=0.0)
    near = [entry for entry in coded if entry[0]["score_high"] >= highest]
    fewest = (1 + EQUAL) * min((line["bytes_held"] for line, _ in near), default=0.0)
    small = [entry for entry in near if entry[0]["bytes_held"] <= fewest]
    return max(small, key=lambda entry: (entry[0]["score"], entry[1] is own), default=(None, None))


def list_coded(section: Section) -> list[Line]:
    """Return the cells with a codec and a budget that read each prompt once, the highest score first."""
    cells = [line for line in section.list_cells(POINT) if line["codec"] != "raw" and line["method"] not in TWICE]
    return sort_by_score([line for line in cells if not is_decided(line)])


def name_part(section: Section) -> str:
    """Return the part of a section."""
    return f"part {section.part}"


def name_place(section: Section, cells: str) -> str:
    """Return the part, the protocol and the cells that a conclusion stands on."""
    subtasks = f" of {section.subtasks} subtasks" if section.subtasks > 1 else ""
    about = f"{name_part(section)}, {describe_protocol(section.protocol)}"
    return f"{about}, {section.samples:,} samples{subtasks} a cell: {cells}"


def conclude_best(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude which method scores most at LEVEL of the bytes while the question is visible."""
    visible = choose_question(sections, "visible")
    column = choose_column(visible)
    if column is None:
        return None
    first, more = describe_best(column, sections)
    return Conclusion(
        f"With {column.share} of the bytes and the question in sight, {name_leaders(column)}.",
        first + describe_kept(visible, margin),
        name_place(column.section, f"raw rows, budget {format_budget(column.budget)}"),
        more,
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
    signs = sign_cells(changed, "question_gain")
    fallen, same, risen = (
        sort_by_score(line for line, each in zip(changed, signs, strict=True) if each == sign) for sign in (-1, 0, 1)
    )
    most = max(changed, key=lambda line: (abs(line["question_gain"]), line["label"]))
    rise = f" and raises it in {len(risen)}" if risen else ""
    held = format_range([line["bytes_held"] for line in changed], say_percent)
    up = f" The score rises for {name_cells(risen)}." if risen and len(risen) <= FEW else ""
    down = f" The score falls for {name_cells(fallen)}." if 1 < len(fallen) <= MANY else ""
    others = ""
    if same:
        named = f" No change is shown for {name_cells(same)}."
        others = (
            named
            if len(same) <= FEW
            else f" In {len(same)} no change is shown{describe_chance(same, column.section, sections)}."
        )
    best, (first, more) = column.leaders[0], describe_best(column, sections)
    if best in changed and best != most:
        own = f"The difference of {name_cell(best)} from its score with the question visible"
        more += f" {own} is {format_change(best, 'question_gain')}."
    return Conclusion(
        f"With a budget of {format_budget(column.budget)}, cutting the cache before the question is known lowers the "
        f"score in {len(fallen)} of {len(changed)} cells{rise} (jointly at 95 %).",
        f"The largest change is that of {name_cell(most)}: {format_change(most, 'question_gain')}.{down}{up} With the "
        f"question's rows, which come on top of the budget, the cells hold {held} of the bytes. With {column.share} of "
        f"them, {name_leaders(column)}. {first}",
        name_place(column.section, f"raw rows, budget {format_budget(column.budget)}"),
        f"{others}{more}",
    )


def name_cells(cells: Sequence[Line]) -> str:
    """Return the names of cells as an English list."""
    return join_words([name_cell(line) for line in cells], "and")


def describe_chance(cells: Sequence[Line], hidden: Section, sections: Sequence[Section]) -> str:
    """Return which cells do not score more for certain than rows kept by chance, even with the question in sight.

    Such cells have little to lose. It is the end of a sentence about cells of a section with a hidden question, and
    empty if there are none, or if no cell of CHANCE was measured in their class.
    """
    model, task, _, also = hidden.protocol
    names = list(map(name_settings, cells))
    for section in sections:
        if section.protocol == (model, task, "visible", also):
            for alike in section.list_classes():
                low = [line for line in list_low(alike) if name_settings(line) in names]
                if low:
                    these = f"{name_cells(low)} {'is' if len(low) == 1 else 'are'}"
                    return (
                        f"; of these, {these} not shown to score more than `{CHANCE}` even with the question in sight"
                    )
    return ""


def list_low(cells: Sequence[Line]) -> list[Line]:
    """Return the cells of a class that do not score more for certain than its cell of CHANCE, without this."""
    chance = next((line for line in cells if line["method"] == CHANCE), None)
    return [line for line in cells if line is not chance and not is_beaten_by(chance, line)] if chance else []


def conclude_codecs(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude whether many rows in a codec score more than fewer raw rows of the same method and bytes.

    It stands on the section with most pairs, and on another protocol only if the main one has none.
    """
    main = choose_question(sections, "visible")
    paired = [(section, pairs) for section in sections if (pairs := pair_equal_bytes(section))]
    if not paired:
        return None
    section, pairs = max(paired, key=lambda entry: (entry[0] in main, len(entry[1]), entry[0].samples))
    count = len(pairs)
    signs = [pair.sign for pair in pairs]
    more, less = signs.count(1), signs.count(-1)
    names = {name_cell(pair.coded) for pair in pairs}
    coded, beat, lose = (*names, "beats", "loses") if len(names) == 1 else ("rows in a codec", "beat", "lose")
    lost = f", and {lose} in {less}" if less else ""
    ordered = [describe_pair(pair) for pair in sorted(pairs, key=lambda pair: -pair.change[0])]
    changes = f"The differences range from {ordered[-1]} to {ordered[0]}."
    if count <= 2:
        changes = f"The {'difference is' if count == 1 else 'differences are'} {' and '.join(ordered)}."
    elsewhere = ""
    for other, more_pairs in paired:
        alike = other.protocol[:2] == section.protocol[:2] and other.protocol[3:] == section.protocol[3:]
        alike = alike and other.subtasks == section.subtasks
        if alike and other is not section and (other.question == section.question or other.part == section.part):
            elsewhere += f" {describe_pairs_elsewhere(other, more_pairs)}"
    return Conclusion(
        f"At equal bytes, {coded} {beat} fewer raw rows of the same method in {more} of {count} pairs{lost} (jointly "
        "at 95 %).",
        changes,
        name_place(section, f"pairs of {name_kinds(pairs)} whose bytes differ by at most {say_percent(EQUAL)}"),
        elsewhere,
    )


def name_kinds(pairs: Sequence[BytesPair]) -> str:
    """Return which methods and codecs pairs have."""
    methods, codecs = ([f"`{name}`" for name in dict.fromkeys(pair.coded[kind] for pair in pairs)] for kind in KINDS)
    return f"{join_words(methods, 'and')} with {join_words(codecs, 'and')}"


def count_kinds(pairs: Sequence[BytesPair]) -> str:
    """Return how many methods and codecs pairs have."""
    counts = {kind: len({pair.coded[kind] for pair in pairs}) for kind in KINDS}
    return " and ".join(count_things(count, kind) for kind, count in counts.items())


def describe_pairs_elsewhere(section: Section, pairs: Sequence[BytesPair]) -> str:
    """Return a sentence about the pairs of another section: how many score more, of how many methods and codecs."""
    signs, ordered = [pair.sign for pair in pairs], sorted(pairs, key=lambda pair: pair.change[0])
    changes = " to ".join(dict.fromkeys(format_difference(*pair.change) for pair in (ordered[0], ordered[-1])))
    return (
        f"In {name_part(section)}, question {section.question}, rows in a codec score more in {signs.count(1)} of "
        f"{len(pairs)} pairs and less in {signs.count(-1)} (jointly at 95 %; {count_kinds(pairs)}): {changes}."
    )


def describe_pair(pair: BytesPair) -> str:
    """Return the difference of the scores of a pair, its bytes and its cells."""
    coded, raw = pair.coded, pair.raw
    rows = [format_budget(line["budget"]) for line in (coded, raw)]
    return (
        f"{format_difference(*pair.change)} at {say_percent(coded['bytes_held'])} of the bytes ({name_cell(coded)}, "
        f"{rows[0]} of the rows against {rows[1]} raw ones)"
    )


def find_kept(sections: Sequence[Section], margin: float) -> tuple[Section | None, list[Line]]:
    """Return the section with most samples, and its cells with fewer bytes that are shown to lose at most the margin.

    The cell with the fewest bytes is first. A section whose full cache scores nothing shows nothing.
    """
    section = max(sections, key=lambda each: (each.samples, len(each.cells)), default=None)
    if section is None or section.full["score"] == 0:
        return None, []
    kept = [line for line in list_smaller(section) if is_kept(line, section.full, margin)]
    return section, sorted(kept, key=lambda line: (line["bytes_held"], -line["low"]))


def describe_kept(sections: Sequence[Section], margin: float) -> str:
    """Return a sentence about the fewest bytes that are shown to lose little, with a space before it, or nothing.

    If the method of that cell reads each prompt twice, it also names the first cell that reads it once.
    """
    section, kept = find_kept(sections, margin)
    if section is None or not kept:
        return ""
    first, *once = (f"{name_with_bytes(line)}{say_files(line)}{say_worst(line)}" for line in list_first(kept))
    bound = f"{find_margin(section.full['score'], margin):.1f} points"
    then = f"; of those that read each prompt once, this is {once[0]}" if once else ""
    count = len(list_smaller(section))
    cells = f"{count} cell{'' if count == 1 else 's'} of {name_part(section)}"
    smallest = f" Of the {cells} with fewer bytes than the full cache, the smallest that is"
    return f"{smallest} shown to [lose at most {bound}](statistics.md#margins-and-counts) is {first}{then}."


def say_worst(line: Line) -> str:
    """Return the subtask in which a cell loses most, and its difference there, in brackets; nothing if unknown."""
    if line["worst_subtask"] is None:
        return ""
    return f" (in its worst subtask, `{line['worst_subtask']}`, {format_change(line, 'worst')})"


def list_first(kept: Sequence[Line]) -> list[Line]:
    """Return the first of some cells and, if its method reads each prompt twice, the first one that reads it once."""
    once = next((line for line in kept if line["method"] not in TWICE), kept[0])
    return [kept[0]] if once is kept[0] else [kept[0], once]


def conclude_no_worse(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude with how few bytes a cell is shown to lose little against the full cache."""
    section, kept = find_kept(choose_question(sections, "visible"), margin)
    smaller = list_smaller(section) if section else []
    if section is None or not smaller:
        return None
    line = kept[0] if kept else max(smaller, key=lambda line: (line["low"], -line["bytes_held"]))
    count = len(smaller)
    bound = f"{find_margin(section.full['score'], margin):.1f} points"
    share = say_percent(line["bytes_held"])
    scores = f"{format_score_interval(line)}, {format_change(line, 'difference')} against the full cache"
    if kept:
        mean = f" in the mean of {section.subtasks} subtasks" if section.subtasks > 1 else ""
        headline = f"With {share} of the bytes, {name_cell(line)} is shown to lose at most {bound}{mean}."
        text = f"It scores {scores}{say_files(line)}.{describe_worst(line)}{describe_other_kept(kept)} "
        text += f"{count} cells with fewer bytes than the full cache were compared with the full cache."
        text += describe_other_lengths(list_first(kept), section, sections)
    else:
        headline = f"No cell that holds fewer bytes than the full cache is shown to lose at most {bound}."
        text = f"That takes a whole interval above -{bound}, so some of them may lose less all the same. "
        text += f"Of {count} cells, {name_with_bytes(line)}{say_files(line)} comes nearest: "
        text += f"{scores}."
    return Conclusion(headline, f"{text} {ALONE.format(bound=bound)}", name_place(section, name_budget(line)))


def describe_other_lengths(cells: Sequence[Line], section: Section, sections: Sequence[Section]) -> str:
    """Return the cells' differences from the full cache with prompts of other lengths, with a space before it."""
    told = []
    for line in cells:
        found = [
            f"{format_change(each, 'difference')} ({other.protocol[3]})"
            for other in sections
            if other.protocol[:3] == section.protocol[:3] and other.protocol[3] != section.protocol[3]
            if (each := other.find_cell(line))
        ]
        told += [f"{name_cell(line)} {join_words(found, 'and')}"] if found else []
    begin = " With prompts of other lengths, these differences from the full cache were measured: "
    return f"{begin}{'; '.join(told)}." if told else ""


def describe_worst(line: Line) -> str:
    """Return a sentence about the subtask in which a cell loses most, with a space before it; nothing if unknown."""
    if line["worst_subtask"] is None:
        return ""
    worst = f"where {name_cell(line)} loses most, the difference is {format_change(line, 'worst')}"
    return f" In `{line['worst_subtask']}`, {worst}."


def describe_other_kept(kept: Sequence[Line]) -> str:
    """Return a sentence about further cells that lose no more, with a space before it; nothing without any.

    A cell is left out if the same one with fewer bytes stands before it.
    """
    first = {line["label"]: line for line in reversed(kept)}
    cells = [line for line in kept[1:] if first[line["label"]] is line]
    if not cells:
        return ""
    named = [name_with_bytes(line) for line in cells]
    if len(cells) > FEW:
        return f" The same is shown for {len(cells)} others, such as {named[0]}."
    told = [f"{name} ({format_change(line, 'difference')})" for name, line in zip(named, cells, strict=True)]
    once = kept[0]["method"] in TWICE and all(line["method"] not in TWICE for line in cells)
    begin = "Of the cells that read each prompt once, the same" if once else "The same"
    return f" {begin} is shown for {join_words(told, 'and')}."


def say_files(line: Line) -> str:
    """Return the bytes of a cell with its file, in brackets; nothing if it needs none."""
    whole = count_with_files(line)
    return f" ({say_percent(whole)} with its file)" if whole > line["bytes_held"] else ""


def conclude_presets(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude how many planned comparisons of two settings of one method, at one budget, show a difference."""
    paired = [section for section in sections if pair_settings(section)]
    main = choose_question(paired, "visible") or choose_question(paired, "hidden")
    section = max(main, key=lambda each: (each.samples, len(pair_settings(each))), default=None)
    if section is None:
        return None
    lines, pairs = {line["hash"]: line for line in section.cells}, pair_settings(section)
    differ = [lines[each.one]["method"] for each in pairs if each.sign != 0]
    methods = {lines[each.one]["method"] for each in pairs}
    widest = max(pairs, key=lambda each: abs(each.change[0]))
    one, other = lines[widest.one], lines[widest.other]
    spreads = find_spreads(section)
    apart, count = sum(spread.apart for spread in spreads), sum(spread.pairs for spread in spreads)
    known = {line["method"] for spread in spreads for line in spread.cells}
    told = {line["method"] for spread in spreads if spread.apart for line in spread.cells}
    in_all = (
        f" Of all {count} pairs of cells of one method, budget and similar bytes, planned or not, {apart} are told "
        f"apart, in {len(told)} of {count_things(len(known), 'method')} (jointly at 95 %)."
    )
    farthest = max(spreads, key=lambda spread: abs(spread.change[0]), default=None)
    if farthest is not None and abs(farthest.change[0]) > abs(widest.change[0]):
        ends = (farthest.cells[0], farthest.cells[-1])
        scores = join_words([f"{format_number(line['score'])} ({name_cell(line)})" for line in ends], "and")
        in_all += f" The farthest apart score {scores}."
    return Conclusion(
        f"Settings alone change the score of {len(set(differ))} of {len(methods)} methods, in {len(differ)} of "
        f"{len(pairs)} planned comparisons (jointly at 95 %).",
        f"Of the planned comparisons, that of {name_cell(one)} and {name_cell(other)} with a budget of "
        f"{format_budget(one['budget'])} shows the largest difference: {format_number(one['score'])} and "
        f"{format_number(other['score'])}, a difference of {format_difference(*widest.change)}."
        f"{in_all if count > len(pairs) else ''}{describe_files(section, sections)}",
        name_place(section, "two presets of a method at one budget"),
        f"{describe_order(section)}{describe_hidden_settings(section, paired)}",
    )


def describe_hidden_settings(visible: Section, paired: Sequence[Section]) -> str:
    """Return how many comparisons of settings show a difference if the question is hidden, with a space before it."""
    for section in paired:
        if (section.part, section.protocol) == (visible.part, (*visible.protocol[:2], "hidden", visible.protocol[3])):
            pairs = pair_settings(section)
            differ = sum(each.sign != 0 for each in pairs)
            unequal = len(pair_settings(section, inf)) - len(pairs)
            rest = f"; the cells of {count_things(unequal, 'other')} do not hold similar bytes" if unequal else ""
            return (
                f" With the question hidden, {differ} of {len(pairs)} planned comparisons at similar bytes show a "
                f"difference{rest}."
            )
    return ""


def describe_files(presets: Section, sections: Sequence[Section]) -> str:
    """Return how many files of other seeds change a score of the same model, with a space before it."""
    known = [each for each in sections if (each.part, each.model) == (SEEDS, presets.model)]
    spreads = [spread for section in known for spread in find_spreads(section)]
    if not spreads:
        return ""
    pairs, apart = sum(spread.pairs for spread in spreads), [spread for spread in spreads if spread.apart]
    widest = max(abs(spread.change[0]) for spread in spreads)
    found = (
        f"none is shown to differ (jointly at 95 %); the largest difference is {format_number(widest)} points, which "
        "is likely to be exaggerated"
    )
    if apart:
        found = f"these are told apart (jointly at 95 %): {join_words(list(map(describe_spread, apart)), 'and')}"
    return f" Of {count_things(pairs, 'pair')} of files that differ in their seeds alone (part seeds), {found}."


def describe_spread(spread: Spread) -> str:
    """Return how many pairs of a method's or codec's files are told apart, and the scores of its files."""
    line, scores = spread.cells[0], [format_number(line["score"]) for line in spread.cells]
    name = line["codec"] if line["method"] == "full" else line["method"]
    return f"{spread.apart} of `{name}` ({join_words(scores, 'and')})"


def pair_settings(section: Section, spread: float = EQUAL) -> list[CellComparison]:
    """Return the planned comparisons of two cells of one method, budget and similar bytes whose files are the same.

    Args:
        section: The section.
        spread: Share by which their bytes may differ.
    """
    lines = {line["hash"]: line for line in section.cells}

    def is_alike(one: Line, other: Line) -> bool:
        same = all(one[name] == other[name] for name in ("method", "allocator", "codec", "budget"))
        held, files = one["bytes_held"], any("path=" in line["label"] for line in (one, other))
        return same and not files and abs(other["bytes_held"] - held) <= spread * held

    return [each for each in section.planned if is_alike(lines[each.one], lines[each.other])]


def describe_order(section: Section) -> str:
    """Return in how many pairs of methods the settings decide which one scores more, with a space before it.

    That is shown if a cell of the one is better than a cell of the other, and another cell of the other better than
    another one of the first, at equal budgets and bytes and without an allocator (jointly, as ranks are).
    """
    column = choose_column([section])
    if column is None:
        return ""
    cells: dict[str, list[Line]] = {}
    for line in column.cells:
        if line["allocator"] == "uniform":
            cells.setdefault(line["method"], []).append(line)

    def wins(one: str, other: str) -> bool:
        return any(is_beaten_by(worse, better) for better in cells[one] for worse in cells[other])

    pairs = list(combinations(cells, 2))
    turned = [pair for pair in pairs if wins(*pair) and wins(*pair[::-1])]
    if not turned:
        return ""
    names = ["`{}` with `{}`".format(*pair) for pair in turned]
    named = f" ({join_words(names, 'and')})" if 2 * len(turned) <= MANY else ""
    return (
        f" In {len(turned)} of {len(pairs)} pairs of methods{named}, the settings decide which one scores more with "
        f"{column.share} of the bytes (jointly at 95 %)."
    )


def conclude_lengths(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude how many planned comparisons of the main model come out alike for all lengths of the prompts."""
    main = choose_protocol(sections)[:1]
    own = [section for section in sections for each in main if section.protocol[:2] == each.protocol[:2]]
    compared = keep_matched(collect_comparisons(own))
    if not compared:
        return None
    kinds = [compare_signs(found.values()) for found in compared.values()]
    places = list_places(compared)
    used = {each.section.part: each.section for found in compared.values() for each in found.values()}
    full = {
        place: format_number(each.section.full["score"])
        for pair, found in compared.items()
        for place, each in found.items()
        if pair.question == "visible"
    }
    scores = join_words([f"{full[place]} ({place.also})" for place in places if place in full], "and")
    names: dict[str, dict[str, None]] = {}
    for each in (next(iter(found.values())) for found in compared.values()):
        names.setdefault(f"`{each.one['method']}`", {})[f"`{each.other['method']}`"] = None
    named = join_words([f"{one} with {join_words(list(others), 'and')}" for one, others in names.items()], "and")
    return Conclusion(
        f"Of {count_things(len(kinds), 'comparison')} at equal bytes, planned for several lengths, {kinds.count(SAME)} "
        f"{'shows' if kinds.count(SAME) == 1 else 'show'} the same sign wherever they were made and "
        f"{kinds.count(OPPOSITE)} opposite ones (the signs of each part jointly at 95 %).",
        f"In {kinds.count(OPEN)}, a sign is not shown. They compare {named}."
        + (f" With the question visible, the full cache scores {scores}." if scores else "")
        + describe_longest(own),
        f"{join_words([name_part(section) for section in used.values()], 'and')}, {own[0].model}, {own[0].task}, "
        f"{join_words([place.also for place in places], 'and')}: pairs of cells",
    )


def describe_longest(sections: Sequence[Section]) -> str:
    """Return in which subtask the full cache loses most from the shortest to the longest prompts, with a space first.

    Args:
        sections: Those of one model and task.
    """
    visible = [section for section in sections if section.question == "visible" and section.by_subtask]
    ordered = sorted(visible, key=lambda section: (find_numbers(section.protocol[3]), -section.samples))
    if not ordered:
        return ""
    longest = next(section for section in ordered if section.protocol == ordered[-1].protocol)
    short, long = (section.by_subtask[section.full["hash"]] for section in (ordered[0], longest))
    losses = {subtask: score - long[subtask] for subtask, score in short.items() if subtask in long}
    worst = max(losses, key=lambda subtask: losses[subtask], default=None)
    if worst is None or losses[worst] <= 0:
        return ""
    return (
        f" From the shortest to the longest prompts, it falls most in `{worst}`: from {format_number(short[worst])} to "
        f"{format_number(long[worst])}."
    )


def conclude_long(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude what cutting costs where answers are long, and where a context gets several questions."""
    heads, texts, cells, more, counts = [], [], [], "", 0
    main = choose_protocol(sections)
    places = (
        ("where answers are long", LONG_TASKS, "visible", "hidden"),
        ("where a context gets several questions", TURN_TASKS, "hidden", "visible"),
    )
    for where, tasks, question, other_question in places:
        section = choose_task(sections, tasks, question) or choose_task(sections, tasks, other_question)
        smaller = [line for line in list_smaller(section) if line["rows_kept"] < ALL] if section else []
        if section is None or not smaller:
            continue
        *_, undecided = count_losses(section, smaller, margin)
        decided = undecided < len(smaller)
        counts += decided
        hidden = section.question == "hidden"
        where += (
            f" and the cache is cut before the {'first one' if tasks == TURN_TASKS else 'question'}" if hidden else ""
        )
        other = main and section.model != main[0].model
        where += f" (task `{section.task}`, model `{section.model}`)" if other else ""
        less = sign_cells(smaller, OF_ALL).count(-1)
        found = f"{less} of {len(smaller)} cut caches {'is' if less == 1 else 'are'} shown to score less"
        heads.append(f"{where}, {found if decided else 'these samples decide nothing'}")
        texts.append(describe_smaller(section, smaller, margin, counts=False))
        raw = ", none with a codec" if all(line["codec"] == "raw" for line in smaller) else ""
        cells.append(name_place(section, f"cells that keep some of the rows{raw}"))
        turned = choose_task(sections, tasks)
        cut = list_cut(turned) if turned is not None else []
        if turned is not None and cut:
            counts, worse = counts + 1, [each.sign for each in cut].count(-1)
            seen = f"of {len(cut)} that are cut with the first question in sight"
            heads[-1] += f"; {seen}, {say_lose(worse)} more at the last one than at the first"
            more += f" {describe_turns(turned, section)}"
            cells.append(name_place(turned, "cells that keep some of the rows"))
    if not heads:
        return None
    headline = "; ".join(heads)
    jointly = f" ({'each count ' if counts > 1 else ''}jointly at 95 %)" if counts else ""
    return Conclusion(f"{headline[0].upper()}{headline[1:]}{jointly}.", " ".join(texts), "; ".join(cells), more)


def conclude_changes(sections: Sequence[Section], margin: float) -> Conclusion | None:
    """Conclude which of the changes that conf/measured.yaml names for cells change the score."""
    section = max(sections, key=lambda each: len(each.changed), default=None)
    if section is None or not section.changed:
        return None
    lines = {line["hash"]: line for line in section.cells}
    ordered = sorted(section.changed, key=lambda each: (each.change[0], each.words))

    def tell(begin: str, changes: Sequence[CellComparison]) -> str:
        scores = [[format_number(lines[run]["score"]) for run in (each.one, each.other)] for each in changes]
        told = [f"*{each.words}* ({' to '.join(pair)})" for each, pair in zip(changes, scores, strict=True)]
        return f"{begin}{'; '.join(told)}." if told else ""

    lower, higher = ([each for each in ordered if each.sign == sign] for sign in (-1, 1))
    return Conclusion(
        f"Of {count_things(len(ordered), 'named change')}, {len(lower)} {'is' if len(lower) == 1 else 'are'} shown to "
        f"lower the score and {len(higher)} to raise it (jointly at 95 %).",
        " ".join(filter(None, (tell("It falls most with ", lower[:FEW]), tell("It rises most with ", higher[-FEW:])))),
        name_place(section, "a cell, and one that changes something in it"),
    )


def list_cut(section: Section) -> list[TurnScores]:
    """Return the scores by turn of the cells that keep only some of the rows, the one that worsens most first."""
    kept = {line["hash"]: line["rows_kept"] for line in section.cells}
    return sorted((each for each in section.turns if kept[each.run] < ALL), key=lambda each: each.change[0])


def describe_turns(section: Section, hidden: Section | None = None) -> str:
    """Return what cut caches lose from the first question of a context to the last.

    Args:
        section: A section whose caches were cut with the first question in sight.
        hidden: One whose caches were cut with none in sight.
    """
    cut, turns = list_cut(section), len(section.turns[0].losses)
    signs, most = [each.sign for each in cut], cut[0]
    line = next(line for line in section.cells if line["hash"] == most.run)
    first, last = (format_number(most.losses[turn][0], sign="+") for turn in (0, -1))
    text = (
        f"With the first of {turns} questions in sight when the cache is cut, "
        f"{say_lose(signs.count(-1), f' of {len(cut)} cut caches')} more against the full cache at the last question "
        f"than at the first, and {say_lose(signs.count(1))} less (jointly at 95 %). "
        f"{name_with_bytes(line)} worsens most: its difference from the full cache is {first} at the first question "
        f"and {last} at the last, a change of {format_difference(*most.change)}."
    )
    if hidden is not None and hidden.turns and hidden.question == "hidden":
        unseen = [each.sign for each in list_cut(hidden)]
        worse = say_lose(unseen.count(-1), f" of {len(unseen)}")
        text += f" With none in sight, {worse} more at the last than at the first."
    return text


def choose_task(sections: Sequence[Section], tasks: Sequence[str], question: str = "visible") -> Section | None:
    """Return the section of some tasks that a statement stands on, of the first model that has one."""
    for model in list_models(sections):
        alike = [each for each in sections if (each.model, each.question) == (model, question)]
        known = [section for section in alike if section.task in tasks]
        if known:
            return max(known, key=lambda section: (section.samples, len(section.cells)))
    return None


def list_smaller(section: Section) -> list[Line]:
    """Return the cells that hold fewer bytes than the full cache and whose difference from it has an interval."""
    cells = section.list_cells(EVICTING, POINT)
    return [line for line in cells if line["bytes_held"] < ALL and line["low"] is not None]


def describe_smaller(section: Section, smaller: Sequence[Line], margin: float, counts: bool = True) -> str:
    """Return the full cache's score, how many cells score less or nearly as much, and the highest score of a cell.

    If nothing is decided, the precision of the differences takes the place of the highest score.

    Args:
        section: The section.
        smaller: Its cells with fewer bytes than the full cache.
        margin: Points by which a cell that loses little may score less than the full cache.
        counts: Whether it says how many cells score less or nearly as much. Otherwise only the highest one.
    """
    best, full = sort_by_score(smaller)[0], section.full
    kept, less, undecided = count_losses(section, smaller, margin)
    bound = find_margin(full["score"], margin)
    text = f"On `{section.task}` the full cache scores {format_score_interval(full)}."
    if counts or undecided == len(smaller):
        text += f" {describe_losses(len(smaller), kept, less, bound, ' with fewer bytes')}"
        if 0 < kept <= FEW:
            names = [name_with_bytes(line) for line in smaller if is_kept(line, full, margin)]
            text += f" {'That is' if kept == 1 else 'These are'} {join_words(names, 'and')}."
    if undecided == len(smaller):
        width = sum(line["high"] - line["low"] for line in smaller) / len(smaller) / 2
        return f"{text} The 95 % intervals of their differences reach {width:.0f} points to either side, in the mean."
    holds = is_kept(best, full, margin)
    if counts and kept == 1 and holds:
        return f"{text} It also scores most: {format_score_interval(best)}."
    judged = ""
    if counts and kept and not holds:
        judged = f", but is not shown to lose at most {bound:.1f} points"
    elif not counts and bound > 0 and holds:
        judged = f", and is shown to lose at most {bound:.1f} points"
    return f"{text} {name_with_bytes(best)} scores most: {format_score_interval(best)}{judged}."


def count_losses(section: Section, smaller: Sequence[Line], margin: float) -> tuple[int, int, int]:
    """Return how many cells are shown to lose at most the margin; of the others, how many to score less, or neither."""
    kept = [is_kept(line, section.full, margin) for line in smaller]
    signs = [sign for sign, small in zip(sign_cells(smaller, OF_ALL), kept, strict=True) if not small]
    return sum(kept), signs.count(-1), len(signs) - signs.count(-1)


def name_with_bytes(line: Line) -> str:
    """Return a cell with the share of the bytes that it holds."""
    return f"{name_cell(line)} with {say_percent(line['bytes_held'])} of the bytes"


def name_budget(line: Line) -> str:
    """Return a cell with its budget."""
    return f"{name_cell(line)}, budget {format_budget(line['budget'])}"
