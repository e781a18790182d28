"""Trains the embedded reference model from scratch; the model card is README.md beside this file.

    python -m kvbench.reference.train --out kvbench/reference --minutes 7.5 --seed 0

Worker processes make samples all the while, the GPU takes one step of 131,072 tokens after the other. Sequence length,
learning rate and the share of copying follow the clock, not the step. Every minute, and whatever happens, the weights
are written; a log line every 100 steps goes to train.jsonl.
"""

import argparse
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
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from safetensors.torch import save_file

from kvbench.reference import data, tokenizer
from kvbench.reference.model import CONFIG, Llama
from kvbench.settings import answered
from kvbench.tasks.ruler import SUBTASKS

STAGES = ((0.0, 256), (0.06, 512), (0.14, 1024), (0.30, 2048), (0.55, 4096))  # from this share of the time on
SHORTER = 0.3  # share of batches of an earlier length, from 1024 on
COPIES, COPYING = 0.2, 0.12  # share of rows that are pure copying, up to this share of the time
RATE, WARMUP, BETAS, DECAY, CLIP = 2e-3, 0.01, (0.9, 0.95), 0.05, 1.0


def feed(name: str, folder: Path, tokens: int, progress, full) -> None:
    """A worker: batches for where the training stands, until it is ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        maker = data.Maker(name, data.load(folder))
        while True:
            done = progress.value
            reached = [length for start, length in STAGES if start <= done]
            length = reached[-1]
            earlier = [x for x in reached[:-1] if x >= 1024]
            if earlier and maker.rng.random() < SHORTER:
                length = maker.rng.choice(earlier)
            full.put((length, *data.batch(maker, length, COPIES if done < COPYING else 0.0, tokens)))
    except Exception:
        full.put(traceback.format_exc())


def rate(done: float) -> float:
    """Learning rate after this share of the time: warm-up, then a cosine to zero."""
    return RATE * min(1.0, done / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def save(model: Llama, folder: Path) -> None:
    """Writes the weights and configs that transformers loads; a reader never sees half a file."""
    save_file(model.export(), folder / "model.part", metadata={"format": "pt"})
    os.replace(folder / "model.part", folder / "model.safetensors")
    special = {"bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS, "pad_token_id": tokenizer.PAD}
    for name, value in (("config", CONFIG), ("generation_config", special | {"do_sample": False})):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")


def batches(full, processes: list) -> Iterator[tuple]:
    """What the workers make, in the order of arrival; a worker that fails is reported and missed."""
    while any(process.is_alive() for process in processes):
        try:
            made = full.get(timeout=60)
        except queue.Empty:
            return
        if isinstance(made, str):
            print(made, flush=True)
        else:
            yield made


def train(out: Path, minutes: float, seed: int, workers: int, tokens: int, steps: int) -> None:
    launched, context = time.monotonic(), multiprocessing.get_context("fork")  # before CUDA is touched
    progress, full = context.Value("d", 0.0), context.Queue(maxsize=192)
    processes = [context.Process(target=feed, args=(f"{seed}/{i}", out, tokens, progress, full), daemon=True)
                 for i in range(workers)]  # fmt: skip
    for process in processes:
        process.start()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    model = Llama(seed, compile=device == "cuda").to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=device == "cuda")
    warm = torch.zeros(tokens // 256, 256, dtype=torch.int64, device=device)
    with half:
        model(warm, warm).sum().backward()  # compiles
    optimizer.zero_grad(set_to_none=True)
    begun = saved = time.monotonic()
    limit, spent, step, seen = 60 * minutes - (begun - launched), 0.0, 0, 0
    names = (*SUBTASKS, "copying")
    told = torch.zeros(2, len(names), device=device)  # loss of answers in nats, and their tokens
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends in `finally` too
    try:
        log = (out / "train.jsonl").open("w")
        for length, ids, weights, kinds in batches(full, processes):
            spent = time.monotonic() - begun
            if spent > limit or step == steps:
                break
            progress.value = done = spent / limit
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
            # A blocking copy would wait for the GPU to finish the step before.
            ids = torch.from_numpy(ids).to(device, torch.int64, non_blocking=True)
            weights = torch.from_numpy(weights[:, 1:]).to(device, torch.float32, non_blocking=True)
            with half:
                losses = model(ids[:, :-1], ids[:, 1:])
            loss = (losses * weights).sum() / weights.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            answers = (weights >= data.ANSWER).float()
            rows = torch.stack([(losses.detach() * answers).sum(1), answers.sum(1)])
            kinds = torch.from_numpy(kinds).to(device, torch.int64, non_blocking=True) % len(names)
            told.index_add_(1, kinds, rows)
            step, seen = step + 1, seen + len(ids) * length
            if step % 100 == 0:
                means = {name: round(nats / n, 4) for name, nats, n in zip(names, *told.tolist(), strict=True) if n}
                line = {"step": step, "seconds": round(spent, 1), "tokens": seen, "length": length, "rate": rate(done),
                        "loss": round(loss.item(), 4), "answers": means}  # fmt: skip
                log.write(json.dumps(line) + "\n")
                log.flush()
                told.zero_()
                if step % 500 == 0:
                    print(json.dumps(line), flush=True)
            if time.monotonic() - saved > 60:
                saved = time.monotonic()
                save(model, out)
    except KeyboardInterrupt:
        print("ended early", flush=True)
    finally:
        save(model, out)
        for process in processes:
            process.terminate()
    facts = {"steps": step, "tokens": seen, "seconds": round(spent, 1), "compiling": round(begun - launched, 1),
             "seed": seed, "workers": workers, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
             "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
    (out / "train.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--tokens", type=int, default=data.TOKENS, help="a step")
    parser.add_argument("--steps", type=int, default=10**9, help="stop earlier, for a trial")
    parser.add_argument("--tokenizer", action="store_true", help="learn the tokenizer into --out, and no more")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.tokenizer or not (given.out / "tokenizer.json").exists():
        tokenizer.learn(data.corpus(), CONFIG["vocab_size"], given.out)
    if not given.tokenizer:
        train(given.out, given.minutes, given.seed, given.workers, given.tokens, given.steps)


if __name__ == "__main__":
    sys.exit(answered(main))
