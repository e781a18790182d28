"""The reference model's full-cache scores: RULER's own prompts and metrics, real greedy generation with transformers.

    python -m kvbench.reference.evaluate --model kvbench/reference --samples 100 --out kvbench/reference/scores.json

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
from kvbench.tasks.ruler import SUBTASKS, Ruler

SEED = 20_000
LENGTHS = (1024, 2048, 4096)


def task(subtask: str, length: int, samples: int) -> Ruler:
    return Ruler(length=length, subtasks=subtask, samples=samples, seed=SEED, cache=None)


def drawn(asked: tuple[str, int, int, str]) -> list[Sample]:
    """Samples of one subtask and length; fitting needs the tokenizer and one added token, <bos>."""
    subtask, length, samples, folder = asked
    return list(task(subtask, length, samples).samples(AutoTokenizer.from_pretrained(folder), 1, length))


@torch.inference_mode()
def outputs(model, tokenizer, samples: list[Sample]) -> list[str]:
    """Greedy answers to the prompts, left-padded to one batch."""
    prompts = [s.context + s.question + s.answer_prefix for s in samples]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=samples[0].max_new_tokens)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(folder: Path, count: int, lengths: tuple[int, ...], batch: int, until: float, out: Path) -> dict:
    """Mean score of every length and subtask, written after each, as long as the clock is before `until`."""
    device, name = ("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else ("cpu", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    asked = [(subtask, length, count, str(folder)) for length in lengths for subtask in SUBTASKS]
    scores: dict = {"samples": count, "seed": SEED, "dtype": "float32", "device": name, "scores": {}}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for (subtask, length, *_), samples in zip(asked, pool.imap(drawn, asked), strict=True):
            if time.time() > until:
                break
            texts = [t for i in range(0, count, batch) for t in outputs(model, tokenizer, samples[i : i + batch])]
            marks = [task(subtask, length, count).score(s, t).score for s, t in zip(samples, texts, strict=True)]
            scores["scores"].setdefault(str(length), {})[subtask] = round(sum(marks) / count, 1)
            out.write_text(json.dumps(scores, indent=1) + "\n")
            print(length, subtask, scores["scores"][str(length)][subtask], flush=True)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "scores.json")
    given = parser.parse_args()
    evaluate(given.model, given.samples, tuple(given.lengths), given.batch, time.time() + given.seconds, given.out)


if __name__ == "__main__":
    sys.exit(answered(main))
