"""Diagnose cells on prompts, and keep the numbers: results/studies/<hash>/, as other studies do.

study.yaml lists the cells under `cells`. The numbers of a cell and a prompt are written as soon as they are known, to
prompts/diagnosis-<cell and sources>-<prompt>.csv, so that a command that was stopped goes on behind them. diagnosis.csv
holds the means over the prompts of all cells that were ever diagnosed on these prompts.
"""

import gc
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from kvbench.analysis.diagnoses import SHARES
from kvbench.config.catalogue import identity_settings
from kvbench.config.imports import sources_unchanging
from kvbench.config.provenance import source_hash
from kvbench.engine.timing import forget_peak, now, peak
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.loading import count_weight_bytes
from kvbench.models.transformers_port import text_config
from kvbench.runs.devices import count_device_bytes
from kvbench.runs.prompt import Prompt
from kvbench.runs.responder import derive_seed
from kvbench.runs.runner import describe_machine
from kvbench.runs.spec import RunSpec
from kvbench.store.parse import parse_yaml
from kvbench.store.run_folder import run_hash, to_plain
from kvbench.store.study_lines import (
    ABOUT,
    CELLS,
    DIAGNOSIS,
    FOLDER,
    PROMPTS,
    Line,
    format_lines,
    read_lines,
    write_text,
)
from kvbench.studies.diagnosis import list_lines
from kvbench.studies.passes import StudyPass, StudyPrompt, TextPieces, average_lines
from kvbench.studies.watched_run import Reading, WatchedRun, answer_greedily, read_answer, read_until_answer
from kvbench.validation import SettingError

REPEATS = 8  # of what --cost measures
COLUMNS = (
    "cell", "tokens", "prefill_seconds", "full_seconds", "cell_seconds", "diagnose_seconds", "ratio", "peak_bytes",
    "device", "torch",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A method, an allocator, a codec, a budget and a block size.

    Attributes:
        name: Its name, such as ``snapkv budget=0.1``.
        run: Its run.
    """

    name: str
    run: RunSpec

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in which cells may differ, as the identity of a run has them."""
        run = self.run
        groups = {name: identity_settings(group) for name, group in run.groups.items()}
        return groups | {"budget": run.budget.value, "budget_of": run.budget.of, "block_size": run.block_size}

    @cached_property
    def file(self) -> str:
        """The beginning of the names of its files."""
        sources = source_hash(["kvbench.studies.diagnosis", *self.run.modules()])
        return f"{DIAGNOSIS}-{run_hash(self.settings | {'sources': sources})[:8]}"


@dataclass(frozen=True)
class Watch:
    """How much of a prompt and its answer is watched. The fields are those of `Reading`."""

    window: int
    tokens: int
    share: float


@dataclass
class DiagnosisPass:
    """Cells of one model on one set of prompts.

    Attributes:
        run: The full cache's run. Its block size is the largest of the cells'.
        cells: The cells.
        count: Number of prompts.
        watch: What is watched.
        text: What is read in place of the task's samples.
    """

    run: RunSpec
    cells: Sequence[Cell]
    count: int
    watch: Watch
    text: TextPieces | None = None

    def __post_init__(self) -> None:
        self.read = StudyPass(self.run, (), self.count, self.run, self.text)
        self.resources = self.read.resources

    def check(self) -> None:
        """Check the prompts before weights are loaded.

        Raises:
            SettingError: A prompt is shorter than the window, or the caches do not fit into memory.
        """
        for prompt in self.read.prompts:
            if len(prompt.ids) < self.watch.window:
                raise SettingError(
                    f"window={self.watch.window}: {prompt.name} has {len(prompt.ids)} tokens; at most that many"
                )
        self.check_memory(max(len(prompt.ids) for prompt in self.read.prompts) + self.watch.tokens)

    def check_memory(self, tokens: int) -> None:
        """Raise a SettingError if the caches of a prompt of so many tokens do not fit into memory."""
        require_memory(self.run, tokens, 1 + max(count_caches(cell.run, tokens) for cell in self.cells))

    @property
    def about(self) -> dict[str, Any]:
        """All settings that may change a number of every cell, for the hash and study.yaml."""
        read_settings = {name: value for name, value in self.read.about.items() if name != "block_size"}
        return read_settings | {"question": self.run.question, "watched": vars(self.watch)}

    def execute(self, results: Path) -> Path:
        """Diagnose what is missing, write the means, and return the folder.

        Args:
            results: The folder of results.
        """
        known: dict[str, Any] = {}
        with sources_unchanging():
            about, cells = self.about, {cell.name: cell.settings | {"files": cell.file} for cell in self.cells}
        folder = results / FOLDER / run_hash(about)
        with suppress(OSError):
            known = parse_yaml((folder / ABOUT).read_bytes()).get(CELLS, {})
        known |= cells
        write_text(folder / ABOUT, yaml.safe_dump(to_plain(about | {CELLS: known}), sort_keys=False))
        for index, prompt in enumerate(tqdm(self.read.prompts, desc="prompts", file=sys.stderr, disable=None)):
            paths = {cell.name: folder / PROMPTS / f"{cell.file}-{index}.csv" for cell in self.cells}
            missing = [cell for cell in self.cells if not paths[cell.name].exists()]
            if missing:
                reading = self.make_reading(prompt)
                full, answer = self._read_full(reading)
                for cell in missing:
                    lines = self._diagnose(cell, reading, full, answer, index)
                    write_text(paths[cell.name], format_lines(lines))
                del full
        prompt_lines: list[list[Line]] = []
        for entry in known.values():
            files = [folder / PROMPTS / f"{entry['files']}-{index}.csv" for index in range(len(self.read.prompts))]
            if all(path.exists() for path in files):  # a cell that was stopped has fewer prompts than the others
                prompt_lines += [read_lines(path, DIAGNOSIS) for path in files]
        write_text(folder / f"{DIAGNOSIS}.csv", format_lines(average_cells(prompt_lines)))
        return folder

    def make_reading(self, prompt: StudyPrompt) -> Reading:
        """Return what is read of a prompt."""
        reading = Reading(
            prompt.ids, prefix=prompt.prefix, **vars(self.watch), seed=derive_seed(self.run.seed, prompt.name)
        )
        reading = replace(reading, words=make_prompt_encoder(self.resources.tokenizer), stop=self.resources.ends)
        if self.text is not None:
            return reading
        sample, encoded = self.resources.prompts[prompt.name]
        context = len(encoded.context) if self.run.question == "hidden" else len(prompt.ids)
        return replace(
            reading,
            ids=prompt.ids[:context],
            question=prompt.ids[context:],
            seed=derive_seed(self.run.seed, sample.group or sample.uid),
            stop=reading.stop.union(sample.ends),
            needles=find_needles(sample, encoded),
        )

    def _read_full(self, reading: Reading) -> tuple[WatchedRun, tuple[int, ...]]:
        run = self.run
        full = WatchedRun(self.resources.model, run.choice(), run.budget, run.block_size, reading, compared=True)
        return full, full.answer()

    def _diagnose(
        self, cell: Cell, reading: Reading, full: WatchedRun, answer: Sequence[int], index: int
    ) -> list[Line]:
        run = cell.run
        watched = WatchedRun(self.resources.model, run.choice(), run.budget, run.block_size, reading)
        full.read(answer)  # only now, so that the device never waits for the host
        watched.read(answer)
        return list(list_lines(full, watched, cell.name, index))

    def measure_costs(self, tokens: int) -> Iterator[list[object]]:
        """Yield what diagnosing a prompt of random tokens costs, a row of `COLUMNS` for each cell.

        Everything is done `REPEATS` times after a first time, which pays for compiling and tuning kernels, and the
        shortest time of each step counts, because a machine that others use only adds to it. The ratio is the time
        beyond the full cache's run and the cell's own, relative to the full cache's prefill.

        Args:
            tokens: Number of tokens.
        """
        run = self.run
        most = text_config(self.resources.model).vocab_size
        ids = torch.randint(most, (tokens,), generator=torch.Generator().manual_seed(run.seed)).tolist()
        reading = Reading(tuple(ids), **vars(self.watch))
        for cell in self.cells:
            times = [self._time_steps(cell, reading) for _ in range(1 + REPEATS)][1:]
            prefill, answering, cell_run, diagnosing = map(min, zip(*times, strict=True))
            more = diagnosing - (prefill + answering + cell_run)
            machine = describe_machine(run.device).get("gpu", "cpu")
            yield [
                cell.name,
                tokens,
                f"{prefill:.4g}",
                f"{prefill + answering:.4g}",
                f"{cell_run:.4g}",
                f"{diagnosing:.4g}",
                f"{more / prefill:.3f}",
                peak(run.device) or "",
                machine,
                torch.__version__,
            ]

    def _time_steps(self, cell: Cell, reading: Reading) -> tuple[float, ...]:
        """Return the seconds of the full cache's prefill, of its answer, of the cell's run, and of diagnosing."""
        model, run, cell_run = self.resources.model, self.run, cell.run
        gc.collect()
        forget_peak(run.device)
        stamps = [now(run.device)]
        context = read_until_answer(model, run.choice(), run.budget, run.block_size, reading)
        stamps.append(now(run.device))
        answer = answer_greedily(context, reading)
        stamps.append(now(run.device))
        context = read_until_answer(model, cell_run.choice(), cell_run.budget, cell_run.block_size, reading)
        read_answer(context, answer)
        del context
        stamps.append(now(run.device))
        full, answer = self._read_full(reading)
        self._diagnose(cell, reading, full, answer, 0)
        stamps.append(now(run.device))
        return tuple(after - before for before, after in pairwise(stamps))


def average_cells(prompts: Iterable[Sequence[Line]]) -> list[Line]:
    """Average the numbers of several prompts. Those of single heads get no interval.

    Intervals are t intervals over prompts, cut to what is possible: nothing is below 0 and no share above 1, unless its
    mean is.
    """
    places: dict[tuple[Any, ...], list[Line]] = {}
    for lines in prompts:
        for line in lines:
            places.setdefault(line.place, []).append(line)
    averaged = []
    for same_place in places.values():
        if same_place[0].head is not None:
            value = sum(line.value for line in same_place) / len(same_place)
            averaged.append(
                same_place[0]._replace(value=value, n=sum(line.n for line in same_place), prompts=len(same_place))
            )
            continue
        line = average_lines(same_place)
        if line.low is not None and line.high is not None:
            most = 1.0 if line.quantity in SHARES else inf
            low, high = max(min(0.0, line.value), line.low), min(max(most, line.value), line.high)
            line = line._replace(low=low, high=high)
        averaged.append(line)
    return averaged


def find_needles(sample: Sample, prompt: Prompt) -> tuple[int, ...]:
    """Return the positions of the tokens of a sample's answers in its context, where they stand as whole words."""
    positions: set[int] = set()
    for target in filter(None, map(str.strip, sample.answers)):
        begin, end = (r"\b" if re.match(r"\w", edge, re.ASCII) else "" for edge in (target[0], target[-1]))
        for match in re.finditer(begin + re.escape(target) + end, sample.context, re.ASCII):
            first, last = bisect_right(prompt.ends, match.start()), bisect_left(prompt.ends, match.end())
            positions.update(range(first, last + 1))
    return tuple(sorted(positions))


def count_caches(run: RunSpec, tokens: int) -> float:
    """Return how many full caches of a prompt the run of a cell takes: its own rows and, in blocks, the copies."""
    budget, choice = run.budget, run.choice()
    copies = choice.codec.packing.before_attention or (run.block_size is not None and run.block_size < tokens)
    rows = budget.rows(tokens, tokens) if choice.method.cuts else None
    return copies + (1.0 if rows is None else min(1.0, rows / tokens))


def require_memory(run: RunSpec, tokens: int, caches: float) -> None:
    """Raise a SettingError if weights and some full caches of a prompt do not fit into the memory that is free.

    bytes = weights + size · (2 · layers · KV heads · dimensions · tokens · caches), where a layer with a sliding
    window or a recurrent state counts as one that holds no rows. What a prefill needs besides is not counted.
    """
    shape, size = run.checkpoint.layout(), run.torch_dtype.itemsize
    rows = len(shape.held) * shape.row_numbers * tokens
    weights = count_weight_bytes(run.checkpoint.config(), run.torch_dtype, run.checkpoint.weights_format)
    wanted = weights + size * rows * caches
    if wanted > (free := count_free_bytes(run)):
        raise SettingError(
            f"model={run.checkpoint.name}: weights and {caches:.2g} full caches of {tokens} tokens take "
            f"{wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free ({run.device}); shorter prompts or "
            "block_size=null"
        )


def count_free_bytes(run: RunSpec) -> int:
    """Return the bytes of memory that are free on the device, on all GPUs with model.device_map=auto."""
    if run.device != "cpu":
        count = torch.cuda.device_count() if run.checkpoint.device_map is not None else 1
        return sum(torch.cuda.mem_get_info(index)[0] for index in range(count))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return count_device_bytes("cpu", False)
