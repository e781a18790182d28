"""Find out why a method loses points: compare its attention with the full cache's, layer by layer and head by head.

Examples:
  kvbench diagnose method=snapkv,keydiff budget=0.1,0.2 model=smollm2 task=ruler prompts=8
  kvbench diagnose method=sink budget=0.2 block_size=256 question=hidden model=smollm2 task=ruler
  kvbench diagnose method=h2o budget=0.1 text=book.txt tokens=8192
  kvbench diagnose method=snapkv budget=0.1 tokens=32768 model=random model.like=llama31_8b \\
      model.tokenizer=reference --cost cost.csv

The words are settings of run.py. Those of the cache (method, allocator, codec, budget, block_size) may have several
values, and each combination is a cell. Other settings have one value. Beside them there are

  prompts=4       number of prompts, at equal distances among the samples of the task
  text=FILE       read this text, or a folder of texts, in place of a task's samples
  tokens=4096     tokens of a prompt, with text and with --cost
  window=32       how many tokens before the answer are watched
  answer=16       how many tokens of the full cache's answer are read and watched
  share=0.95      the share of the attention that the oracle's top-p rows get

A prompt is read once into the full cache, and once for each cell. The full cache must fit into memory, twice if a cell
reads the prompt in blocks. The numbers go to results/studies/<hash>/diagnosis.csv. A command that was stopped goes on
where it was, and later cells join those of before. docs/diagnose.md says what is measured and how to read it.

--cost measures, in place of all this, what diagnosing a prompt of random tokens costs. The file is a CSV.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, read_number, require_file, run_command
from kvbench.validation import SettingError, require_writable

OWN = {"prompts": "4", "text": None, "tokens": "4096", "window": "32", "answer": "16", "share": "0.95"}
OF_CELLS = ("method", "allocator", "codec", "budget", "budget_of", "block_size")


def make_parser() -> CommandParser:
    parser = CommandParser("diagnose", __doc__)
    parser.add_settings("words", "SETTING=VALUE", "settings, such as method=snapkv budget=0.1", nargs="+")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="measure what diagnosing costs, and write it there")
    return parser


def diagnose(arguments: Sequence[str]) -> int:
    """Diagnose the cells, and print the folder and a table.

    Raises:
        SettingError: A setting cannot be used.
    """
    options = make_parser().parse(arguments)
    given, settings = dict(OWN), []
    for word in options.words:
        name, equals, value = word.partition("=")
        if not equals:
            raise SettingError(f"{word}: only settings follow diagnose, such as method=snapkv")
        if name == "limit":
            raise SettingError(f"{word}: prompts= says how many samples are read")
        if name in OWN:
            given[name] = value
        else:
            settings.append(word)
    numbers = {name: read_number(name, given[name]) for name in ("prompts", "tokens", "window", "answer")}
    cells, results = plan_cells(settings, numbers["prompts"])

    from kvbench.studies.diagnosis_pass import DiagnosisPass, Watch
    from kvbench.studies.passes import TextPieces

    sizes = [cell.run.block_size for cell in cells]
    run = describe_full(settings, numbers["prompts"], None if None in sizes else max(sizes))
    watch = Watch(numbers["window"], numbers["answer"], read_share(given["share"]))
    text = TextPieces.from_setting(given["text"], numbers["tokens"])
    diagnosis = DiagnosisPass(run, cells, numbers["prompts"], watch, text)
    if options.cost is not None:
        require_file("--cost", options.cost)
        diagnosis.check_memory(numbers["tokens"])
        write_costs(options.cost, diagnosis.measure_costs(numbers["tokens"]))
        return 0
    require_writable("results", results)
    diagnosis.check()
    folder = diagnosis.execute(results)

    from kvbench.analysis.diagnoses import format_diagnosis
    from kvbench.store.study_lines import read_study

    print(folder)
    print("\n".join(format_diagnosis(read_study(folder), [cell.name for cell in cells], find_width())))
    return 0


def plan_cells(settings: Sequence[str], count: int) -> tuple[list[Any], Path]:
    """Return the cells that the settings describe, checked, and the folder of results.

    Raises:
        SettingError: A setting cannot be used, or a cell keeps the full cache as it is.
    """
    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import compose_config, expand_cells, parse_override
    from kvbench.runs.spec import RunSpec
    from kvbench.studies.diagnosis_pass import Cell

    cells: list[Cell] = []
    with translate_errors():
        for word in settings:
            if not is_of_cell(word) and parse_override(word).is_sweep_override():
                raise SettingError(f"{word}: one value; only {', '.join(OF_CELLS)} may have several")
        for words in expand_cells(settings):
            config = compose_config([f"limit={count}", *words])
            run = RunSpec.from_config(config)
            if run.full and run.groups["codec"]["name"] == "raw":
                raise SettingError(
                    "method=full: the full cache loses nothing; choose a method that cuts, or a codec that packs rows"
                )
            budget = None if run.full else run.budget.value
            cells.append(Cell(name_cell(run.groups["method"]["name"], budget, words), run))
    return cells, Path(config.results)


def describe_full(settings: Sequence[str], count: int, block_size: int | None) -> Any:
    """Return the full cache's run: the settings that are not the cells', and a block size."""
    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import compose_config
    from kvbench.runs.spec import RunSpec

    shared = [word for word in settings if not is_of_cell(word)]
    size = "null" if block_size is None else block_size
    with translate_errors():
        run = RunSpec.from_config(compose_config([f"limit={count}", *shared, "method=full", f"block_size={size}"]))
    if run.measures:
        raise SettingError(f"task={run.task_settings['name']}: has no samples; a task with prompts, or text=FILE")
    return run


def is_of_cell(word: str) -> bool:
    """Return whether a setting is one in which cells may differ."""
    return word.partition("=")[0].split(".")[0].lstrip("+") in OF_CELLS


def name_cell(method: str, budget: float | None, words: Sequence[str]) -> str:
    """Return the name of a cell: its method, its budget, and the other settings that the command gives."""
    more = [word for word in words if is_of_cell(word) and word.partition("=")[0] not in ("method", "budget")]
    return " ".join([method, *([] if budget is None else [f"budget={budget}"]), *more])


def read_share(text: str | None) -> float:
    """Return the setting `share`."""
    try:
        share = float(text or "")
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise SettingError(f"share={text}: a number above 0 and at most 1")
    return share


def write_costs(path: Path, costs: Iterable[Sequence[object]]) -> None:
    """Write what diagnosing each cell costs as CSV, and print a line for each."""
    from kvbench.store.csv_rows import format_rows
    from kvbench.store.study_lines import write_text
    from kvbench.studies.diagnosis_pass import COLUMNS

    rows = list(costs)
    write_text(path, format_rows([COLUMNS, *rows]))
    for row in rows:
        cost = dict(zip(COLUMNS, row, strict=True))
        print(f"{cost['cell']}: {cost['ratio']} of a prefill of {cost['prefill_seconds']} s")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: diagnose(arguments))
