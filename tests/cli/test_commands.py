"""`kvbench <command>`: the help is complete and quick, a wrong name gets a hint, and a command imports no other one."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import chain

import pytest

from kvbench.__main__ import format_help, list_commands, main
from kvbench.analysis.budget_curve import KEEP
from kvbench.analysis.budget_series import EACH, SHARES, SOLVABLE
from kvbench.cli import GROUPS
from kvbench.config.catalogue import list_choices
from kvbench.efficiency.plan import PLAN
from kvbench.integrations.math_verify import SECONDS
from kvbench.report.dashboard import PORT
from kvbench.report.figures import INCHES
from kvbench.runs.choose_solvable import SAMPLES
from kvbench.training.evaluate import LENGTHS, STEPS
from tests.support.repository import ROOT

COMMANDS = tuple(chain(*GROUPS.values()))
# modules of kvbench/cli/ that are no command
SHARED = {
    "__init__", "command", "run_help", "calibration_texts", "diagnose",
    *(f"calibrate_{method}" for method in ("deltakv", "kvzap", "palu", "triattention")),
}  # fmt: skip
HEAVY = ("torch", "transformers", "pandas", "numpy", "scipy", "hydra", "omegaconf", "wandb")


def test_every_module_is_a_command_that_the_help_lists_once():
    files = {path.stem.replace("_", "-") for path in (ROOT / "kvbench/cli").glob("*.py") if path.stem not in SHARED}
    assert sorted(COMMANDS) == sorted(files)
    text = format_help()
    for name, said in list_commands().items():
        assert 10 < len(said) < 130 and said.endswith("."), name
        assert text.count(f"\n  {name} ") == 1 and said in text


def test_no_command_prints_the_help_as_an_error(capsys):
    assert main([]) == 2
    assert capsys.readouterr() == ("", format_help() + "\n")
    for option in ("-h", "--help"):
        assert main([option]) == 0
        assert capsys.readouterr() == (format_help() + "\n", "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("repot", "did you mean report or export? kvbench --help lists all"),
        ("check_method", "did you mean check-method? kvbench --help lists all"),
        ("sweepstatus", "did you mean sweep-status? kvbench --help lists all"),
        ("xyz", "choose one that kvbench --help lists"),
        ("--nor", "choose one that kvbench --help lists"),
        ("", "choose one that kvbench --help lists"),
    ],
)
def test_an_unknown_command_is_one_line_with_a_hint(name, hint, capsys):
    assert main([name]) == 2
    assert capsys.readouterr() == ("", f"kvbench: {name}: no such command; {hint}\n")


def test_the_version_is_the_projects(capsys):
    assert main(["--version"]) == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr() == (f"kvbench {version}\n", "")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_help_imports_what_takes_long():
    """The heaviest of them alone takes longer than a help may: 1 s."""
    code = f"""
import sys
from kvbench.__main__ import main

def ask(*given):
    try:
        return main([*given, "--help"])
    except SystemExit as stop:
        return stop.code

codes = [ask(), *map(ask, {COMMANDS!r})]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"{{codes}} {{heavy}}" if any(codes) or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"usage: kvbench {name}" in done.stdout


def test_the_help_of_a_run_lists_what_conf_offers(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for group in ("model", "method", "allocator", "codec", "task", "logger"):
        assert f"  {group}={'|'.join(list_choices(group))}\n" in text
    assert "\n  budget: 0.05 " in text and "\n  hydra:" not in text and "\n  defaults:" not in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("choose_solvable", f"(default: {SAMPLES})"),
        ("curves", f"(default: {KEEP})"),
        ("curves", f"{EACH} or {SOLVABLE}"),
        *(("curves", f"{name} ({name} ") for name in SHARES),
        ("dashboard", f"(default: {PORT})"),
        ("evaluate", f"default: {LENGTHS[0]} to {LENGTHS[-1]}"),
        ("evaluate", f"(default: {STEPS})"),
        ("figures", f"of {','.join(INCHES)} (default: all)"),
        (
            "figures",
            f"column ({INCHES['curve']} in), page ({INCHES['tasks']} in) or inches (default: column for curves",
        ),
        ("grade", f"(default: {SECONDS:g})"),
    ],
)
def test_the_help_says_defaults_that_a_module_it_does_not_import_decides(command, said):
    text = import_module(f"kvbench.cli.{command}").make_parser().format_help()
    assert said in re.sub(r"\s+", " ", text)


def test_the_plan_of_the_cost_is_the_one_that_is_measured():
    assert import_module("kvbench.cli.efficiency").parse_arguments(["quick"]).plan == PLAN


def test_a_command_imports_what_it_needs():
    code = (
        "import sys; from kvbench.__main__ import main; code = main(['grid', 'nowhere']);"
        "sys.exit(code if code != 2 else {'torch', 'kvbench.cli.curves', 'kvbench.cli.run'} & sys.modules.keys() or 3)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 3, found.stderr
    assert found.stderr.startswith("kvbench: ") and found.stderr.count("\n") == 1


def test_a_missing_extra_is_one_line(capsys, monkeypatch):
    from kvbench.cli import command, report

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert report.main(["nowhere"]) == 2
    said = "altair, vl_convert: not installed; pip install 'kvbench[report]' installs it"
    assert capsys.readouterr() == ("", f"kvbench: {said}\n")


def test_a_table_is_printed(tmp_path, capsys):
    assert main(["table", "dropkv", "1", "--results", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert main(["papers", str(tmp_path), "dropkv", "1"]) == 0
    assert capsys.readouterr().out == table != ""
    assert main(["table", "dropkv", "99", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("kvbench: EXHIBIT=99: did you mean table")
