"""Train the compressors of DeltaKV, and go on after an interruption.

Beside the output OUT lie OUT.training, the state from which the same command goes on, and OUT.log.jsonl, one line of
losses per step. The state is written every minute. After an interruption the training repeats the steps since then, so
that its weights are those of a training that was never interrupted. The state is removed once OUT is written.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvbench.methods.codecs.delta_compressors import Compressor, name_weights
from kvbench.models.transformers_port import find_text_decoder
from kvbench.stops import check_stop
from kvbench.training.delta_losses import (
    DeltaRecipe,
    combine_losses,
    compute_cross_entropy,
    compute_losses,
    draw_compressors,
)
from kvbench.training.interrupted_training import Settings, name_log, name_state, write_state
from kvbench.training.recording import describe_origin, write_tensors
from kvbench.training.token_sequences import PackedText
from kvbench.validation import SettingError, name_file_in_errors

MOST_HELD_OUT = 16  # sequences that are never trained on
SAVE_EVERY = 60.0  # seconds
FILE_DTYPE = torch.bfloat16  # as in the authors' files


@dataclass(frozen=True)
class HeldOut:
    """The losses on sequences that were not trained on."""

    tokens: int
    """Number of tokens."""
    untouched: float
    """Mean cross-entropy of the untouched model, in nats."""
    compressed: float
    """Mean cross-entropy of the model that reads what the compressors leave."""
    errors: list[float]
    """Mean squared error of each layer."""


def count_held_out(sequences: int) -> int:
    """Return how many of so many sequences are held out: one in 50, at least one."""
    return min(MOST_HELD_OUT, max(1, sequences // 50))


def count_needed(trained: int) -> int:
    """Return how many sequences a text must have so that so many are left beside those held out."""
    return next(total for total in count(trained + 1) if total - count_held_out(total) >= trained)


def order_sequences(sequences: int, batch: int, seed: int, first: int) -> Iterator[list[int]]:
    """Yield the sequences of each step from the step `first` on. Every pass takes all of them in a new order.

    Args:
        sequences: Number of sequences.
        batch: Sequences of a step, at most as many. A rest of a pass that fills no batch is left out.
        seed: Seed of the orders.
        first: Number of steps that were taken before.
    """
    steps = sequences // batch
    for number in count(first // steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(sequences, generator=generator)[: steps * batch].view(steps, batch).tolist()
        yield from order[first % steps if number == first // steps else 0 :]


class DeltaTraining:
    """A training and its progress.

    The compressors are trained in float32, used in the model's dtype, and written in bfloat16.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        width: int,
        recipe: DeltaRecipe,
        text: PackedText,
        out: Path,
        settings: Settings,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Draw compressors, or take those of an interrupted training.

        Args:
            model: A supported transformers model. Its weights no longer require gradients afterwards.
            width: 2·d_k of the model.
            recipe: The recipe.
            text: The sequences. The last ones are held out.
            out: The output. The training writes the files beside it.
            settings: Value of each option.
            state: What `load_state` returns.
        """
        self.model, self.recipe, self.out, self.settings = model.requires_grad_(False), recipe, out, settings
        kept = len(text.sequences) - count_held_out(len(text.sequences))
        self.sequences, self.held_out = text.sequences.split([kept, len(text.sequences) - kept])
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        drawn = draw_compressors(len(find_text_decoder(model).layers), width, recipe)
        self.masters = [compressor.to(self.device, torch.float32) for compressor in drawn]
        self.weights = {name: weight.requires_grad_() for name, weight in name_weights(self.masters).items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=recipe.rate, weight_decay=0.0)
        self.step, self.logged = 0, 0
        if state is not None:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.logged = state["step"], state["logged"]
        self.saved = self.step

    def compressors(self) -> list[Compressor]:
        """Return the compressors in the model's dtype. Gradients flow back to the weights in float32."""
        return [compressor.to(self.device, self.dtype) for compressor in self.masters]

    def save(self) -> None:
        """Write the state from which the training goes on.

        Raises:
            OSError: The state cannot be written, and the one before is unchanged. The error names the file.
        """
        state = {
            "settings": dict(self.settings),
            "step": self.step,
            "logged": self.logged,
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_state(self.out, state)
        self.saved = self.step

    def take_step(self, chosen: Sequence[int]) -> dict[str, float]:
        """Take one step of the optimizer, and return the losses and the learning rate.

        Args:
            chosen: The sequences of the batch.

        Raises:
            SettingError: The loss is not finite. The weights are those before the step.
        """
        ids = self.sequences[chosen].to(self.device, torch.int64)
        entropy, errors = compute_losses(self.model, self.compressors(), ids, self.recipe)
        loss = combine_losses(entropy, errors, self.recipe.loss)
        if not torch.isfinite(loss):
            raise SettingError(
                f"--lr={self.recipe.rate}: the loss of step {self.step + 1} is not finite; give a smaller rate"
            )
        rate = self.recipe.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "ce": entropy.item(), "mse": errors.mean().item(), "lr": rate}

    def run(self) -> None:
        """Take the steps that are left. The state is written every minute."""
        log, recipe = name_log(self.out), self.recipe
        self.out.parent.mkdir(parents=True, exist_ok=True)
        batches = order_sequences(len(self.sequences), recipe.batch, recipe.seed, self.step)
        saved = time.monotonic()
        with (
            name_file_in_errors(log),
            log.open("ab") as file,
            tqdm(total=recipe.steps, initial=self.step, desc="deltakv", unit="step", file=sys.stderr) as bar,
        ):
            file.truncate(min(self.logged, file.tell()))  # lines of steps after the last state are written again
            while self.step < recipe.steps:
                check_stop()
                losses = self.take_step(next(batches))
                file.write(json.dumps(losses).encode() + b"\n")
                file.flush()
                self.logged = file.tell()
                bar.set_postfix(ce=f"{losses['ce']:.3f}", mse=f"{losses['mse']:.4f}", refresh=False)
                bar.update()
                if time.monotonic() - saved > SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        self.save()

    @torch.no_grad()
    def evaluate(self) -> HeldOut:
        """Compute the losses of the written compressors on the sequences held out."""
        compressors = [
            compressor.to(self.device, FILE_DTYPE).to(self.device, self.dtype) for compressor in self.masters
        ]
        untouched, compressed, errors = [], [], []
        for sequence in self.held_out:
            ids = sequence[None].to(self.device, torch.int64)
            untouched.append(compute_cross_entropy(self.model, ids).double())
            entropy, error = compute_losses(self.model, compressors, ids, self.recipe)
            compressed.append(entropy.double())
            errors.append(error.double())
        means = [torch.stack(losses).mean(0) for losses in (untouched, compressed, errors)]
        return HeldOut(self.held_out.numel(), means[0].item(), means[1].item(), means[2].tolist())

    def write(self, metadata: Mapping[str, str]) -> None:
        """Write the compressors and remove the state.

        Args:
            metadata: The metadata of the file.
        """
        write_compressors(self.out, self.masters, metadata)
        self.forget()

    def forget(self) -> None:
        """Remove the state."""
        name_state(self.out).unlink(missing_ok=True)


def write_compressors(out: Path, compressors: Sequence[Compressor], metadata: Mapping[str, str]) -> None:
    """Write the file of the compressors of the layers 0, 1, …, in bfloat16."""
    weights = {name: weight.detach().to("cpu", FILE_DTYPE) for name, weight in name_weights(compressors).items()}
    write_tensors(out, weights, metadata)


def describe_training(
    identity: str, recipe: DeltaRecipe, text: PackedText, source: str, held_out: HeldOut
) -> dict[str, str]:
    """Return the metadata of a file of compressors.

    Args:
        identity: Identity of the model.
        recipe: The recipe.
        text: The texts.
        source: What was read.
        held_out: The losses on the sequences held out.
    """
    numbers = {"recipe": json.dumps(recipe.describe()), "held_out": json.dumps(asdict(held_out))}
    return describe_origin(identity, text, source) | numbers
