"""Look at what a full cache holds and what methods keep, and check what the papers claim about it.

Examples:
  kvbench papers study all                                           every study, on the embedded model
  kvbench papers study keydiff figure14 model=smollm2 task=longbench prompts=20
  kvbench papers study keydiff text=book.txt tokens=8192
  kvbench papers study all tokens=32768 model=random model.like=llama31_8b model.tokenizer=reference --cost cost.csv

The first word is a paper of conf/papers/exhibits/, or all. The second is an exhibit of the paper; without one all of
them are computed. The other words are settings of run.py, such as model, task, block_size, dtype or seed, and

  prompts=4       number of prompts, at equal distances among the samples of the task. Studies that only count tokens
                  read all samples of a data set, unless limit= is given
  text=FILE       read this text, or a folder of texts, in place of a task's samples
  tokens=4096     tokens of a prompt, with text
  layers=0,5      layers that figures of single heads show, or their depths such as 0.5, which stand for the nearest
                  layer (default: up to six at equal distances)
  steps=40        steps of each training, for DeltaKV's Figures 5 and 6
  codec.path=FILE compressors of DeltaKV (kvbench calibrate deltakv), for its Figure 4; the embedded model has some

An exhibit that the model cannot have is an error if it is asked for by name. Otherwise the command says why it is left
out, and goes on with the others.

KeyDiff's Figures 5, 8 to 10 and 12 and Expected Attention's Figure 6 compare methods. They read each prompt with every
method, in the paper's blocks and down to its budgets, whatever block_size and layers say.

The numbers go to results/studies/<hash>/<study>.csv. `kvbench papers write` emits the exhibits from there. A command
that was stopped goes on where it was; studies that were computed before are not computed again.

--cost measures, in place of all this, how much longer a prefill of random tokens takes with each study and with all of
them, and how much memory it needs. The file is a CSV. Studies that read no prompt into a full cache are left out.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, read_number, require_file, run_command
from kvbench.validation import SettingError, require_writable

OWN = {"prompts": "4", "text": None, "tokens": "4096", "layers": None, "codec.path": None, "steps": None}
REFUSED = ("method", "allocator", "codec", "budget", "budget_of", "fidelity")  # a study reads into a full cache


def make_parser() -> CommandParser:
    parser = CommandParser("papers study", __doc__)
    parser.add_argument("paper", help="a paper of conf/papers/exhibits, or all")
    parser.add_settings("words", "EXHIBIT | SETTING=VALUE", "an exhibit of it, and settings")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="measure time and memory, and write them there")
    return parser


def compute_studies(arguments: Sequence[str]) -> int:
    """Compute the studies of a paper or an exhibit, and print the folder and what holds.

    Raises:
        SettingError: There is no such paper or exhibit, or a setting cannot be used.
    """
    options = make_parser().parse(arguments)
    names = [word for word in options.words if "=" not in word]
    if len(names) > (options.paper != "all"):
        raise SettingError(f"{names[-1]}: after a paper one exhibit, after all none; then settings")
    from kvbench.papers.exhibits import describe_claims, list_studies, load_exhibits

    exhibits = load_exhibits(None if options.paper == "all" else options.paper, names[0] if names else None)
    given = dict(OWN)
    settings = []
    for word in options.words:
        name, equals, value = word.partition("=")
        if equals and name in OWN:
            given[name] = value
        elif equals:
            if name.partition(".")[0] in REFUSED:
                raise SettingError(f"{name}={value}: a study reads into a full cache; leave it out")
            settings.append(word)
    count, tokens = (read_number(name, given[name]) for name in ("prompts", "tokens"))
    steps = None if given["steps"] is None else read_number("steps", given["steps"])
    run, results = describe_run(settings, count)

    from kvbench.store.study_lines import read_study
    from kvbench.studies.catalogue import choose_layers, prepare_studies
    from kvbench.studies.passes import StudyPass, TextPieces
    from kvbench.studies.study import LayerStudy, PromptStudy
    from kvbench.studies.training_study import TrainingStudy, with_steps

    text = TextPieces.from_setting(given["text"], tokens)
    studies, missing = prepare_studies(exhibits, run.seed, run.checkpoint, given["codec.path"])
    if given["layers"] is not None:
        shown = choose_layers(given["layers"], run.checkpoint.layout())
        studies = [replace(study, shown=shown) if isinstance(study, LayerStudy) else study for study in studies]
    if trains := {study.name for study in studies if isinstance(study, TrainingStudy)}:
        if len(exhibits) > 1:  # a training takes minutes even on a small model
            if steps is not None:
                raise SettingError(f"steps={steps}: only with one exhibit that trains, deltakv figure05 or figure06")
            reason = SettingError(
                "it trains compressors for minutes; ask for it by name, as in `papers study deltakv figure06`"
            )
            missing |= {name: reason for name, exhibit in exhibits.items() if exhibit["study"] in trains}
        elif steps is not None:
            studies = [with_steps(study, steps) for study in studies]
    elif steps is not None:
        raise SettingError(f"steps={steps}: none of these exhibits trains; leave it out")
    whole = run
    if of_samples := {study.name for study in studies if isinstance(study, PromptStudy)}:
        if text is not None:
            reason = SettingError(f"text={text.path}: it is about the samples of a task; leave text out")
            missing |= {name: reason for name, exhibit in exhibits.items() if exhibit["study"] in of_samples}
        elif run.task.length is None:  # otherwise the task makes samples to a length, and a few say as much as many
            whole = describe_run(settings, None)[0]
    if len(missing) == len(exhibits):
        raise next(iter(missing.values()))
    exhibits = {name: exhibit for name, exhibit in exhibits.items() if name not in missing}
    studies = [study for study in studies if study.name in list_studies(exhibits)]
    if options.cost is not None:
        write_costs(options.cost, run, studies, tokens)
        return 0
    require_writable("results", results)
    folder = StudyPass(run, studies, count, whole, text).execute(results)
    for name, reason in missing.items():
        print(f"kvbench: {name} is left out: {reason}", file=sys.stderr)
    print(folder)
    for line in describe_claims(exhibits, read_study(folder)):
        print(line)
    return 0


def write_costs(path: Path, run: Any, studies: Sequence[Any], tokens: int) -> None:
    """Measure what studies cost, print a line for each, and write the CSV."""
    from kvbench.runs.resources import Resources
    from kvbench.store.csv_rows import format_rows
    from kvbench.store.study_lines import write_text
    from kvbench.studies.cost import COLUMNS, format_costs, measure_costs
    from kvbench.studies.study import LayerStudy

    layered = [study for study in studies if isinstance(study, LayerStudy)]
    if not layered:
        raise SettingError("--cost: not measured for these exhibits, because they read no prompt into a full cache")
    require_file("--cost", path)
    costs = list(measure_costs(Resources(run).model, layered, tokens, run.block_size, run.seed))
    rows = format_costs(costs, tokens, run.block_size, run.device)
    write_text(path, format_rows([COLUMNS, *rows]))
    for study, _, _, seconds, ratio, _, memory, *_ in rows:
        print(f"{study:20}  {seconds} s  {ratio} x" + (f"  {memory} x memory" if memory else ""))


def describe_run(settings: Sequence[str], count: int | None) -> tuple[Any, Path]:
    """Return the run that says what is read, a full cache with enough samples of each subtask, and the results folder.

    Args:
        settings: Settings of run.py.
        count: Number of prompts; None for all samples that the settings allow.
    """
    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import compose_config
    from kvbench.runs.spec import RunSpec

    with translate_errors():
        config = compose_config([f"limit={count or 'null'}", *settings, "method=full"])
        return RunSpec.from_config(config), Path(config.results)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: compute_studies(arguments))
