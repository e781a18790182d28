"""The text of `kvbench run --help`, which is read from conf/ without Hydra."""

from itertools import groupby

from kvbench.config.paths import CONF, GROUPS

USAGE = """usage: kvbench run [SETTING=VALUE …]           one run, and the full cache's beside it
       kvbench run -m [SETTING=VALUE,VALUE …]  a sweep over all combinations
       kvbench run --cfg job [SETTING=VALUE …] print the settings and run nothing (--cfg hydra: the launcher's)
       kvbench run -m --verbose …              print the table of every cell too, not only one line
       kvbench run --config-dir FOLDER …       take files such as FOLDER/method/mine.yaml too

A finished run is not run again, and an interrupted one continues where it stopped. The results go to results/ in the
current folder; results=FOLDER takes another one.

Examples:
  kvbench run method=snapkv budget=0.1 task=ruler task.length=2048 limit=5
  kvbench run -m method=snapkv,knorm budget=0.05,0.1,0.2 question=hidden
  kvbench run -m preset=dropkv_table5              all runs of a paper's table
  kvbench run row=dropkv_snapkv                    a method as that paper sets it
  kvbench run -m hydra/launcher=slurm …            one SLURM job a cell
"""


def format_run_help() -> str:
    """Return the usage, the names that each group takes, and the settings of conf/config.yaml with their comments."""
    lines = [USAGE, "Groups (method.window=16 changes a setting of the chosen one):"]
    for group in GROUPS:
        names = sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))
        lines.append(f"  {group}={'|'.join(names)}")
    lines += ["", "Settings and their defaults:"]
    for name, block in read_blocks((CONF / "config.yaml").read_text(encoding="utf-8")):
        if name not in ("defaults", "hydra"):
            lines += [f"  {line}" for line in block]
    return "\n".join(lines)


def read_blocks(text: str) -> list[tuple[str, list[str]]]:
    """Split a YAML file at its top-level keys: each key with its lines, those below it included."""
    names: list[str] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        names.append(names[-1] if line[0].isspace() else line.partition(":")[0])
    pairs = groupby(zip(names, lines, strict=True), key=lambda pair: pair[0])
    return [(name, [line for _, line in block]) for name, block in pairs]
