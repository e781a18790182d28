"""Show how the hash of a run comes about.

Examples:
  kvbench results explain 4c18e060
  kvbench results explain 4c18e060 --results /data/results

A run is identified by its settings, its model's weights, its data, the machine's kind and the sources that can change
its numbers. The command prints them as a tree, each with a short hash, so that two runs can be compared line by line.
It marks the sources that do something else today and those that only one of both hashes contains, because a run with
the same settings gets another hash then.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.config.provenance import FOLDERS, replay_hash, source_hashes
from kvbench.store.run_folder import RunFolder, read_run_value, run_hash
from kvbench.store.runs import list_folders
from kvbench.validation import SettingError

MAX_CHARACTERS = 80  # characters of a value


def explain(results: Path, name: str) -> Iterator[str]:
    """Yield the lines of the tree for the run whose hash begins with `name`.

    Raises:
        SettingError: There is no such run, several begin so, or the run cannot be read.
    """
    folder = find_run(results, name)
    yield folder.hash
    for key in sorted(folder.value.keys() - {"sources"}):
        value = folder.value[key]
        yield f"├─ {key} {run_hash({key: value})[:8]}  {shorten(value)}"
    yield f"└─ sources {folder.value.get('sources')}"
    for line in explain_sources(folder):
        yield f"   {line}"


def find_run(results: Path, name: str) -> RunFolder:
    """Return the run whose hash begins with `name`."""
    matches = [path.name for path in list_folders(results) if path.name.startswith(name)]
    if len(matches) != 1:
        what = f"{len(matches)} runs begin so: {', '.join(matches)}" if matches else f"no run of {results} begins so"
        raise SettingError(f"run={name}: {what}")
    try:
        return RunFolder(results / "runs", read_run_value(results / "runs" / matches[0]))
    except ValueError as error:
        raise SettingError(f"run={matches[0]}: {error}") from None


def explain_sources(folder: RunFolder) -> list[str]:
    """Return one line for each module and package that the run's sources consist of, with what differs today."""
    uid = next(iter(folder.records()), None)
    machine = {} if uid is None else folder.machine(uid)
    then = machine.get("sources")
    if not isinstance(then, Mapping):
        return ["(kvbench 0.1 did not write down which modules these are)"]
    outside = [module for module in then if ".".join(module.split(".")[:2]) not in FOLDERS]
    modules = ["kvbench.runs.runner", *(module for module in outside if then[module])]
    try:
        now = source_hashes(modules)
    except ValueError:
        now = source_hashes([module for module in modules if is_importable(module)])
    lines = []
    if net := machine.get("replay"):
        note = "" if net == replay_hash() else "  (another one today: kvbench computes something else)"
        lines.append(f"{net[:8]:8}  data of the replay net{note}")
    for module, digest in then.items():
        change = "  (does something else today)" if module in now else "  (not hashed today)"
        lines.append(f"{digest[:8]:8}  {module}{'' if now.get(module) == digest else change}")
    lines += [f"{digest[:8]:8}  {module}  (not hashed then)" for module, digest in now.items() if module not in then]
    return lines


def is_importable(module: str) -> bool:
    """Whether a module can be found today."""
    try:
        source_hashes([module])
    except ValueError:
        return False
    return True


def shorten(value: object) -> str:
    """Return a value as text of at most MAX_CHARACTERS characters, and an ellipsis if there are more."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def make_parser() -> CommandParser:
    parser = CommandParser("results explain", __doc__)
    parser.add_argument("run", help="the hash of a run, or its beginning")
    parser.add_results()
    return parser


def print_explanation(arguments: Sequence[str]) -> None:
    """Print the tree."""
    options = make_parser().parse(arguments)
    for line in explain(options.results, options.run):
        print(line)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_explanation(arguments))
