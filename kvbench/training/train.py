"""Train the embedded model from scratch. Its model card is kvbench/models/embedded_v2/README.md.

Worker processes make samples while the GPU trains. Sequence length, learning rate and the share of copies follow the
training time, not the number of steps.

The weights, and the state from which `--resume` continues, are written every minute and at the end, even after an
error. Every 100 steps, a line of losses and scores is appended to train.jsonl. `--pause` ends a session before the
training is complete. A resumed training draws new samples, because their seed contains the number of sessions.

The exit code is 1 if the training was interrupted or ran out of samples.
"""

import json
import math
import multiprocessing
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # find GPUs without starting CUDA, because workers are forked later

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbench.atomic import replace_file
from kvbench.runs.workers import exit_with_parent
from kvbench.stops import check_stop
from kvbench.training import tokenizer, training_data
from kvbench.training.architecture import Llama, weight_shapes
from kvbench.training.recipe import Recipe
from kvbench.validation import SettingError

BETAS = (0.9, 0.95)
STATE = "state.pt"
SHARD = 15_000_000  # bytes of a weights file
QUIET = 60  # seconds without a sample after which the training ends
SURE = math.log(2)  # nats; a token with a smaller loss has a probability over 0.5


def feed_batches(name: str, folder: Path, recipe: Recipe, progress, full) -> None:
    """Make batches in a worker process until this process or its parent ends.

    Args:
        name: Part of the seed; every worker has another one.
        folder: Folder with the tokenizer.
        recipe: The recipe.
        progress: Shared value: the share of the training time that is over.
        full: Queue of finished batches. A worker that fails puts its traceback there as text.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the workers
    Thread(target=exit_with_parent, daemon=True).start()
    try:
        maker = training_data.SampleMaker(name, training_data.load_tokenizer(folder), recipe)
        while True:
            done = progress.value
            *earlier, length = recipe.lengths(done)
            earlier = [x for x in earlier if x >= 1024]
            if earlier and maker.rng.random() < recipe.shorter:
                length = maker.rng.choice(earlier)
            full.put(training_data.make_batch(maker, length, recipe.copies if done < recipe.copying else 0.0))
    except Exception:
        full.put(traceback.format_exc())


class NoSamples(Exception):
    """The workers deliver no more samples."""


def receive_batches(full, processes: list) -> Iterator[training_data.Batch]:
    """Yield the batches of the workers in order of arrival. The traceback of a worker that fails goes to stderr.

    Args:
        full: Queue of the workers.
        processes: The workers.

    Raises:
        NoSamples: All workers have ended, or no batch has arrived for `QUIET` seconds.
    """
    waited = 0
    while True:
        try:
            made = full.get(timeout=1)
        except queue.Empty:
            waited, alive = waited + 1, sum(process.is_alive() for process in processes)
            if not alive or waited > QUIET:
                raise NoSamples(f"no samples any more; {alive} of {len(processes)} workers are left") from None
            continue
        waited = 0
        if isinstance(made, str):
            print(made, file=sys.stderr, flush=True)
        else:
            yield made


def learning_rate(recipe: Recipe, done: float) -> float:
    """Return the learning rate at a time from 0 to 1: a linear rise, a constant part, and a linear fall to zero."""
    return recipe.rate * min(1.0, done / recipe.warmup, max(0.0, 1 - done) / (1 - recipe.steady))


def save_model(model: Llama, folder: Path) -> None:
    """Write the weights and configurations from which transformers can load the model."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, weight in model.export().items():
        if sum(map(count_bytes, shards[-1].values())) + count_bytes(weight) > SHARD:
            shards.append({})
        shards[-1][name] = weight
    names = ["model.safetensors"]
    texts: dict[str, dict[str, Any]] = {}
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        where = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(count_bytes(weight) for shard in shards for weight in shard.values())
        texts = {"model.safetensors.index": {"metadata": {"total_size": total}, "weight_map": where}}
    for name, shard in zip(names, shards, strict=True):
        with replace_file(folder / name) as draft:
            save_file(shard, draft, metadata={"format": "pt"})
    special = {"bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS, "pad_token_id": tokenizer.PAD}
    texts |= {"config": model.recipe.config(), "generation_config": special | {"do_sample": False}}
    for name, value in texts.items():
        with replace_file(folder / f"{name}.json") as draft:
            draft.write_text(json.dumps(value, indent=2) + "\n")


def count_bytes(weight: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return weight.numel() * weight.element_size()


@dataclass
class Training:
    """A training and its progress."""

    out: Path
    """Folder for the results."""
    recipe: Recipe
    seed: int
    limit: float
    """Seconds that the whole training takes."""
    spent: float = 0.0
    """Seconds of it that are over."""
    step: int = 0
    """Number of steps taken."""
    tokens: int = 0
    """Number of tokens trained on."""
    sessions: int = 0
    """Number of sessions begun."""
    begun_with: str | None = None
    """Identity of the initial weights; None for random ones."""

    def begin(self, device: str, weights: Path | None) -> None:
        """Create the model and the optimizer, and compile the model.

        Args:
            device: "cuda" or "cpu".
            weights: Folder with initial weights; None for random ones. A later session ignores it and continues from
                the state of the session before.
        """
        self.device, cuda = device, device == "cuda"
        self.model = Llama(self.recipe, self.seed, compile=cuda).to(device)
        matrices = [p for p in self.model.weights if p.dim() > 1]
        rest = [p for p in self.model.weights if p.dim() == 1] + [self.model.maps]
        groups = [{"params": matrices, "weight_decay": self.recipe.decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.recipe.rate, betas=BETAS, fused=cuda)
        if self.sessions:
            state = torch.load(self.out / STATE, map_location=device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        elif weights:
            self.model.take(weights)
        self.sessions += 1
        self.warm()

    def counts(self) -> dict[str, float | str | None]:
        """Return the progress as it is saved for the next session."""
        names = ("seed", "limit", "spent", "step", "tokens", "sessions", "begun_with")
        return {name: getattr(self, name) for name in names}

    def save(self) -> None:
        """Write the weights, and the state from which the next session continues."""
        save_model(self.model, self.out)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "counts": self.counts()}
        with replace_file(self.out / STATE) as draft:
            torch.save(state, draft)

    def losses(self, made: training_data.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses of a batch.

        Returns:
            The cross-entropy of every token, shape (rows, length); the weights of these losses, same shape; the mean
            loss of the look-ahead, a scalar.
        """
        # A blocking copy would wait until the GPU has finished the previous step.
        ids = torch.from_numpy(made.ids).to(self.device, torch.int64, non_blocking=True)
        weights = torch.from_numpy(made.weights[:, 1:]).to(self.device, torch.float32, non_blocking=True)
        pairs, targets = (
            torch.from_numpy(part).to(self.device, non_blocking=True) for part in (made.pairs, made.targets)
        )
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            next_token, last = self.model(ids[:, :-1], ids[:, 1:])
            if not self.recipe.look_ahead:
                return next_token, weights, next_token.new_zeros(())
            looked = self.model.compute_look_ahead_loss(last, pairs, targets)
        return next_token, weights, looked.sum() / (targets >= 0).sum().clamp(min=1)

    def take(self, made: training_data.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Take one step of the optimizer.

        Returns:
            The loss, a scalar; the loss of the look-ahead, a scalar; and a tensor of shape (3, rows) about the answers
            in each row: the sum of their tokens' losses in nats, the number of tokens, and 1 if every token has a
            probability over 0.5, so that greedy decoding answers correctly, else 0.
        """
        recipe, done = self.recipe, self.spent / self.limit
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, done)
        losses, weights, looked = self.losses(made)
        loss = (losses * weights).sum() / weights.sum()
        (loss + recipe.look_weight * min(1.0, done / recipe.look_ramp) * looked).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        answers = (weights > 1.5 * training_data.CONTEXT).float()
        self.step, self.tokens = self.step + 1, self.tokens + losses.numel()
        nats = losses.detach() * answers
        told = torch.stack((nats.sum(1), answers.sum(1), (nats.amax(1) < SURE).float()))
        return loss.detach(), looked.detach(), told

    def warm(self) -> None:
        """Compile the model by a forward and backward pass that changes no weights."""
        length = self.recipe.stages[0][1]
        shape = max(1, self.recipe.tokens // length), length + 1
        pairs = len(self.recipe.offsets), self.recipe.places
        kinds, looked = np.zeros(shape[0], np.int8), np.zeros(pairs, np.int64)
        made = training_data.Batch(np.zeros(shape, np.uint16), np.ones(shape, np.float16), kinds, looked, looked)
        losses, _, ahead = self.losses(made)
        (losses.sum() + ahead).backward()
        self.optimizer.zero_grad(set_to_none=True)


class TrainingLog:
    """Append a line to train.jsonl every `EVERY` steps.

    For each kind of sample it contains the mean loss of the answers' tokens, and as a score the percentage of rows in
    which all answers are correct.
    """

    EVERY = 100

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.names = path, (*training_data.NAMES, "copying")
        self.told = torch.zeros(4, len(self.names), device=device)

    def add(self, training: Training, made: training_data.Batch, loss: Tensor, looked: Tensor, rows: Tensor) -> None:
        """Add the results of a step, as `Training.take` returns them, and write a line if it is time."""
        kinds = torch.from_numpy(made.kinds).to(self.told.device, torch.int64, non_blocking=True) % len(self.names)
        self.told.index_add_(1, kinds, torch.cat((rows, torch.ones_like(rows[:1]))))
        if training.step % self.EVERY:
            return
        told = [(name, *sums) for name, *sums in zip(self.names, *self.told.tolist(), strict=True) if sums[1]]
        line = {
            "step": training.step,
            "seconds": round(training.spent, 1),
            "tokens": training.tokens,
            "length": made.ids.shape[1] - 1,
            "loss": round(loss.item(), 4),
            "ahead": round(looked.item(), 4),
            "answers": {name: round(nats / tokens, 4) for name, nats, tokens, _, _ in told},
            "scores": {name: round(100 * right / count, 1) for name, _, _, right, count in told},
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.told.zero_()
        if training.step % (5 * self.EVERY) == 0:
            print(json.dumps(line), flush=True)


def train(training: Training, device: str, workers: int, pause: float, steps: float, weights: Path | None) -> int:
    """Train until the training, or this session, is complete.

    Args:
        training: The training, new or loaded.
        device: "cuda" or "cpu".
        workers: Number of processes that make samples.
        pause: Seconds after which the session ends.
        steps: Number of steps after which the session ends.
        weights: Folder with initial weights; None for random ones.

    Returns:
        The exit code: 0, or 1 if the session was interrupted or ran out of samples.
    """
    launched, context = time.monotonic(), multiprocessing.get_context("fork")  # forks before CUDA starts
    progress, full = context.Value("d", training.spent / training.limit), context.Queue(maxsize=4 * workers)
    names = [f"{training.seed}/{i}" + f"/{training.sessions}" * (training.sessions > 0) for i in range(workers)]
    processes = [
        context.Process(target=feed_batches, args=(name, training.out, training.recipe, progress, full), daemon=True)
        for name in names
    ]
    for process in processes:
        process.start()
    training.begin(device, weights)
    log = TrainingLog(training.out / "train.jsonl", device)
    begun = saved = time.monotonic()
    before, first, code = training.spent, training.step, 0
    try:
        for made in receive_batches(full, processes):
            check_stop()
            training.spent = before + time.monotonic() - begun
            paused = training.step > first and time.monotonic() - launched > pause  # takes at least one step
            if training.spent > training.limit or paused or training.step >= first + steps:
                break
            progress.value = training.spent / training.limit
            log.add(training, made, *training.take(made))
            if time.monotonic() - saved > 60:
                saved = time.monotonic()
                training.save()
        if not training.step:
            raise NoSamples("the time was over before the first step")
    except (KeyboardInterrupt, NoSamples) as error:
        why, more = f": {error}" * bool(str(error)), "; --resume goes on" * bool(training.step)
        print(f"kvbench: ended early{why}{more}", file=sys.stderr, flush=True)
        code = 1
    finally:
        if training.step:
            training.save()
        for process in processes:
            process.terminate()
    facts = training.counts() | {
        "compiling": round(begun - launched, 1),
        "workers": workers,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in training.model.weights),
    }
    (training.out / "train.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts), flush=True)
    return code


def check_weights(weights: Path, recipe: Recipe) -> None:
    """Check that a folder contains weights of the recipe's shape.

    Raises:
        SettingError: It does not.
    """
    config = weights / "config.json"
    if not config.is_file() or not any(weights.glob("model*.safetensors")):
        raise SettingError(f"--weights={weights}: no folder with config.json and model*.safetensors")
    held, wanted = json.loads(config.read_text()), recipe.config()
    differ = [
        f"{name} is {held.get(name)}, the recipe's {wanted[name]}" for name in wanted if held.get(name) != wanted[name]
    ]
    if differ:
        raise SettingError(f"--weights={weights}: {'; '.join(differ)}")
    names: set[str] = set()
    for path in weights.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    if missing := sorted(weight_shapes(recipe).keys() - names):
        raise SettingError(f"--weights={weights}: {len(missing)} weights are missing, {missing[0]} for one")
