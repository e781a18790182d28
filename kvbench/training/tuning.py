"""Tune low-rank factors of a base model, and go on after an interruption.

Beside the output OUT lie OUT.training, the state from which the same command goes on, and OUT.log.jsonl, the learning
curve. The state is written every minute and at a pause. After an interruption the tuning repeats the steps since then;
on one GPU its factors are to the bit those of a tuning that was never interrupted. The state is removed once OUT is
written.

Several GPUs share the batches of a step, and sum their gradients. Each holds the whole model.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._inductor import config as inductor
from torch.utils import deterministic

from kvbench.config.provenance import find_version
from kvbench.interfaces.tensor_files import IDENTITY
from kvbench.models.low_rank import NUMBERS, FactorsFile
from kvbench.stops import check_stop
from kvbench.training.interrupted_training import Settings, name_log, name_state, write_state
from kvbench.training.recording import write_tensors
from kvbench.training.tuning_batches import TEXT, Batch, SampleSource, read_batches
from kvbench.training.tuning_model import LowRankLlama
from kvbench.training.tuning_recipe import TuningRecipe
from kvbench.validation import SettingError, name_file_in_errors, refuse_on_error

BETAS = (0.9, 0.95)
SAVE_EVERY = 60.0  # seconds
LOG_EVERY = 10  # steps
PRODUCTS = 6  # operations for each weight and token: forward and backward without gradients of weights, and attention
STAGES = "tunings"  # key of the metadata of a file of factors
SURE = 0.6931471805599453  # nats; a token with a smaller loss has a probability over 0.5


@dataclass
class Tally:
    """What was seen of each kind of samples since the last line of the log.

    By kind: nats of the tokens that count, their number, rows in which each of them has a probability over 0.5, so that
    greedy decoding gives the answer, and rows.
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    divergence: float = 0.0
    """Nats of divergence from the base, over all tokens of plain text."""
    seconds: float = 0.0
    waiting: float = 0.0
    """Seconds in which the GPU waited for samples."""
    tokens: int = 0

    def add(self, other: "Tally") -> None:
        """Add what another GPU has seen. The time is that of one."""
        for kind, sums in other.sums.items():
            before = self.sums.get(kind, [0.0] * len(sums))
            self.sums[kind] = [a + b for a, b in zip(before, sums, strict=True)]
        self.divergence += other.divergence
        self.tokens += other.tokens

    def describe(self) -> dict[str, Any]:
        """Return the entries of a line of the log."""
        tasks = {kind: sums for kind, sums in sorted(self.sums.items()) if kind != TEXT}
        nats, count = (sum(sums[i] for sums in tasks.values()) for i in (0, 1))
        text = self.sums.get(TEXT)
        return {
            "loss": round(nats / count, 4) if count else None,
            "text": round(text[0] / text[1], 4) if text else None,
            "kl": round(self.divergence / text[1], 5) if text else None,
            "answers": {kind: round(sums[0] / sums[1], 4) for kind, sums in tasks.items()},
            "scores": {kind: round(100 * sums[2] / sums[3], 1) for kind, sums in tasks.items()},
            "tokens_per_s": round(self.tokens / self.seconds) if self.seconds else None,
            "waiting": round(self.waiting / self.seconds, 3) if self.seconds else None,
        }


@dataclass(frozen=True)
class Ranks:
    """The processes that tune together, one for each GPU."""

    rank: int = 0
    count: int = 1

    def sum(self, flat: Tensor) -> None:
        """Sum a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(flat)

    def gather(self, tally: Tally) -> list[Tally]:
        """Return what all processes have seen in a step, this one first."""
        if self.count == 1:
            return [tally]
        tallies: list[Any] = [None] * self.count
        dist.all_gather_object(tallies, tally)
        return [tally, *(other for rank, other in enumerate(tallies) if rank != self.rank)]


def count_seen(batch: Batch, seen: Tensor) -> Tally:
    """Return what was seen of a batch by kind. The host waits for the GPU.

    Args:
        batch: The batch.
        seen: What `Tuning.compute_loss` returns of it.
    """
    tally = Tally(tokens=batch.ids.numel())
    for kind, (nats, count, is_right, divergence) in zip(batch.kinds, seen.T.tolist(), strict=True):
        tally.add(Tally({kind: [nats, count, is_right, 1.0]}, divergence))
    return tally


def weigh_answers(batch: Batch, is_text: Tensor) -> Tensor:
    """Return the share of each token of a batch in the mean over its answers, (n,), 0 in plain text. They sum to 1.

    Args:
        batch: The batch.
        is_text: Whether a token is plain text, (n,).
    """
    counts = torch.bincount(batch.rows)[batch.rows]
    weights = torch.where(is_text, 0.0, counts.rsqrt())
    return weights / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def make_deterministic() -> None:
    """Let CUDA and the compiler compute the same numbers each time. This must be called before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves time; nothing reads it
    if hasattr(inductor, "deterministic"):  # it chooses no kernel by timing then
        inductor.deterministic = True


class Tuning:
    """A tuning and its progress.

    Args:
        model: The base with factors.
        recipe: The recipe.
        out: The output. The tuning writes the files beside it.
        settings: Value of each option.
        state: What `interrupted_training.load_state` returns.
        ranks: The processes that tune together.
    """

    def __init__(
        self,
        model: LowRankLlama,
        recipe: TuningRecipe,
        out: Path,
        settings: Settings,
        state: Mapping[str, Any] | None = None,
        ranks: Ranks = Ranks(),
    ) -> None:
        self.model, self.recipe, self.out, self.settings, self.ranks = model, recipe, out, settings, ranks
        self.weights = list(model.factors.parameters())
        fused = model.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.weights, lr=recipe.rate, betas=BETAS, weight_decay=0.0, fused=fused)
        self.step, self.logged, self.seconds = 0, 0, 0.0
        self.tally = Tally()
        if state is not None:
            with torch.no_grad():
                for name, weight in model.factors.items():
                    weight.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.logged, self.seconds = state["step"], state["logged"], state["seconds"]
            self.tally = Tally(**state["tally"])
        self.saved = self.step

    def save(self) -> None:
        """Write the state from which the tuning goes on.

        Raises:
            OSError: The state cannot be written, and the one before is unchanged. The error names the file.
        """
        if self.ranks.rank:
            return
        state = {
            "settings": dict(self.settings),
            "step": self.step,
            "logged": self.logged,
            "seconds": self.seconds,
            "tally": vars(self.tally),
            "weights": {name: weight.detach() for name, weight in self.model.factors.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_state(self.out, state)
        self.saved = self.step

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch: the mean cross-entropy of the answers' tokens, plus weighted ones of plain text.

        A token of a sample with n of them weighs 1 / sqrt(n) in the mean, so that a ledger of 2,000 tokens does not
        outweigh all questions that three tokens answer.

        Returns:
            The loss, a scalar, and what was seen of the batch, (4, rows): nats of the tokens that count, their number,
            1 if each of them has a probability over 0.5, and nats of divergence from the base.
        """
        recipe, device = self.recipe, self.model.device
        is_text = torch.tensor([kind == TEXT for kind in batch.kinds])[batch.rows]
        ids, places, targets, rows, in_text = (
            part.to(device, torch.int64) for part in (batch.ids, batch.places, batch.targets, batch.rows, is_text)
        )
        shares = weigh_answers(batch, is_text).to(device)
        x = self.model(ids)
        nats = self.model.compute_entropy(x.index_select(0, places), targets)
        texts = int(is_text.sum())
        loss = (nats * shares).sum()
        zeros = nats.new_zeros(len(batch.kinds))
        diverged = zeros
        if texts:
            loss = loss + recipe.text_weight * (nats * in_text).sum() / texts
            if recipe.kl_weight:
                divergence, owners = self._compare_with_base(x, batch)
                loss = loss + recipe.kl_weight * divergence.mean()
                diverged = zeros.index_add(0, owners, divergence.detach())
        nats = nats.detach()
        nats, count, unsure = (
            zeros.index_add(0, rows, part) for part in (nats, torch.ones_like(nats), (nats >= SURE).to(nats.dtype))
        )
        return loss, torch.stack([nats, count, (unsure == 0).to(nats.dtype), diverged])

    def _compare_with_base(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the divergence from the base's predictions at places in plain text, as far as the base reads.

        Args:
            x: Last hidden states of the batch.
            batch: The batch, which has rows of plain text.

        Returns:
            The divergence in nats, (n,), and the row of each place, (n,).
        """
        device, width = self.model.device, batch.ids.shape[1]
        length = min(width, self.model.shape.positions)
        order = torch.full((len(batch.kinds),), -1)
        order[batch.text_rows] = torch.arange(len(batch.text_rows))
        is_read = (order[batch.rows] >= 0) & (batch.places % width < length)
        places, rows = batch.places[is_read], batch.rows[is_read]
        with torch.no_grad():
            ids = batch.ids[batch.text_rows, :length].to(device, torch.int64)
            base = self.model(ids, tuned=False, compiled=False)
        inner = (order[rows] * length + places % width).to(device)
        return self.model.compute_divergence(
            x.index_select(0, places.to(device)), base.index_select(0, inner)
        ), rows.to(device)

    def take_step(self, batches: Iterator[Batch], stop: bool = False) -> bool:
        """Take one step of the optimizer.

        Args:
            batches: Yields this process's batches.
            stop: Whether this process wants to stop after the step.

        Returns:
            Whether any process wants to stop.

        Raises:
            SettingError: The loss is not finite. The factors are those before the step.
        """
        recipe, begun, tally = self.recipe, time.monotonic(), Tally()
        self.optimizer.zero_grad(set_to_none=True)
        parts: list[tuple[Batch, Tensor]] = []
        for _ in range(recipe.batches // self.ranks.count):
            asked = time.monotonic()
            batch = next(batches)
            tally.waiting += time.monotonic() - asked
            loss, seen = self.compute_loss(batch)
            (loss / recipe.batches).backward()
            parts.append((batch, seen))
        wishes = self.weights[0].new_tensor([float(stop)])
        flat = torch.cat([*(weight.grad.flatten() for weight in self.weights if weight.grad is not None), wishes])
        self.ranks.sum(flat)
        for weight, part in zip(self.weights, flat[:-1].split([w.numel() for w in self.weights]), strict=True):
            weight.grad = part.view_as(weight)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, recipe.clip)
        if not torch.isfinite(norm):
            raise SettingError(f"--rate={recipe.rate}: the gradient of step {self.step + 1} is not finite; give less")
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(self.step)
        self.optimizer.step()
        self.step += 1
        for batch, seen in parts:
            tally.add(count_seen(batch, seen))
        tally.seconds = time.monotonic() - begun
        self.seconds += tally.seconds
        for part in self.ranks.gather(tally):
            self.tally.add(part)
        self.tally.seconds += tally.seconds
        self.tally.waiting += tally.waiting
        return bool(flat[-1].item() > 0)

    def list_numbers(self, last: int) -> range:
        """Return the numbers of this process's batches from the next step to the step `last`."""
        return range(self.step * self.recipe.batches + self.ranks.rank, last * self.recipe.batches, self.ranks.count)

    def run(
        self, make_source: Callable[[], SampleSource], workers: int, pause: float, steps: int | None = None
    ) -> bool:
        """Take the steps that are left, or those until a pause. The state is written every minute and at the end.

        Args:
            make_source: Makes what draws samples, in each worker.
            workers: Number of processes that make samples for this one; 0 makes them in this one.
            pause: Seconds after which the tuning stops.
            steps: Number of steps after which it stops; None for no such limit.

        Returns:
            Whether the tuning is finished.
        """
        begun = saved = time.monotonic()
        last = self.recipe.steps if steps is None else min(self.recipe.steps, self.step + steps)
        batches = read_batches(make_source, self.recipe, self.list_numbers(last), workers)
        stops = False
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with TuningLog(self) as log:
            while self.step < last and not stops:
                check_stop()
                try:
                    stops = self.take_step(batches, time.monotonic() - begun > pause)
                except RuntimeError:
                    check_stop()  # a signal to the whole group ends the workers, too, and torch complains about them
                    raise
                log.write_line()
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return self.step == self.recipe.steps


class TuningLog:
    """Append a line to OUT.log.jsonl every `LOG_EVERY` steps and after the last one, and print it.

    Lines of steps after the last state are written again.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.path = tuning, name_log(tuning.out)

    def __enter__(self) -> "TuningLog":
        if not self.tuning.ranks.rank:
            with name_file_in_errors(self.path):
                self.file = self.path.open("ab")
                self.file.truncate(min(self.tuning.logged, self.file.tell()))
        return self

    def __exit__(self, *error: object) -> None:
        if not self.tuning.ranks.rank:
            self.file.close()

    def write_line(self) -> None:
        """Write a line if it is time."""
        tuning = self.tuning
        if tuning.step % LOG_EVERY and tuning.step < tuning.recipe.steps:
            return
        counts = {"step": tuning.step, "tokens": tuning.step * tuning.recipe.step, "seconds": round(tuning.seconds, 1)}
        line = counts | {"lr": tuning.recipe.learning_rate(tuning.step - 1)} | tuning.tally.describe()
        tuning.tally = Tally()
        if tuning.ranks.rank:
            return
        with name_file_in_errors(self.path):
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()
        tuning.logged = self.file.tell()
        print(json.dumps(line), file=sys.stderr, flush=True)


def write_factors(out: Path, model: LowRankLlama, metadata: Mapping[str, str]) -> None:
    """Write the file of factors (`kvbench.models.low_rank`) and remove the state.

    Args:
        out: The file.
        model: The model with its factors.
        metadata: What `describe_tuning` returns.
    """
    write_tensors(out, model.export(), metadata)
    name_state(out).unlink(missing_ok=True)


def describe_tuning(
    identity: str,
    model: str,
    recipe: TuningRecipe,
    steps: int,
    gpus: int,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Return the metadata of a file of factors.

    Args:
        identity: Identity of the base's weights.
        model: The base.
        recipe: The recipe.
        steps: Number of steps that were taken.
        gpus: Number of GPUs that shared them.
        earlier: What `read_tuning` returns of the file whose factors the tuning began with.
    """
    stages = [*earlier, {"recipe": recipe.describe(), "steps": steps, "tokens": steps * recipe.step, "gpus": gpus}]
    return {
        IDENTITY: identity,
        **{name: str(getattr(recipe, name)) for name in NUMBERS},
        STAGES: json.dumps(stages, sort_keys=True),
        "source": f"samples and texts that kvbench generates (kvbench/training/tuning_data.py), base {model}",
        "licence": "Apache-2.0",
        "kvbench": find_version(),
    }


def read_tuning(file: FactorsFile) -> list[dict[str, Any]]:
    """Return how factors were tuned, for each tuning that took them further: recipe, steps, tokens, GPUs.

    Args:
        file: Their file, which `write_factors` wrote.

    Raises:
        SettingError: The metadata do not say it.
    """
    with refuse_on_error(f"{file.setting}: its metadata do not say how the factors were tuned"):
        stages = [dict(stage) for stage in json.loads(file.metadata[STAGES])]
        if not stages:
            raise ValueError("no tuning")
        return stages


def estimate_hours(numbers: int, tokens: int) -> float:
    """Return about how many hours this machine's processor would tune, by the speed of a product of matrices.

    Args:
        numbers: Number of weights of the base.
        tokens: Number of tokens.
    """
    a = torch.ones(512, 512)
    a @ a
    begun = time.perf_counter()
    for _ in range(8):
        a @ a
    per_second = 8 * 2 * 512**3 / (time.perf_counter() - begun)
    return PRODUCTS * numbers * tokens / per_second / 3600
