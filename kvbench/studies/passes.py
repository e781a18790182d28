"""Read prompts and let studies look at them: one pass over a prompt serves all studies of a full cache.

The numbers of each study and prompt are written as soon as the prompt has been read. A command that was stopped goes on
behind them, and a command that asks for other studies of the same prompts reads the prompts for those only.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from kvbench.analysis.intervals import Values, mean
from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings, task_identity
from kvbench.config.imports import sources_unchanging
from kvbench.config.provenance import source_hash
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import State
from kvbench.models.chat_template import count_template_tokens
from kvbench.models.encoding import encode_text
from kvbench.runs.resources import Resources
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import run_hash, to_plain
from kvbench.store.study_lines import ABOUT, FOLDER, HOLDS, PROMPTS, Line, format_lines, read_lines, write_text
from kvbench.studies.policy_reads import identify_policies, read_policies
from kvbench.studies.policy_study import PolicyStudy
from kvbench.studies.study import ClosedForm, LayerStudy, Memory, PromptStudy, Recorder, Study
from kvbench.studies.training_study import TrainingStudy
from kvbench.training.token_sequences import read_text_files
from kvbench.validation import SettingError

UNLIMITED = 10**9  # tokens: more than any prompt has, so that no task shortens one
LEAST_TOKENS = 128  # shortest prompt; windows and quarters of a shorter one would be empty


@dataclass(frozen=True)
class StudyPrompt:
    """The tokens of a prompt.

    Attributes:
        name: Its uid, or the number of its piece of a text.
        ids: Token ids.
        prefix: Number of tokens before the text.
    """

    name: str
    ids: tuple[int, ...]
    prefix: int = 0


@dataclass(frozen=True)
class TextPieces:
    """A text file, or a folder of them, as prompts of equal length."""

    path: Path
    tokens: int

    @classmethod
    def from_setting(cls, text: str | None, tokens: int) -> "TextPieces | None":
        """Return the text of a command's setting `text`; None if it is not given.

        Raises:
            SettingError: The setting is empty.
        """
        if text == "":
            raise SettingError("text=: a file or a folder of texts; leave it out to read a task's samples")
        return None if text is None else cls(Path(text), tokens)


@dataclass
class StudyPass:
    """Studies of one model on one set of prompts.

    Attributes:
        run: The model, the task, the device and what else settings say; its method is the full cache.
        studies: The studies.
        count: Number of prompts.
        whole: The same run with all samples of the task, for studies that only count their tokens.
        text: What is read in place of the task's samples.
    """

    run: RunSpec
    studies: Sequence[Study]
    count: int
    whole: RunSpec
    text: TextPieces | None = None
    resources: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.resources = Resources(self.run)

    @cached_property
    def prompts(self) -> list[StudyPrompt]:
        """The prompts: pieces of the text, or samples at equal distances of the task, so that no subtask is missing.

        Raises:
            SettingError: There are too few tokens, or a prompt is longer than the model reads.
        """
        if self.text is not None:
            chosen = self._cut_text(self.text)
        else:
            samples = [
                StudyPrompt(uid, prompt.ids, prompt.prefix) for uid, (_, prompt) in self.resources.prompts.items()
            ]
            count = min(self.count, len(samples))
            chosen = [samples[index * len(samples) // count] for index in range(count)]
        for prompt in chosen:
            if len(prompt.ids) < LEAST_TOKENS:
                raise SettingError(f"task: {prompt.name} has {len(prompt.ids)} tokens; a study needs {LEAST_TOKENS}")
            if len(prompt.ids) > self.run.checkpoint.longest():
                raise SettingError(
                    f"task: {prompt.name} has {len(prompt.ids)} tokens, and model={self.run.checkpoint.name} reads "
                    f"{self.run.checkpoint.longest()}"
                )
        return chosen

    def _cut_text(self, text: TextPieces) -> list[StudyPrompt]:
        longest = self.run.checkpoint.longest()
        if not LEAST_TOKENS <= text.tokens <= longest:
            raise SettingError(f"tokens={text.tokens}: from {LEAST_TOKENS} to {longest}, which the model reads")
        switch = self.run.checkpoint.layout().rope_switch
        if switch is not None and self.run.block_size is not None and text.tokens > switch:
            raise SettingError(
                f"block_size={self.run.block_size}: this model's RoPE changes its frequencies beyond {switch} tokens, "
                f"so a text read in blocks is another one; block_size=null, or tokens={switch} at most"
            )
        ids: list[int] = []
        for file_text in read_text_files(text.path, "text"):
            ids += encode_text(self.resources.tokenizer, file_text)[0]
            if len(ids) >= self.count * text.tokens:
                break
        count = min(self.count, len(ids) // text.tokens)
        if not count:
            raise SettingError(f"text={text.path}: {len(ids)} tokens, fewer than tokens={text.tokens}")
        pieces = [tuple(ids[index * text.tokens : (index + 1) * text.tokens]) for index in range(count)]
        return [StudyPrompt(str(index), ids) for index, ids in enumerate(pieces)]

    @cached_property
    def about(self) -> dict[str, Any]:
        """All settings that may change a number, for the hash and study.yaml."""
        value, run = self.run.value, self.run
        ids = sha256(repr([prompt.ids for prompt in self.prompts]).encode()).hexdigest()[:16]
        named = {"name": self.text.path.stem if self.text else str(value["task"]["name"]), "count": len(self.prompts)}
        shown = next((study.shown for study in self.studies if isinstance(study, LayerStudy) and study.shown), None)
        task = {"tokens": self.text.tokens} if self.text else {"task": task_identity(run.task_settings)}
        return {
            "model": value["model"],
            "prompts": named | task | {"ids": ids, "longest": max(len(prompt.ids) for prompt in self.prompts)},
            "block_size": run.block_size,
            "seed": run.seed,
            "device": value["device"],
        } | ({} if shown is None else {"layers": list(shown)})

    def execute(self, results: Path) -> Path:
        """Compute what is missing, write a file for each study, and return the folder.

        Args:
            results: The folder of results.
        """
        folder = results / FOLDER / run_hash(self.about)
        write_text(folder / ABOUT, yaml.safe_dump(to_plain(self.about), sort_keys=False))
        with sources_unchanging():
            files = {study.name: f"{study.name}-{identify_study(study)}" for study in self.studies}
        reading = [study for study in self.studies if isinstance(study, LayerStudy | PolicyStudy)]
        lines_by_study: dict[str, list[list[Line]]] = {study.name: [] for study in reading}
        bar = tqdm(self.prompts if reading else (), desc="prompts", file=sys.stderr, disable=None)
        for index, prompt in enumerate(bar):
            paths = {study.name: folder / PROMPTS / f"{files[study.name]}-{index}.csv" for study in reading}
            missing = [study for study in reading if not paths[study.name].exists()]
            if missing:
                for study, lines in self._read(missing, prompt, index == 0):
                    write_text(paths[study.name], format_lines(lines))
            for name, path in paths.items():
                lines_by_study[name].append(read_lines(path, name))
        for study in self.studies:
            if study.name in lines_by_study:
                lines = average_prompts(lines_by_study[study.name])
            else:
                lines = self._compute(study, folder / PROMPTS / f"{files[study.name]}-{self._limit}.csv")
            write_text(folder / f"{study.name}.csv", format_lines(lines))
        return folder

    @property
    def _limit(self) -> int | str:
        """How many samples of each subtask a study may see that reads no prompt with the model."""
        return self.whole.task_settings["limit"] or "all"

    def _compute(self, study: Study, path: Path) -> list[Line]:
        """Return the lines of a study of no single prompt, from its file if it has been computed."""
        if not path.exists():
            if isinstance(study, PromptStudy):
                tokenizer = self.resources.tokenizer
                samples = self.whole.task.samples(tokenizer, count_template_tokens(tokenizer), UNLIMITED)
                lines = study.compute(list(samples), tokenizer)
            elif isinstance(study, TrainingStudy):
                lines = study.compute(self.resources, None if self.text is None else self.text.path, path.parent)
            else:
                assert isinstance(study, ClosedForm)
                lines = study.compute(self.run.checkpoint.layout(), self.run.checkpoint.config())
            write_text(path, format_lines(lines))
        return read_lines(path, study.name)

    def _read(
        self, studies: Sequence[LayerStudy | PolicyStudy], prompt: StudyPrompt, first: bool
    ) -> Iterator[tuple[Study, list[Line]]]:
        """Read a prompt with the model and yield the lines of each study."""
        model, seed = self.resources.model, self.run.seed
        layered = [study for study in studies if isinstance(study, LayerStudy)]
        if layered:
            memories = read_prompt(model, prompt, layered, self.run.block_size, seed)
            for study in layered:
                yield study, list(study.finish(memories.pop(study.name), first))
        ids = torch.tensor([prompt.ids], device=next(model.parameters()).device)
        comparing = [study for study in studies if isinstance(study, PolicyStudy)]
        yield from read_policies(model, ids, prompt.prefix, comparing, seed, first)


def identify_study(study: Study) -> str:
    """Return a hash of a study's sources and further inputs, for the names of its files."""
    policies = identify_policies(study) if isinstance(study, PolicyStudy) else {}
    return run_hash({"sources": source_hash([type(study).__module__]), "inputs": study.inputs} | policies)[:8]


def read_prompt(
    model: torch.nn.Module,
    prompt: StudyPrompt,
    studies: Sequence[LayerStudy],
    block_size: int | None = None,
    seed: int = 0,
) -> dict[str, dict[int, Memory]]:
    """Read a prompt into a full cache and return what each study remembers of each layer.

    Args:
        model: A supported model.
        prompt: The prompt.
        studies: The studies, all served by one pass.
        block_size: Tokens read at once; None reads the prompt as one block.
        seed: Seed of the sample.
    """
    choice = CachePolicy(
        Recorder("recorder", studies=tuple(studies)),
        Allocator("uniform"),
        build("codec", load_settings("codec", "raw")),
    )
    context = GenerationContext(model, choice, Budget(1.0), block_size, (seed,), prompt.prefix, compile=False)
    context.prefill(torch.tensor([prompt.ids], device=next(model.parameters()).device))
    states: dict[int, State] = {layer.index: layer.state for layer in context.own_layers}
    return {study.name: {index: state.layer[study.name] for index, state in states.items()} for study in studies}


def average_prompts(prompts: Iterable[Sequence[Line]]) -> list[Line]:
    """Average the numbers of several prompts, with 95 % intervals over prompts (kvbench.analysis.intervals).

    Numbers are averaged if they have the same place (`Line.place`). A number that only one prompt has gets no interval.
    Points of a scatter, which share a place with no number of another prompt, stay as they are.
    """
    places: dict[tuple[Any, ...], list[Line]] = {}
    for lines in prompts:
        for line in lines:
            places.setdefault(line.place, []).append(line)
    return [average_lines(same_place) for same_place in places.values()]


def average_lines(lines: Sequence[Line]) -> Line:
    """Average lines of one place. A number that is infinite in a prompt, such as a ratio to 0, is infinite here too."""
    total, values = sum(line.n for line in lines), [line.value for line in lines]
    if inf in values or len(values) == 1:
        return lines[0]._replace(value=max(values), n=total, prompts=len(lines))
    groups = [str(index) for index in range(len(lines))]
    least, most = (0.0, 1.0) if lines[0].series == HOLDS else (-inf, inf)
    average = mean([Values(values, groups, least, most)])
    low = None if average.low is None else max(least, average.low)  # rounding may make it -0.0
    return lines[0]._replace(value=average.value, n=total, low=low, high=average.high, prompts=len(lines))
