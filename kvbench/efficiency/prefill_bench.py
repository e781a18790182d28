"""Compare the prefill time of every method with that of the full cache: what an eviction costs.

A set-up is a method, an allocator and a codec with their default presets: every method with uniform and raw, and the
method of `--cross` with every other allocator and codec. `--also` adds a method with another preset, for presets that
are methods of their own, or with a codec that the method of `--cross` cannot have. Settings such as
palu.path=FILE change methods and codecs.

Everything runs once before the first round. In a round each set-up is timed once, between two prefills of the full
cache on the same prompt of random tokens. Its ratio is its time over the mean of these two, so that other load of the
machine affects both alike. The table shows the median of the rounds' ratios and their quartiles. A refused set-up is
listed with the reason. The least ratio by operations (kvbench.efficiency.roofline) stands beside it where it is known.

The limit is 1.3. It is 2 for a method that needs log-sum-exps, because it passes over the logits once more. A method
for which the model reads the prompt again has no limit. A ratio over its limit is marked; the exit code does not depend
on it.
"""

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.config.compose import LISTED_BY
from kvbench.efficiency.roofline import prefill_ratio
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import PromptEncoder
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.transformers_port import text_config
from kvbench.runs.runner import describe_machine
from kvbench.runs.spec import UNCUT
from kvbench.store.csv_rows import format_rows
from kvbench.validation import SettingError, name_file_in_errors, require_choice, require_int

LIMIT = 1.3  # times the full cache's prefill
LIMIT_LSE = 2.0


@dataclass(frozen=True)
class Setup:
    """A method, an allocator and a codec, by their names in conf/.

    Attributes:
        method: The method.
        allocator: The allocator.
        codec: The codec.
        preset: The method's preset that `--also` names; "" for the one that its settings have.
    """

    method: str = UNCUT["method"]
    allocator: str = UNCUT["allocator"]
    codec: str = UNCUT["codec"]
    preset: str = ""

    def __str__(self) -> str:
        others = (self.preset, self.allocator, self.codec)
        return " ".join([self.method, *(name for name in others if name and name not in UNCUT.values())])

    def load(self, settings: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Load the settings of the method and of the codec; `settings` are by name of a method or codec."""
        method_args = dict(settings.get(self.method, {}))
        if self.preset:
            method_args["preset"] = self.preset
        codec = load_settings("codec", self.codec, settings.get(self.codec))
        return load_settings("method", self.method, method_args), codec

    def choice(self, settings: Mapping[str, Mapping[str, Any]]) -> CachePolicy:
        """Build the three with settings by name of a method or codec; SettingError if they cannot work together."""
        method, codec = self.load(settings)
        allocator = build("allocator", load_settings("allocator", self.allocator))
        return choose_cache(build("method", method), allocator, build("codec", codec))


@dataclass(frozen=True)
class PrefillCost:
    """The times of one set-up.

    Attributes:
        setup: The set-up.
        limit: How many times the full cache's prefill it may take; None for no limit.
        seconds: Its seconds in each round.
        full: In each round, the mean seconds of the two prefills of the full cache around it.
        floor: The least ratio that its operations allow; None if it is not known.
        reason: Why it was not run.
    """

    setup: Setup
    limit: float | None = None
    seconds: tuple[float, ...] = ()
    full: tuple[float, ...] = ()
    floor: float | None = None
    reason: str = ""

    @property
    def milliseconds(self) -> tuple[float, float]:
        """The medians of its own times and of the full cache's."""
        setup, full = (1000 * float(np.median(seconds)) for seconds in (self.seconds, self.full))
        return setup, full

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of the rounds' ratios; the second is the median."""
        low, middle, high = np.quantile(np.divide(self.seconds, self.full), (0.25, 0.5, 0.75)).tolist()
        return low, middle, high

    @property
    def over(self) -> bool:
        """Whether the median is over the limit."""
        return self.limit is not None and self.quartiles[1] > self.limit

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.reason:
            return f"not run: {self.reason}"
        return "no limit" if self.limit is None else "OVER" if self.over else "ok"


def list_setups(methods: Sequence[str], cross: str | None, also: Sequence[Setup] = ()) -> list[Setup]:
    """List every method, `also`, and `cross` with every allocator and codec but the default ones."""
    alone = [*(Setup(method) for method in methods if method != UNCUT["method"]), *also]
    if cross is None:
        return alone
    allocators = [Setup(cross, allocator=name) for name in list_choices("allocator") if name != UNCUT["allocator"]]
    return [
        *alone,
        *allocators,
        *(Setup(cross, codec=name) for name in list_choices("codec") if name != UNCUT["codec"]),
    ]


def find_limit(method: Method) -> float | None:
    """Return how many times the full cache's prefill a method may take; None for no limit."""
    return None if method.needs_extra_reads else LIMIT_LSE if "lse" in method.wants else LIMIT


def time_prefill(
    model: torch.nn.Module, choice: CachePolicy, budget: Budget, ids: Tensor, words: PromptEncoder | None
) -> float:
    """Return the seconds of one prefill of `ids`, shape (1, tokens), as one block; `words` encodes a method's texts."""
    gc.collect()  # frees the cache of the prefill before
    start = time.perf_counter()
    GenerationContext(model, choice, budget, None, (0,), words=words).prefill(ids)
    return time.perf_counter() - start


def measure_costs(
    model: torch.nn.Module,
    ids: Tensor,
    budget: Budget,
    rounds: int,
    chosen: Sequence[Setup],
    settings: Mapping[str, Mapping[str, Any]],
    own_words: PromptEncoder | None = None,
) -> list[PrefillCost]:
    """Measure set-ups. Return their costs in the order of `chosen`; `settings` are by name of a method or codec."""
    full = Setup().choice({})
    time_prefill(model, full, Budget(1.0), ids, own_words)
    gc.freeze()  # the collector skips everything that exists now
    ready, refused = {}, {}
    for setup in tqdm(chosen, desc="once before", file=sys.stderr):
        try:
            choice = setup.choice(settings)
            time_prefill(model, choice, budget, ids, own_words)
            ready[setup] = choice
        except SettingError as error:
            refused[setup] = PrefillCost(setup, reason=str(error))
    seconds: dict[Setup, list[float]] = {setup: [] for setup in ready}
    around: dict[Setup, list[float]] = {setup: [] for setup in ready}
    for number in range(rounds):
        before = time_prefill(model, full, Budget(1.0), ids, own_words)
        for setup, choice in tqdm(ready.items(), desc=f"round {number + 1} of {rounds}", file=sys.stderr):
            seconds[setup].append(time_prefill(model, choice, budget, ids, own_words))
            after = time_prefill(model, full, Budget(1.0), ids, own_words)
            around[setup].append((before + after) / 2)
            before = after
    costs = {
        setup: PrefillCost(
            setup,
            find_limit(choice.method),
            tuple(seconds[setup]),
            tuple(around[setup]),
            prefill_ratio(model, ids.shape[1], *setup.load(settings)),
        )
        for setup, choice in ready.items()
    }
    return [(costs | refused)[setup] for setup in chosen]


def format_costs(costs: Sequence[PrefillCost]) -> str:
    """Format costs as aligned text with a line for each set-up."""
    lines: list[tuple[str, ...]] = [("set-up", "ms", "full ms", "ratio", "quartiles", "floor", "limit", "")]
    for cost in costs:
        numbers = [""] * 5
        if not cost.reason:
            low, middle, high = cost.quartiles
            times = [f"{milliseconds:.0f}" for milliseconds in cost.milliseconds]
            numbers = [*times, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", format_bound(cost.floor, 2)]
        lines.append((str(cost.setup), *numbers, format_bound(cost.limit, 1), cost.verdict))
    first, *others, last = zip(*lines, strict=True)
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, last, strict=True))


def format_bound(bound: float | None, digits: int) -> str:
    """Return the text of a floor or a limit; "" if there is none."""
    return "" if bound is None else f"{bound:.{digits}f}"


def save_costs(costs: Sequence[PrefillCost], path: Path, about: Mapping[str, Any]) -> None:
    """Write a CSV of unrounded numbers; every line also has what is the same for all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ("method", "preset", "allocator", "codec")
    titles = (*parts, "ms", "full_ms", "ratio", "quartile_1", "quartile_3", "floor", "limit", "over")
    rows: list[list[object]] = [[*titles, "not_run", *about]]
    for cost in costs:
        numbers: list[float | bool | None] = [None] * 8
        if not cost.reason:
            low, middle, high = cost.quartiles
            numbers = [*cost.milliseconds, middle, low, high, cost.floor, cost.limit, cost.over]
        names = [getattr(cost.setup, part) for part in parts]
        rows.append([*names, *numbers, cost.reason, *about.values()])
    with name_file_in_errors(path):
        path.write_text(format_rows(rows), encoding="utf-8")


def parse_value(text: str) -> Any:
    """Parse a value as YAML; a text that is no YAML stays as it is."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse NAME.KEY=VALUE, … into settings by name of a method or codec."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and key):
            raise SettingError(f"{text}: NAME.KEY=VALUE")
        require_choice("method or codec", name, [*methods_available(), *list_choices("codec")], LISTED_BY)
        settings.setdefault(name, {})[key] = parse_value(value)
    return settings


def parse_also(texts: Sequence[str]) -> list[Setup]:
    """Parse METHOD, METHOD.PRESET, METHOD+CODEC or METHOD.PRESET+CODEC, … into set-ups."""
    setups = []
    for text in texts:
        named, plus, codec = text.partition("+")
        method, dot, preset = named.partition(".")
        require_choice("--also: method", method, methods_available(), LISTED_BY)
        if dot:
            load_settings("method", method, {"preset": preset})  # refuses a preset that the method does not have
        if plus:
            require_choice("--also: codec", codec, list_choices("codec"))
        setups.append(Setup(method, codec=codec or UNCUT["codec"], preset=preset))
    return setups


def run_prefill_bench(options: Namespace, command: str) -> None:
    """Measure, save and print."""
    for name in ("tokens", "rounds"):
        require_int(f"--{name}", getattr(options, name), 1)
    for method in (*options.methods, options.cross or UNCUT["method"]):
        require_choice("--methods", method, methods_available(), LISTED_BY)
    if options.out.is_dir() or any(parent.is_file() for parent in options.out.parents):
        raise SettingError(f"--out={options.out}: no file can be there")
    budget, settings = Budget(options.budget), parse_settings(options.settings)
    chosen = list_setups(options.methods, options.cross, parse_also(options.also))
    checkpoint = Checkpoint("timed", find_model(options.model, "--model"))
    if options.tokens > checkpoint.longest():
        raise SettingError(f"--tokens={options.tokens}: the model takes {checkpoint.longest()}")
    model, own_words = checkpoint.weights(torch.float32, "cpu"), make_prompt_encoder(checkpoint.tokenizer())
    vocabulary = text_config(model).vocab_size
    ids = torch.randint(vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    costs = measure_costs(model, ids, budget, options.rounds, chosen, settings, own_words)
    here = describe_machine("cpu")
    about = {name: getattr(options, name) for name in ("model", "tokens", "budget", "rounds")}
    about |= {name: here[name] for name in ("processor", "threads", "python")} | here["versions"]
    save_costs(costs, options.out, about | {"command": command})
    print(format_costs(costs))
    print(f"{options.tokens} tokens, budget {options.budget}, {here['threads']} threads: {options.out}")
