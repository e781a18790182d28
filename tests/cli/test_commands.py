"""`kvbench <command>`: the help is complete and quick, and a command imports no other one.

A wrong name gets a hint. Names and forms of 0.1 work and say the new ones.
"""

import re
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from kvbench.__main__ import format_help, format_start, main
from kvbench.analysis.budget_curve import KEEP
from kvbench.analysis.budget_series import EACH, SHARES, SOLVABLE
from kvbench.cli import COMMANDS, GROUPS
from kvbench.cli.completion import TEMPLATES, make_script
from kvbench.config.catalogue import list_choices
from kvbench.efficiency.plan import PLAN
from kvbench.integrations.math_verify import SECONDS
from kvbench.report.dashboard import PORT
from kvbench.report.figures import INCHES
from kvbench.runs.choose_solvable import SAMPLES
from kvbench.training.evaluate import LENGTHS, STEPS
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

NAMES = [command.name for command in COMMANDS]
# modules of kvbench/cli/ that are no command
SHARED = {
    "__init__", "command", "run_help", "calibration_options", "calibration_steps", "power_options", "sweep_cells",
    *(f"calibrate_{method}" for method in ("deltakv", "fp8", "kvquant", "kvzap", "palu", "triattention")),
}  # fmt: skip
HEAVY = ("torch", "transformers", "pandas", "numpy", "scipy", "hydra", "omegaconf", "wandb")


def test_every_module_is_a_command_that_one_help_and_the_page_list():
    files = {path.stem for path in (ROOT / "kvbench/cli").glob("*.py") if path.stem not in SHARED}
    assert sorted(command.module for command in COMMANDS) == sorted(files) and len(set(NAMES)) == len(NAMES)
    old = [name for command in COMMANDS for name in command.old]
    assert len(set(old)) == len(old) and not set(old) & set(NAMES)
    page = (ROOT / "docs/commands.md").read_text()
    for command in COMMANDS:
        said = command.summary
        assert 10 < len(said) < 130 and said.endswith("."), command.name
        assert f"\n  {command.word} " in format_help(command.group) and said in format_help(command.group)
        before = ", ".join(f"`{name}`" for name in command.old)
        assert f"\n| `{command.name}` | {said} | {before} |\n" in page


def test_no_command_names_three_to_begin_with_and_the_groups(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (
        not out
        and err == format_start() + "\n"
        and len(re.findall(r"^  kvbench (run|results) \w+.* {2}", err, re.M)) == 3
    )
    for option in ("-h", "--help"):
        assert main([option]) == 0
        assert capsys.readouterr() == (format_help() + "\n", "")
    for group in GROUPS:
        assert main([group, "--help"]) == 0
        assert capsys.readouterr() == (format_help(group) + "\n", "")
        assert (f"\n  kvbench {group} " in err) == (group != "dev")
    assert main(["check"]) == 2
    assert capsys.readouterr() == ("", format_help("check") + "\n")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("repot", "did you mean kvbench results report or kvbench results export? kvbench --help lists all"),
        ("check_method x", "did you mean kvbench check method? kvbench --help lists all"),
        ("reslts show 3f", "did you mean kvbench results? kvbench --help lists all"),
        ("xyz", "choose one that kvbench --help lists"),
        ("--nor", "choose one that kvbench --help lists"),
        ("results shw 3f", "did you mean show? kvbench results --help lists all"),
        ("check xyz", "choose one of results, bundle, data, method, task"),
        ("papers wrte", "did you mean write? Choose one of write, list, study"),
    ],
)
def test_an_unknown_command_or_group_is_one_line_with_a_hint(given, hint, capsys):
    words = given.split()
    named = " ".join(words[: 1 + (words[0] in GROUPS)])
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"kvbench: {named}: no such command; {hint}\n")


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.old], ids=lambda command: command.module
)
def test_an_old_name_works_and_says_the_new_one(command, monkeypatch, capsys):
    called = []
    monkeypatch.setattr(import_module(f"kvbench.cli.{command.module}"), "main", called.append)
    for name in command.old:
        assert main([*name.split(), "--nor"]) == 0
        line = f"kvbench {name} is now kvbench {command.name}; the old name goes in the next release\n"
        assert capsys.readouterr() == ("", line)
    assert main([*command.name.split(), "--nor"]) == 0
    assert called == [["--nor"]] * (len(command.old) + 1) and capsys.readouterr() == ("", "")


def test_groups_that_were_commands_take_the_old_arguments(tmp_path, monkeypatch, capsys):
    called = []
    for module in ("results", "papers"):
        monkeypatch.setattr(import_module(f"kvbench.cli.{module}"), "main", called.append)
    given = [["results"], ["results", str(tmp_path)], ["results", "task=ruler"], ["papers"], ["papers", "dropkv", "5"]]
    for words in given:
        assert main(words) == 0
        assert capsys.readouterr().err.startswith(f"kvbench {words[0]} is now kvbench {words[0]} ")
    assert called == [words[1:] for words in given]


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ("results show 3f {0}", "{0}"),
        ("results compare 3f 77 {0}", "{0}"),
        ("results explain 3f {0}", "{0}"),
        ("results scores {0} task=ruler", "{0}"),
        ("results export {0} {0}/out", "{0}"),
        ("results grid {0}", "{0}"),
        ("check results {0}", "{0}"),
        ("status {0}", "{0}"),
        ("status {0} {0}/sweep", "{0}"),
        ("papers write {0} dropkv 99", "{0}"),
        only_in_full("dev replay {0} --records 1 --seed 1", "{0}"),
        ("check method knorm --set no=1", None),
    ],
)
def test_an_old_form_works_and_says_the_new_one(given, moved, tmp_path, capsys):
    """Each then ends in the line that it ends in when it is given in the new form."""
    (tmp_path / "runs").mkdir()
    words = given.format(tmp_path).split()
    old, new = ("--set no=1", "no=1") if moved is None else (str(tmp_path), f"--results {tmp_path}")
    code = main(words)
    line, *rest = capsys.readouterr().err.splitlines()
    assert line == f"{old} is now {new}; the old form goes in the next release"
    assert main(" ".join(words).replace(old, new, 1).split()) == code
    assert capsys.readouterr().err.splitlines() == rest and len(rest) == code // 2


@pytest.mark.parametrize(
    "given",
    ["results show 3f --results a --results b", "results scores a/b --results c", "results grid a --results b",
     "results scores a/b c/d", "run --results a results=b", "plan --results a task=ruler results=b"],
)  # fmt: skip
def test_two_folders_of_results_are_one_line(given, capsys):
    assert main(given.split()) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.endswith(": give only one folder of results") and len(before) < 2


def test_a_run_takes_the_folder_of_results(tmp_path, capsys):
    folder = tmp_path / "a=b 'c"
    assert main(["run", "--cfg", "job", "-p", "results", "--results", str(folder)]) == 0
    assert capsys.readouterr() == (f"{folder}\n", "")


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

codes = [ask(), *(ask(*name.split()) for name in {NAMES!r})]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"{{codes}} {{heavy}}" if any(codes) or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        assert f"usage: kvbench {name} " in done.stdout


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
        "import sys; from kvbench.__main__ import main; code = main(['results', 'grid', '--results', 'nowhere']);"
        "sys.exit(code if code != 2 else {'torch', 'kvbench.cli.curves', 'kvbench.cli.run'} & sys.modules.keys() or 3)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 3, found.stderr
    assert found.stderr.startswith("kvbench: ") and found.stderr.count("\n") == 1


def test_a_missing_extra_is_one_line(capsys, monkeypatch):
    from kvbench.cli import command, report

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert report.main([]) == 2
    said = "altair, vl_convert: not installed; pip install 'kvbench[report]' installs it"
    assert capsys.readouterr() == ("", f"kvbench: {said}\n")


def test_a_table_is_printed(tmp_path, capsys):
    assert main(["papers", "write", "dropkv", "1", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("# DropKV, Table 1")
    assert main(["papers", "write", "dropkv", "99", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("kvbench: EXHIBIT=99: did you mean table")


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("kvbench pap", "papers"),
        ("kvbench results s", "scores show"),
        ("kvbench results scores --gr", "--group-by"),
        ("kvbench run -m met", "method="),
        ("kvbench run -m method=snapkv,kno", "snapkv,knorm"),
        ("kvbench completion f", "fish"),
        ("kvbench results show abc", ""),
    ],
)
def test_bash_completes(line, reply, tmp_path):
    """What follows `=` is a word of its own for bash."""
    script = tmp_path / "script"
    script.write_text(f'{make_script("bash")}COMP_LINE=$1 COMP_POINT=${{#1}}; _kvbench; echo "${{COMPREPLY[*]}}"\n')
    done = subprocess.run(["bash", str(script), line], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert (done.stdout, done.stderr) == (f"{reply}\n", "")


def test_every_shell_gets_the_names_and_another_one_is_one_line(capsys):
    for shell in TEMPLATES:
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert text == make_script(shell) and "snapkv" in text and "leaderboard" in text and "PLACES" not in text
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr() == ("", "kvbench: SHELL=tcsh: choose one of bash, fish, zsh\n")
