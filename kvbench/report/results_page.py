"""Write docs/results.md and its pictures from the lines of measured cells (kvbench.analysis.result_lines).

Every number and every sentence about them follows from the CSV files. A section whose cells were not measured is left
out. The same files give the same page.
"""

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.analysis.joint_signs import MARGIN, find_margin, is_no_worse, sign_known_intervals
from kvbench.analysis.result_lines import SIGN, Line, parse_lines
from kvbench.analysis.text_table import Column, format_interval, format_markdown, format_number, format_percent
from kvbench.atomic import replace_file
from kvbench.config.compose import expand_cells
from kvbench.config.tiers import Tier, read_tiers
from kvbench.report import print_charts
from kvbench.report.figures import INCHES, make_slug
from kvbench.report.print_charts import POINTS
from kvbench.report.style import choose_styles
from kvbench.validation import SettingError, require_choice

PAGE = "results.md"
WIDE = 2  # budgets of a table that shows intervals; tables of more budgets show scores and ranks
FEW = 3  # methods that a sentence names in any case
MOST_CURVES = 12  # methods of a picture
NO_WORSE = "✓"  # beside the score of a cell that is shown to be no worse than the full cache
ALL = 0.995  # a cell with at least this share of the full cache's bytes counts as holding all of them
COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")
Protocol = tuple[str, ...]

HEAD = """\
# Results

<!-- Written by `python -m kvbench dev measured --page`. Edit kvbench/report/results_page.py instead. -->

What the methods and codecs of kvbench score on a small real language model, smollm2, and on the embedded model,
reference, and what these numbers can and cannot tell. Everything on this page was measured by the commands below, and
every number is in
{links},
with a line for each cell. [Analysing results](analysis.md) explains how to get such tables of your own runs.

## What was measured
"""
RANKS = """\
*Ranks* are the places that a cell may have among those of its class: the cells of a column that hold like bytes,
within a tenth. Methods that keep more rows than they read are classes of their own, by the rows that they read. Ranks
without *bytes* beside them are of an older version and count the whole column. All ranks of a class hold together with
95 % confidence: every pair of cells was compared on the same samples, and the level counts the pairs (Bonferroni). Two
cells whose ranks overlap may still differ, but these samples do not show it. *diff* is the difference from the full
cache on the same samples, with its 95 % interval. *KL* is the divergence of the predictions from the full cache's, in
nats a token.

A cell is *no worse* than the full cache, and has the mark {mark}, only if the lower end of its *diff* is above -m. The
margin m is {margin:g} points, or a tenth of the full cache's score where that is less. An interval that merely contains
0 shows no such thing. Counts of cells that score less or more hold together with 95 % confidence (Holm's procedure over
the cells that a sentence counts); [Statistics](statistics.md#margins-and-counts) says how.
"""
JOINT = " These signs hold together with 95 % confidence."
MORE = (
    "Scores are higher than without the {} in {{more}} of {{count}} cells and lower in {{less}}; in {{same}} neither "
    "is shown." + JOINT
)
CHANGES = {  # key of GAINS -> sentence with the numbers of cells that score less, more, or the same
    "question_gain": "Scores fall in {less} of {count} cells when the cache is cut before the question is known, rise "
    f"in {{more}}, and in {{same}} neither is shown.{JOINT}",
    "allocator_gain": MORE.format("allocator"),
    "codec_gain": MORE.format("codec"),
}
FILES = """\
A cell is on a *front* if no other cell holds fewer bytes and scores as much. One front goes by the bytes of a cache,
the other one by the bytes *with files*: those of the cache and of the files that a method or codec needs beside the
model, as if they served a single prompt. All prompts share them. *In all* also counts what a method keeps beside the
rows, such as positions and codes; older measurements do not say it. A table lists the cells on either front and all
others that need files. Fronts go by mean scores, and neighbours on them often cannot be told apart."""
LIMITS = """\
## What these numbers cannot tell

SmolLM2-135M is a very small model, and its weights were quantised to 4 bits before kvbench got them
([its page](smollm2.md)). It finds single values in a text. It hardly follows chains of them, counts words or answers
questions about texts, so its tables are about finding values. Larger models spread what they know about a text over
more layers and heads. How methods rank here is therefore no evidence about how they rank at 8 billion parameters, and
neither are the sizes of the differences. What does carry over is how many samples it takes to tell methods apart, and
that a score without an interval is not a comparison.

The tables say nothing about time. Some methods pay for their score: kvzip and kvgrad let the model read each prompt
twice, attention_matching also solves equations for each head, and omnikv, quest, pqcache and deltakv without its codec
keep the whole cache in memory ([cost](gpu-and-efficiency.md)).

The embedded model was trained by kvbench on tasks like these. Its tables test the harness and show what a method or
codec does in this model. They are no evidence about others.
"""


def choose_files(folder: Path, machine: str | None = None) -> dict[str, Path]:
    """Return tier -> the file with its lines, by tier.

    Args:
        folder: The folder of all machines.
        machine: Name of the machine whose file is taken if several have measured a tier.

    Raises:
        SettingError: There is no such machine, no file, or a tier of several machines to choose from.
    """
    machines = {path.name: path for path in sorted(folder.glob("*")) if any(path.glob("*.csv"))}
    if not machines:
        raise SettingError(f"{folder}: no results there; kvbench dev measured a")
    if machine is not None:
        require_choice("--machine", machine, machines)
    paths_by_tier: dict[str, list[Path]] = {}
    for path in sorted(path for machine_folder in machines.values() for path in machine_folder.glob("*.csv")):
        paths_by_tier.setdefault(path.stem, []).append(path)
    for tier, paths in paths_by_tier.items():
        names = [path.parent.name for path in paths]
        if len(paths) > 1 and machine not in names:
            raise SettingError(f"--machine: tier {tier} was measured on several; choose one of {', '.join(names)}")
        paths_by_tier[tier] = [path for path in paths if path.parent.name == machine] or paths
    return {tier: paths_by_tier[tier][0] for tier in sorted(paths_by_tier)}


def write_results_page(files: Mapping[str, Path], out: Path, margin: float = MARGIN) -> list[Path]:
    """Write the page and its pictures, and return their paths.

    Args:
        files: Tier -> the file with its lines (`choose_files`).
        out: Folder of the page. Pictures are written into its subfolder `images`.
        margin: Points by which a cell that is no worse than the full cache may score less (`find_margin`).

    Raises:
        SettingError: A file has no lines.
    """
    tiers = {tier: parse_lines(path.read_text(encoding="utf-8")) for tier, path in files.items()}
    for tier, lines in tiers.items():
        if not lines:
            raise SettingError(f"{files[tier]}: has no lines")
    pictures = draw_pictures(tiers)
    folders = {os.path.relpath(path.parent, out): None for path in files.values()}
    page = format_page(tiers, list(folders), pictures, margin)
    (out / "images").mkdir(parents=True, exist_ok=True)
    written = {out / PAGE: page} | {out / "images" / f"{name}.svg": text for name, text in pictures.items()}
    for path, text in written.items():
        with replace_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return list(written)


def format_page(
    tiers: Mapping[str, Sequence[Line]], sources: Sequence[str], pictures: Mapping[str, str], margin: float = MARGIN
) -> str:
    """Return the page.

    Args:
        tiers: Name of a tier -> its lines.
        sources: Folders of the lines, relative to the page's.
        pictures: Names of the pictures that there are.
        margin: As in `write_results_page`.
    """
    links = join_words([f"[{source.removeprefix('../')}]({source})" for source in sources], "and")
    parts = [HEAD.format(links=links), *describe_origin(tiers), ""]
    parts += ["## Which methods can be told apart", "", RANKS.format(mark=NO_WORSE, margin=margin)]
    compared = {}  # only within a tier, because others may have been measured with other kernels
    for name, lines in tiers.items():
        for protocol, cells in split_protocols(lines):
            title = f"Tier {name}: {describe_protocol(protocol)}"
            compared[title] = cells
            shown = list_pictures(name, cells, pictures)
            parts += [f"### {title}", "", *(f"![Scores with 95 % intervals](images/{at}.svg)\n" for at in shown)]
            parts += [f"{wrap(text)}\n" for text in (*describe_separation(cells, margin), *describe_holders(cells))]
            parts += [*format_scores(cells, margin), "", *format_decided(cells, margin)]
    sections = {
        "What changes when the question is hidden": format_gains(compared, "question_gain"),
        "What allocators bring": format_gains(compared, "allocator_gain"),
        "What a byte buys": format_bytes(compared),
    }
    for title, text in sections.items():
        parts += [f"## {title}", "", *text, ""] if text else []
    return "\n".join([*parts, LIMITS])


def split_protocols(lines: Sequence[Line]) -> list[tuple[Protocol, list[Line]]]:
    """Return the lines of each protocol, in the order in which protocols begin."""
    groups: dict[Protocol, list[Line]] = {}
    for line in lines:
        groups.setdefault(name_protocol(line), []).append(line)
    return list(groups.items())


def name_protocol(line: Line) -> Protocol:
    """Return what the cells of a table have in common."""
    return tuple(str(line[name] or "") for name in ("model", "task", "question", "protocol"))


def describe_protocol(protocol: Protocol) -> str:
    """Return the title of a protocol."""
    model, task, question, also = protocol
    return ", ".join(part for part in (model, f"{task} {also}".strip(), f"question {question}") if part)


def describe_origin(tiers: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return what was measured, where, and with which code."""
    known = read_tiers()

    def describe(item: tuple[str, Sequence[Line]]) -> tuple[str, str, int, int, str]:
        name, lines = item
        title = known[name].title if name in known else ""
        return name, title, len(lines), sum(line["n"] for line in lines), join_values(lines, "machine")

    columns = [
        Column("tier", "", lambda row: row[0]),
        Column("", "what", lambda row: row[1]),
        Column("", "cells", lambda row: f"{row[2]:,}"),
        Column("", "answers", lambda row: f"{row[3]:,}"),
        Column("", "command", lambda row: f"python -m kvbench dev measured {row[0]}"),
        Column("", "measured on", lambda row: row[4]),
    ]
    lines = [line for lines in tiers.values() for line in lines]
    dtype, torch, transformers, code = (join_values(lines, name) for name in ("dtype", "torch", "transformers", "code"))
    said = f"Measured in {dtype}, with torch {torch} and transformers {transformers}, by code {code}. "
    said += "conf/measured.yaml lists the sweeps."
    warnings = dict.fromkeys(
        sentence for line in lines for sentence in SENTENCE.split(line["warnings"] or "") if sentence
    )
    parts = said, describe_unfinished(tiers, known), describe_versions(tiers), " ".join(warnings)
    notes = [f"\n{wrap(text)}" for text in parts if text]
    return [*format_markdown(columns, [*map(describe, tiers.items())]), *notes]


def describe_unfinished(tiers: Mapping[str, Sequence[Line]], known: Mapping[str, Tier]) -> str:
    """Return which tiers have fewer cells than conf/measured.yaml lists; empty if none has."""
    texts = []
    for name, lines in tiers.items():
        sweeps = known[name].list_sweeps(Path("results")) if name in known else []
        planned, measured = sum(len(expand_cells(sweep)) for sweep in sweeps), len(list_methods(lines))
        if measured < planned:
            texts.append(f"Tier {name} is not finished: {measured} of its {planned} cells of methods were measured.")
    return " ".join(texts)


def join_values(lines: Sequence[Line], name: str) -> str:
    """Return what lines have in a column, each value once and commits shortened."""
    known = {COMMIT.sub(r"\1", str(line[name])) for line in lines if line[name]}
    return join_words(sorted(known) or ["unknown"], "and")


def describe_versions(tiers: Mapping[str, Sequence[Line]]) -> str:
    """Return what the full cache scores where tiers of a protocol have other code or GPUs; empty if it is the same."""
    texts = []
    for protocol, cells in split_protocols([line for lines in tiers.values() for line in lines if is_full(line)]):
        scores = sorted({line["score"] for line in cells})
        if len(scores) > 1 and len({(line["code"], line["machine"]) for line in cells}) > 1:
            bounds = f"{format_number(scores[0])} to {format_number(scores[-1])}"
            texts.append(f"{bounds} ({describe_protocol(protocol)})")
    if not texts:
        return ""
    return (
        f"The full cache scores {join_words(texts, 'and')}, depending on the tier. These tiers were measured with "
        "different kernels or GPUs, which add up numbers of 16 bits in other orders, and a few answers change with "
        "that. All cells of a tier have the same kernels and GPU: compare a method with the cells of its own tier."
    )


def describe_separation(cells: Sequence[Line], margin: float) -> list[str]:
    """Return sentences about each budget: which pairs differ, which cells may be best, and which are no worse."""
    said = []
    full = next(line for line in cells if is_full(line))
    for budget in list_budgets(cells):
        column = [line for line in list_methods(cells) if line["budget"] == budget]
        if len(column) < 2:
            continue
        ranked = [text for alike in split_classes(column) if (text := describe_ranks(alike))]
        said.append(f"**{format_budget(budget)} kept.** {' '.join([*ranked, compare_to_full(column, full, margin)])}")
    return said


def split_classes(column: Sequence[Line]) -> list[list[Line]]:
    """Return the cells of a column by the class in which they are ranked. Older versions ranked whole columns."""
    classes: dict[str | None, list[Line]] = {}
    for line in column:
        classes.setdefault(line.get("rank_class"), []).append(line)
    return list(classes.values())


def describe_ranks(cells: Sequence[Line]) -> str:
    """Return how many pairs of a class can be told apart, and which cells may be its best; empty for a single cell."""
    if len(cells) < 2:
        return ""
    apart, pairs = sum(line["rank_first"] - 1 for line in cells), len(cells) * (len(cells) - 1) // 2
    first = [line["label"] for line in cells if line["rank_first"] == 1]
    named = len(first) <= max(FEW, len(cells) / 2)
    best = f"The best may be {join_words(first, 'or')}." if named else f"Any of {len(first)} cells may be the best."
    alike = cells[0].get("rank_class")
    where = f" at {alike}" if alike else ""
    return f"{apart} of {pairs} pairs of cells{where} can be told apart. {best}"


def compare_to_full(column: Sequence[Line], full: Line, margin: float) -> str:
    """Return how many cells of a column are no worse than the full cache, how many score less, and the others."""
    bound = find_margin(full["score"], margin)
    held = [is_no_worse(line["low"], bound) for line in column]
    less = sum(sign < 0 and not kept for sign, kept in zip(sign_cells(column, "difference"), held, strict=True))
    count = f"{sum(held)} of {len(column)} cells {'is' if sum(held) == 1 else 'are'} shown to lose at most"
    left = len(column) - sum(held) - less
    rest = f", and for {left} neither is shown" if left else ""
    others = f"{less} {'is' if less == 1 else 'are'} shown to score less"
    return f"{count} {bound:.1f} points against the full cache; {others}{rest}."


def sign_cells(cells: Sequence[Line], name: str) -> list[int]:
    """Return the joint sign of each cell's gain or difference.

    Lines of older versions have no signs. They follow from the 95 % intervals then.

    Args:
        cells: The cells that are counted together.
        name: A key of GAINS, or "difference".
    """
    signs = [line[f"{name}{SIGN}"] for line in cells if line.get(f"{name}{SIGN}") is not None]
    if len(signs) == len(cells):
        return signs
    ends = ("low", "high") if name == "difference" else (f"{name}_low", f"{name}_high")
    return sign_known_intervals([(line[name], line[ends[0]], line[ends[1]]) for line in cells])


def describe_holders(cells: Sequence[Line]) -> list[str]:
    """Return a sentence about the methods that hold all bytes of the full cache; none if there are no such methods."""
    held = [line for line in list_methods(cells) if line["bytes_held"] >= ALL and not is_decided(line)]
    names = dict.fromkeys(line["label"] for line in held)
    if not names:
        return []
    one = len(names) == 1
    said = (
        f"{join_words(list(names), 'and')} {'holds' if one else 'hold'} all bytes of the full cache: "
        f"{'its' if one else 'their'} budget is the share of rows that a token of the answer attends to."
    )
    whole = {line["label"]: line.get("bytes_in_all") for line in held}
    known = [f"{format_percent(share)} ({label})" for label, share in whole.items() if share is not None]
    if known:
        said += f" With what they keep beside the rows, such as codes and bounds, {join_words(known, 'and')} are held."
    return [said]


def format_scores(cells: Sequence[Line], margin: float) -> list[str]:
    """Return the table of a protocol: methods down, the highest mean score first, and budgets across."""
    budgets, methods = list_budgets(cells), [line for line in list_methods(cells) if not is_decided(line)]
    if not methods:
        return []
    rows = arrange(methods)
    full = next(line for line in cells if is_full(line))
    ordered = sorted(rows, key=lambda label: -sum(line["score"] for line in rows[label].values()) / len(rows[label]))

    rows[full["label"]] = dict.fromkeys(budgets, full)

    def show(budget: float | int | str | None, write: Callable[[Line], str]) -> Callable[[str], str]:
        return lambda label: write(rows[label][budget]) if budget in rows[label] else ""

    def write_score(line: Line) -> str:
        return format_score(line, full, margin)

    columns = [Column("method", "", lambda label: label)]
    for budget in budgets:
        title = format_budget(budget)
        columns.append(Column(title, "score", show(budget, write_score)))
        if len(budgets) <= WIDE:
            columns.append(
                Column(title, "diff", show(budget, lambda line: format_change(line, "difference", "low", "high")))
            )
        if any(line.get("rank_class") for line in methods):
            columns.append(Column(title, "bytes", show(budget, lambda line: format_percent(line["bytes_held"]))))
        columns.append(Column(title, "ranks", show(budget, format_ranks)))
        if len(budgets) <= WIDE and any(line["kl"] is not None for line in methods):
            columns.append(Column(title, "KL", show(budget, format_divergence)))
    return format_markdown(columns, [*ordered, full["label"]])


def format_decided(cells: Sequence[Line], margin: float) -> list[str]:
    """Return the table of the cells whose method decides how many rows stay, most bytes first; empty without any."""
    decided = [line for line in cells if is_decided(line)]
    if not decided:
        return []
    full = next(line for line in cells if is_full(line))
    columns = [
        Column("method", "", lambda line: line["label"]),
        Column("decided by", "", lambda line: line["budget"] if is_decided(line) else ""),
        Column("bytes held", "", lambda line: format_percent(line["bytes_held"])),
        Column("score", "", lambda line: format_score(line, full, margin)),
        Column("diff", "", lambda line: format_change(line, "difference", "low", "high")),
        Column("KL", "", format_divergence),
    ]
    said = (
        "In these cells the method decides how many rows stay. The bytes held are an outcome; compare them with those "
        "of a budget."
    )
    ordered = sorted(decided, key=lambda line: (-line["bytes_held"], line["label"]))
    return [wrap(said), "", *format_markdown(columns, [*ordered, full]), ""]


def format_gains(compared: Mapping[str, Sequence[Line]], gain: str) -> list[str]:
    """Return what a key of GAINS changes; nothing if no cell was measured with and without it.

    Args:
        compared: Title -> cells that are compared.
        gain: The key.
    """
    text: list[str] = []
    for title, cells in compared.items():
        changed = list_methods([line for line in cells if line[gain] is not None])
        if not changed:
            continue
        signs = count_signs(changed, gain)
        told = CHANGES[gain].format(count=len(changed), less=signs[-1], more=signs[1], same=signs[0])
        said = f"**{title}.** {told}"
        text += [wrap(said), "", *format_changes(changed, gain), ""]
    return text


def arrange(cells: Sequence[Line]) -> dict[str, dict[Any, Line]]:
    """Return label -> budget -> cell."""
    rows: dict[str, dict[Any, Line]] = {}
    for line in cells:
        rows.setdefault(line["label"], {})[line["budget"]] = line
    return rows


def format_changes(cells: Sequence[Line], gain: str) -> list[str]:
    """Return a table of paired changes with 95 % intervals: labels down, budgets across."""
    rows = arrange(cells)
    budgets = [*list_budgets(cells), *dict.fromkeys(line["budget"] for line in cells if is_decided(line))]

    def show(budget: float | int | str | None) -> Callable[[str], str]:
        return lambda label: format_change(rows[label][budget], gain) if budget in rows[label] else ""

    columns = [Column("method", "", lambda label: label)]
    columns += [Column(format_budget(budget), "", show(budget)) for budget in budgets]
    return format_markdown(columns, sorted(rows))


def format_bytes(compared: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return which cells hold the fewest bytes for their scores, where some have a codec or need files.

    Args:
        compared: Title -> cells that are compared.
    """
    text: list[str] = []
    for title, cells in compared.items():
        files = [line for line in cells if count_with_files(line) > line["bytes_held"]]
        if not files and all(line["codec"] == "raw" for line in cells):
            continue
        fronts = {"cache": find_front(cells), "with files": find_front(cells, count_with_files)}
        listed = [line for line in cells if line in files or any(line in front for front in fronts.values())]
        packed = [line for line in fronts["cache"] if line["codec"] != "raw"]
        said = (
            f"**{title}.** {len(fronts['cache'])} of {len(cells)} cells are on the front by bytes held, "
            f"{len(packed)} of them with a codec, and {len(fronts['with files'])} on the front with files."
        )
        text += [wrap(said), ""]

        def name_fronts(line: Line, fronts: Mapping[str, Sequence[Line]] = fronts) -> str:
            fronts_of_line = [name for name, front in fronts.items() if line in front]
            return "both" if len(fronts_of_line) == len(fronts) else "".join(fronts_of_line)

        columns = [
            Column("cell", "", lambda line: line["label"]),
            Column("budget", "", lambda line: format_budget(line["budget"])),
            Column("bytes held", "", lambda line: format_percent(line["bytes_held"])),
            Column("with files", "", lambda line: format_share(line["bytes_with_files"])),
            Column("in all", "", lambda line: format_share(line.get("bytes_in_all"))),
            Column("score", "", lambda line: format_number(line["score"])),
            Column("95 %", "", lambda line: format_interval(line["score_low"], line["score_high"])),
            Column("front", "", name_fronts),
        ]
        text += [*format_markdown(columns, sorted(listed, key=lambda line: (line["bytes_held"], -line["score"]))), ""]
    return [FILES, "", *text, *format_gains(compared, "codec_gain")] if text else []


def format_share(share: float | None) -> str:
    """Return a share as a percentage; nothing if older runs do not say it."""
    return "" if share is None else format_percent(share)


def count_with_files(line: Line) -> float:
    """Return the bytes of a cell's cache and files over those of the full cache. Older runs know of no files."""
    held: float = line["bytes_held"]
    return held if line["bytes_with_files"] is None else line["bytes_with_files"]


def find_front(cells: Sequence[Line], count: Callable[[Line], float] = lambda line: line["bytes_held"]) -> list[Line]:
    """Return the cells such that no other one has a smaller `count` and scores as much, the smallest count first."""
    front: list[Line] = []
    for line in sorted(cells, key=lambda line: (count(line), -line["score"])):
        if not front or line["score"] > front[-1]["score"]:
            front.append(line)
    return front


def count_signs(cells: Sequence[Line], gain: str) -> dict[int, int]:
    """Return how many changes are jointly below 0, above 0, and neither: {-1: …, 1: …, 0: …}."""
    signs = sign_cells(cells, gain)
    return {sign: signs.count(sign) for sign in (-1, 0, 1)}


def list_budgets(cells: Sequence[Line]) -> list[Any]:
    """Return the budgets that cells were given, the largest first."""
    return sorted({line["budget"] for line in list_methods(cells) if not is_decided(line)}, reverse=True)


def list_methods(cells: Sequence[Line]) -> list[Line]:
    """Return the cells but that of the full cache."""
    return [line for line in cells if not is_full(line)]


def is_full(line: Line) -> bool:
    """Return whether a line is that of the unchanged full cache."""
    return (line["method"], line["codec"]) == ("full", "raw")


def is_decided(line: Line) -> bool:
    """Return whether the method decides how many rows stay. The line then has a setting in the place of the budget."""
    return isinstance(line["budget"], str)


def format_budget(budget: float | int | str) -> str:
    """Return a budget as a percentage or a number of rows, or the setting that decides in its place as it is."""
    if isinstance(budget, str):
        return budget
    return f"{budget} rows" if isinstance(budget, int) and budget > 1 else f"{100 * budget:g} %"


def format_score(line: Line, full: Line, margin: float) -> str:
    """Return the score of a cell, with a mark if it is shown to be no worse than the full cache."""
    score = format_number(line["score"])
    shown = not is_full(line) and is_no_worse(line["low"], find_margin(full["score"], margin))
    return f"{score} {NO_WORSE}" if shown else score


def format_ranks(line: Line) -> str:
    """Return the ranks that a cell may have; nothing for the full cache."""
    first, last = line["rank_first"], line["rank_last"]
    if first is None:
        return ""
    ranks = f"{first}" if first == last else f"{first} to {last}"
    return f"{ranks} of {line['rank_of']}" if line.get("rank_of") else ranks


def format_change(line: Line, name: str, low: str | None = None, high: str | None = None) -> str:
    """Return a difference with its interval; nothing for a cell that has none."""
    if line[name] is None:
        return ""
    ends = line[low or f"{name}_low"], line[high or f"{name}_high"]
    return f"{format_number(line[name], sign='+')} {format_interval(*ends, sign='+')}"


def format_divergence(line: Line) -> str:
    """Return the divergence from the full cache; nothing for a cell that has none."""
    return "" if line["kl"] is None or is_full(line) else format_number(line["kl"], 3)


def wrap(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def join_words(words: Sequence[str], last: str) -> str:
    """Return words as an English list."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def list_pictures(tier: str, cells: Sequence[Line], pictures: Mapping[str, str]) -> list[str]:
    """Return the names of the pictures of a protocol."""
    names = [name_picture(tier, cells, budget) for budget in (*list_budgets(cells), None)]
    return [name for name in names if name in pictures]


def name_picture(tier: str, cells: Sequence[Line], budget: float | int | str | None) -> str:
    """Return the name of a picture: of one budget, or of a curve if `budget` is None."""
    parts = [tier, *map(make_slug, filter(None, name_protocol(cells[0])))]
    return "-".join(["measured", *parts, "curve" if budget is None else f"{budget:g}"])


def draw_pictures(tiers: Mapping[str, Sequence[Line]]) -> dict[str, str]:
    """Draw pictures of each protocol: a curve if there are more than WIDE budgets, otherwise scores at each budget.

    Where methods decide how many rows stay, there is a curve too.

    Returns:
        Name of a picture -> its SVG.
    """
    pictures = {}
    for tier, lines in tiers.items():
        for _, cells in split_protocols(lines):
            budgets = list_budgets(cells)
            shown = [None] if len(budgets) > WIDE else [*budgets, *([None] if any(map(is_decided, cells)) else [])]
            for budget in shown:
                pictures[name_picture(tier, cells, budget)] = draw_picture(cells, budget)
    return pictures


def shorten_label(label: str) -> str:
    """Return a label without what a reader of a picture can do without, because long ones are cut."""
    return label.removeprefix("full · ").replace("codec.path=", "").replace("codec.", "")


def draw_picture(cells: Sequence[Line], budget: float | int | str | None) -> str:
    """Return the SVG of scores against bytes held, or at one budget."""
    full = next(line for line in cells if is_full(line))
    chosen = [line for line in list_methods(cells) if budget in (None, line["budget"])]
    labels = list(dict.fromkeys(line["label"] for line in chosen))
    if budget is None:  # curves of all variants would hide each other
        plain = [line for line in chosen if (line["allocator"], line["codec"]) == ("uniform", "raw")]
        means = {label: [line["score"] for line in plain if line["label"] == label] for label in labels}
        ordered = sorted(
            (label for label in labels if means[label]), key=lambda label: -sum(means[label]) / len(means[label])
        )
        labels = [label for label in labels if label in ordered[:MOST_CURVES]]
        chosen = [line for line in plain if line["label"] in labels]
    methods = [next(line["method"] for line in chosen if line["label"] == label) for label in labels]
    shown = {"smallest": None, "samples": full["n"], "left_out": 0, "average": full["average"]}
    series = [
        {"s": place, "label": shorten_label(label)} | style | shown
        for place, (label, style) in enumerate(zip(labels, choose_styles(methods), strict=True))
    ]
    points = [
        {
            "s": labels.index(line["label"]),
            "budget": format_budget(line["budget"]),
            "share": line["bytes_held"],
            "diff": line["difference"],
            "diff_low": line["low"],
            "diff_high": line["high"],
            "lost": line["lost"],
            "gained": line["gained"],
            "same": line["n"] - line["lost"] - line["gained"],
            **{name: line[name] for name in ("score", "score_low", "score_high", "n")},
        }
        for line in chosen
    ]
    whole = [
        {"s": line["s"]} | {name: full[name] for name in ("score", "score_low", "score_high", "n")} for line in series
    ]
    panel = {"model": full["model"], "task": full["task"], "question": full["question"], "notes": []}
    panel |= {"also": [text for text in [full["protocol"]] if text], "series": series, "points": points, "full": whole}
    pixels = 72 * INCHES["tasks"] / POINTS
    drawing = print_charts.draw_curve(panel, "bytes", pixels)
    assert drawing is not None  # every series has points
    title = print_charts.title_panel(panel, drawing.about, pixels)
    return print_charts.render_svg(drawing, pixels, title)[0]
