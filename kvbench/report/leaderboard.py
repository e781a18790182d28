"""Build a site from bundles: one table of scores over all their runs, the report page, and the bundles themselves.

    index.html      the matrix of scores, and the bundles that it comes from with their digests
    report.html     the report page (kvbench.report.page), with its samples in report/
    bundles/        copies of the bundles, named by their digests, so that readers can verify them

Every number is computed from the bundles' records, after kvbench.analysis.bundle has verified them. Nothing of a bundle
is executed: the report's texts of prompts, which are made again from a run's settings, are left out. The site needs no
server and no network.
"""

from collections.abc import Sequence
from datetime import datetime
from html import escape as escape_html
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbench.analysis.bundle import VerifiedBundle, verify_bundle
from kvbench.analysis.score_matrix import build_blocks
from kvbench.analysis.score_matrix_format import format_html
from kvbench.analysis.score_matrix_order import sort_rows
from kvbench.atomic import replace_file
from kvbench.report.page import HERE, write_report
from kvbench.report.samples import write_file
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError, escape

STYLE = (
    "caption { text-align: left; padding: 24px 0 4px; } tbody th { color: var(--ink); font-size: 14px; }"
    " td { white-space: nowrap; } .scroll p { margin-top: 8px; }"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_leaderboard(
    paths: Sequence[Path], out: Path, now: datetime, average: str | None = None, sort: str | None = None
) -> Path:
    """Write the site, and return the path of its first page.

    Args:
        paths: The bundles. Where several hold a run, its records come from the first of them.
        out: Folder of the site.
        now: The time that the pages state.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.
        sort: What sorts the rows, such as "0.1" (`kvbench.analysis.score_matrix_order.sort_rows`).

    Raises:
        SettingError: A bundle cannot be verified, two of them hold different answers of one run, or their runs cannot
            be shown together.
    """
    if (out / "runs").exists():
        raise SettingError(f"--out={out}: is a folder of results, whose report would be replaced; choose another one")
    bundles = {path: verify_bundle(path) for path in paths}
    with TemporaryDirectory() as folder:
        results = Path(folder)
        for path, own in bundles.items():
            check_same_answers(path, own, results)
            own.unpack(results)
        runs = load_runs(results)
        blocks, refused = build_blocks([run for run in runs if not run.full], runs, average)
        if refused:
            raise SettingError(refused[0])
        blocks = blocks if sort is None else sort_rows(blocks, sort)
        index = render_index(bundles, format_html(blocks), now)
        write_report(results, now, out, with_prompts=False)
    (out / "bundles").mkdir(exist_ok=True)
    for path, own in bundles.items():
        with replace_file(out / name_copy(own)) as draft:
            draft.write_bytes(path.read_bytes())
    write_file(out / "index.html", index)
    return out / "index.html"


def check_same_answers(path: Path, bundle: VerifiedBundle, results: Path) -> None:
    """Compare the answers of a bundle with those of the runs that are in `results` already.

    Raises:
        SettingError: A run has another answer there. Times may differ.
    """
    if not bundle.about["finished"].keys() & {folder.name for folder in results.glob("runs/*")}:
        return
    there = {run.hash: run for run in load_runs(results)}
    with TemporaryDirectory() as folder:
        bundle.unpack(Path(folder))
        for run in load_runs(Path(folder)):
            known = there[run.hash].records if run.hash in there else {}
            for uid, record in run.records.items():
                if uid in known and any(known[uid].get(name) != record.get(name) for name in ("output", "score")):
                    raise SettingError(
                        escape(f"bundle={path}: run {run.hash}: {uid} has another answer in an earlier bundle")
                    )


def name_copy(bundle: VerifiedBundle) -> str:
    """Return the path of a bundle's copy in the site."""
    return f"bundles/{bundle.digest[:16]}.zip"


def render_index(bundles: dict[Path, VerifiedBundle], tables: str, now: datetime) -> str:
    """Return the first page: the tables, and the bundles that they come from."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    rows = [
        "<tr>"
        f'<th scope="row"><a href="{name_copy(own)}">{escape_html(escape(path.name))}</a></th>'
        f'<td class="num">{own.runs}</td><td class="num">{own.records}</td>'
        f"<td>{escape_html(escape(str(own.about['kvbench'])))}</td><td><code>{own.digest}</code></td></tr>"
        for path, own in bundles.items()
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Bundle", "Runs", "Records", "kvbench", "SHA-256"))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kvbench leaderboard</title><style>{style}{STYLE}</style></head><body><main>",
            "<h1>kvbench leaderboard</h1>",
            f"<p>Made {now:%Y-%m-%d %H:%M UTC} from {len(bundles)} bundles, which kvbench verified: every number",
            'follows from their records. <a href="report.html">The report</a> shows curves, costs and answers.</p>',
            f'<section class="scroll">{tables}</section>',
            f'<section class="scroll"><h2>Bundles</h2><table><thead><tr>{head}</tr></thead><tbody>',
            *rows,
            "</tbody></table><p><code>kvbench verify FILE --digest SHA-256</code> checks one of them.</p></section>",
            "</main></body></html>\n",
        ]
    )
