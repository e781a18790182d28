"""Check a bundle before it is submitted to a leaderboard: what readers will ask about it, and what it answers."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvbench.analysis.score_matrix import name_run
from kvbench.analysis.submissions import (
    CountedRun,
    Panel,
    Submission,
    describe_hardware,
    describe_software,
    find_settings,
    list_commands,
    read_submission,
)
from kvbench.store.runs import name_some
from kvbench.validation import SettingError

PASS, WARN, FAIL = "pass", "warn", "fail"
CLEAN = re.compile(r"git [0-9a-f]{40}|version \S+")  # of the code, without uncommitted changes
STATED = {"hardware": ("processor", "threads"), "software": ("python", "versions")}
STATEMENTS = {"hardware": describe_hardware, "software": describe_software}
Check = tuple[str, str, str]  # PASS, WARN or FAIL; the point; what was found


def check_bundle(path: Path, average: str | None = None) -> list[Check]:
    """Return the checklist of a bundle.

    Args:
        path: The bundle's file.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.
    """
    try:
        submission = read_submission(path, average)
    except SettingError as error:
        return [(FAIL, "verifies", str(error))]
    bundle = submission.bundle
    line = f"{bundle.records} records of {bundle.runs} runs give its table; sha256 {bundle.digest}"
    return [
        (PASS, "verifies", line),
        (FAIL, "scored", name_some(submission.left_out)) if submission.left_out else (PASS, "scored", "all runs"),
        *(check for panel in submission.panels for check in check_panel(panel)),
        *check_statements(submission),
    ]


def check_panel(panel: Panel) -> Iterator[Check]:
    """Yield the points about the samples of one protocol."""
    block = panel.block
    about = f"{block.task}, question {block.question}"
    full, *others = [run for _, _, run in panel.cells]
    yield (
        (PASS, "full-cache", f"{about}: answered all {block.samples} samples")
        if full.whole
        else (FAIL, "full-cache", f"{about}: {describe_loss(full)}, so no difference is shown")
    )
    lacking = [f"{name_run(run)} {run.lacking}" for run in (full, *others) if run.lacking]
    named = f"{about}: {block.samples} samples, named by {panel.planned}"
    yield (FAIL, "samples", f"{named}; lacking: {name_some(lacking)}") if lacking else (PASS, "samples", named)
    failed = [f"{name_run(run)} {run.failed}" for run in others if run.failed]
    yield (
        (WARN, "failed", f"{about}: {name_some(failed)}; each scores 0")
        if failed
        else (PASS, "failed", f"{about}: no sample of a method")
    )
    settings = full.settings
    known = {name: settings.get(name, settings.get(f"task.{name}")) for name in ("seed", "limit")}
    text = f"{about}: {', '.join(f'{name} {setting}' for name, setting in known.items())}"
    yield (WARN, "limit", f"{text}: a part of the benchmark") if known["limit"] is not None else (PASS, "limit", text)
    yield (WARN, "data", f"{about}: {' '.join(block.warnings)}") if block.warnings else (PASS, "data", about)
    yield (
        (PASS, "fidelity", f"{about}: predictions are compared")
        if panel.fidelity
        else (WARN, "fidelity", f"{about}: predictions are not compared (fidelity=true)")
    )


def describe_loss(run: CountedRun) -> str:
    """Return how many samples a run failed on or lacks."""
    return f"failed on {run.failed} and lacks {run.lacking} of {len(run.records)} samples"


def check_statements(submission: Submission) -> Iterator[Check]:
    """Yield the points about what a submission states: hardware, software, code and commands."""
    machines = [machine for run_machines in submission.machines.values() for machine in run_machines]
    silent = [name for name, run_machines in submission.machines.items() if not run_machines]
    for point, names in STATED.items():
        lacking = silent or [name for name in names for machine in machines if not machine.get(name)]
        text = name_some(list(dict.fromkeys(STATEMENTS[point](machine) for machine in machines)))
        yield (FAIL, point, f"not stated: {name_some(lacking)}") if lacking else (PASS, point, text)
    codes = sorted({str(machine.get("code")) for machine in machines})
    odd = [code for code in codes if not CLEAN.fullmatch(code)]
    text = f"{name_some(odd or codes)}{': readers cannot get this code' if odd else ''}"
    yield (WARN if odd or len(codes) > 1 else PASS, "code", text)
    commands = list_commands(submission)
    lacking = [name for name, run_machines in submission.machines.items() if not any(map(find_settings, run_machines))]
    yield (
        (FAIL, "commands", f"no settings to make these runs again: {name_some(lacking)}")
        if lacking
        else (PASS, "commands", f"{len(commands)}, one for each different run")
    )
