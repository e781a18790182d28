"""Every command of the package says in one line what it cannot use, and ends in silence when nobody reads it."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvbench.cli import COMMANDS
from kvbench.cli.command import READER_GONE, run_command
from tests.support.command_line import run_cli
from tests.support.report_store import make_records, write_run
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

NAMELESS = (
    "audit",
    "dashboard",
    "export",
    "grade",
    "grid",
    "papers",
    "papers_list",
    "report",
    "sweep_status",
)  # modules


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    results = tmp_path_factory.mktemp("store")
    write_run(results, make_records(1.0, 100), method={"name": "full"}, sampling={"temperature": 0.0, "top_p": 1.0})
    write_run(results, make_records(0.5, 100), budget=0.5, sampling={"temperature": 0.0, "top_p": 1.0})
    return results


def unread(*arguments: str) -> tuple[int, str]:
    """Exit code and errors of a Python command whose output has no reader."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )  # fmt: skip
    finally:
        os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    ["results scores", *map(only_in_full, ["results curves", "check results", "results grid", "papers write"])]
    + [*map(only_in_full, ["results report", "results export"])],
)
def test_a_command_ends_in_silence(command, store, tmp_path):
    more = [str(tmp_path)] if command == "results export" else []
    assert unread("-m", "kvbench", *command.split(), "--results", str(store), *more) == (READER_GONE, "")


@pytest.mark.parametrize("command", [only_in_full("-m kvbench results grade --help"), "run.py --cfg job"])
def test_so_do_help_and_the_command_line(command):
    assert unread(*command.split()) == (READER_GONE, "")


def test_every_command_is_answered():
    found = [*ROOT.glob("kvbench/**/*.py"), ROOT / "run.py"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}
    scripts = {name for name, text in texts.items() if '__name__ == "__main__"' in text}
    assert scripts == {"kvbench/__main__.py", "run.py"}
    assert all("run_command(" in texts[name] for name in scripts)


def test_another_pipe_that_breaks_is_an_error():
    def work() -> None:
        raise BrokenPipeError("of a helper")

    with pytest.raises(BrokenPipeError, match="of a helper"):
        run_command(work)


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command.module in NAMELESS],
    ids=lambda command: command.module,
)
def test_arguments_that_are_none_are_one_line(command, tmp_path, capsys):
    given = ["--results", str(tmp_path), *["no", "such", "argument", "there"], "--nor=this"]
    assert import_module(f"kvbench.cli.{command.module}").main(given) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("kvbench: unrecognized arguments: ") and err.count("\n") == 1
    assert f"; usage: kvbench {command.name} [-h] " in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "given", "line"),
    [
        ("export", ["--results", "{}", "{}/file/out"], "out={}/file/out: a folder that can be written"),
        ("papers", ["--results", "{}/nowhere"], "results={}/nowhere: no such folder"),
        ("papers", ["dropkv", "1", "--results", "{}/file"], "results={}/file: no such folder"),
        ("bench_share", ["results={}/file", "method=knorm"], "results={}/file: a folder that can be written"),
        ("bench_share", ["nosuch=1"], "nosuch: no such setting"),
        ("bench_share", ["method=nosuch"], "method=nosuch: choose one that kvbench run --help lists"),
        ("bench_share", ["task=efficiency", "method=knorm"], "task=efficiency: one whose prompts"),
        ("wandb_sync", ["--results", "{}", "more"], "more: no SETTING=VALUE; --results DIR names a folder"),
    ],
)
def test_what_cannot_be_used_is_one_line(command, given, line, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert import_module(f"kvbench.cli.{command}").main([own.format(tmp_path) for own in given]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("kvbench: " + line.format(tmp_path)) and err.count("\n") == 1
    assert [own.name for own in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("results={}", "results={}: a folder that can be written"),
        ("hydra.sweep.dir={}/sweep", "hydra.sweep.dir={}/sweep: a folder that can be written"),
        ("hydra/launcher=nosuch", "hydra/launcher=nosuch: choose one of local, slurm"),
    ],
)
def test_a_sweep_that_cannot_be_launched_is_one_line(given, line, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.touch()
    found = run_cli(["-m", "method=snapkv,knorm", given.format(file)], monkeypatch, capsys)
    assert found == (2, "", f"kvbench: {line.format(file)}\n") and list(tmp_path.iterdir()) == [file]
