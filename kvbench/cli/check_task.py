"""Check one task against what every task must hold, without a model's weights.

Examples:
  kvbench check task phonebook
  kvbench check task mytask task.path=rows.jsonl limit=20 --model reference
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("check task", __doc__)
    parser.add_argument("task", help="its name in conf/task")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="settings of the task; seed and limit")
    parser.add_argument("--config-dir", help="a folder of your own with task/<name>.yaml in it")
    parser.add_argument("--model", default="reference", help="the model whose tokenizer is used")
    return parser


def check_task(arguments: Sequence[str]) -> int:
    """Print what each check finds. Return 1 if one fails."""
    chosen = make_parser().parse(arguments)
    from kvbench.config.compose import add_folder

    if chosen.config_dir is not None:
        add_folder(Path(chosen.config_dir))
    from kvbench.models.checkpoint import Checkpoint, find_model
    from kvbench.runs.task_checks import TaskUnderTest, print_subject, run_checks

    checkpoint = Checkpoint(chosen.model, find_model(chosen.model, "--model"))
    subject = TaskUnderTest(chosen.task, chosen.settings, checkpoint)
    subject.construct()  # a class or setting that cannot be used is refused before anything is printed
    print_subject(subject)
    return 1 if run_checks(subject) else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: check_task(arguments))
