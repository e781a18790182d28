"""Write the card of a tuned model from files: `kvbench dev docs-tables --card`.

The tables of docs/smollm2-long.md, and those of its base in docs/smollm2.md, come from the metadata of the factors,
from the shares of kvbench/training/tuning_data.py, and from three files in results/tuned/<model>/:

  scores.csv   what `kvbench dev choose-solvable --table` wrote of the model and of its base
  text.csv     OUT.text.csv of `kvbench dev tune --evaluate`
  curve.csv    OUT.curve.csv of the same command

The learning curve becomes a picture. The subtasks that a model can do become the list `solvable` of its file in
conf/model/.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from kvbench.analysis.full_scores import AVERAGE, FullScore, read_scores
from kvbench.analysis.solvable_subtasks import LEAST_SCORE
from kvbench.models.low_rank import FactorsFile, read_factors_file
from kvbench.models.tuned_models import TUNED_MODELS
from kvbench.report.doc_tables import escape_cell, replace_table
from kvbench.report.learning_curve import draw_learning_curve
from kvbench.runs.choose_solvable import format_list
from kvbench.training import tuning_recipe
from kvbench.training.tuning import read_tuning
from kvbench.training.tuning_data import MORE, SHARES, SHORT
from kvbench.training.tuning_notes import FAMILIES, read_curve, read_text_losses
from kvbench.training.tuning_recipe import TuningRecipe, choose_recipe
from kvbench.validation import SettingError, refuse_on_error

OPTION = "--card"  # of `kvbench dev docs-tables`
MODEL = "smollm2_long"
PAGE = "docs/smollm2-long.md"
BASE_PAGE = f"docs/{TUNED_MODELS[MODEL]}.md"
PICTURE = f"docs/images/{MODEL}-curve.svg"
CAPTION = "Right answers by family of tasks, and losses, against the tokens read"
CHOICES = {name: f"conf/model/{name}.yaml" for name in (MODEL, TUNED_MODELS[MODEL])}  # model -> its file
LINES = {"loss": "answers", "text": "plain text"}  # losses of the curve -> what the picture's key calls them
NOTE = f"# `kvbench dev docs-tables {OPTION}` writes what follows, from results/tuned/{MODEL}/scores.csv.\n"
GOOD_SCORE = (
    70.0  # points; a row of the table counts the subtasks that reach them, and names the others after the tuning
)


@dataclass(frozen=True)
class CardFiles:
    """The files of a checkout that a card is made from."""

    root: Path

    @property
    def factors(self) -> Path:
        """The file of factors."""
        return self.root / f"kvbench/models/{MODEL}.safetensors"

    def result(self, name: str) -> Path:
        """Return a file of results."""
        return self.root / "results/tuned" / MODEL / name


def make_card(root: Path) -> dict[str, str]:
    """Return the text of each file that the card consists of, by its path in the checkout.

    Args:
        root: The checkout.

    Raises:
        SettingError: A file that the card is made from is missing or damaged.
    """
    files = CardFiles(root)
    text = (root / PAGE).read_text(encoding="utf-8")
    scores = read_scores(files.result("scores.csv"))
    for label, rows in list_tables(files, scores).items():
        text = replace_table(text, label, rows, OPTION)
    choices = {path: (root / path).read_text(encoding="utf-8") for path in CHOICES.values()}
    base = (root / BASE_PAGE).read_text(encoding="utf-8")
    for label, rows in list_base_tables(scores).items():
        base = replace_table(base, label, rows, OPTION)
    picture = f"![{CAPTION}]({Path(PICTURE).relative_to('docs')})"
    text = replace_table(text, "learning curve", [picture], OPTION)
    drawn = draw_learning_curve(read_curve(files.result("curve.csv")), {name: name for name in FAMILIES}, LINES)
    listed = {path: replace_list(choices[path], list_solved(scores, name)) for name, path in CHOICES.items()}
    return {PAGE: text, BASE_PAGE: base, **listed, PICTURE: drawn}


def list_tables(files: CardFiles, scores: Sequence[FullScore]) -> dict[str, list[str]]:
    """Return the lines of each table by its label."""
    file = read_factors_file(files.factors, "model.factors")
    tunings = read_tuning(file)
    with refuse_on_error(f"{files.factors}: its metadata have no recipe"):
        recipes = [choose_recipe(tuning["recipe"]) for tuning in tunings]
    return {
        "factors": list(list_facts(file, tunings, scores)),
        "recipe": list(list_settings(recipes)),
        "lengths": list(list_lengths(recipes)),
        "kinds": list(list_kinds()),
        "measurements": list(list_measurements(scores)),
        "scores": list(list_scores(scores, {TUNED_MODELS[MODEL]: "before", MODEL: "after"})),
        "plain text": list(list_text_losses(files)),
    }


def list_base_tables(scores: Sequence[FullScore]) -> dict[str, list[str]]:
    """Return the lines of each table of the base's page by its label."""
    base = TUNED_MODELS[MODEL]
    return {
        "scores": list(list_scores(scores, {base: ""})),
        "measurements": list(list_measurements([score for score in scores if score.model == base])),
    }


def list_facts(file: FactorsFile, tunings: Sequence[Mapping[str, Any]], scores: Sequence[FullScore]) -> Iterator[str]:
    """Yield a table of what the file of factors is."""
    trained = [f"{tuning['steps']:,} steps, {tuning['tokens']:,} tokens, GPUs: {tuning['gpus']}" for tuning in tunings]
    data = file.path.read_bytes()
    numbers = sum(prod(shape) for shape in file.shapes.values())
    weights = ", ".join(f"`{weights}`" for weights in dict.fromkeys(s.weights for s in scores if s.model == MODEL))
    facts = {
        "file": f"`kvbench/models/{file.path.name}`, {len(data):,} bytes, SHA-256 `{sha256(data).hexdigest()}`",
        "base": f"`model={TUNED_MODELS[MODEL]}`, whose weights have the identity `{file.base}`",
        "tuned model": f"its merged weights have the identity {weights}",
        "factors": f"rank {file.rank}, alpha {file.alpha:g}, {numbers:,} numbers",
        "RoPE": f"base θ {file.theta:,.0f}",
        "context": f"{file.longest:,} tokens, prompt and answer together",
        "training": "; then ".join(trained),
        "source": file.metadata["source"],
        "licence": file.metadata["licence"],
        "made with": f"kvbench {file.metadata['kvbench']}",
    }
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {escape_cell(fact)} |" for name, fact in facts.items())


def list_settings(recipes: Sequence[TuningRecipe]) -> Iterator[str]:
    """Yield a table of the settings of each tuning and of what they mean."""
    meanings = read_meanings(Path(tuning_recipe.__file__).read_text(encoding="utf-8"))
    yield f"| setting | {list_heads(recipes)} | meaning |"
    yield f"|---|{'---|' * len(recipes)}---|"
    for name in TuningRecipe().describe():
        values = [getattr(recipe, name) for recipe in recipes]
        shown = " | ".join(value if isinstance(value, str) else f"{value:,.10g}" for value in values)
        yield f"| `{name}` | {shown} | {escape_cell(meanings[name])} |"


def list_heads(recipes: Sequence[TuningRecipe]) -> str:
    """Return the heads of the columns of each tuning."""
    return " | ".join(f"tuning {number}" for number in range(1, len(recipes) + 1))


def read_meanings(source: str) -> dict[str, str]:
    """Return the texts behind the fields of `TuningRecipe` by their names."""
    [recipe] = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TuningRecipe"
    ]
    return {
        field.target.id: text.value.value
        for field, text in zip(recipe.body, recipe.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def list_lengths(recipes: Sequence[TuningRecipe]) -> Iterator[str]:
    """Yield a table of the lengths of samples in each tuning."""
    yield f"| tokens of a sample, at most | {list_heads(recipes)} |"
    yield f"|--:|{'--:|' * len(recipes)}"
    for length in sorted({length for recipe in recipes for length in recipe.shares}):
        shares = " | ".join(f"{100 * recipe.shares.get(length, 0):.1f} %" for recipe in recipes)
        yield f"| {length:,} | {shares} |"


def list_kinds() -> Iterator[str]:
    """Yield a table of the kinds of samples."""
    short = {kind: share * MORE.get(kind, 1) for kind, share in SHARES.items()}
    yield f"| kind | share of samples longer than {SHORT:,} tokens | of others |"
    yield "|---|--:|--:|"
    for kind, share in SHARES.items():
        parts = share / sum(SHARES.values()), short[kind] / sum(short.values())
        yield f"| {kind} | {100 * parts[0]:.1f} % | {100 * parts[1]:.1f} % |"


def list_measurements(scores: Sequence[FullScore]) -> Iterator[str]:
    """Yield a table of how the scores were measured."""
    yield from (
        "| model | weights | task | samples of a subtask | seed | dtype | device |",
        "|---|---|---|---|--:|---|---|",
    )
    counts: dict[tuple[object, ...], dict[int, int]] = {}  # source -> length -> samples
    for score in scores:
        if score.subtask != AVERAGE:
            where = score.model, score.weights, score.task, score.seed, score.dtype, score.device
            counts.setdefault(where, {})[score.length] = score.samples
    for (model, weights, task, seed, dtype, device), numbers in counts.items():
        count = ", ".join(f"{number} of {length} tokens" for length, number in sorted(numbers.items()))
        if len(set(numbers.values())) == 1:
            count = str(next(iter(numbers.values())))
        yield f"| `{model}` | `{weights}` | `{task}` | {count} | {seed} | {dtype} | {device} |"


def list_scores(scores: Sequence[FullScore], models: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of the scores by subtask and length, with a count of good ones.

    Args:
        scores: Scores of all models.
        models: Models of the table -> what their columns are called behind the length; "" for the length alone.
    """
    known = {(score.model, score.length, score.subtask): score for score in scores}
    columns = [
        (model, length)
        for length in sorted({score.length for score in scores})
        for model in models
        if (model, length, AVERAGE) in known
    ]
    names = dict.fromkeys(score.subtask for score in scores if score.model in models and score.subtask != AVERAGE)
    heads = [f"{length}, {models[model]}" if models[model] else f"{length}" for model, length in columns]
    yield f"| subtask | {' | '.join(heads)} |"
    yield f"|---|{'--:|' * len(columns)}"
    for name in (*names, AVERAGE):
        cells = [format_score(known.get((*column, name))) for column in columns]
        bold = "**" if name == AVERAGE else ""
        yield f"| {bold}{name}{bold} | {' | '.join(f'{bold}{cell}{bold}' if cell else '' for cell in cells)} |"
    counted = []
    for column in columns:
        there = {name: known[*column, name].score for name in names if (*column, name) in known}
        others = [name for name, score in there.items() if score < GOOD_SCORE]
        named = f", not {', '.join(others)}" if others and column[0] == MODEL else ""
        counted.append(f"{len(there) - len(others)} of {len(there)}{named}")
    yield f"| subtasks with {GOOD_SCORE:g} or more | {' | '.join(counted)} |"


def format_score(score: FullScore | None) -> str:
    """Return a score with its interval, "" of none."""
    if score is None:
        return ""
    interval = "" if score.low is None or score.high is None else f" [{score.low:.1f}, {score.high:.1f}]"
    return f"{score.score:.1f}{interval}"


def list_text_losses(files: CardFiles) -> Iterator[str]:
    """Yield a table of the losses on plain text."""
    base = TUNED_MODELS[MODEL]
    yield f"| tokens of a sequence | sequences | `{base}`, nats a token | `{MODEL}` | change | device |"
    yield "|--:|--:|--:|--:|--:|---|"
    for loss in read_text_losses(files.result("text.csv")):
        numbers = f"{loss.base:.4f} | {loss.tuned:.4f} | {loss.change:+.4f}"
        yield f"| {loss.length:,} | {loss.sequences} | {numbers} | {loss.device} |"


def list_solved(scores: Sequence[FullScore], model: str) -> list[str]:
    """Return the lines of the list `solvable` for a model's file in conf/.

    Raises:
        SettingError: There are no scores of the model, or of several tasks.
    """
    mine = [score for score in scores if score.model == model and score.subtask != AVERAGE]
    sources = {(score.weights, score.seed, score.task) for score in mine}
    if len(sources) != 1:
        raise SettingError(f"scores.csv: {len(sources)} weights or tasks of {model}; expected one")
    lists: dict[int, list[str]] = {score.length: [] for score in mine}
    for score in mine:
        if score.score >= LEAST_SCORE:
            lists[score.length].append(score.subtask)
    [(weights, seed, task)] = sources
    return list(format_list(weights, seed, task, lists))


def replace_list(text: str, lines: Sequence[str]) -> str:
    """Return a file of conf/model/ whose last key, `solvable`, is written anew."""
    about = f"# The subtasks on which the full cache scores {LEAST_SCORE:g} or more, for a second average in tables:"
    return text.partition(NOTE)[0] + NOTE + "".join(f"{line}\n" for line in (about, *lines))
