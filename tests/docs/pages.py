"""The code blocks of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/, and what the comments in front of them say."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<comment>.+) -->\n)?^```(?P<language>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE)
FILE = re.compile(r"# ((?:methods|tasks|conf|kvbench/studies)/[\w./]+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. A comment right in front of it says how to run it.

    `<!-- run with: a=1 b=2 -->` gives its commands `python run.py …` these settings in place of their own, to make them
    small.
    `<!-- run after: a=1 b=2 -->` runs `python run.py -m a=1 b=2` before, so that commands find results.
    `<!-- not run: reason -->` does not run it.
    """

    page: Path
    line: int
    language: str
    text: str
    comment: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def says(self, key: str) -> str | None:
        """Return what the comment says after `key: `, or None."""
        found, _, rest = (self.comment or "").partition(": ")
        return rest if found == key else None

    @property
    def is_run(self) -> bool:
        return self.says("not run") is None

    @property
    def file(self) -> str | None:
        """The file of the repository that the block shows, by its first line."""
        found = FILE.match(self.text)
        return found[1] if found and self.language in ("python", "yaml") else None

    def commands(self) -> list[list[str]]:
        """Return the words of every command of a bash block."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["comment"])
        for found in BLOCK.finditer(text)
    ]


def iterate_commands() -> Iterator[tuple[Block, list[str]]]:
    """Yield every command of every bash block with its block."""
    for page in PAGES:
        for block in read_blocks(page):
            if block.language == "bash":
                for words in block.commands():
                    yield block, words
