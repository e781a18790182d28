"""Write docs/results-measured.md: what was measured, where, with which code, and what of it is not finished."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import Column, format_markdown
from kvbench.config.study_parts import StudyPart, read_study
from kvbench.report.results_cells import list_methods
from kvbench.report.results_text import join_words, wrap

COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
CHECKSUMS = """\
A `.parquet` file has a row for each sample ([how to read it](analysis.md)), and a `.zip` file has a random sample of
the answers, of which `python -m kvbench check bundle FILE --replay 4` executes some again and prints how many agree.
The study read several samples together, and a replay reads each alone. A GPU rounds the two differently in bfloat16,
so the text of an answer can differ on the same kind of GPU, too. Without the GPU that made the answers, add
`device=cpu`. A CPU rounds differently again, so methods keep other rows, and many answers differ. `--agree` lowers the
share that must agree. `sha256sum -c SHA256SUMS` in a folder checks these files. Answers of SmolLM2 need `make model`
first, and answers of a method or codec with a file need that file."""
SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")


def describe_origin(parts: Mapping[str, Sequence[Line]], checksums: Mapping[str, str]) -> list[str]:
    """Return what was measured, where, and with which code.

    Args:
        parts: Name of a part -> its lines.
        checksums: Published file -> its SHA-256.
    """
    known = list_known()

    def describe(item: tuple[str, Sequence[Line]]) -> tuple[str, str, int, int, str, str]:
        name, lines = item
        title = f"{known[name].title}. {known[name].question}" if name in known else ""
        origin = join_values(lines, "machine"), join_values(lines, "code")
        return name, title, len(lines), sum(line["n"] for line in lines), *origin

    columns = [
        Column("part", "", lambda row: row[0]),
        Column("", "what", lambda row: row[1]),
        Column("", "cells, full caches included", lambda row: f"{row[2]:,}"),
        Column("", "answers", lambda row: f"{row[3]:,}"),
        Column("", "command", lambda row: f"python -m kvbench dev measured {row[0]}"),
        Column("", "measured on", lambda row: row[4]),
        Column("", "code", lambda row: row[5].replace("git ", "")),
    ]
    lines = [line for lines in parts.values() for line in lines]
    dtype, torch, transformers = (join_values(lines, name) for name in ("dtype", "torch", "transformers"))
    sentence = f"Measured in {dtype}, with torch {torch} and transformers {transformers}. *code* is the commit"
    sentence += "; *dirty* means with uncommitted changes" if any("dirty" in line["code"] for line in lines) else ""
    sentence += ". conf/measured.yaml lists the sweeps."
    about = (f"Part {name}: {known[name].note}" for name in parts if name in known and known[name].note)
    paragraphs = sentence, describe_unfinished(parts, known), *about
    notes = [*(f"\n{wrap(text)}" for text in paragraphs if text), *list_warnings(parts)]
    return [*format_markdown(columns, [*map(describe, parts.items())]), *notes, *format_checksums(checksums)]


def list_warnings(parts: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return what readers of the scores must know, each with the parts that it is about."""
    about: dict[str, dict[str, None]] = {}
    for name, lines in parts.items():
        for text in dict.fromkeys(line["warnings"] or "" for line in lines):
            for warning in SENTENCE.split(text):
                about.setdefault(warning, {})[name] = None
    noted = [(warning, list(names)) for warning, names in about.items() if warning]
    items = [f"{'part' if len(names) == 1 else 'parts'} {join_words(names, 'and')}: {said}" for said, names in noted]
    return ["", *(wrap(f"* {item[0].upper()}{item[1:]}", "  ") for item in items)] if items else []


def format_checksums(checksums: Mapping[str, str]) -> list[str]:
    """Return the section with the checksums of published files; nothing if there are none."""
    if not checksums:
        return []
    columns = [Column("file", "", lambda item: item[0]), Column("SHA-256", "", lambda item: item[1])]
    return ["", "## Checksums", "", wrap(CHECKSUMS), "", *format_markdown(columns, sorted(checksums.items()))]


def describe_progress(measured: Mapping[str, int]) -> str:
    """Return how much of the study was measured; empty if all or nothing of it was.

    Args:
        measured: Name of a part -> its cells of methods.
    """
    study = list_known()
    planned = {name: count_planned(study[name]) for name in measured if name in study}
    whole = [name for name, count in planned.items() if measured[name] >= count]
    if not planned or len(whole) == len(study):
        return ""
    complete = f"{len(whole)} of its {len(study)} parts {'is' if len(whole) == 1 else 'are'} complete"
    begun = f" and {len(planned) - len(whole)} begun" if len(planned) > len(whole) else ""
    return f"The study is under way: {complete}{begun} ([which](results-measured.md))."


@cache  # the pages ask for it a hundred times
def list_known() -> Mapping[str, StudyPart]:
    """Return the parts of conf/measured.yaml."""
    return read_study()


def count_planned(part: StudyPart) -> int:
    """Return the number of cells of a part of conf/measured.yaml, without those of the full cache."""
    return len(part.list_cells(Path("results")))


def count_planned_methods(part: StudyPart) -> Counter[str]:
    """Return the number of cells of each method of a part of conf/measured.yaml."""
    chosen = (text.partition("=") for cell in part.list_cells(Path("results")) for text in cell)
    return Counter(value for name, _, value in chosen if name == "method")


def describe_unfinished(parts: Mapping[str, Sequence[Line]], known: Mapping[str, StudyPart]) -> str:
    """Return which parts have fewer cells than conf/measured.yaml lists, and which of the study have none."""
    texts = [say_unfinished(name, len(list_methods(lines)), known) for name, lines in parts.items()]
    left = [name for name in known if name not in parts]
    if left and len(left) < len(known):
        texts.append(f"Parts of the study that have not begun: {join_words(left, 'and')}.")
    return " ".join(text for text in texts if text)


def say_unfinished(name: str, measured: int, known: Mapping[str, StudyPart]) -> str:
    """Return that a part has fewer cells of methods than conf/measured.yaml lists; empty if it has all."""
    planned = count_planned(known[name]) if name in known else 0
    missing = f"Part {name} is not finished: {measured} of its {planned} cells of methods were measured."
    return missing if measured < planned else ""


def join_values(lines: Sequence[Line], name: str) -> str:
    """Return what lines have in a column, each value once and commits shortened."""
    values = {value for line in lines if line[name] for value in str(line[name]).split(" and ")}
    known = {COMMIT.sub(r"\1", value) for value in values}
    return join_words(sorted(known) or ["unknown"], "and")
