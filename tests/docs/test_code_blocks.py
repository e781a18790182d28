"""Every code block of README.md and docs/ is executed with the embedded model, or says why it is not.

What executes has the marker `docs` and runs with `make test-docs`. `make test` composes the settings of every command,
parses its arguments, or looks its make target up, whether it is executed or not.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from kvbench.__main__ import main as run_kvbench
from kvbench.cli.run import parse_arguments
from kvbench.config import catalogue, compose
from kvbench.sweeps.plan import expand_sweep
from tests.docs.pages import PAGES, Block, iterate_commands, read_blocks
from tests.support.command_line import run_cli
from tests.support.repository import ROOT

LANGUAGES = ("python", "bash", "yaml", "toml", "")
KEYS = ("run with", "run after", "not run")
RUN, KVBENCH = ["python", "run.py"], ["python", "-m", "kvbench"]
OTHERS = ("pre-commit",)  # programs that only blocks that are not run may call
COMMANDS = list(iterate_commands())
NAMES = [f"{block.name}-{number}" for number, (block, _) in enumerate(COMMANDS)]


class Parsed(BaseException):
    """Raised when a command has parsed its arguments, so that it does nothing with them."""


def test_every_block_is_run_or_says_why():
    for page in PAGES:
        blocks = read_blocks(page)
        assert page.read_text().count("\n```") + page.read_text().startswith("```") == 2 * len(blocks), page
        for block in blocks:
            assert block.language in LANGUAGES, block.name
            if block.comment is not None:
                key, _, text = block.comment.partition(": ")
                assert key in KEYS and len(text.split()) >= (3 if key == "not run" else 1), block.name


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the files that a page's blocks show, and that the project does not have, into `folder`."""
    written = []
    for block in read_blocks(page):
        if block.file is not None and not (ROOT / block.file).exists():
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
            written.append(block.file)
    return written


def first_cell(arguments: Sequence[str]) -> list[str]:
    """Return the overrides of a run, or of a sweep's first cell."""
    return expand_sweep(parse_arguments(arguments).overrides)[0]


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=NAMES)
def test_a_command_has_settings_and_arguments_that_exist(block, words, tmp_path, monkeypatch):
    if words[:2] == RUN:
        if any(file.startswith("conf/") for file in write_files(block.page, tmp_path)):
            monkeypatch.setattr(compose, "_added", [tmp_path / "conf"])
        config = compose.compose_config(first_cell(words[2:]))
        for group in ("method", "allocator", "codec", "task"):
            catalogue.resolve(group, config[group])
    elif words[:3] == KVBENCH:
        parse = argparse.ArgumentParser.parse_known_args

        def parse_only(*arguments, **settings):
            parse(*arguments, **settings)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
        with pytest.raises(Parsed):
            run_kvbench(words[3:])
    elif words[0] == "make":
        done = subprocess.run(
            ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
        )
        assert done.returncode == 0, done.stderr
    else:
        assert words[0] in OTHERS and not block.is_run, (block.name, words)


@pytest.mark.parametrize("page", [page for page in PAGES if read_blocks(page)], ids=lambda page: page.name)
def test_yaml_can_be_read_and_python_compiles(page):
    for block in read_blocks(page):
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.name
        if block.language == "python":
            compile(block.text, block.name, "exec")


def is_executed(page: Path) -> bool:
    return any(block.is_run and block.language in ("python", "bash") for block in read_blocks(page))


class Shell:
    """Runs the commands of a page: in this process, or in a copy of the project where the page adds files to it."""

    def __init__(self, page: Path, folder: Path, monkeypatch, capsys) -> None:
        self.monkeypatch, self.capsys, self.copy = monkeypatch, capsys, None
        if any(block.file for block in read_blocks(page)):
            self.copy = folder / "kvbench"
            skip = shutil.ignore_patterns(".*", "results", "site", "tests", "docs", "__pycache__")
            shutil.copytree(ROOT, self.copy, ignore=skip)
            write_files(page, self.copy)
        monkeypatch.chdir(self.copy or folder)

    def run(self, words: Sequence[str], more: Sequence[str]) -> None:
        """Run a command that begins with `python run.py` or `python -m kvbench`; others are not run."""
        if words[0] != "python":
            assert words[0] == "make"
            return
        if words[:2] == RUN and "--cfg" not in words:
            keys = {setting.partition("=")[0] for setting in more}
            words = [*(word for word in words if word.partition("=")[0] not in keys), *more]
        if self.copy is not None:
            done = subprocess.run([sys.executable, *words[1:]], cwd=self.copy, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
        elif words[:2] == RUN:
            code, _, errors = run_cli(words[2:], self.monkeypatch, self.capsys)
            assert code in (0, None), errors[-2000:]
        else:
            assert run_kvbench(words[3:]) in (0, None), self.capsys.readouterr().err[-2000:]


@pytest.mark.docs
@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if is_executed(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    shell = Shell(page, tmp_path, monkeypatch, capsys)
    names: dict = {}
    for block in read_blocks(page):
        if not block.is_run or block.file is not None:
            continue
        if (before := block.says("run after")) is not None:
            shell.run([*RUN, "-m", *before.split()], [])
        if block.language == "python":
            exec(compile(block.text, block.name, "exec"), names)
        elif block.language == "bash":
            for words in block.commands():
                shell.run(words, (block.says("run with") or "").split())


def blocks_of(text: str, folder: Path) -> list[Block]:
    page = folder / "page.md"
    page.write_text(text)
    return read_blocks(page)


def test_blocks_are_found_with_their_comments(tmp_path):
    bash = "<!-- run with: limit=1 -->\n```bash\npython run.py a=1 \\\n  b='x y'  # why\n```\n"
    first, second = blocks_of(f"words\n\n{bash}\n```python\n1\n```\n", tmp_path)
    assert (first.language, first.says("run with"), first.is_run, first.line) == ("bash", "limit=1", True, 3)
    assert first.commands() == [["python", "run.py", "a=1", "b=x y"]]
    assert (second.language, second.comment, second.file) == ("python", None, None)
    [third] = blocks_of("<!-- not run: for a reason -->\n```yaml\n# conf/method/a.yaml\nname: a\n```\n", tmp_path)
    assert not third.is_run and third.file == "conf/method/a.yaml"
