"""Build a site from bundles: a table of scores with a row for each submission and run, and the bundles themselves.

    index.html                      the tables, what each submission says of itself, and what was left out
    reports/<digest>/report.html    the report page of one submission (kvbench.report.page), with its samples beside it
    bundles/<digest>.zip            copies of the bundles, so that readers can verify them

Every number is computed from the records of one bundle (kvbench.analysis.submissions), after kvbench.analysis.bundle
has verified it. Nothing of a bundle is executed: the report's texts of prompts, which are made again from a run's
settings, are left out. The site needs no server and no network.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape as escape_html
from pathlib import Path
from typing import Any

from kvbench.analysis.run_labels import format_budget
from kvbench.analysis.score_matrix import FULL
from kvbench.analysis.score_matrix_columns import BEST, COLUMNS, TIED
from kvbench.analysis.score_matrix_format import describe_samples
from kvbench.analysis.submissions import (
    BY_SETTINGS,
    BoardRow,
    BoardTable,
    Submission,
    build_tables,
    describe_hardware,
    describe_software,
    list_commands,
    read_submission,
)
from kvbench.analysis.text_table import format_number
from kvbench.atomic import replace_file
from kvbench.report.page import HERE, write_report
from kvbench.report.samples import write_file
from kvbench.validation import SettingError, escape

STYLE = (
    "caption { text-align: left; padding: 24px 0 4px; } tbody th { color: var(--ink); font-size: 14px; }"
    " td { white-space: nowrap; } .scroll p { margin-top: 8px; } pre { white-space: pre-wrap; }"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
DIGITS = 16  # digits of a digest in a file's name
APART, OTHERWISE = "≠", "≈"
NOTHING = "–"
LEGEND = (
    "Each row is one run of one submission, scored from this submission's own records. A sample that the run failed on "
    "or lacks scores 0 in this row and changes no other one.",
    "diff: method - the submission's own full cache in points, paired on the same samples, with its 95 % interval. It "
    f"is left out ({NOTHING}) if that full cache failed on a sample or lacks one.",
    f"{APART}: this full cache's mean score differs from that of so many other submissions on the same samples, by "
    f"more than the 95 % interval of the paired difference. {OTHERWISE}: some samples have another score there. A full "
    "cache that answers worse than it could raises the differences beside it.",
    f"{BEST} the highest score of the rows of a budget that hold similar bytes, or read similar shares of the rows. "
    f"{TIED} cannot be told from it (95 %, simultaneous paired comparisons). Only rows of one table that answered "
    "every sample are compared, and one that no other is like has no mark.",
)
SHOWN = ("score", "score_interval", "difference", "interval")
COSTS = ("bytes_held", "rows_attended", "at_limit")


def write_leaderboard(
    paths: Sequence[Path], out: Path, now: datetime, average: str | None = None
) -> tuple[Path, Mapping[Path, str]]:
    """Write the site. A bundle that cannot be used is named on stderr and on the first page, and the others are shown.

    Args:
        paths: The bundles.
        out: Folder of the site.
        now: The time that the pages state.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.

    Returns:
        The path of the first page, and the bundles that were left out, each with the reason.

    Raises:
        SettingError: No bundle can be used, or `out` is a folder of results.
    """
    if (out / "runs").exists():
        raise SettingError(f"--out={out}: is a folder of results; choose another one")
    submissions: list[Submission] = []
    refused: dict[Path, str] = {}
    for path in dict.fromkeys(paths):
        try:
            submissions.append(
                read_submission(path, average, lambda submission, folder: write_files(submission, folder, out, now))
            )
        except SettingError as error:
            refused[path] = str(error)
            print(escape(f"kvbench: {error}"), file=sys.stderr)
    if not submissions:
        raise SettingError(f"none of the {len(paths)} bundles can be used")
    write_file(out / "index.html", render_index(submissions, refused, build_tables(submissions), now))
    return out / "index.html", refused


def write_files(submission: Submission, results: Path, out: Path, now: datetime) -> None:
    """Write the report of a submission and the copy of its bundle."""
    write_report(results, now, out / name_report(submission), with_prompts=False)
    (out / "bundles").mkdir(exist_ok=True)
    with replace_file(out / name_copy(submission)) as draft:
        draft.write_bytes(submission.path.read_bytes())


def name_report(submission: Submission) -> str:
    """Return the folder of a submission's report in the site."""
    return f"reports/{submission.bundle.digest[:DIGITS]}"


def name_copy(submission: Submission) -> str:
    """Return the path of a bundle's copy in the site."""
    return f"bundles/{submission.bundle.digest[:DIGITS]}.zip"


def render_index(
    submissions: Sequence[Submission], refused: Mapping[Path, str], tables: Sequence[BoardTable], now: datetime
) -> str:
    """Return the first page."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    about = [
        ("Bundle", lambda submission: f'<a href="{name_copy(submission)}">{mark_up(submission.path.name)}</a>'),
        (
            "Report",
            lambda submission: (
                f'<a href="reports/{submission.bundle.digest[:DIGITS]}/report.html">curves, costs, answers</a>'
            ),
        ),
        ("Runs", lambda submission: str(submission.bundle.runs)),
        ("Records", lambda submission: str(submission.bundle.records)),
        ("kvbench", lambda submission: mark_up(submission.bundle.about["kvbench"])),
        ("SHA-256", lambda submission: f"<code>{submission.bundle.digest}</code>"),
    ]
    left_out = [f"{path.name}: {why.removeprefix(f'bundle={path}: ')}" for path, why in refused.items()]
    left_out += [f"{submission.path.name}: {why}" for submission in submissions for why in submission.left_out]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>kvbench leaderboard</title><style>{style}{STYLE}</style></head><body><main>",
        "<h1>kvbench leaderboard</h1>",
        f"<p>Made {now:%Y-%m-%d %H:%M UTC} from {len(submissions)} bundles, which kvbench verified: every number",
        "follows from their records.</p>",
        '<section class="scroll">',
        *(line for table in tables for line in render_table(table)),
        *(f"<p>{mark_up(text)}</p>" for text in LEGEND),
        '</section><section class="scroll"><h2>Submissions</h2>',
        *render_rows("", about, submissions),
        "<p><code>kvbench check bundle FILE --digest SHA-256</code> checks one of them.</p>",
        *(line for submission in submissions for line in describe_submission(submission)),
        "</section>",
    ]
    if left_out:
        lines = "".join(f"<li>{mark_up(line)}</li>" for line in left_out)
        parts.append(f"<section><h2>Left out</h2><ul>{lines}</ul></section>")
    return "\n".join([*parts, "</main></body></html>\n"])


def render_table(table: BoardTable) -> list[str]:
    """Return the lines of a table of scores."""
    panels = list({id(row.panel): row.panel for row in table.rows}.values())
    warnings = dict.fromkeys(warning for panel in panels for warning in panel.block.warnings)
    samples = describe_samples(replace(panels[0].block, left_out=(), warnings=tuple(warnings)))
    source = (
        "The settings name the samples."
        if panels[0].planned == BY_SETTINGS
        else "The settings do not name the samples: each submission is held to all samples that one of its runs has."
    )
    columns: list[tuple[str, Callable[[BoardRow], str]]] = [
        ("method", lambda row: mark_up(row.label or "(no name)")),
        ("budget", lambda row: NOTHING if row.label == FULL else mark_up(format_budget(row.run))),
        ("submission", lambda row: f'<a href="#{row.submission.bundle.digest}">{name_submission(row.submission)}</a>'),
        *((COLUMNS[name].head, format_column(name)) for name in SHOWN),
        ("its full cache", describe_full_cache),
        ("n", lambda row: str(row.cell.score.samples)),
        ("failed", lambda row: str(row.run.failed or NOTHING)),
        ("lacking", lambda row: str(row.run.lacking or NOTHING)),
        *((COLUMNS[name].head, format_column(name)) for name in COSTS),
    ]
    return render_rows(f"{table.title}. {samples} {source}", columns, table.rows)


def render_rows(caption: str, columns: Sequence[tuple[str, Callable[[Any], str]]], rows: Sequence[Any]) -> list[str]:
    """Return the lines of an HTML table.

    Args:
        caption: Its caption, as text.
        columns: The title of each column, and the function that returns its HTML for a row. The first labels the rows.
        rows: The rows.
    """
    lines = [f"<table><caption>{mark_up(caption)}</caption><thead><tr>"]
    lines += [f'<th scope="col">{mark_up(title)}</th>' for title, _ in columns]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        first, *others = (read(row) for _, read in columns)
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{value}</td>" for value in others)}</tr>')
    return [*lines, "</tbody></table>"]


def format_column(name: str) -> Callable[[BoardRow], str]:
    """Return a function that returns the HTML of a column of the matrix for a row."""
    return lambda row: mark_up(COLUMNS[name].format(row.cell).strip()) or NOTHING


def describe_full_cache(row: BoardRow) -> str:
    """Return the score of the full cache of a row's submission, and how it compares with those of other submissions."""
    agreement = row.agreement
    parts = [format_number(row.panel.block.full.score.value)]
    parts += [f"{APART} {agreement.apart} of {agreement.others}"] if agreement.apart else []
    parts += (
        [f"{OTHERWISE} {agreement.differ - agreement.apart} of {agreement.others}"]
        if agreement.differ > agreement.apart
        else []
    )
    return mark_up(" ".join(parts))


def describe_submission(submission: Submission) -> list[str]:
    """Return the lines about the hardware, the software and the commands of a submission, as it states them."""
    lines = [f'<h3 id="{submission.bundle.digest}">{name_submission(submission)}</h3><ul>']
    stated = [
        f"{describe_hardware(machine)}; {describe_software(machine)}; code {machine.get('code') or 'unknown'}"
        for machines in submission.machines.values()
        for machine in machines
    ]
    lines += [f"<li>{mark_up(line)}</li>" for line in dict.fromkeys(stated)] or ["<li>It does not say.</li>"]
    commands = list_commands(submission)
    shown = "\n".join(map(mark_up, commands))
    return [*lines, f"</ul><details><summary>Commands ({len(commands)})</summary><pre>{shown}</pre></details>"]


def name_submission(submission: Submission) -> str:
    """Return the file's name and the first digits of the digest of a submission, as HTML."""
    return f"{mark_up(submission.path.name)} <code>{submission.bundle.digest[:8]}</code>"


def mark_up(text: object) -> str:
    """Return the text of a stranger as HTML in one line."""
    return escape_html(escape(str(text)))
