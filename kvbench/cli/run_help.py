"""Write the text of `kvbench run --help` from the files of conf/, without Hydra."""

from itertools import groupby

from kvbench.config.paths import CONF, GROUPS

USAGE = """usage: kvbench run [SETTING=VALUE …]           one run, and its baseline with the full cache
       kvbench run -m [SETTING=VALUE,VALUE …]  a sweep over all combinations
       kvbench run --cfg job [SETTING=VALUE …] print the settings without running (--cfg hydra: the launcher's)
       kvbench run -m --verbose …              also print the table of every cell, not only one line
       kvbench run --config-dir FOLDER …       also use files such as FOLDER/method/mine.yaml

A finished run is not repeated, and an interrupted run continues where it stopped. Results go to results/ in the
current folder, or to DIR with --results DIR, which is the setting results=DIR.

Examples:
  kvbench run method=snapkv budget=0.1 task=ruler task.length=2048 limit=5
  kvbench run -m method=snapkv,knorm budget=0.05,0.1,0.2 question=hidden
  kvbench run -m preset=dropkv_table5              all runs of a paper's table
  kvbench run row=dropkv_snapkv                    one method with the settings of that paper
  kvbench run -m hydra/launcher=slurm …            one SLURM job for each cell
"""


def format_run_help() -> str:
    """Return the usage, the names that each group accepts, and the settings of conf/config.yaml with their comments."""
    lines = [USAGE, "Groups (method.window=16 changes a setting of the chosen method):"]
    for group in GROUPS:
        lines.append(f"  {group}={'|'.join(list_names(group))}")
    lines += ["", "Settings and their defaults:"]
    for block in read_settings().values():
        lines += [f"  {line}" for line in block]
    return "\n".join(lines)


def list_names(group: str) -> list[str]:
    """Return the names that a group accepts."""
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def read_settings() -> dict[str, list[str]]:
    """Return the settings of conf/config.yaml, each with its lines."""
    blocks = read_blocks((CONF / "config.yaml").read_text(encoding="utf-8"))
    return {name: block for name, block in blocks if name not in ("defaults", "hydra")}


def read_blocks(text: str) -> list[tuple[str, list[str]]]:
    """Split a YAML file at its top-level keys.

    Returns:
        (key, its lines) for each key. The lines include the indented ones below it, but no blank or comment lines.
    """
    names: list[str] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        names.append(names[-1] if line[0].isspace() else line.partition(":")[0])
    pairs = groupby(zip(names, lines, strict=True), key=lambda pair: pair[0])
    return [(name, [line for _, line in block]) for name, block in pairs]
