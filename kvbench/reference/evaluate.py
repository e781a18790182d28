"""The reference model's full-cache scores: the tasks' own prompts and metrics, greedy generation by transformers.

    python -m kvbench.reference.evaluate --samples 100 --out scores.json

The seed is not the harness's default, so the draws are not the main table's; the QA questions are, since RULER's sample
i always asks question i. None of either was ever trained on.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.settings import answered
from kvbench.task import Sample
from kvbench.tasks.ledger import LedgerTask
from kvbench.tasks.ruler import SUBTASKS, Ruler

SEED = 20_000
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LEDGER = "ledger"
STEPS = 60  # lines of a ledger
BATCHED = 131_072  # prompt tokens of a batch; its mask has (rows, length, length)
Asked = tuple[str, int, int, str, str | None]  # subtask, length, samples, folder, cache


def task(subtask: str, length: int, samples: int, cache: str | None = None) -> Ruler | LedgerTask:
    if subtask == LEDGER:
        return LedgerTask(length, recalled=5, early=0.5, largest=50, max_new_tokens=None, samples=samples, seed=SEED)
    return Ruler(length=length, subtasks=subtask, samples=samples, seed=SEED, cache=cache)


def drawn(asked: Asked) -> list[Sample]:
    """Samples of one subtask and length; fitting needs the tokenizer and one added token, <bos>."""
    subtask, length, samples, folder, cache = asked
    longest = length if subtask != LEDGER else max(LENGTHS)
    return list(task(subtask, length, samples, cache).samples(AutoTokenizer.from_pretrained(folder), 1, longest))


@torch.inference_mode()
def outputs(model, tokenizer, samples: list[Sample]) -> list[str]:
    """Greedy answers to the prompts, left-padded to one batch."""
    prompts = [s.context + s.question + s.answer_prefix for s in samples]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    new = max(sample.max_new_tokens for sample in samples)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=new)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(
    folder: Path, count: int, lengths: list[int], steps: int, until: float, out: Path, cache: str | None
) -> None:
    """Mean scores of every length and subtask, and of ledgers of `steps` lines, each written at once; none is begun
    after `until`, by the clock.
    """
    device, name = ("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else ("cpu", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    asked = [(LEDGER, steps)] if steps else []
    asked += [(subtask, length) for length in lengths for subtask in SUBTASKS]
    scores: dict = {"samples": count, "seed": SEED, "dtype": "float32", "device": name, "scores": {}}
    every = [(subtask, length, count, str(folder), cache) for subtask, length in asked]
    with multiprocessing.get_context("spawn").Pool(min(4, os.cpu_count() or 1)) as pool:
        for (subtask, length), samples in zip(asked, pool.imap(drawn, every), strict=True):
            if time.time() > until:
                break
            most = max(1, BATCHED // (length if subtask != LEDGER else 4096))
            texts = [t for i in range(0, count, most) for t in outputs(model, tokenizer, samples[i : i + most])]
            marks = [task(subtask, length, count).score(s, t).score for s, t in zip(samples, texts, strict=True)]
            scores["scores"].setdefault(str(length), {})[subtask] = round(sum(marks) / count, 1)
            out.write_text(json.dumps(scores, indent=1) + "\n")
            print(length, subtask, scores["scores"][str(length)][subtask], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "v2")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=STEPS, help="lines of a ledger, 0: no ledger")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after")
    parser.add_argument("--cache", help="folder in which samples are kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "v2/scores.json")
    given = parser.parse_args()
    if given.steps:
        task(LEDGER, given.steps, given.samples).check()
    until = time.time() + given.seconds
    evaluate(given.model, given.samples, given.lengths, given.steps, until, given.out, given.cache)


if __name__ == "__main__":
    sys.exit(answered(main))
