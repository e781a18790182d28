"""Check one method against the laws that every method obeys.

Examples:
  kvbench check method snapkv
  kvbench check method mymethod window=16 preset=paper --model reference
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError


def make_parser() -> CommandParser:
    parser = CommandParser("check method", __doc__)
    parser.add_argument("method", help="its name in conf/method")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the method")
    parser.add_old_set()
    parser.add_argument("--config-dir", help="a folder of your own with method/<name>.yaml in it")
    parser.add_argument("--model", default="reference", help="an embedded model, or the folder of a small one")
    return parser


def check_method(arguments: Sequence[str]) -> int:
    """Print what each check finds. Return 1 if one fails."""
    chosen = make_parser().parse(arguments)
    from pathlib import Path

    from kvbench.config.compose import add_folder

    if chosen.config_dir is not None:
        add_folder(Path(chosen.config_dir))
    import torch
    import yaml

    from kvbench.models.checkpoint import Checkpoint, find_model
    from kvbench.runs.method_checks import MethodUnderTest, print_subject, run_checks

    overrides = {}
    for text in chosen.settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"{text}: KEY=VALUE")
        try:
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SettingError(f"{text}: the value is not valid YAML ({getattr(error, 'problem', error)})") from None
    checkpoint = Checkpoint(chosen.model, find_model(chosen.model, "--model"))
    subject = MethodUnderTest(chosen.method, overrides, checkpoint)
    subject.choice().check(checkpoint.layout())  # refused before weights are loaded
    checkpoint.check()
    torch.set_num_threads(1)
    print_subject(subject)
    return 1 if run_checks(subject) else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: check_method(arguments))
