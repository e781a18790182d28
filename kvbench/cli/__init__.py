"""The commands of kvbench: `COMMANDS` is the one table of their names, their modules and their old names."""

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
GROUPS = {
    "results": "Read results: print, draw, compare, export and publish them.",
    "check": "Check results, a bundle, data, a method or a task.",
    "papers": "Compare with papers: their tables, figures and claims beside what was measured.",
    "dev": "Develop kvbench itself: for its maintainers.",
}  # the first word of a command with two words -> what these commands are for


class Command(NamedTuple):
    """A command of `kvbench`.

    Attributes:
        name: What is typed after `kvbench`: a word, or a group and a word.
        module: Its module in kvbench/cli/, which is imported only if the command is called.
        old: Names of 0.1, which the next release does not accept.
    """

    name: str
    module: str
    old: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The group, "" for a command of one word."""
        return self.name.rpartition(" ")[0]

    @property
    def word(self) -> str:
        """The name inside the group."""
        return self.name.rpartition(" ")[2]

    @property
    def summary(self) -> str:
        """What the command does: the first line of its module, which is not imported."""
        with (FOLDER / f"{self.module}.py").open(encoding="utf-8") as file:
            return file.readline().strip('"\n')


COMMANDS = (
    Command("run", "run"),
    Command("plan", "plan"),
    Command("status", "sweep_status", ("sweep-status",)),
    Command("warm", "warm"),
    Command("diagnose", "diagnose", ("study diagnose",)),
    Command("efficiency", "efficiency"),
    Command("model", "model"),
    Command("calibrate", "calibrate"),
    Command("completion", "completion"),
    Command("results scores", "results", ("results",)),
    Command("results show", "show", ("show",)),
    Command("results compare", "compare", ("compare",)),
    Command("results curves", "curves", ("curves",)),
    Command("results grid", "grid", ("grid",)),
    Command("results report", "report", ("report",)),
    Command("results dashboard", "dashboard", ("dashboard",)),
    Command("results figures", "figures", ("figures",)),
    Command("results export", "export", ("export",)),
    Command("results explain", "explain", ("explain",)),
    Command("results grade", "grade", ("grade",)),
    Command("results bundle", "bundle", ("bundle",)),
    Command("results leaderboard", "leaderboard", ("leaderboard",)),
    Command("results wandb-sync", "wandb_sync", ("wandb-sync",)),
    Command("check results", "audit", ("audit",)),
    Command("check bundle", "verify", ("verify",)),
    Command("check data", "data", ("data",)),
    Command("check method", "check_method", ("check-method",)),
    Command("check task", "check_task", ("check-task",)),
    Command("papers write", "papers", ("papers", "table")),
    Command("papers list", "papers_list", ("papers --list",)),
    Command("papers study", "study", ("study",)),
    Command("dev train", "train", ("train",)),
    Command("dev evaluate", "evaluate", ("evaluate",)),
    Command("dev tune", "tune"),
    Command("dev choose-solvable", "choose_solvable", ("choose-solvable",)),
    Command("dev replay", "replay", ("replay",)),
    Command("dev prompt-excerpts", "prompt_excerpts", ("prompt-excerpts",)),
    Command("dev record-schema", "record_schema", ("record-schema",)),
    Command("dev docs-tables", "docs_tables", ("docs-tables",)),
    Command("dev measured", "measured", ("measured",)),
    Command("dev bench-methods", "bench_methods", ("bench-methods",)),
    Command("dev bench-share", "bench_share", ("bench-share",)),
)
