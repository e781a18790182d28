"""The interface of a study that trains DeltaKV's compressors, and what it is told of each training.

A training lies in one file, training-<hash>.json, under the folder of its study's prompts. The hash is of its settings
and of the training's sources, so two studies share a training that both need, and a command that was stopped goes on
with the first one that is missing, from the state that `kvbench calibrate deltakv` would go on from too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from kvbench.config.provenance import source_hash
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.runs.resources import Resources
from kvbench.store.run_folder import run_hash
from kvbench.store.study_lines import Line, write_text
from kvbench.studies.study import Study
from kvbench.training.delta_losses import DeltaRecipe, check_layout, choose_recipe
from kvbench.training.delta_training import DeltaTraining, HeldOut, count_needed
from kvbench.training.interrupted_training import load_state, name_log
from kvbench.training.token_sequences import PackedText, pack_texts, read_text_files, write_essays, write_samples

STEPS, LENGTH = 40, 256  # enough to see an order; the authors train for 20,000 steps


@dataclass(frozen=True)
class Training:
    """A training that has ended.

    Attributes:
        recipe: Its settings.
        losses: For each step, the mean cross-entropy of the next token (`ce`, nats) and the mean squared error of keys
            and values (`mse`), before the step.
        held_out: The losses on sequences that it never read.
    """

    recipe: DeltaRecipe
    losses: list[dict[str, float]]
    held_out: HeldOut


@dataclass(frozen=True)
class TrainingStudy(Study):
    """Trains compressors with several settings, and compares them."""

    steps: int = STEPS
    """Steps of each training, which the command's setting `steps` gives."""

    @property
    def inputs(self) -> str:
        return f"{self.steps} steps of {LENGTH} tokens"

    def prepare(self, checkpoint: Checkpoint, compressors: str | None) -> Self:
        check_layout(checkpoint.layout())
        self.choose(checkpoint, {})
        return self

    def choose(self, checkpoint: Checkpoint, given: Mapping[str, Any]) -> DeltaRecipe:
        """Return the recipe for a model, with some settings of `DeltaRecipe` that differ from the default."""
        layout = checkpoint.layout()
        settings = {"steps": self.steps, "length": min(LENGTH, layout.longest), "seed": self.seed, **given}
        return choose_recipe(2 * layout.heads * layout.dim, layout.longest, settings)

    def list_settings(self, default: DeltaRecipe) -> Iterable[dict[str, Any]]:
        """Return for each training the settings in which it differs from the default recipe."""
        raise NotImplementedError

    def compare(self, default: DeltaRecipe, trainings: Iterable[Training]) -> Iterable[Line]:
        """Return the lines, from the trainings in the order of `list_settings`."""
        raise NotImplementedError

    def compute(self, resources: Resources, text: Path | None, folder: Path) -> Iterable[Line]:
        """Train what has not been trained, and return the lines.

        Args:
            resources: The model and its tokenizer.
            text: A file or folder to train on. None: samples of the embedded model's kind, or essays for other models.
            folder: The folder of the files of trainings.
        """
        checkpoint = resources.run.checkpoint
        default = self.choose(checkpoint, {})
        recipes = [self.choose(checkpoint, settings) for settings in self.list_settings(default)]
        sources = source_hash(["kvbench.training.delta_training"])
        paths = {recipe: folder / f"training-{identify(recipe, sources)}.json" for recipe in recipes}
        missing = {recipe: path for recipe, path in paths.items() if not path.exists()}
        if missing:
            packed = pack_text(resources, text, default)
            for recipe, path in missing.items():
                write_text(path, json.dumps(train(resources, recipe, packed, path.with_suffix(".safetensors"))))
        return self.compare(default, [read_training(path) for path in (paths[recipe] for recipe in recipes)])


def identify(recipe: DeltaRecipe, sources: str) -> str:
    """Return a hash of a training's settings and sources."""
    return run_hash({"recipe": asdict(recipe), "sources": sources})[:8]


def pack_text(resources: Resources, text: Path | None, recipe: DeltaRecipe) -> PackedText:
    """Return the sequences that are trained on, and some more that are held out."""
    folder = Path(resources.run.checkpoint.path)
    if text is not None:
        texts = read_text_files(text, "text")
    elif folder == REFERENCE:
        texts = write_samples(folder, recipe.length, recipe.seed)
    else:
        texts = write_essays(recipe.seed)
    wanted = count_needed(recipe.steps * recipe.batch)
    return pack_texts(resources.tokenizer, texts, recipe.length, wanted, count_needed(recipe.batch))


def train(resources: Resources, recipe: DeltaRecipe, text: PackedText, out: Path) -> dict[str, Any]:
    """Train, and return the settings, the losses and those on the sequences held out, for `read_training`.

    Args:
        resources: The model.
        recipe: The settings.
        text: The sequences.
        out: A file that is not written; the state and the log lie beside it while the training runs.
    """
    layout = resources.run.checkpoint.layout()
    settings = {**asdict(recipe), "text": text.digest}
    state = load_state(out, settings)
    training = DeltaTraining(resources.model, 2 * layout.heads * layout.dim, recipe, text, out, settings, state)
    training.run()
    held_out = training.evaluate()
    log = name_log(out)
    losses = [{name: step[name] for name in ("ce", "mse")} for step in map(json.loads, log.read_text().splitlines())]
    training.forget()
    log.unlink()
    return {"recipe": asdict(recipe), "losses": losses, "held_out": asdict(held_out)}


def read_training(path: Path) -> Training:
    """Read what `train` returned."""
    written = json.loads(path.read_text(encoding="utf-8"))
    return Training(DeltaRecipe(**written["recipe"]), written["losses"], HeldOut(**written["held_out"]))


def with_steps(study: Study, steps: int) -> Study:
    """Return the study, whose trainings take so many steps if it has any."""
    return replace(study, steps=steps) if isinstance(study, TrainingStudy) else study
