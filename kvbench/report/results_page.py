"""Write docs/results.md, its sub-pages, docs/which-method.md and their pictures from the lines of measured cells.

docs/results.md is one screen: a figure, conclusions (kvbench.report.results_conclusions) and what they cannot tell.
Each section of the lines has its tables on one sub-page (`find_page`). Every number and every sentence about them
follows from the files of lines (kvbench.analysis.result_lines) and from the tables of `kvbench efficiency`. The same
files give the same pages.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvbench.analysis.joint_signs import MARGIN
from kvbench.analysis.result_lines import Line, PartNumbers, list_part_files, read_part
from kvbench.analysis.text_table import format_range
from kvbench.atomic import replace_file
from kvbench.report import results_choice
from kvbench.report.results_cells import (
    EVICTING,
    LONG_TASKS,
    POINT,
    READING,
    SEEDS,
    TURN_TASKS,
    Section,
    classify,
    count_cells,
    list_leaders,
    list_methods,
    list_ties,
    split_sections,
)
from kvbench.report.results_conclusions import (
    LEVEL,
    Conclusion,
    choose_column,
    choose_question,
    conclude_best,
    conclude_changes,
    conclude_codecs,
    conclude_hidden,
    conclude_lengths,
    conclude_long,
    conclude_no_worse,
    conclude_presets,
)
from kvbench.report.results_cost import CostTable, describe_slow, format_costs, read_cost_tables, read_prefill_ratios
from kvbench.report.results_figure import FIGURE, choose_figure, draw_figure, list_compared
from kvbench.report.results_limits import describe_models, format_limits
from kvbench.report.results_models import describe_turned, format_lengths, format_models
from kvbench.report.results_origin import describe_origin, describe_progress, list_known
from kvbench.report.results_pictures import draw_pictures, list_pictures
from kvbench.report.results_tables import (
    PLANNED,
    format_bytes,
    format_equal_bytes,
    format_gains,
    format_named_changes,
    format_section,
    format_spreads,
    format_subtasks,
)
from kvbench.report.results_text import COMMENT, KEPT, format_budget, join_words, name_cell, wrap, wrap_paragraphs
from kvbench.store.checksums import verify_checksums
from kvbench.validation import SettingError, require_choice

PAGE = "results.md"
EQUAL, HIDDEN, LONG, TURNS, CODECS, MODELS, PRESETS, COST, MEASURED = PAGES = (  # names of the sub-pages
    *("equal-bytes", "question-hidden", "long-answers", "several-turns", "codecs", "models-and-lengths"),
    *("presets-and-seeds", "cost", "measured"),
)
TITLES = {  # sub-page -> its title, and the question that it answers
    EQUAL: ("Equal bytes", "Which method scores most with the same bytes, if it sees the question?"),
    HIDDEN: ("Question hidden", "What does it cost to cut the cache before the question is known?"),
    LONG: ("Long answers", "What happens if the cache is cut while an answer grows?"),
    TURNS: ("Several turns", "What remains of a context for its second and third question?"),
    CODECS: ("Codecs", "Are many rows in a codec better than few raw ones?"),
    MODELS: ("Models and lengths", "Are the same methods better in other models, and for longer prompts?"),
    PRESETS: ("Presets and seeds", "How much do settings, and files of other seeds, change?"),
    COST: ("Cost", "What do a token and the first token cost in time?"),
    MEASURED: ("What was measured", "By which commands, on which machines, and with which code?"),
}
RULES = {  # sub-page -> the rules whose conclusions answer it; docs/results.md has the first one of each page of FIRST
    EQUAL: (conclude_best, conclude_no_worse),
    HIDDEN: (conclude_hidden,),
    CODECS: (conclude_codecs, conclude_changes),
    PRESETS: (conclude_presets,),
    LONG: (conclude_long,),
    TURNS: (conclude_long,),
    MODELS: (conclude_lengths,),
}
FIRST = {page: [page] for page in (EQUAL, HIDDEN, CODECS, PRESETS)} | {LONG: [LONG, TURNS]}  # -> the pages with more
CHANGES_FIRST = (HIDDEN, CODECS)  # sub-pages whose question asks for what a setting changes
PARTS = {"presets": PRESETS, SEEDS: PRESETS}  # parts with a sub-page of their own, whatever their lines say
FRONT = """\
# Results

{comment}

What KV-cache methods and codecs score on small models: {models}. **How methods rank on such models is no evidence about
large ones** ([more](#what-they-cannot-tell)). {counts} Every number is in {links}, and [What was
measured](results-measured.md) has the commands.

A *cell* is a method with a budget, a codec or both: `snapkv · int4` is the method `snapkv` with the codec `int4`, and
`full` keeps all rows. Its score is between 0 and 100: the mean over the subtasks of a
task, such as the 13 of RULER. *Raw* rows are keys and values without a codec. *Bytes* are those of the keys and values
in memory when the answer begins, as a share of the full cache's. *Jointly at 95 %* means that all signs that a sentence
counts are right in 95 of 100 such studies. The [glossary](glossary.md) has other words.

![Score over measured bytes](images/{figure}.svg)

{caption}

## What they show
"""
CAPTION = """\
Each mark is a cell, with the 95 % interval of its score, which may be smaller than the mark. The key names cells that
no other one with fewer bytes beats, also among those that read each prompt once, and others with high scores; the rest
are grey. Lines join cells that differ in their budgets alone. The dashed line is the full cache, in a grey band as wide
as its interval. {ties}{hollow}"""
TIES = (
    "A blue band beside marks spans neighbours by score, with raw rows and similar bytes, of which no two can be told "
    "apart (all ranks of one share of the bytes hold together with 95 % confidence). "
)
ONE_BEST = "Of the raw cells of similar bytes, {best} is shown to be the best each time. "
HOLLOW = "Hollow marks are methods that keep all rows but attend to few."
FIXED = """\
A fixed rule makes each conclusion from the data, whatever the outcome. Each topic stands on one model: smollm2_long if
it was measured for it, else smollm2, else reference. Of this model it takes the task and length with most answers. The
rules are: the best of the most cells compared at {level} of the bytes, and the fewest bytes that lose at most a
[margin](statistics.md#margins-and-counts); what hiding the question changes there; cells with a codec against raw rows
of equal bytes; planned comparisons of two settings of a method; and losses where answers are long or a context gets
several questions. The best method, what hiding the question changes, and codecs stand on the part that compares most
cells or pairs. All other rules take the part with most samples a cell. [Which method should I use?](which-method.md)
draws on the same data.
"""
TERMS = (  # what a sub-page says about its tables: what it must show for this, and sentences
    (
        "",
        "Tables of scores are sorted by the mean score over their budgets, the highest first, with the full cache "
        "last, or by bytes or rows read if their cells have no common budget. *bytes* is the measured share of the "
        "full cache's.",
    ),
    (
        "diff |",
        "*diff* is the difference from the full cache on the same samples, with its 95 % interval.",
    ),
    ("KL |", "*KL* is the divergence of the predictions from the full cache's, in nats a token."),
    (
        "ranks |",
        "*Ranks* are the places that a cell may have in its class: the cells of a budget that hold (or read) at most a "
        "tenth more than the one with the fewest bytes (or rows). A cell that is alone in its class has none. All "
        "ranks of a class hold together with 95 % confidence ([Statistics](statistics.md#ranks)).",
    ),
    (
        "",
        "A budget is a share of the rows at the time when the cache is cut or, with `budget_of=seen`, of all rows seen "
        "so far. Rows that are read or written later, such as those of a hidden question, come on top of it unless the "
        "method goes on cutting while it answers, so *bytes* can differ from the budget.",
    ),
)
JUDGED = (
    (
        "",
        "A cell is *shown to lose at most m points*, and has the mark {mark}, only if the lower end of its difference "
        "from the full cache is above -m: it may score less, but not by more. The margin m is {margin:g} points, or a "
        "tenth of the full cache's score where that is less. An interval that merely contains 0 does not show this. "
        "Counts of cells that score less or more hold together with 95 % confidence (Holm's procedure over the cells "
        "that a sentence counts).",
    ),
    ("undecided", "Cells of which neither is shown are *undecided*."),
    (
        "codec",
        "Where a budget has raw cells that read all rows that they hold, sentences about this budget leave out codecs "
        "and cells that read few of their rows.",
    ),
    ("", "[Statistics](statistics.md#margins-and-counts) says how."),
)
SUBPAGE = """\
# {title}

{comment}

{question} [Results](results.md) has all conclusions, and [What these numbers cannot
tell](results.md#what-they-cannot-tell) applies here, too.
"""
ONE_SEED = (
    "Files of other seeds were not measured yet (part seeds): each file below comes from one training or calibration, "
    "so a difference between two files also holds the luck of these."
)
BY_SUBTASK = "Scores by subtask"
NAMES = (
    "[Methods](methods.md) says what each preset sets, and where it comes from. A slash joins the names of presets "
    "that set the same."
)
HIDDEN_BYTES = (
    "Both cells of a change have the same budget, but not always the same bytes: the rows of a hidden question come on "
    "top of it, and some methods cut them again while they answer."
)
HIDDEN_RATIOS = (
    " With the question hidden, evicting cells hold {ratios} times the bytes of those with the question visible, and "
    "more bytes can raise a score."
)
PAYS = """\
Some methods pay for their score. kvzip and kvgrad let the model read each prompt twice, attention_matching also solves
equations for each head, and omnikv, quest, pqcache and deltakv without its codec keep the whole cache in memory.{slow}
[GPU and efficiency](gpu-and-efficiency.md) says how times are measured. The models have random weights in the original
shape. Empty cells were not measured or did not run. *over full* is the ratio to the full cache of kvbench in the same
run. The times of a table come from several runs, so ratios of its times can differ from it.
"""


def choose_files(folder: Path, machine: str | None = None) -> dict[str, Path]:
    """Return part -> the file with its lines, in the order of conf/measured.yaml.

    Args:
        folder: The folder of all machines.
        machine: Name of the machine whose file is taken if several have measured a part.

    Raises:
        SettingError: There is no such machine, no file, or a part of several machines to choose from.
    """
    measured = list_part_files(folder)
    machines = {path.parent.name: path.parent for path in measured}
    if not machines:
        raise SettingError(f"{folder}: no results there; kvbench dev measured screening")
    if machine is not None:
        require_choice("--machine", machine, machines)
    paths_by_part: dict[str, list[Path]] = {}
    for path in measured:
        paths_by_part.setdefault(path.stem, []).append(path)
    for part, paths in paths_by_part.items():
        names = [path.parent.name for path in paths]
        if len(paths) > 1 and machine not in names:
            raise SettingError(f"--machine: part {part} was measured on several; choose one of {', '.join(names)}")
        paths_by_part[part] = [path for path in paths if path.parent.name == machine] or paths
    order = {part: number for number, part in enumerate(list_known())}
    return {
        part: paths_by_part[part][0]
        for part in sorted(paths_by_part, key=lambda part: (order.get(part, len(order)), part))
    }


def write_results_page(
    files: Mapping[str, Path], out: Path, margin: float = MARGIN, efficiency: Path | None = None
) -> list[Path]:
    """Write the pages and their pictures, and return their paths, docs/results.md first.

    Args:
        files: Part -> the file with its lines (`choose_files`).
        out: Folder of the pages. Pictures are written into its subfolder `images`.
        margin: Points by which a cell that loses little may score less than the full cache (`find_margin`).
        efficiency: Folder of the tables of times of all machines; None if there are none.

    Raises:
        SettingError: A file has no lines.
    """
    numbers = read_parts(files)
    parts = {part: known.lines for part, known in numbers.items()}
    sections = split_sections(parts, numbers)
    pictures = draw_pictures(sections)
    figure = choose_figure(sections)
    pictures |= {FIGURE: draw_figure(figure)} if figure else {}
    folders = list(dict.fromkeys(os.path.relpath(path.parent, out) for path in files.values()))
    tables = read_cost_tables(efficiency) if efficiency else []
    prefill = read_prefill_ratios(efficiency) if efficiency else {}
    checksums = read_all_checksums(files.values())
    pages = format_pages(parts, folders, pictures, tables, margin, numbers, checksums, prefill)
    (out / "images").mkdir(parents=True, exist_ok=True)
    written = {out / name: text for name, text in pages.items()}
    written |= {out / "images" / f"{name}.svg": text for name, text in pictures.items()}
    for path, text in written.items():
        with replace_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return list(written)


def read_parts(files: Mapping[str, Path]) -> dict[str, PartNumbers]:
    """Return part -> its lines, and the comparisons that conf/measured.yaml names for it.

    Raises:
        SettingError: A file has no lines.
    """
    known = list_known()
    parts = {
        part: read_part(path, known[part].pairs, known[part].changes) if part in known else read_part(path)
        for part, path in files.items()
    }
    for part, numbers in parts.items():
        if not numbers.lines:
            raise SettingError(f"{files[part]}: has no lines")
    return parts


def read_all_checksums(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of all published files in the folders of some of them, by folder and name.

    Raises:
        SettingError: As `kvbench.store.checksums.verify_checksums`.
    """
    folders = dict.fromkeys(path.parent for path in files)
    return {f"{folder.name}/{name}": digest for folder in folders for name, digest in verify_checksums(folder).items()}


def format_pages(
    parts: Mapping[str, Sequence[Line]],
    sources: Sequence[str],
    pictures: Mapping[str, str],
    tables: Sequence[CostTable] = (),
    margin: float = MARGIN,
    numbers: Mapping[str, PartNumbers] = MappingProxyType({}),
    checksums: Mapping[str, str] = MappingProxyType({}),
    prefill: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the name of each page and its text, docs/results.md first.

    Args:
        parts: Name of a part -> its lines.
        sources: Folders of the lines, relative to the pages'.
        pictures: Names of the pictures that there are.
        tables: Tables of times.
        margin: As in `write_results_page`.
        numbers: Name of a part -> its numbers, for the parts whose comparisons are known.
        checksums: Published file -> its SHA-256.
        prefill: Method -> the time of its prefill over the full cache's.
    """
    sections = split_sections(parts, numbers)
    pages = {PAGE: format_front(sections, sources, pictures, margin)}
    for page in PAGES:
        pages[name_page(page)] = format_subpage(page, parts, sections, pictures, tables, margin, checksums, prefill)
    return pages | {results_choice.PAGE: results_choice.format_choice(sections, tables, margin)}


def name_page(page: str) -> str:
    """Return the file of a sub-page."""
    return f"results-{page}.md"


def link_page(page: str) -> str:
    """Return a link to a sub-page, whose text is its title."""
    return f"[{TITLES[page][0]}]({name_page(page)})"


def find_page(section: Section) -> str:
    """Return the sub-page of a section: by its part, task, whether most of its cells have a codec, and its question."""
    if section.part in PARTS:
        return PARTS[section.part]
    if section.task in LONG_TASKS:
        return LONG
    if section.task in TURN_TASKS:
        return TURNS
    if 2 * sum(line["codec"] != "raw" for line in section.list_cells(POINT)) > len(list_methods(section.cells)):
        return CODECS
    return HIDDEN if section.question == "hidden" else EQUAL


def format_front(
    sections: Sequence[Section], sources: Sequence[str], pictures: Mapping[str, str], margin: float
) -> str:
    """Return docs/results.md."""
    links = join_words([f"[{source.removeprefix('../')}]({source})" for source in sources], "and")
    measured = count_cells(sections)
    cells = sum(measured.values())
    answers = sum(line["n"] for section in sections for line in section.cells)
    figure = choose_figure(sections)
    shown = figure.cells if figure else ()
    counts = f"{answers:,} answers of {cells:,} cells and of their full caches were measured."
    progress = describe_progress(measured)
    classes = list_compared(figure) if figure else []
    leaders = [list_leaders(cells) for cells in classes]
    best = dict.fromkeys(name_cell(line) for cells in leaders for line in cells)
    ties = TIES if any(map(list_ties, classes)) else ""
    if leaders and all(len(cells) == 1 for cells in leaders):
        ties += ONE_BEST.format(best=join_words([*best], "or"))
    hollow = any(classify(line) == READING for line in shown)
    text = FRONT.format(
        comment=COMMENT.format(module="results_page"),
        models=describe_models(sections),
        counts=" ".join(text for text in (counts, progress) if text),
        links=links,
        figure=FIGURE,
        caption=CAPTION.format(ties=ties, hollow=HOLLOW if hollow else ""),
    )
    if FIGURE not in pictures:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("!["))
    drawn = {page: each for page in FIRST if (each := RULES[page][0](sections, margin)) is not None}
    numbered = [
        wrap(f"{number}. {each.write(short=True)} More: {', '.join(map(link_page, FIRST[page]))}.", "   ")
        for number, (page, each) in enumerate(drawn.items(), 1)
    ]
    more = [f"| {link_page(page)} | {question} |" for page, (_, question) in TITLES.items()]
    more += ["| [Which method should I use?](which-method.md) | What do these results recommend? |"]
    return "\n".join(
        [
            *(wrap_paragraphs(text), *(f"{paragraph}\n" for paragraph in numbered)),
            wrap_paragraphs(FIXED.format(level=format_budget(LEVEL))),
            *("## What they cannot tell", "", *format_limits(sections)),
            *("## More", "", "| page | question |", "|---|---|", *more, ""),
        ]
    )


def format_subpage(
    page: str,
    parts: Mapping[str, Sequence[Line]],
    sections: Sequence[Section],
    pictures: Mapping[str, str],
    tables: Sequence[CostTable],
    margin: float,
    checksums: Mapping[str, str],
    prefill: Mapping[str, float],
) -> str:
    """Return a sub-page, one of PAGES."""
    title, question = TITLES[page]
    head = wrap_paragraphs(
        SUBPAGE.format(title=title, comment=COMMENT.format(module="results_page"), question=question)
    )
    if page == MEASURED:
        return "\n".join([head, *describe_origin(parts, checksums), ""])
    if page == COST:
        pays = wrap_paragraphs(PAYS.format(slow=describe_slow(prefill, tables)))
        return "\n".join([head, pays, *(format_costs(tables) or ["No times were measured yet.\n"])])
    study, changes = list_known(), list[str]()
    for heading, text in list_changes(page, sections).items():
        changes += [f"## {heading}", "", *text, ""] if text else []
    shown: list[str] = []
    for section in sections:
        if find_page(section) == page:
            drawn = list_pictures(section, pictures)
            about = f"Scores with 95 % intervals: {section.title}"
            shown += [f"## {section.title}", "", *(f"![{about}](images/{at}.svg)\n" for at in drawn)]
            note = study[section.part].note if section.part in study else ""
            shown += [*([f"{wrap(note)}\n"] if note else []), *format_section(section, margin)]
    body = drop_repeated([*changes, *shown] if page in CHANGES_FIRST else [*shown, *changes])
    answers = [f"{wrap(conclusion.write())}\n" for conclusion in answer_page(page, sections, margin)]
    if page != MODELS:
        shown_text = "\n".join(body)
        explained = (" ".join(said for needed, said in terms if needed in shown_text) for terms in (TERMS, JUDGED))
        answers += [f"{wrap(said.format(mark=KEPT, margin=margin))}\n" for said in explained]
    if page == PRESETS:
        answers.append(f"{wrap(NAMES)}\n")
    return "\n".join([head, *([*answers, *body] if body else ["Nothing was measured for this yet.\n"])])


def drop_repeated(lines: Sequence[str]) -> list[str]:
    """Return lines without the explanations of a table that stand above it on the page already."""
    explained = f"{wrap(PLANNED)}\n"
    first = lines.index(explained) if explained in lines else 0
    return [line for place, line in enumerate(lines) if line != explained or place == first]


def answer_page(page: str, sections: Sequence[Section], margin: float) -> list[Conclusion]:
    """Return the conclusions of docs/results.md that answer the question of a sub-page."""
    tasks = {LONG: LONG_TASKS, TURNS: TURN_TASKS}.get(page)
    shown = [section for section in sections if tasks is None or section.task in tasks]
    drawn = [rule(shown, margin) for rule in RULES.get(page, ())]
    return [conclusion for conclusion in drawn if conclusion is not None]


def describe_hidden_bytes(sections: Sequence[Section]) -> str:
    """Return why the bytes differ if the question is hidden, and by how much, for the evicting cells with both."""
    held = {
        (section.part, section.protocol, line["label"], line["budget"]): line["bytes_held"]
        for section in sections
        for line in section.list_cells(EVICTING)
    }
    ratios = []
    for (part, (model, task, question, also), *cell), share in held.items():
        seen = held.get((part, (model, task, "visible", also), *cell))
        if question == "hidden" and seen:
            ratios.append(share / seen)
    return HIDDEN_BYTES + (HIDDEN_RATIOS.format(ratios=format_range(ratios, "{:.2f}".format)) if ratios else "")


def show_subtasks(sections: Sequence[Section], question: str) -> list[str]:
    """Return the scores by subtask of the cells that the statement about the best method stands on."""
    column = choose_column(choose_question(sections, question))
    return format_subtasks(column.section, column.cells) if column else []


def show_coded_subtasks(sections: Sequence[Section]) -> list[str]:
    """Return the scores by subtask of the codecs without eviction, of the section that has most of them."""
    coded = [
        (len(cells), section, cells)
        for section in choose_question(sections, "visible")
        if (cells := [line for line in section.list_cells(POINT) if line["method"] == "full"])
    ]
    if not coded:
        return []
    _, section, cells = max(coded, key=lambda entry: entry[0])
    return format_subtasks(section, cells)


def list_changes(page: str, sections: Sequence[Section]) -> dict[str, list[str]]:
    """Return the headings and texts behind the sections of a sub-page, about what one setting changes."""
    if page == HIDDEN:
        gains = format_gains(sections, "question_gain")
        return {
            "What changes when the question is hidden": [wrap(describe_hidden_bytes(sections)), "", *gains]
            if gains
            else [],
            BY_SUBTASK: show_subtasks(sections, "hidden"),
        }
    if page == EQUAL:
        return {
            BY_SUBTASK: show_subtasks(sections, "visible"),
            "What allocators bring": format_gains(sections, "allocator_gain"),
        }
    if page == PRESETS:
        shown = [section for section in sections if find_page(section) == PRESETS]
        spreads = format_spreads(shown or sections)
        if spreads and not any(section.part == SEEDS for section in shown):
            spreads = [wrap(ONE_SEED), "", *spreads]
        return {"How much presets, settings and files change": spreads}
    if page == MODELS:
        compared, turned = format_models(sections), describe_turned(sections)
        told = [wrap(turned), ""] if turned else []
        return {"Longer prompts": format_lengths(sections), "Planned comparisons": compared and [*told, *compared]}
    if page == CODECS:
        return {
            "At equal bytes": format_equal_bytes(sections),
            "What parts of a codec change": format_named_changes(sections),
            "At equal rows": format_gains(sections, "codec_gain"),
            BY_SUBTASK: show_coded_subtasks(sections),
            "What a byte buys": format_bytes(sections),
        }
    return {}
