"""The prefill of every method over that of the full cache: what a cut costs, on one machine in one run.

A set-up is a method with its default preset, an allocator and a codec: every method with uniform and raw, and the
method of `--cross` with every other allocator and codec. In a round each set-up is timed once, between two prefills of
the full cache on the same prompt (random tokens: only their number costs time); its ratio is its time over the mean of
these two, so that what else the machine does hits both alike. The table shows the median of the rounds' ratios and
their quartiles. Everything was run once before the rounds. A set-up that is refused is listed with the reason.

Limits: 1.3; 2 for a method that needs the log-sum-exps, since it passes over the logits once more; none for one for
which the model reads the prompt once more. A ratio over its limit is marked; the exit code says nothing about it.
"""

import csv
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

from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import PromptEncoder
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.runs.runner import describe_machine
from kvbench.runs.spec import UNCUT
from kvbench.validation import SettingError, name_file_in_errors, require_choice, require_int

LIMIT = 1.3  # of the full cache's time
LIMIT_LSE = 2.0


@dataclass(frozen=True)
class Setup:
    """Names as in conf/."""

    method: str = UNCUT["method"]
    allocator: str = UNCUT["allocator"]
    codec: str = UNCUT["codec"]

    def __str__(self) -> str:
        return " ".join([self.method, *(own for own in (self.allocator, self.codec) if own not in UNCUT.values())])

    def choice(self, method_args: Mapping[str, Any]) -> CachePolicy:
        """The three, constructed; SettingError where they cannot work."""
        return choose_cache(
            build("method", load_settings("method", self.method, method_args)),
            build("allocator", load_settings("allocator", self.allocator)),
            build("codec", load_settings("codec", self.codec)),
        )


@dataclass(frozen=True)
class PrefillCost:
    """Of one set-up, times in seconds, one for each round."""

    setup: Setup
    limit: float | None = None
    own: tuple[float, ...] = ()
    full: tuple[float, ...] = ()  # mean of the two prefills of the full cache around it
    reason: str = ""  # why it was not run

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the rounds' ratios; the second is the median."""
        return tuple(np.quantile(np.divide(self.own, self.full), (0.25, 0.5, 0.75)).tolist())

    @property
    def over(self) -> bool:
        return self.limit is not None and self.quartiles[1] > self.limit

    @property
    def verdict(self) -> str:
        if self.reason:
            return f"not run: {self.reason}"
        return "no limit" if self.limit is None else "OVER" if self.over else "ok"


def list_setups(methods: Sequence[str], cross: str | None) -> list[Setup]:
    """Every method, and `cross` with every allocator and codec but the plain ones."""
    alone = [Setup(method) for method in methods if method != UNCUT["method"]]
    if cross is None:
        return alone
    allocators = [Setup(cross, allocator=name) for name in list_choices("allocator") if name != UNCUT["allocator"]]
    return [
        *alone,
        *allocators,
        *(Setup(cross, codec=name) for name in list_choices("codec") if name != UNCUT["codec"]),
    ]


def find_limit(method: Method) -> float | None:
    """How many times the full cache's prefill a method may take, None for one that has no limit."""
    return None if method.needs_extra_reads else LIMIT_LSE if method.wants_lse else LIMIT


def time_prefill(
    model: torch.nn.Module, choice: CachePolicy, budget: Budget, ids: Tensor, own: PromptEncoder | None
) -> float:
    """Of one prefill of `ids` (1, tokens) as one block; `own`: for methods that have words for the model."""
    gc.collect()  # the cache before this one
    start = time.perf_counter()
    GenerationContext(model, choice, budget, None, (0,), words=own).prefill(ids)
    return time.perf_counter() - start


def measure_costs(
    model: torch.nn.Module, ids: Tensor, budget: Budget, rounds: int, chosen: Sequence[Setup],
    method_args: Mapping[str, Mapping[str, Any]], own_words: PromptEncoder | None = None,
) -> list[PrefillCost]:  # fmt: skip
    """The costs in the order of `chosen`; `parse_method_args`: settings by method."""
    full = Setup().choice({})
    time_prefill(model, full, Budget(1.0), ids, own_words)
    gc.freeze()  # nothing of what is there now is looked through before every prefill
    ready, refused = {}, {}
    for setup in tqdm(chosen, desc="once before", file=sys.stderr):
        try:
            choice = setup.choice(method_args.get(setup.method, {}))
            time_prefill(model, choice, budget, ids, own_words)
            ready[setup] = choice
        except SettingError as error:
            refused[setup] = PrefillCost(setup, reason=str(error))
    own, around = ({setup: [] for setup in ready} for _ in range(2))
    for number in range(rounds):
        before = time_prefill(model, full, Budget(1.0), ids, own_words)
        for setup, choice in tqdm(ready.items(), desc=f"round {number + 1} of {rounds}", file=sys.stderr):
            own[setup].append(time_prefill(model, choice, budget, ids, own_words))
            after = time_prefill(model, full, Budget(1.0), ids, own_words)
            around[setup].append((before + after) / 2)
            before = after
    costs = {
        setup: PrefillCost(setup, find_limit(choice.method), tuple(own[setup]), tuple(around[setup]))
        for setup, choice in ready.items()
    }
    return [(costs | refused)[setup] for setup in chosen]


def format_costs(costs: Sequence[PrefillCost]) -> str:
    """Aligned text, a line for each set-up."""
    lines = [("set-up", "ms", "full ms", "ratio", "quartiles", "limit", "")]
    for cost in costs:
        numbers = [""] * 4
        if not cost.reason:
            low, middle, high = cost.quartiles
            times = [f"{1000 * float(np.median(own)):.0f}" for own in (cost.own, cost.full)]
            numbers = [*times, f"{middle:.2f}", f"{low:.2f}-{high:.2f}"]
        lines.append((str(cost.setup), *numbers, "" if cost.limit is None else f"{cost.limit:.1f}", cost.verdict))
    first, *middle, last = zip(*lines, strict=True)
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in middle]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, last, strict=True))


def save_costs(costs: Sequence[PrefillCost], path: Path, about: Mapping[str, Any]) -> None:
    """A CSV whose lines stand alone: unrounded numbers, and what is the same for all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    titles = ("method", "allocator", "codec", "ms", "full_ms", "ratio", "quartile_1", "quartile_3", "limit", "over")
    with name_file_in_errors(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*titles, "not_run", *about])
        for cost in costs:
            setup, numbers = cost.setup, [None] * 7
            if not cost.reason:
                low, middle, high = cost.quartiles
                times = [1000 * float(np.median(own)) for own in (cost.own, cost.full)]
                numbers = [*times, middle, low, high, cost.limit, cost.over]
            writer.writerow([setup.method, setup.allocator, setup.codec, *numbers, cost.reason, *about.values()])


def parse_value(text: str) -> Any:
    """What YAML says it is, or else the text itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def parse_method_args(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """METHOD.KEY=VALUE, … as settings by method."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, own = text.partition("=")
        method, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise SettingError(f"--set={text}: METHOD.KEY=VALUE")
        require_choice("--set: method", method, methods_available())
        found.setdefault(method, {})[key] = parse_value(own)
    return found


def run_prefill_bench(options: Namespace, command: str) -> None:
    """Measure, save and print."""
    for name in ("tokens", "rounds"):
        require_int(f"--{name}", getattr(options, name), 1)
    for method in (*options.methods, options.cross or UNCUT["method"]):
        require_choice("--methods", method, methods_available())
    if options.out.is_dir() or any(own.is_file() for own in options.out.parents):
        raise SettingError(f"--out={options.out}: no file can be there")
    budget, own = Budget(options.budget), parse_method_args(options.set)
    checkpoint = Checkpoint("timed", find_model(options.model))
    if options.tokens > checkpoint.longest():
        raise SettingError(f"--tokens={options.tokens}: the model takes {checkpoint.longest()}")
    model, own_words = checkpoint.weights(torch.float32, "cpu"), make_prompt_encoder(checkpoint.tokenizer())
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    costs = measure_costs(
        model, ids, budget, options.rounds, list_setups(options.methods, options.cross), own, own_words
    )
    here = describe_machine("cpu")
    about = {name: getattr(options, name) for name in ("model", "tokens", "budget", "rounds")}
    about |= {name: here[name] for name in ("processor", "threads", "python")} | here["versions"]
    save_costs(costs, options.out, about | {"command": command})
    print(format_costs(costs))
    print(f"{options.tokens} tokens, budget {options.budget}, {here['threads']} threads: {options.out}")
