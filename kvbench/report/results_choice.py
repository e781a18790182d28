"""Write docs/which-method.md: what the lines of a study recommend, by what a user needs.

Each recommendation names the cells that may be the best (kvbench.report.results_cells.list_leaders), or says that they
are too many to name. It stands on the section that `choose_column` finds.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import Column as TableColumn
from kvbench.analysis.text_table import format_markdown, format_number, format_range
from kvbench.report.results_cells import (
    LONG_TASKS,
    READING,
    TURN_TASKS,
    TWICE,
    Section,
    count_cells,
    find_front,
    is_kept,
    list_budgets,
    list_methods,
    sort_by_score,
)
from kvbench.report.results_conclusions import (
    CHANCE,
    FEW,
    Column,
    choose_column,
    choose_once,
    choose_question,
    choose_task,
    conclude_codecs,
    conclude_no_worse,
    count_losses,
    describe_elsewhere,
    describe_smaller,
    describe_turns,
    find_best_coded,
    list_cut,
    list_low,
    list_smaller,
    name_cells,
    name_part,
    name_place,
)
from kvbench.report.results_cost import RATIO, CostTable, find_fastest
from kvbench.report.results_limits import describe_models
from kvbench.report.results_origin import count_planned_methods, list_known, say_unfinished
from kvbench.report.results_text import (
    COMMENT,
    format_budget,
    format_change,
    format_score_interval,
    join_words,
    say_percent,
    wrap,
    wrap_paragraphs,
)

PAGE = "which-method.md"
LEVELS = (0.1, 0.2, 0.5)  # shares of the bytes
HEAD = """\
# Which method should I use?

{comment}

This page says what [the results](results.md) recommend for each need. **They come from very small models** ({models}),
and how methods rank there is no evidence about how they rank on a model of 8 billion parameters. Take the methods in
the tables as candidates, and measure them on your own model and task: `python run.py -m method=… budget=…`
([Quickstart](quickstart.md)). A name such as `tova decoding=false · int4` stands for `method=tova method.decoding=false
codec=int4`, and `expected_attention · ada kvpress` for `method=expected_attention allocator=ada
allocator.preset=kvpress`. The method `full` keeps all rows. With a codec, the budget is the share of the bytes over the
codec's own: 0.2 / (36 / 128) = 0.711 for 20 % in int4 and heads of 64 numbers.

*Budget* is the setting, and *bytes* is what the cells then hold when the answer begins, the rows of a hidden question
included. *May be best* lists the cells with raw rows that the samples cannot tell from the one with the highest score
at these bytes. If there are many cells, the table gives their number and the one with the highest score. The score and
*diff*, its difference from the full cache, have 95 % intervals and are those of the first cell that is named. Some
methods ({twice}) let the model read each prompt a second time before the first token, which [takes
time](results-cost.md). *read once* names the raw cells that may be best without them. *With a codec* names the cell
with the highest score of those that read once and keep their rows in a codec or, of several whose intervals reach this
score, the one with the fewest bytes. It says so if none of their intervals reaches the score of the raw cell that reads
once. If they hold other bytes, these stand beside the score. If a part is named in brackets, the cell was measured
there, on other samples. [Models and lengths](results-models-and-lengths.md) has scores for longer prompts. Some methods
need [a file for the model](files-for-methods.md). That of `duo_attention` was made from KVzip's scores, and its authors
train one.
"""
NEEDS = {  # question of the prompts -> title of the need
    "visible": "The question is known when the cache is cut",
    "hidden": "The question is not known yet",
}
NOTHING = "Nothing was measured for this yet."


def format_choice(sections: Sequence[Section], tables: Sequence[CostTable], margin: float) -> str:
    """Return the page.

    Args:
        sections: All sections of the study.
        tables: Tables of times.
        margin: Points by which a cell that loses little may score less than the full cache.
    """
    comment = COMMENT.format(module="results_choice")
    models = describe_models(sections)
    text = [wrap_paragraphs(HEAD.format(comment=comment, models=models, twice=join_words(TWICE, "and")))]
    for question, title in NEEDS.items():
        chosen = choose_question(sections, question)
        columns = [column for level in LEVELS if (column := choose_column(chosen, level, near=True))]
        text += [f"## {title}", "", *format_columns(columns, sections)]
        said = [describe_elsewhere(column, sections).strip() for column in columns]
        said += [describe_missing(part, sections) for part in dict.fromkeys(column.section.part for column in columns)]
        text += [f"{wrap(sentence)}\n" for sentence in said if sentence]
    for title, tasks in {"Answers are long": LONG_TASKS, "A context gets several questions": TURN_TASKS}.items():
        known = [section for question in NEEDS if (section := choose_task(sections, tasks, question))]
        advice = [line for section in known for line in recommend_task(section, margin)]
        text += [f"## {title}", "", *(advice or [f"{NOTHING}\n"])]
    text += ["## Only the bytes count", ""]
    rules = [rule(sections, margin) for rule in (conclude_no_worse, conclude_codecs)]
    text += [f"{wrap(conclusion.write())}\n" for conclusion in rules if conclusion] or [f"{NOTHING}\n"]
    visible = choose_question(sections, "visible")
    speed = [*recommend_speed(tables, choose_column(visible)), *recommend_readers(visible)]
    return "\n".join([*text, "## Tokens should be fast", "", *speed])


def describe_missing(part: str, sections: Sequence[Section]) -> str:
    """Return that a part of the study is not finished, and what this means for a table; empty if it is."""
    said = say_unfinished(part, count_cells(sections)[part], list_known())
    if not said:
        return ""
    lines = [line for section in sections if section.part == part for line in list_methods(section.cells)]
    missing = count_planned_methods(list_known()[part]) - Counter(line["method"] for line in lines)
    return f"{said} Cells of {join_words([f'`{name}`' for name in missing], 'and')} are missing."


def format_columns(columns: Sequence[Column], sections: Sequence[Section]) -> list[str]:
    """Return the recommendations of some columns as a table, and what it stands on.

    Args:
        columns: The columns.
        sections: The sections whose cells with a codec may be named.
    """
    if not columns:
        return [f"{NOTHING}\n"]
    listed = [
        TableColumn("budget", "", lambda column: format_budget(column.budget)),
        TableColumn("bytes", "", lambda column: column.share),
        TableColumn("may be best", "", lambda column: name_best(column.leaders, len(column.cells))),
        TableColumn("score", "", lambda column: format_score_interval(column.leaders[0])),
        TableColumn("diff", "", lambda column: format_change(column.leaders[0], "difference")),
        TableColumn("read once", "", name_read_once),
        TableColumn("with a codec", "", partial(name_coded, sections)),
        TableColumn("part", "", lambda column: column.section.part),
    ]
    compared: dict[str, tuple[Section, list[int]]] = {}
    for column in columns:
        compared.setdefault(column.section.title, (column.section, []))[1].append(len(column.cells))
    places = [name_place(section, f"{format_range(counts)} cells compared") for section, counts in compared.values()]
    return [*format_markdown(listed, columns), "", wrap(f"*({'; '.join(places)})*"), ""]


def name_best(leaders: Sequence[Line], count: int) -> str:
    """Return the labels of cells that may be the best of `count`, or their number and one of the highest if many."""
    if len(leaders) > FEW:
        return f"any of {len(leaders)} of {count} cells, such as {leaders[0]['label']}"
    return join_words([line["label"] for line in leaders], "or")


def name_read_once(column: Column) -> str:
    """Return the cells that may be the best of those that read each prompt once, and the score of the first."""
    if all(line["method"] not in TWICE for line in column.cells):
        return "the same"
    leaders, count = choose_once(column)
    return f"{name_best(leaders, count)}: {say_score(leaders[0], column)}" if leaders else ""


def name_coded(sections: Sequence[Section], column: Column) -> str:
    """Return the cell with a codec that may be best of those that read each prompt once and hold hardly more bytes.

    Its interval reaches the score of the raw cell that reads once. If there is no such cell, the text says so.
    """
    if find_best_coded(column, sections) == (None, None):
        return ""
    once, _ = choose_once(column)
    coded, section = find_best_coded(column, sections, reached=once[0]["score"] if once else 0.0)
    if coded is None or section is None:
        return "none scores as much"
    part = "" if section is column.section else f" ({name_part(section)})"
    return f"{coded['label']}: {say_score(coded, column)}{part}"


def say_score(line: Line, column: Column) -> str:
    """Return the score of a cell, and its bytes if these are not those of a column."""
    share = say_percent(line["bytes_held"])
    return format_number(line["score"]) + ("" if share == column.share else f" with {share}")


def recommend_task(section: Section, margin: float) -> list[str]:
    """Return what a section of another kind of task recommends, for each budget at which cells can be compared."""
    smaller = list_smaller(section)
    if not smaller:
        return []
    kept, *_ = count_losses(section, smaller, margin)
    none = "" if kept else " So none of them is recommended."
    none += " No cell with a codec was measured." if all(line["codec"] == "raw" for line in smaller) else ""
    if section.question == "visible" and list_cut(section):
        none += f" {describe_turns(section)}"
    text = [f"{wrap(f'*Question {section.question}.* {describe_smaller(section, smaller, margin)}{none}')}\n"]
    found = [column for budget in list_budgets(section.cells) if (column := choose_budget(section, budget))]
    columns = [column for column in found if any(is_kept(line, section.full, margin) for line in column.cells)]
    return [
        *text,
        *(
            format_columns(columns[::-1], [section])
            if columns
            else [wrap(f"*({name_place(section, 'all cells')})*"), ""]
        ),
    ]


def choose_budget(section: Section, budget: float) -> Column | None:
    """Return the column of a section with this budget, if it has two cells of similar bytes."""
    return choose_column([section], budget, near=True, budget=budget)


def recommend_readers(sections: Sequence[Section]) -> list[str]:
    """Return the cells that hold all rows, read few of them, and score most for what they read; nothing without any."""
    known = [(section.samples, len(cells), section) for section in sections if (cells := section.list_cells(READING))]
    if not known:
        return []
    section = max(known, key=lambda entry: entry[:2])[2]
    cells = section.list_cells(READING)
    front = [
        line
        for line in find_front(cells, lambda line: float(line["rows_attended"]))
        if not any(is_better(other, line) for other in cells)
    ]
    listed = [
        TableColumn("rows read", "", lambda line: say_percent(line["rows_attended"])),
        TableColumn("cell", "", lambda line: line["label"]),
        TableColumn("bytes in all", "", say_in_all),
        TableColumn("score", "", format_score_interval),
        TableColumn("diff", "", lambda line: format_change(line, "difference")),
    ]
    place = name_place(section, "cells that no other one beats with fewer rows read; neighbours may tie")
    text = (
        "Where the whole cache fits, a method may hold all rows and let a token read few of them. What it keeps beside "
        "the rows to choose them, such as codes and bounds, is in *bytes in all*:"
    )
    return [f"{wrap(text)}\n", *format_markdown(listed, front), "", wrap(f"*({place})*"), ""]


def say_in_all(line: Line) -> str:
    """Return the bytes of a cell with all that it keeps beside the rows; nothing if its records do not say it."""
    share = line["bytes_in_all"]
    return "" if share is None else say_percent(share)


def is_better(other: Line, line: Line) -> bool:
    """Return whether another cell reads hardly more rows, and the whole interval of its score is higher."""
    return bool(
        other["rows_attended"] <= (1 + EQUAL) * line["rows_attended"] and other["score_low"] > line["score_high"]
    )


def recommend_speed(tables: Sequence[CostTable], column: Column | None = None) -> list[str]:
    """Return which cells decode a token fastest.

    Args:
        tables: Tables of times.
        column: Cells whose scores tell which methods are no better than chance; None names none.
    """
    fastest = find_fastest(tables)
    if fastest is None:
        return [f"{NOTHING}\n"]
    table, rows = fastest
    ratios = format_range([float(row[RATIO]) for row in rows], "{:.2f}".format)
    text = (
        f"With 128k tokens in the shape of Llama-3.1-8B on {table.machine}, the shortest median time for a token is "
        f"{ratios} of the full cache's: {'; '.join(row[''] for row in rows)}. [What methods cost](results-cost.md) "
        "has all cells, and what they add to the first token."
    )
    low = sort_by_score(list_low(column.cells)) if column else []
    if column and low:
        are = "is" if len(low) == 1 else "are"
        text += (
            f" Times say nothing about scores, which the study measured at other budgets: with {column.share} of the "
            f"bytes, {name_cells(low)} {are} not shown to score more than `{CHANCE}`."
        )
    return [f"{wrap(text)}\n"]
