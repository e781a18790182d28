"""Measure the results that docs/results.md shows, tier by tier.

Examples:
  kvbench dev measured a
  kvbench dev measured a b c --results /data/measured --workers 8
  kvbench dev measured --page
  kvbench dev measured a b --power

The tiers are in conf/measured.yaml: sweeps of kvbench run -m, and files that they need. Finished runs are skipped, so
the same command goes on after a stop. A folder of results with runs of a tier from another kind of GPU, other versions
or other code is refused.

With --workers, so many processes share the samples of each sweep, and the GPUs too if there are fewer. Times of records
then say nothing about cost; the files hold none.

A tier ends with RESULTS/measured/<machine>/<tier>.csv, one line for each finished run, also if Ctrl-C or a SIGTERM
stops it. The exit code is 1 if a cell is refused or a run is not finished. With --page, the command measures nothing:
it writes docs/results.md and its pictures from these files. With --power, it measures nothing either: it prints which
differences the planned samples can tell apart, from the deviations in these files.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, require_extra, run_command
from kvbench.cli.power_options import add_power, check_power
from kvbench.config.tiers import TIERS, Tier, choose_tiers
from kvbench.validation import SettingError, require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("dev measured", __doc__)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help="keys of conf/measured.yaml")
    parser.add_results(old=False)
    parser.add_argument("--file", type=Path, help="another file with tiers (default: conf/measured.yaml)")
    parser.add_argument(
        "--workers", type=parse_workers, metavar="N", help="the setting workers of the sweeps: a number, or auto"
    )
    add_power(parser)
    parser.add_argument("--page", action="store_true", help="write the page from the files of all machines")
    parser.add_argument(
        "--machine", help="folder below RESULTS/measured, such as nvidia-h200, for tiers that several machines measured"
    )
    parser.add_argument("--out", type=Path, help="folder of the page (default: docs)")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="POINTS",
        help="a cell counts as no worse than the full cache only if its interval ends above -POINTS (default: 3)",
    )
    return parser


def parse_workers(text: str) -> int | str:
    """Return the number of processes if the text is one, otherwise the text."""
    return int(text) if text.isascii() and text.isdecimal() else text


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options.

    Raises:
        SettingError: An option is missing, or belongs to the other way of calling the command.
    """
    options = make_parser().parse(arguments)
    if options.page and (options.tiers or options.file or options.workers is not None or options.power):
        raise SettingError("--page: measures no tier; call the command twice")
    check_power(options)
    if options.power and options.workers is not None:
        raise SettingError("--workers: not with --power, which measures nothing")
    if not options.page and (options.machine or options.out or options.margin is not None):
        raise SettingError("--machine, --out and --margin: only with --page")
    if options.margin is not None and not 0 < options.margin <= 100:
        raise SettingError(f"--margin={options.margin:g}: choose points above 0 and up to 100")
    if not options.page and not options.tiers:
        raise SettingError("measured: name a tier of conf/measured.yaml, such as a; or --page")
    return options


def measure(options: Namespace) -> int:
    """Run the tiers, and write the lines of each. Return 1 if a run is not finished, otherwise 0."""
    from kvbench.config.catalogue import translate_errors
    from kvbench.runs.checks import check_workers

    check_workers(options.workers, "--workers")
    tiers = choose_tiers(options.tiers, options.file or TIERS)
    require_writable("--results", options.results)
    code = 0
    with translate_errors():
        for tier in tiers:
            code = max(code, measure_tier(tier, options.results, options.workers))
    return code


def print_power(options: Namespace) -> int:
    """Print what the samples of each tier can tell apart, and return 0."""
    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import expand_cells
    from kvbench.sweeps.power_table import describe_power

    measured = options.results / "measured"
    with translate_errors():
        for tier in choose_tiers(options.tiers, options.file or TIERS):
            cells = [cell for sweep in tier.list_sweeps(options.results) for cell in expand_cells(sweep)]
            lines = describe_power(cells, measured, options.deviation, find_width())
            print("\n".join([f"tier {tier.name}: {tier.title}", *lines, ""]))
    return 0


def measure_tier(tier: Tier, results: Path, workers: int | str | None = None) -> int:
    """Make the files of a tier, run its sweeps, and write its lines.

    Args:
        tier: The tier.
        results: The folder of results.
        workers: The setting `workers` of the sweeps; None leaves it as it is.

    Returns:
        1 if a cell is refused or has no finished run, otherwise 0.

    Raises:
        SettingError: The store has runs of the tier from elsewhere, a file cannot be made, or no run is finished.
    """
    from kvbench.cli.run import run_sweep
    from kvbench.runs.executor import Executor
    from kvbench.sweeps.plan import Sweep
    from kvbench.sweeps.tier_store import check_store, list_values

    worker_settings = [f"workers={workers}"] if workers is not None else []
    sweeps = [[*given, *worker_settings] for given in tier.list_sweeps(results)]
    missing = tier.list_files(results)
    if missing:  # the runs that need them are not known yet, but the others are
        known = [settings for settings in sweeps if not any(path.name in text for path in missing for text in settings)]
        check_store(tier.name, list_values(map(Sweep.plan, known)), results)
        make_files(tier.name, missing)
    planned = [Sweep.plan(settings) for settings in sweeps]
    check_store(tier.name, list_values(planned), results)
    try:
        with Executor(results) as executor:
            for number, settings in enumerate(sweeps, 1):
                print(f"tier {tier.name}, sweep {number} of {len(sweeps)}: {' '.join(settings)}", flush=True)
                run_sweep(settings, executor=executor)
    except KeyboardInterrupt:
        with suppress(SettingError):  # nothing is finished yet
            write_lines(tier, planned, results)
        raise
    return write_lines(tier, planned, results)


def write_lines(tier: Tier, planned: Sequence[Any], results: Path) -> int:
    """Write a line for each finished run of a tier, and say how many there are.

    Args:
        tier: The tier.
        planned: Its sweeps, each a `kvbench.sweeps.plan.Sweep`.
        results: The folder of results.

    Returns:
        1 if a cell is refused or has no finished run, otherwise 0.

    Raises:
        SettingError: No run of a method is finished.
    """
    from kvbench.analysis.result_lines import format_lines, make_lines
    from kvbench.atomic import replace_file
    from kvbench.config.provenance import content_hash
    from kvbench.efficiency.measured_task import machine_name
    from kvbench.store.runs import check_folder, find_runs
    from kvbench.sweeps.tier_store import list_values

    values = list_values(planned)
    check_folder(results)
    runs = [run for run in find_runs(results).runs if run.hash in values]
    lines = make_lines(runs, {content_hash(path): path.stem for path in tier.find_files(results)})
    if not lines:
        raise SettingError(f"tier {tier.name}: no run of a method is finished")
    device = next(iter(values.values()))["device"]["type"]
    path = results / "measured" / machine_name(device) / f"{tier.name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as draft:
        draft.write_text(format_lines(lines), encoding="utf-8")
    refused = sum(cell.run is None for sweep in planned for cell in sweep.cells)
    left = f"; {refused} cells are refused" if refused else ""
    finished = sum(run.finished for run in runs)
    print(f"{path}: {len(lines)} cells, {finished} of {len(values)} runs are finished{left}")
    return int(finished < len(values) or refused > 0)


def make_files(tier: str, missing: Mapping[Path, Sequence[str]]) -> None:
    """Make the files that a tier needs. A file that is not finished does not get its name, and neither does its log.

    Args:
        tier: Name of the tier.
        missing: Path -> the arguments of `kvbench` that make it, without `--out`.

    Raises:
        SettingError: A command failed.
    """
    from kvbench.__main__ import start

    for path, command in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"draft-{path.name}")
        if start([*command, "--out", str(draft)]) != 0:
            raise SettingError(f"tier {tier}: {path} could not be made")
        log = draft.with_name(f"{draft.name}.log.jsonl")
        if log.exists():
            log.rename(path.with_name(f"{path.name}.log.jsonl"))
        draft.rename(path)


def write_page(options: Namespace) -> int:
    """Write the page, print the paths of its files, and return 0."""
    require_extra("report", "altair", "vl_convert")
    from kvbench.analysis.joint_signs import MARGIN
    from kvbench.report.results_page import choose_files, write_results_page

    files = choose_files(options.results / "measured", options.machine)
    margin = MARGIN if options.margin is None else options.margin
    for path in write_results_page(files, options.out or Path("docs"), margin, options.results / "efficiency"):
        print(path)
    return 0


def main(arguments: Sequence[str]) -> int:
    def work() -> int:
        options = parse_arguments(arguments)
        return write_page(options) if options.page else print_power(options) if options.power else measure(options)

    return run_command(work)
