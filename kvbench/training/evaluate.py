"""Score the embedded model with the full cache.

Prompts and metrics come from the tasks of kvbench. transformers generates the answers greedily.

The output file describes what was scored and how, and contains a list of {task, length or steps, samples, score} under
`scores`. If the file exists and describes the same weights, new scores are added to it, and scores with the same number
of samples are not computed again.

The seed differs from kvbench's default, so most samples are not those of the main table. The QA questions are the same,
because sample i of RULER always asks question i. The model was trained on neither.
"""

import json
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from kvbench.atomic import replace_file
from kvbench.config.catalogue import CONF, build
from kvbench.interfaces.task import Sample
from kvbench.models.checkpoint import Checkpoint
from kvbench.tasks.ledger.task import LedgerTask
from kvbench.tasks.ruler.task import SUBTASKS, Ruler
from kvbench.validation import SettingError

SEED = 20_000
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LEAST = 512  # shortest length in tokens that `--lengths` accepts
LEDGER = "ledger"
STEPS = 60  # lines of a ledger
BATCHED = 131_072  # most prompt tokens in a batch, because its mask has the shape (rows, length, length)
SampleRequest = tuple[str, int, int, str, str | None]  # subtask, length or lines, samples, model's folder, cache


@cache
def load_ledger_settings() -> dict[str, Any]:
    """Load the settings of task=ledger."""
    return yaml.safe_load((CONF / "task/ledger.yaml").read_text())


def make_task(subtask: str, length: int, samples: int, cache: str | None = None) -> Ruler | LedgerTask:
    """Build the task of one subtask.

    Args:
        subtask: A subtask of RULER, or `LEDGER`.
        length: Tokens of a prompt, or lines of a ledger.
        samples: Number of samples.
        cache: Folder in which RULER keeps its samples.
    """
    if subtask == LEDGER:
        return build(
            "task", load_ledger_settings() | {"steps": length, "samples": samples, "seed": SEED, "limit": None}
        )
    return Ruler(length=length, subtasks=subtask, samples=samples, seed=SEED, cache=cache)


def score_key(score: dict[str, Any]) -> tuple[str, int]:
    """Return the values that identify a score in the file: its subtask, and its length or number of lines."""
    return score["task"], score["steps" if score["task"] == LEDGER else "length"]


def draw_samples(asked: SampleRequest) -> list[Sample]:
    """Draw the samples of one subtask and length, with room for one more token, `<bos>`."""
    subtask, length, samples, folder, cache = asked
    model = Checkpoint("", folder)
    longest = length if subtask != LEDGER else model.longest()
    task: Any = make_task(subtask, length, samples, cache)  # mypy may take `samples` for the InitVar of this name
    return list(task.samples(model.tokenizer(), 1, longest))


@torch.inference_mode()
def generate_answers(model, tokenizer, samples: list[Sample]) -> list[str]:
    """Generate an answer to each prompt greedily. The prompts form one batch, padded on the left."""
    prompts = [s.context + s.question + s.answer_prefix for s in samples]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    new = max(sample.max_new_tokens for sample in samples)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=new)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def load_scores(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Load the scores of a file.

    Args:
        out: The file.
        about: What is scored and how. An existing file must have the same values.

    Returns:
        The content of the file; `about` with an empty list of scores if there is no file.

    Raises:
        SettingError: The file describes something else.
    """
    if not out.exists():
        return about | {"scores": []}
    try:
        held = json.loads(out.read_text())
        differ = [f"{name} {held.get(name)}, now {value}" for name, value in about.items() if held.get(name) != value]
    except (OSError, ValueError, AttributeError):
        differ = ["something else"]
    if differ:
        raise SettingError(f"--out={out}: holds scores of {'; '.join(differ)}")
    return held


def evaluate(given: Namespace, held: dict[str, Any]) -> int:
    """Compute every score that the file lacks, of the ledger and of each length and subtask.

    The file is written after each score.

    Args:
        given: Arguments of the command line.
        held: Content of the file, as `load_scores` returns it.

    Returns:
        0, or 1 if the time `--seconds` ended before the last score.
    """
    until, folder = time.monotonic() + given.seconds, str(given.model)
    checkpoint = Checkpoint("", folder)
    tokenizer = checkpoint.tokenizer()
    model = checkpoint.weights(torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    asked = [(LEDGER, given.steps)] if given.steps else []
    asked += [(subtask, length) for length in given.lengths for subtask in SUBTASKS]
    made = {score_key(score) for score in held["scores"] if score["samples"] == given.samples}
    asked = [one for one in asked if one not in made]
    every = [(subtask, length, given.samples, folder, given.cache) for subtask, length in asked]
    with multiprocessing.get_context("spawn").Pool(min(4, os.cpu_count() or 1)) as pool:
        for (subtask, length), samples in zip(asked, pool.imap(draw_samples, every), strict=True):
            if time.monotonic() > until:
                print(f"kvbench: --seconds are over before {subtask} {length}", file=sys.stderr)
                return 1
            most = max(1, BATCHED // (length if subtask != LEDGER else 4096))
            texts = [
                t
                for i in range(0, len(samples), most)
                for t in generate_answers(model, tokenizer, samples[i : i + most])
            ]
            task = make_task(subtask, length, given.samples)
            marks = [task.score(s, t).score for s, t in zip(samples, texts, strict=True)]
            score = {"task": subtask, "steps" if subtask == LEDGER else "length": length, "samples": len(marks)}
            score |= {"score": round(sum(marks) / len(marks), 1)}
            held["scores"] = [*(one for one in held["scores"] if score_key(one) != (subtask, length)), score]
            with replace_file(given.out) as draft:
                draft.write_text(json.dumps(held, indent=1) + "\n")
            print(*score.values(), flush=True)
    for length in given.lengths:
        scores = [one["score"] for one in held["scores"] if one.get("length") == length]
        print(f"average of {len(scores)} at {length}: {sum(scores) / len(scores):.1f}")
    return 0
