"""Write the tables of the pages of results, and the sentences about them.

Lines of a table are sorted by their mean score over its budgets, the highest first, and the full cache is last. Tables
of points are sorted by bytes, and those of cells that read few rows by the rows read, the fewest first.
"""

from collections.abc import Callable, Mapping, Sequence

from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.joint_signs import find_margin
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import (
    Column,
    format_interval,
    format_markdown,
    format_number,
    format_percent,
    format_range,
)
from kvbench.report.results_cells import (
    ALL,
    EVICTING,
    LONG_TASKS,
    POINT,
    READING,
    SEEDS,
    Section,
    arrange,
    classify,
    count_signs,
    count_with_files,
    find_front,
    find_spreads,
    is_decided,
    is_kept,
    list_budgets,
    list_methods,
    pair_equal_bytes,
    sign_cells,
    sort_by_score,
    split_classes,
)
from kvbench.report.results_text import (
    describe_losses,
    format_budget,
    format_change,
    format_difference,
    format_divergence,
    format_ranks,
    format_score,
    format_share,
    join_words,
    label_with_budget,
    say_lose,
    say_percent,
    wrap,
)

WIDE = 2  # budgets of a table that shows intervals; tables of more budgets show scores and ranks
FEW = 3  # methods that a sentence names in any case
JOINT = " These signs hold together with 95 % confidence."
MORE = "Scores are shown to be higher than without the {} in {{more}} of {{count}} cells and lower in {{less}}"
CHANGES = {  # key of GAINS -> sentence with the numbers of cells that score less or more
    "question_gain": "Scores are shown to fall in {less} of {count} cells when the cache is cut before the question is "
    "known, and to rise in {more}",
    "allocator_gain": MORE.format("allocator"),
    "codec_gain": MORE.format("codec"),
}
FILES = """\
A cell is on a *front* if no other cell holds as few bytes or fewer and scores as much or more. One front goes by the
bytes of a cache, the other one by the bytes *with files*: those of the cache and of the files that a method or codec
needs beside the model, as if they served a single prompt. All prompts share them. *In all* also counts what a method
keeps beside the rows, such as positions and codes. A table lists the cells on either front and all others that need
files. Fronts go by mean scores, and neighbours on them often cannot be told apart."""
SPREADS = """\
Each row has cells of one budget and similar bytes that differ in a preset, a setting or a file only. *range* is the
difference of the highest and the lowest score. These two were picked for their distance, so *range* and its interval
exaggerate, and an interval above 0 alone shows no difference. *apart* counts all pairs of cells that are shown to
differ (Holm's procedure over all pairs of a section)."""
EQUAL_BYTES = f"""\
A pair is a cell with a codec and a cell of the same method with fewer raw rows, whose bytes differ by at most
{say_percent(EQUAL)}. Pairs are sorted by the raw rows, then by the gain. Pairs with other bytes are left out. With the
question hidden, the question's rows come on top of the budget, and weigh more where they are raw."""
PAIRED = " The intervals of *{column}* are paired by sample."
TURNS = (
    "**By question.** Of {count} cells, those that keep all rows included, {less} more against the full cache at the "
    "last of {turns} questions about a context than at the first, and {more} less (jointly at 95 %). *question 1* and "
    "so on are the differences from the full cache at each question, and *change* is the last one less the first, "
    "paired by context, with its 95 % interval. The cell that worsens most is first."
)
PLANNED = (
    "These pairs were named before they were measured. With other settings the other cell may score more ([Presets and "
    "seeds](results-presets-and-seeds.md)). Two cells of the same budget do not always hold the same bytes, which "
    "stand beside them. *difference* is the score of the second cell less that of the first, paired by sample, with "
    "its 95 % interval. *more* says which of them scores more."
)
PLANNED_SIGNS = (
    "**Planned comparisons.** The signs hold together with 95 % confidence for all {count} planned comparisons that "
    "were measured in the part{shown} (Holm's procedure)."
)
NAMED_CHANGES = (
    "Each row changes one thing in another cell, or two where its name says so. *unchanged* is the score of that "
    "cell, and *gain* is the difference from it, paired by sample, with its 95 % interval. The largest loss is "
    "first. The unchanged cells are {cells}."
)
ENDS = (
    "**How answers end.** *tokens* is the mean number of tokens of an answer, and *at the limit* the share of answers "
    "that the task's limit of tokens ended. An answer that is much shorter than the full cache's probably leaves out "
    "steps."
)
POINTS = (
    "In these cells a codec packs the rows, or the method decides how many rows stay. Cells of one budget of rows hold "
    "different bytes, so each cell stands at its measured bytes."
)
READERS = (
    "In these cells a token reads only some of the rows that the cache holds. The budget is the share that it should "
    "read, and *rows* is the share that was read."
)
LISTED = {  # kind whose cells have a line each -> titles of the budget and the share that sorts them, and its key
    READING: ("budget", "rows", "rows_attended"),
    POINT: ("rows kept", "bytes", "bytes_held"),
}


def format_section(section: Section, margin: float) -> list[str]:
    """Return the sentences and tables of a section."""
    subtasks = f", of {section.subtasks} subtask{'s' if section.subtasks > 1 else ''}" if section.subtasks else ""
    text = [f"{section.samples:,} samples a cell{subtasks}.\n"]
    if section.part != SEEDS:  # which of several seeds is best is no question
        text += [f"{wrap(sentence)}\n" for sentence in describe_separation(section, margin)]
    text += [*format_scores(section, margin), ""]
    for kind, sentences in {READING: [READERS, *describe_holders(section)], POINT: [POINTS]}.items():
        if section.list_cells(kind):
            text += [wrap(" ".join(sentences)), "", *format_listed(section, kind, margin), ""]
    return [*text, *format_ends(section), *format_turns(section), *format_planned(section)]


def format_ends(section: Section) -> list[str]:
    """Return the table of how long answers are, and how many a limit ended; empty for tasks with short answers."""
    if section.task not in LONG_TASKS:
        return []
    columns = [
        Column("cell", "", lambda line: line["label"]),
        Column("budget", "", lambda line: format_budget(line["budget"])),
        Column("score", "", lambda line: format_number(line["score"])),
        Column("tokens", "", lambda line: f"{line['tokens_out']:,.0f}"),
        Column("at the limit", "", lambda line: format_percent(line["at_limit"])),
    ]
    return [wrap(ENDS), "", *format_markdown(columns, sort_by_score(section.cells)), ""]


def format_turns(section: Section) -> list[str]:
    """Return the table of differences from the full cache by turn; empty without any."""
    if not section.turns:
        return []
    turns, known = len(section.turns[0].losses), {each.run: each for each in section.turns}
    signs = [each.sign for each in section.turns]

    def show(turn: int) -> Callable[[Line], str]:
        return lambda line: format_number(known[line["hash"]].losses[turn][0], sign="+")

    columns = [
        Column("cell", "", lambda line: line["label"]),
        Column("budget", "", lambda line: format_budget(line["budget"])),
        Column("bytes", "", lambda line: format_percent(line["bytes_held"])),
        *(Column(f"question {turn + 1}", "", show(turn)) for turn in range(turns)),
        Column("change", "", lambda line: format_difference(*known[line["hash"]].change)),
    ]
    cells = sorted(
        (line for line in list_methods(section.cells) if line["hash"] in known),
        key=lambda line: (known[line["hash"]].change[0], line["label"]),
    )
    sentence = TURNS.format(
        less=say_lose(signs.count(-1)), more=say_lose(signs.count(1)), count=len(signs), turns=turns
    )
    return [wrap(sentence), "", *format_markdown(columns, cells), ""]


def format_planned(section: Section) -> list[str]:
    """Return the table of the planned comparisons; empty without any."""
    if not section.planned:
        return []
    lines = {line["hash"]: line for line in section.cells}

    def name(run: str) -> str:
        line = lines[run]
        return f"{label_with_budget(line)} ({format_percent(line['bytes_held'])} of the bytes)"

    def decide(comparison: CellComparison) -> str:
        return {-1: "first", 0: "not shown", 1: "second"}[comparison.sign]

    columns = [
        Column("first", "", lambda each: name(each.one)),
        Column("second", "", lambda each: name(each.other)),
        Column("first score", "", lambda each: format_number(lines[each.one]["score"])),
        Column("second score", "", lambda each: format_number(lines[each.other]["score"])),
        Column("difference", "", lambda each: format_difference(*each.change)),
        Column("more", "", decide),
    ]
    shown, count = len(section.planned), section.planned_in_all
    part = f", of which this table has {shown}" if shown < count else ""
    sentences = PLANNED_SIGNS.format(count=count, shown=part), PLANNED
    return [*(f"{wrap(text)}\n" for text in sentences), *format_markdown(columns, section.planned), ""]


def describe_separation(section: Section, margin: float) -> list[str]:
    """Return sentences about each budget: which pairs of a class differ, which cells may be best, which lose little.

    Budgets and classes without evicting cells are left out if the section has any. Budgets of which the same can be
    said share a sentence.
    """
    budgets_by_text: dict[str, list[str]] = {}
    chosen = section.list_cells(EVICTING) or list_methods(section.cells)
    for budget in list_budgets(chosen):
        column = [line for line in list_methods(section.cells) if line["budget"] == budget]
        if len(column) < 2:
            continue
        classes = [alike for alike in split_classes(column) if any(line in chosen for line in alike)]
        ranked = [text for alike in classes if (text := describe_ranks(alike))]
        compared = compare_to_full([line for line in column if line in chosen], section.full, margin)
        budgets_by_text.setdefault(" ".join([*ranked, compared]), []).append(format_budget(budget))
    return [f"**{name_budgets(budgets)}.** {text}" for text, budgets in budgets_by_text.items()]


def name_budgets(budgets: Sequence[str]) -> str:
    """Return what a sentence is about that holds for each of some budgets."""
    return f"Budget {budgets[0]}" if len(budgets) == 1 else f"At each of the budgets {join_words(budgets, 'and')}"


def describe_ranks(cells: Sequence[Line]) -> str:
    """Return how many pairs of a class can be told apart, and which cells may be its best; empty for a single cell."""
    if len(cells) < 2:
        return ""
    apart, pairs, count = sum(line["rank_first"] - 1 for line in cells), len(cells) * (len(cells) - 1) // 2, len(cells)
    first = [line["label"] for line in sort_by_score(cells) if line["rank_first"] == 1]
    may = "is" if len(first) == 1 else "may be"
    best = f"The best of these {count} {may} {join_words(first, 'or')}."
    if len(first) > max(FEW, count / 2):
        best = f"Any of {len(first)} cells may be the best."
    elif len(first) == count:
        best = f"Any of these {count} may be the best."
    told = f"{apart} of {pairs} pairs of cells at {cells[0]['rank_class']} can be told apart."
    if count == 2:
        told = f"The two cells at {cells[0]['rank_class']} can{'' if apart else 'not'} be told apart."
    return f"{told} {best}"


def compare_to_full(column: Sequence[Line], full: Line, margin: float) -> str:
    """Return how many cells of a column lose at most the margin, how many of the others score less, and the rest."""
    held = [is_kept(line, full, margin) for line in column]
    less = sum(sign < 0 and not kept for sign, kept in zip(sign_cells(column, "difference"), held, strict=True))
    return describe_losses(len(column), sum(held), less, find_margin(full["score"], margin))


def describe_holders(section: Section) -> list[str]:
    """Return a sentence about the methods that hold all bytes of the full cache; none if there are no such methods."""
    held = [line for line in list_methods(section.cells) if line["bytes_held"] >= ALL and not is_decided(line)]
    names = dict.fromkeys(line["label"] for line in held)
    if not names:
        return []
    sentence = f"{join_words(list(names), 'and')} {'holds' if len(names) == 1 else 'hold'} all bytes of the full cache."
    whole = {line["label"]: line["bytes_in_all"] for line in held if line["bytes_in_all"] is not None}
    known = [f"{format_percent(share)} ({label})" for label, share in whole.items()]
    if known:
        sentence += f" What is kept beside the rows, such as codes and bounds, makes this {join_words(known, 'and')}."
    return [sentence]


def format_scores(section: Section, margin: float) -> list[str]:
    """Return the table of the evicting cells, with columns for each budget; empty without any.

    Args:
        section: The section.
        margin: Points by which a cell that loses little may score less than the full cache.
    """
    cells, full = section.list_cells(EVICTING), section.full
    if not cells:
        return []
    rows, budgets = arrange(cells), list_budgets(cells)
    ordered = sorted(rows, key=lambda label: -sum(line["score"] for line in rows[label].values()) / len(rows[label]))
    rows[full["label"]] = dict.fromkeys(budgets, full)

    def show(budget: float | int | str, write: Callable[[Line], str]) -> Callable[[str], str]:
        return lambda label: write(rows[label][budget]) if budget in rows[label] else ""

    columns = [Column("method", "", lambda label: label)]
    for budget in budgets:
        title = format_budget(budget)
        columns.append(Column(title, "score", show(budget, lambda line: format_score(line, full, margin))))
        if len(budgets) <= WIDE:
            columns.append(Column(title, "diff", show(budget, lambda line: format_change(line, "difference"))))
        columns.append(Column(title, "bytes", show(budget, lambda line: format_percent(line["bytes_held"]))))
        if any(format_ranks(line) for line in cells if line["budget"] == budget):
            columns.append(Column(title, "ranks", show(budget, format_ranks)))
        if len(budgets) <= WIDE and any(line["kl"] is not None for line in cells):
            columns.append(Column(title, "KL", show(budget, format_divergence)))
    return format_markdown(columns, [*ordered, full["label"]])


def format_subtasks(section: Section, cells: Sequence[Line]) -> list[str]:
    """Return the mean scores of some cells by subtask, and how precise they are; empty if they are unknown."""
    known = section.by_subtask
    shown = [line for line in (*sort_by_score(cells), section.full) if line["hash"] in known]
    if len(shown) < 2 or (section.subtasks or 1) < 2:
        return []
    names = list(known[section.full["hash"]])
    samples = section.samples // len(names)
    if samples < 2:  # nothing can be said about the precision
        return []
    half = mean([Values([100.0 * (place % 2) for place in range(samples)], [str(place) for place in range(samples)])])

    def show(subtask: str) -> Callable[[Line], str]:
        return lambda line: f"{known[line['hash']][subtask]:.0f}"

    columns = [
        Column("cell", "", lambda line: line["label"]),
        Column("mean", "", lambda line: format_number(line["score"])),
        *(Column(name.removeprefix("ruler_").replace("_", " "), "", show(name)) for name in names),  # long heads wrap
    ]
    share = format_range([line["bytes_held"] for line in shown[:-1]], say_percent)
    sentence = (
        f"**{section.title}.** The cells hold {share} of the bytes. With {samples} samples a subtask, the 95 % "
        f"interval of a number near 50 reaches at most from {half.low:.0f} to {half.high:.0f}."
    )
    return [wrap(sentence), "", *format_markdown(columns, shown)]


def format_listed(section: Section, kind: str, margin: float) -> list[str]:
    """Return a table with a line for each cell of a kind of LISTED, in the order of its rows or bytes."""
    budget, title, share = LISTED[kind]
    cells, full = section.list_cells(kind), section.full
    ranks = [Column("ranks", "", format_ranks)] if kind == READING and any(map(format_ranks, cells)) else []
    columns = [
        Column("cell", "", lambda line: line["label"]),
        Column(budget, "", lambda line: format_budget(line["budget"])),
        Column(title, "", lambda line: format_percent(line[share])),
        Column("score", "", lambda line: format_score(line, full, margin)),
        Column("diff", "", lambda line: format_change(line, "difference")),
        *ranks,
        Column("KL", "", format_divergence),
    ]
    ordered = sorted(cells, key=lambda line: (line[share], -line["score"], line["label"]))
    return format_markdown(columns, [*ordered, full])


def format_gains(sections: Sequence[Section], gain: str) -> list[str]:
    """Return what a key of GAINS changes; nothing if no cell was measured with and without it."""
    text: list[str] = []
    for section in sections:
        changed = list_methods([line for line in section.cells if line[gain] is not None])
        if not changed:
            continue
        signs = count_signs(changed, gain)
        counted = CHANGES[gain].format(count=len(changed), less=signs[-1], more=signs[1])
        text += [
            wrap(f"**{section.title}.** {counted}{say_undecided(signs[0])}{JOINT}"),
            "",
            *format_changes(changed, gain),
            "",
        ]
    return text


def say_undecided(count: int) -> str:
    """Return the end of a sentence that counts changes."""
    return f"; in {count} neither is shown." if count else "."


def format_changes(cells: Sequence[Line], gain: str) -> list[str]:
    """Return paired changes with 95 % intervals.

    A table has the evicting cells, labels down in their order and budgets across. Others have a line each.
    """
    evicting = [line for line in cells if classify(line) == EVICTING]
    listed = [line for line in cells if classify(line) != EVICTING]
    rows = arrange(evicting)

    def show(budget: float | int | str) -> Callable[[str], str]:
        return lambda label: format_change(rows[label][budget], gain) if budget in rows[label] else ""

    columns = [Column("method", "", lambda label: label)]
    columns += [Column(format_budget(budget), "", show(budget)) for budget in list_budgets(evicting)]
    others = [
        Column("cell", "", lambda line: line["label"]),
        Column("budget", "", lambda line: format_budget(line["budget"])),
        Column("change", "", lambda line: format_change(line, gain)),
    ]
    listed.sort(key=lambda line: (line["label"], -line["rows_kept"], -line["rows_attended"]))
    table = format_markdown(columns, sorted(rows)) if rows else []
    between = [""] if rows and listed else []
    return [*table, *between, *(format_markdown(others, listed) if listed else [])]


def format_bytes(sections: Sequence[Section]) -> list[str]:
    """Return which cells hold the fewest bytes for their scores, where some have a codec or need files."""
    text: list[str] = []
    for section in sections:
        if section.part == SEEDS:
            continue
        cells = section.cells
        files = [line for line in cells if count_with_files(line) > line["bytes_held"]]
        if not files and all(line["codec"] == "raw" for line in cells):
            continue
        fronts = {"cache": find_front(cells), "with files": find_front(cells, count_with_files)}
        listed = [line for line in cells if line in files or any(line in front for front in fronts.values())]
        packed = [line for line in fronts["cache"] if line["codec"] != "raw"]
        sentence = (
            f"**{section.title}.** {len(fronts['cache'])} of {len(cells)} cells are on the front by bytes held, "
            f"{len(packed)} of them with a codec, and {len(fronts['with files'])} on the front with files."
        )
        text += [wrap(sentence), ""]

        def name_fronts(line: Line, fronts: Mapping[str, Sequence[Line]] = fronts) -> str:
            fronts_of_line = [name for name, front in fronts.items() if line in front]
            return "both" if len(fronts_of_line) == len(fronts) else "".join(fronts_of_line)

        columns = [
            Column("cell", "", lambda line: line["label"]),
            Column("budget", "", lambda line: format_budget(line["budget"])),
            Column("bytes held", "", lambda line: format_percent(line["bytes_held"])),
            Column("with files", "", lambda line: format_share(line["bytes_with_files"])),
            Column("in all", "", lambda line: format_share(line["bytes_in_all"])),
            Column("score", "", lambda line: format_number(line["score"])),
            Column("95 %", "", lambda line: format_interval(line["score_low"], line["score_high"])),
            Column("front", "", name_fronts),
        ]
        text += [*format_markdown(columns, sorted(listed, key=lambda line: (line["bytes_held"], -line["score"]))), ""]
    return [FILES, "", *text] if text else []


def format_spreads(sections: Sequence[Section]) -> list[str]:
    """Return tables of how much presets, settings and files change; empty if no cells differ in these alone."""
    text: list[str] = []
    for section in sections:
        spreads = find_spreads(section)
        if not spreads:
            continue
        apart, pairs = sum(spread.apart for spread in spreads), sum(spread.pairs for spread in spreads)
        shown = f"{apart or 'None'} of {pairs} pairs {'are' if apart > 1 else 'is'} shown to differ."
        sentence = f"**{section.title}.** {shown}{JOINT}"
        sentence += PAIRED.format(column="range")
        columns = [
            Column("highest", "", lambda spread: spread.cells[0]["label"]),
            Column("lowest", "", lambda spread: spread.cells[-1]["label"]),
            Column("budget", "", lambda spread: format_budget(spread.cells[0]["budget"])),
            Column("cells", "", lambda spread: str(len(spread.cells))),
            Column("scores", "", lambda spread: ", ".join(format_number(line["score"]) for line in spread.cells)),
            Column("range", "", lambda spread: format_difference(*spread.change)),
            Column("apart", "", lambda spread: f"{spread.apart} of {spread.pairs}"),
        ]
        text += [wrap(sentence), "", *format_markdown(columns, spreads), ""]
    return [wrap(SPREADS), "", *text] if text else []


def format_named_changes(sections: Sequence[Section]) -> list[str]:
    """Return tables of what conf/measured.yaml changes in cells; empty if it names no changes."""
    return [line for section in sections if section.changed for line in format_changed(section)]


def format_changed(section: Section) -> list[str]:
    """Return how many of the named changes of a section change the score, and their table."""
    lines = {line["hash"]: line for line in section.cells}
    signs = [each.sign for each in section.changed]
    told = (
        f"**{section.title}.** {signs.count(-1)} of {len(signs)} changes are shown to lower the score and "
        f"{signs.count(1)} to raise it{say_undecided(signs.count(0))}{JOINT} "
    )
    unchanged = [lines[run] for run in dict.fromkeys(each.one for each in section.changed)]
    cells = [f"{line['label']} ({format_percent(line['bytes_held'])} of the bytes)" for line in unchanged]
    several = len({lines[each.other]["budget"] for each in section.changed}) > 1

    def name(each: CellComparison) -> str:
        return f"{each.words}, {format_budget(lines[each.other]['budget'])}" if several else each.words

    columns = [
        Column("change", "", name),
        Column("bytes", "", lambda each: format_percent(lines[each.other]["bytes_held"])),
        Column("with files", "", lambda each: format_share(lines[each.other]["bytes_with_files"])),
        Column("unchanged", "", lambda each: format_number(lines[each.one]["score"])),
        Column("score", "", lambda each: format_number(lines[each.other]["score"])),
        Column("gain", "", lambda each: format_difference(*each.change)),
        Column("shown", "", lambda each: {-1: "lower", 0: "", 1: "higher"}[each.sign]),
    ]
    ordered = sorted(section.changed, key=lambda each: each.change[0])
    text = wrap(told + NAMED_CHANGES.format(cells=join_words(cells, "and")))
    return [text, "", *format_markdown(columns, ordered), ""]


def format_equal_bytes(sections: Sequence[Section]) -> list[str]:
    """Return tables of the pairs of cells of a method with and without a codec at equal bytes; empty without any."""
    text: list[str] = []
    for section in sections:
        pairs = pair_equal_bytes(section)
        if not pairs:
            continue
        signs = [pair.sign for pair in pairs]
        sentence = (
            f"**{section.title}.** The cell with the codec scores more in {signs.count(1)} of {len(pairs)} pairs and "
            f"less in {signs.count(-1)}{say_undecided(signs.count(0))}{JOINT}"
        ) + PAIRED.format(column="gain")
        columns = [
            Column("cell with a codec", "", lambda pair: pair.coded["label"]),
            Column("its rows", "", lambda pair: format_budget(pair.coded["budget"])),
            Column("raw rows", "", lambda pair: format_budget(pair.raw["budget"])),
            Column("bytes", "", lambda pair: format_percent(pair.coded["bytes_held"])),
            Column("score", "", lambda pair: format_number(pair.coded["score"])),
            Column("raw score", "", lambda pair: format_number(pair.raw["score"])),
            Column("gain", "", lambda pair: format_difference(*pair.change)),
        ]
        ordered = sorted(pairs, key=lambda pair: (pair.raw["budget"], -pair.change[0], pair.coded["label"]))
        text += [wrap(sentence), "", *format_markdown(columns, ordered), ""]
    return [wrap(EQUAL_BYTES), "", *text] if text else []
