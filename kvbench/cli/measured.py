"""Measure the results that docs/results.md shows, part by part.

Examples:
  kvbench dev measured screening
  kvbench dev measured screening turns --results /data/measured --workers 8
  kvbench dev measured screening --collect --draw 24 --results /data/measured
  kvbench dev measured --lines results/measured/nvidia-h200/untuned.parquet
  kvbench dev measured --page
  kvbench dev measured confirmation --power

The parts are in conf/measured.yaml: sweeps of kvbench run -m, and files that they need. Finished runs are skipped, so
the same command goes on after a stop. A folder of results with runs of a part from another kind of GPU, other versions
or other code is refused.

With --workers, so many processes share the samples of each sweep, and the GPUs too if there are fewer. Times of records
then say nothing about cost; the files hold none.

A part ends with RESULTS/measured/<machine>/<part>.parquet, one row for each sample of each finished run, also if Ctrl-C
or a SIGTERM stops it. The exit code is 1 if a cell is refused or a run is not finished. A machine without pyarrow
measures too and writes no such file, as the command says when it begins and ends. --collect then writes it elsewhere,
from a copy of RESULTS with its runs and files: it measures nothing, and the runs say which machine made them. Runs that
need a file which the copy lacks count as not finished.

With --draw, a bundle of so many answers drawn from these runs is written beside the rows. kvbench check bundle checks
it and executes its answers again. SHA256SUMS in the same folder has the checksums of both.

The other options measure nothing either. --lines prints what follows from a file of rows: a CSV with one line a cell.
--page writes docs/results.md and its pictures from the files of all parts. --power prints how many answers there are,
how long they take, and which differences they can tell apart by the deviations in these files.
"""

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, require_extra, run_command
from kvbench.cli.power_options import add_power, check_power
from kvbench.config.study_parts import STUDY, StudyPart, choose_study_parts, quote
from kvbench.validation import SettingError, require_writable

NO_ROWS = "no pyarrow here, so no file of rows; copy RESULTS and run kvbench dev measured {part} --collect elsewhere"


def make_parser() -> CommandParser:
    parser = CommandParser("dev measured", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="keys of conf/measured.yaml")
    parser.add_results(old=False)
    parser.add_argument("--file", type=Path, help="another file with parts (default: conf/measured.yaml)")
    parser.add_argument(
        "--workers", type=parse_workers, metavar="N", help="the setting workers of the sweeps: a number, or auto"
    )
    parser.add_argument(
        "--collect", action="store_true", help="write the files of runs that RESULTS holds, made by any machine"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="also write a bundle of N drawn answers beside the rows")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="print a line for each cell of a file, as CSV")
    add_power(parser)
    parser.add_argument("--page", action="store_true", help="write the page from the files of all machines")
    parser.add_argument(
        "--machine", help="folder below RESULTS/measured, such as nvidia-h200, for parts that several machines measured"
    )
    parser.add_argument("--out", type=Path, help="folder of the page (default: docs)")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="POINTS",
        help="a cell is shown to lose little only if its interval begins above -POINTS (default: 3)",
    )
    return parser


def parse_workers(text: str) -> int | str:
    """Return the number of processes if the text is one, otherwise the text."""
    return int(text) if text.isascii() and text.isdecimal() else text


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options.

    Raises:
        SettingError: An option is missing, or belongs to another way of calling the command.
    """
    options = make_parser().parse(arguments)
    ways = {"--page": options.page, "--lines": options.lines, "--power": options.power, "--collect": options.collect}
    chosen = [way for way, given in ways.items() if given]
    of_part = options.parts or options.file or options.workers is not None
    if (options.page or options.lines) and (of_part or len(chosen) > 1):
        raise SettingError(f"{chosen[0]}: measures no part; call the command twice")
    check_power(options)
    if options.lines and options.lines.suffix != ".parquet":
        raise SettingError(f"--lines={options.lines}: a .parquet file of rows")
    if len(chosen) > 1:
        raise SettingError(f"{chosen[0]}: not with {chosen[1]}; call the command twice")
    if options.draw is not None and (options.page or options.lines or options.power):
        raise SettingError(f"--draw: not with {chosen[0]}, which writes no rows")
    if options.draw is not None and options.draw < 1:
        raise SettingError(f"--draw={options.draw}: a whole number of at least 1")
    if chosen and options.workers is not None:
        raise SettingError(f"--workers: not with {chosen[0]}, which measures nothing")
    if not options.page and (options.machine or options.out or options.margin is not None):
        raise SettingError("--machine, --out and --margin: only with --page")
    if options.margin is not None and not 0 < options.margin <= 100:
        raise SettingError(f"--margin={options.margin:g}: choose points above 0 and up to 100")
    if not options.page and not options.lines and not options.parts:
        raise SettingError("measured: name a part of conf/measured.yaml, such as screening; or --page")
    return options


def measure(options: Namespace) -> int:
    """Run the parts or collect their runs, and write the rows of each. Return 1 if a run is not finished, or 0."""
    from kvbench.config.catalogue import translate_errors
    from kvbench.runs.checks import check_workers
    from kvbench.store.published_runs import require_pyarrow

    check_workers(options.workers, "--workers")
    parts = choose_study_parts(options.parts, options.file or STUDY)
    require_writable("--results", options.results)
    if options.collect:
        require_pyarrow("--collect")
    code = 0
    with translate_errors():
        for part in parts:
            if options.collect:
                code = max(code, collect_part(part, options.results, options.draw))
            else:
                code = max(code, measure_part(part, options.results, options.workers, options.draw))
    return code


def print_lines(path: Path) -> int:
    """Print the lines of a file as CSV, and return 0."""
    from kvbench.analysis.result_lines import format_lines, read_lines

    print(format_lines(read_lines(path)), end="")
    return 0


def print_power(options: Namespace) -> int:
    """Print what the samples of each part can tell apart, and return 0."""
    from kvbench.config.catalogue import translate_errors
    from kvbench.sweeps.power_table import describe_columns, describe_power

    measured, width = options.results / "measured", find_width()
    with translate_errors():
        for part in choose_study_parts(options.parts, options.file or STUDY):
            cells = part.list_cells(options.results)
            lines = describe_power(cells, measured, width, options.deviation, options.rate or part.rate, part.pairs)
            print("\n".join([f"part {part.name}: {part.title}", *lines, ""]))
    print("\n".join(describe_columns(width)))
    return 0


def measure_part(part: StudyPart, results: Path, workers: int | str | None = None, draw: int | None = None) -> int:
    """Make the files of a part, run its sweeps, and write its rows.

    Args:
        part: The part.
        results: The folder of results.
        workers: The setting `workers` of the sweeps; None leaves it as it is.
        draw: As in `write_rows`.

    Returns:
        1 if a cell is refused or has no finished run, otherwise 0.

    Raises:
        SettingError: The store has runs of the part from elsewhere, a file cannot be made, or no run is finished.
    """
    from kvbench.cli.run import run_sweep
    from kvbench.runs.executor import Executor
    from kvbench.store.published_runs import has_pyarrow
    from kvbench.store.runs import check_folder, find_runs
    from kvbench.sweeps.part_store import check_store, list_values
    from kvbench.sweeps.plan import Sweep

    def write() -> int:
        check_folder(results)
        runs = [run for run in find_runs(results).runs if run.hash in values]
        return write_rows(part, planned, runs, results, draw)

    worker_settings = [f"workers={workers}"] if workers is not None else []
    stages = [[[*line, *worker_settings] for line in lines] for lines in part.list_stages(results)]
    if not has_pyarrow():
        print(f"part {part.name}: {NO_ROWS.format(part=part.name)}", file=sys.stderr)
    missing = part.list_files(results)
    if missing:  # the runs that need them are not known yet, but their full cache and the others are
        names = [path.name for path in missing]
        known = [
            keep_full_cache(line) if any(name in text for name in names for text in line) else line
            for lines in stages
            for line in lines
        ]
        check_store(part.name, list_values(map(Sweep.plan, known)), results)
        make_files(part.name, missing)
    planned = [Sweep.plan_lines(lines) for lines in stages]
    values = list_values(planned)
    check_store(part.name, values, results)
    states = [state.name for sweep in planned for state in sweep.states]
    print(f"part {part.name}: {states.count('done')} of {len(states)} cells are done", flush=True)
    try:
        with Executor(results) as executor:
            for number, lines in enumerate(stages, 1):
                for line in lines:
                    print(f"part {part.name}, sweep {number} of {len(stages)}: {' '.join(line)}", flush=True)
                run_sweep(lines, executor=executor)
    except KeyboardInterrupt:
        with suppress(SettingError):  # nothing is finished yet
            write()
        raise
    return write()


def keep_full_cache(line: Sequence[str]) -> list[str]:
    """Return the arguments of the full cache that the cells of a line are compared with."""
    chosen = ("method", "allocator", "codec", "budget")
    kept = [text for text in line if text.partition("=")[0].partition(".")[0] not in chosen]
    return [*kept, "method=full"]


def collect_part(part: StudyPart, results: Path, draw: int | None = None) -> int:
    """Write the rows of a part's finished runs, which any machine may have made.

    Args:
        part: The part.
        results: The folder of results, with the runs and with the files that the part needs.
        draw: As in `write_rows`.

    Returns:
        1 if a cell is refused or has no finished run, otherwise 0.

    Raises:
        SettingError: Every cell needs a file that is missing, no run of a method is finished, or the runs come from
            several machines or states of the code.
    """
    from kvbench.config.compose import expand_cells
    from kvbench.store.runs import check_folder
    from kvbench.sweeps.part_store import collect_runs, list_values
    from kvbench.sweeps.plan import Sweep

    check_folder(results)
    missing = part.list_files(results)
    stages = [[cell for line in lines for cell in expand_cells(line)] for lines in part.list_stages(results)]
    quoted = {quote(path) for path in missing}
    known = [[cell for cell in cells if not needs_file(cell, quoted)] for cells in stages]
    unknown = sum(map(len, stages)) - sum(map(len, known))  # the hashes of their runs follow from the files
    if unknown:
        said = f"part {part.name}: {next(iter(missing))} is missing; copy it from the machine that measured"
        if not any(known):
            raise SettingError(said)
        cells = (
            "1 cell needs a missing file and counts"
            if unknown == 1
            else f"{unknown} cells need a missing file and count"
        )
        print(f"{said}. {cells} as not finished.", file=sys.stderr)
    planned = [Sweep.plan_lines(cells) for cells in known if cells]
    runs = collect_runs(part.name, list_values(planned), results)
    return write_rows(part, planned, runs, results, draw, unknown)


def needs_file(cell: Sequence[str], files: Collection[str]) -> bool:
    """Return whether a setting of a cell, given as overrides, is one of the quoted paths."""
    return any(text.partition("=")[2] in files for text in cell)


def write_rows(
    part: StudyPart,
    planned: Sequence[Any],
    runs: Sequence[Any],
    results: Path,
    draw: int | None = None,
    unknown: int = 0,
) -> int:
    """Write the rows of a part's finished runs and their checksum, and say how many runs there are.

    Args:
        part: The part.
        planned: Its sweeps, each a `kvbench.sweeps.plan.Sweep`.
        runs: Its runs, finished or not, each a `kvbench.store.runs.StoredRun`.
        results: The folder of results.
        draw: How many answers a bundle beside the rows has; None writes no bundle.
        unknown: How many cells of the part are not planned, because they need a file that is missing.

    Returns:
        1 if a cell is refused or has no finished run, otherwise 0.

    Raises:
        SettingError: No run of a method is finished, runs of a protocol cannot be shown in one table, the checksums in
            the folder of rows cannot be read, or the runs have fewer answers than are to be drawn.
    """
    from kvbench.analysis.bundle import write_drawn_runs
    from kvbench.analysis.result_lines import ROWS, make_lines
    from kvbench.config.provenance import content_hash
    from kvbench.store.checksums import read_checksums, write_checksum
    from kvbench.store.published_runs import has_pyarrow, name_machine, publish
    from kvbench.sweeps.part_store import list_values

    finished = [publish(run) for run in runs if run.finished]
    lines = make_lines(finished)
    if not lines:
        raise SettingError(f"part {part.name}: no run of a method is finished")
    if has_pyarrow():
        from kvbench.store.published_file import write_published

        path = results / "measured" / name_machine(finished[0].value["device"]) / f"{part.name}{ROWS}"
        path.parent.mkdir(parents=True, exist_ok=True)
        read_checksums(path.parent)  # raises before anything is written if they are damaged
        write_published(finished, {content_hash(file): file.stem for file in part.find_files(results)}, path)
        write_checksum(path)
        where = str(path)
        if draw is not None:
            bundle = path.with_suffix(".zip")
            write_drawn_runs([run for run in runs if run.finished], bundle, draw)
            write_checksum(bundle)
            print(f"{bundle}: {draw} drawn answers")
    else:
        where = f"part {part.name}: {NO_ROWS.format(part=part.name)}"
    count = len(list_values(planned)) + unknown
    refused = sum(cell.run is None for sweep in planned for cell in sweep.cells)
    left = f"; {refused} cells are refused" if refused else ""
    print(f"{where}: {len(lines)} cells, {len(finished)} of {count} runs are finished{left}")
    return int(len(finished) < count or refused > 0)


def make_files(part: str, missing: Mapping[Path, Sequence[str]]) -> None:
    """Make the files that a part needs. A file that is not finished does not get its name, and neither does its log.

    Args:
        part: Name of the part.
        missing: Path -> the arguments of `kvbench` that make it, without `--out`.

    Raises:
        SettingError: A command failed.
    """
    from kvbench.__main__ import start

    for path, command in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"draft-{path.name}")
        if start([*command, "--out", str(draft)]) != 0:
            raise SettingError(f"part {part}: {path} could not be made")
        log = draft.with_name(f"{draft.name}.log.jsonl")
        if log.exists():
            log.rename(path.with_name(f"{path.name}.log.jsonl"))
        draft.rename(path)


def write_page(options: Namespace) -> int:
    """Write the page, print the paths of its files, and return 0."""
    require_extra("report", "altair", "vl_convert")
    from kvbench.analysis.joint_signs import MARGIN
    from kvbench.report.results_page import choose_files, write_results_page

    out = options.out or Path("docs")
    require_writable("--out", out)
    files = choose_files(options.results / "measured", options.machine)
    margin = MARGIN if options.margin is None else options.margin
    for path in write_results_page(files, out, margin, options.results / "efficiency"):
        print(path)
    return 0


def main(arguments: Sequence[str]) -> int:
    def work() -> int:
        options = parse_arguments(arguments)
        if options.lines:
            return print_lines(options.lines)
        return write_page(options) if options.page else print_power(options) if options.power else measure(options)

    return run_command(work)
