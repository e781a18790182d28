"""Compile the GPU kernels of a group of runs before their first sample, so that no record's time contains compilation.

First all runs read the beginnings of some prompts while their kernels are only announced, and compiled on all
processors at once. Then they read these prompts whole and begin the answers as they will with samples, and keep
nothing. This compiles what is left, and does what libraries do once for a length. Processes that share a GPU leave it
out, because no table shows their times.
"""

import sys
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import islice

import torch
from tqdm import tqdm

from kvbench.engine.context import FEW
from kvbench.engine.generation import WORTH, GenerationContext
from kvbench.engine.graph_prefill import SHORT
from kvbench.engine.joint_decoding import read_on, run_alone
from kvbench.engine.rehearsal import LAYERS, rehearse
from kvbench.engine.timing import clear, forget_peak
from kvbench.engine.warming import Compilations, compile_ahead, count_compilations
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.transformers_port import use_first_layers
from kvbench.runs.joint_samples import choose_joint_batches, find_batch_size
from kvbench.runs.prompt import Prompt, batch_key
from kvbench.runs.resources import Resources
from kvbench.runs.responder import WARM_UP, Responder, list_turns
from kvbench.runs.shared_runs import Batch, RunGroup, clear_frames, spoils_model
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder, run_hash
from kvbench.validation import ContractError

BEGINNING = 8192  # most tokens of a block that the first layers read: almost all kernels are those of longer prompts
LEAST = 2048  # most tokens of a block that all layers read
MOST_LAST, MOST_QUESTION = 64, 1024  # tokens from which on no size of a last block and of a question matters
SHARE = 0.3  # budget of a beginning that the run's budget would keep whole


def make_warm_group(runs: Mapping[RunFolder, RunSpec], bench: Resources) -> RunGroup:
    """Make a group of runs whose samples compile nothing. On a CPU there is nothing to compile.

    One line says how many kernels were compiled, if any. The state of random numbers stays as it is, and memory that
    only this needed is free. What this process has rehearsed before is not rehearsed again.

    Args:
        runs: Runs that differ only in method, allocator, codec or budget, by the folders of their records.
        bench: Their tokenizer, model and prompts.
    """
    first = next(iter(runs.values()))
    every, batches = list(runs.values()), 1
    if first.shares_decoding:
        prompt_tokens = max(len(prompt.ids) + prompt.unknown for _, prompt in bench.prompts.values())
        answer_tokens = max(sample.max_new_tokens for sample, _ in bench.prompts.values())
        batches = choose_joint_batches(every, prompt_tokens, answer_tokens, bench.gpu_processes)
    make_group = partial(RunGroup, runs, partial(Responder, bench=bench), bench.reload_model, batches)
    device, needs = first.device, list_needs(runs.values(), bench.prompts)
    if device == "cpu" or bench.rehearsed.issuperset(needs):
        return make_group()
    examples = choose_examples(bench.prompts, first, find_batch_size(every))
    kinds = {name_kind(run): run for run in runs.values()}.values()  # the same kernels serve all budgets
    gpu = next(bench.model.parameters()).device  # the model is loaded before the time begins
    with report_compilations() as done, torch.random.fork_rng([gpu]):
        begin = time.perf_counter()
        try:
            key = hash_compilation(every, needs, [some[0][0] for some in examples])
            compile_ahead(key, partial(read_beginnings, kinds, bench, [some[0] for some in examples]))
        except Exception as error:  # of Triton; what follows compiles them too
            say_not_ahead("all methods", error)
        done.seconds += time.perf_counter() - begin
        clear(device)
        group = make_group()
        for some in examples if bench.gpu_processes == 1 else ():
            group.rehearse([some, *find_companion(some, bench.prompts)])
        forget_peak(device)
    if len(group.readers) == len(runs):
        bench.rehearsed |= needs
    return group


def list_needs(runs: Collection[RunSpec], prompts: Mapping[str, tuple[Sample, Prompt]]) -> set[Hashable]:
    """List what the samples of a group of runs may need: each run with each size of a prompt.

    It matters whether answers are decoded together, and if so whether those of several runs are (`RunGroup.rehearse`).
    """
    first = next(iter(runs))
    sizes = {size for pair in prompts.values() for size in list_sizes(pair[1], first)}
    how = first.shares_decoding, first.shares_decoding and len(runs) > 1
    return {(name_kind(run), str(run.budget), how, size) for run in runs for size in sizes}


def hash_compilation(runs: Sequence[RunSpec], needs: Collection[Hashable], samples: Iterable[Sample]) -> str:
    """Hash what the kernels of `read_beginnings` follow from, as far as sizes that are powers of two tell.

    The number of samples is no part of it.

    Args:
        runs: The runs.
        needs: What their samples need (`list_needs`).
        samples: The samples whose beginnings are read.
    """
    known = {
        "needs": sorted(map(repr, needs)),
        "answers": sorted({limit_answer(run, sample.max_new_tokens) for run in runs for sample in samples}),
        "sources": sorted({run.value["sources"] for run in runs}),
        "triton": version("triton"),
    }
    return run_hash(known | {name: runs[0].value[name] for name in ("model", "device")})


def name_kind(run: RunSpec) -> str:
    """Return a text that is equal for runs that differ only in task, budget and seed."""
    key = run.groups, run.block_size, run.question, run.temperature, run.top_p, run.max_batch, run.compile, run.fidelity
    return str(key)


@contextmanager
def report_compilations() -> Iterator[Compilations]:
    """Say at the end how many kernels were compiled inside and how long it took, if any were."""
    with count_compilations() as done:
        yield done
    if done.kernels:
        line = f"kvbench: compiled {len(done.kernels)} GPU kernels in {done.seconds:.0f} s"
        tqdm.write(line, file=sys.stderr)


def choose_examples(prompts: Mapping[str, tuple[Sample, Prompt]], run: RunSpec, size: int) -> list[Batch]:
    """Choose batches of up to `size` samples that need every variant of a kernel that any sample needs.

    The longest come first. Kernels tell apart the sizes of the prompt, of its last block, and of the question behind
    it, each up to the next power of two.
    """
    known: set[Hashable] = set()
    chosen: list[Batch] = []
    for uid, example in sorted(prompts.items(), key=lambda item: -len(item[1][1].context)):
        sample, prompt = example
        if prompt.earlier or known.issuperset(sizes := list_sizes(prompt, run)):
            continue
        known.update(sizes)
        if sample.conversation:
            chosen.append([prompts[other] for other in list_turns(uid, prompts)])
        else:
            key = batch_key(*example)
            same = [pair for pair in prompts.values() if not pair[0].conversation and batch_key(*pair) == key]
            chosen.append(same[:size])
    return chosen


def find_companion(batch: Batch, prompts: Mapping[str, tuple[Sample, Prompt]]) -> list[Batch]:
    """Return another batch, of one sample, whose answers may be decoded together with those of `batch`, if any may."""
    groups = {sample.group or sample.uid for sample, _ in batch}
    others = (
        pair for uid, pair in prompts.items() if not pair[0].conversation and (pair[0].group or uid) not in groups
    )
    return [[pair] for pair in islice(others, 1)]


def list_sizes(prompt: Prompt, run: RunSpec) -> list[Hashable]:
    """List the sizes of a prompt that kernels tell apart, rounded up to powers of two."""
    hidden = run.question == "hidden"
    first, rest = len(prompt.context), len(prompt.rest)
    first, rest = (first, rest) if hidden else (first + rest, 0)
    last = first % run.block_size if run.block_size else 0
    sizes = {"prompt": first, "last block": min(last, MOST_LAST), "question": min(rest, MOST_QUESTION)}
    return [(name, 1 << (size - 1).bit_length() if size else 0) for name, size in sizes.items()]


def read_beginnings(runs: Iterable[RunSpec], bench: Resources, examples: Sequence[tuple[Sample, Prompt]]) -> None:
    """Read a short prompt as a run's warm-up does, and the beginning of each example, in each run.

    The first layers of the model need the same kernels as all of them. Where they do not suffice, as for a method that
    has learned something for each layer, or where memory does not, all layers read less. If this fails too, one line
    says so, and what follows compiles the kernels that it did not reach. The error of a method that breaks its contract
    is left to its run.
    """
    for run in runs:
        error = try_run(run, bench, examples, LAYERS, BEGINNING)
        if error is not None and not isinstance(error, ContractError):
            error = try_run(run, bench, examples, None, LEAST)
        if error is not None and not isinstance(error, ContractError):
            say_not_ahead(f"method={run.groups['method']['name']}", error)


def try_run(
    run: RunSpec, bench: Resources, examples: Sequence[tuple[Sample, Prompt]], layers: int | None, most: int
) -> Exception | None:
    """Read as `read_beginnings` does, and return the error if it fails. Weights that it spoiled are loaded again.

    Args:
        run: The run.
        bench: Its tokenizer and model.
        examples: Samples and their prompts.
        layers: Number of layers of the model that read; None for all.
        most: Largest number of tokens of a block.
    """
    try:
        with nullcontext() if layers is None else use_first_layers(bench.model, layers):
            device = next(bench.model.parameters()).device
            words = make_prompt_encoder(bench.tokenizer)
            rehearse(bench.model, run.choice(), words, torch.tensor([WARM_UP], device=device))
            for sample, prompt in ((None, Prompt(WARM_UP, ())), *examples):
                read_beginning(run, bench, prompt, sample.max_new_tokens if sample else 0, most)
    except Exception as error:
        clear_frames(error)
        if spoils_model(error):
            bench.reload_model()
        return error
    return None


def read_beginning(run: RunSpec, bench: Resources, prompt: Prompt, answer: int, most: int) -> None:
    """Read the beginning of a prompt, its question, and up to `answer` tokens of an answer, in blocks of `most`."""
    ids, rest = list(prompt.context), list(prompt.rest)
    if run.question != "hidden":
        ids, rest = ids + rest, []
    size = run.block_size
    if size is None:
        ids = ids[:most]
    else:  # as many whole blocks as a graph is worth, if it may read them, and the last one
        last, size = len(ids) % size, min(size, most)
        ids = ids[: (FEW + 2 if size <= SHORT else 2) * size + min(last, size)]
    rows = run.budget.rows(len(ids), len(ids))
    budget = run.budget if rows is None or rows < len(ids) else Budget(SHARE)
    answer = limit_answer(run, answer)
    device = next(bench.model.parameters()).device
    context = GenerationContext(
        bench.model,
        run.choice(),
        budget,
        size,
        (0,),
        prompt.prefix,
        make_prompt_encoder(bench.tokenizer),
        run.compile,
        answer,
    )
    context.prefill(torch.tensor([ids], device=device))
    if answer:
        with context.branch():
            if rest:
                run_alone(read_on(context, torch.tensor([rest], device=device)))
            context.reserve(answer)
            for _ in context.generate(answer, run.sampling, frozenset()):
                pass


def limit_answer(run: RunSpec, answer: int) -> int:
    """Return how many tokens of an answer are read, of `answer` at most: more need no further kernels."""
    method = run.choice().method
    return min(answer, max(WORTH, method.decode_interval if method.decoding else 0) + 1)


def say_not_ahead(whose: str, error: Exception) -> None:
    """Say that kernels are compiled at their first launch, and why."""
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    tqdm.write(f"kvbench: {whose}: kernels are compiled one after the other: {reason}", file=sys.stderr)
