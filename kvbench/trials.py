"""The trials of one run of task=efficiency, each a generator of lines: a quantity, its unit, its median and its spread.

latency     time to first token over `repeats` prefills; of `answers` of them the answer too: time per output token
            (median over steps; the first WARMED leave out what a first step prepares), end-to-end times; memory
throughput  the largest batch that fits, found by bisection, and what it decodes in a second
scoring     the method's score alone: time, scratch, launches
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvbench import timing
from kvbench.floors import Machine, Weights, decode_ms, prefill_ms, score_needs
from kvbench.model import Checkpoint
from kvbench.run import DTYPES, Run
from kvbench.scoring import scoring
from kvbench.subject import Subject, subject
from kvbench.timing import Spread, fits

WARMED = 8  # steps of an answer before the median is taken, or half of a short answer
PROBE = 3  # tokens that a batch must decode to count as fitting
CPU_BATCH = 8  # largest batch tried on a CPU, where memory does not run out in time

Line = dict[str, Any]


@lru_cache(maxsize=1)
def weights(checkpoint: Checkpoint, dtype: str, device: str) -> torch.nn.Module:
    """The model; one a process is kept for the cells that follow."""
    return checkpoint.weights(DTYPES[dtype], device)


def measure(run: Run) -> list[Line]:
    """All lines of a run."""
    kind = {"latency": latency, "throughput": throughput, "scoring": score}[run.task.measure]
    lines = list(kind(run))
    if run.task.baseline == "static_compiled":
        torch.compiler.reset()  # its graphs hold memory
    timing.clear(run.device)
    return lines


def latency(run: Run) -> Iterator[Line]:
    """Time to first token, per token, to the end; bytes."""
    task, device, model = run.task, run.device, weights(run.checkpoint, run.dtype, run.device)
    answer, own, ids = max(task.ends), subject(model, run), tokens(run, model)
    timing.clear(device)
    for _ in range(task.warmup):
        fit, _ = fits(lambda: tried(own, ids, answer if task.answers else 1), device)
        if not fit:
            yield {"quantity": "latency", "status": "out_of_memory"}
            return
    first, steps, ends, means, found = [], [], {end: [] for end in task.ends}, [], {}
    for number in range(task.repeats):
        timing.clear(device)
        timing.forget_peak(device)
        begin = timing.now(device)
        fit, _ = fits(lambda: own.read(ids), device)
        if not fit:
            yield {"quantity": "latency", "status": "out_of_memory"}
            return
        first.append(1000 * (timing.now(device) - begin))
        found |= memory(own, model, device)
        found["peak_prefill_bytes"] = timing.peak(device)
        if number >= task.answers:
            continue
        timing.forget_peak(device)
        fit, stamps = fits(lambda: answered(own, answer, device), device)
        if not fit:
            yield {"quantity": "answer", "status": "out_of_memory"}
            break
        between = stamps.between()
        steps += between[min(WARMED, len(between) // 2) :]
        means.append(sum(between) / len(between))
        for end, times in ends.items():
            times.append(first[-1] + sum(between[: end - 1]))
        found["peak_decode_bytes"] = timing.peak(device)
    if run.task.baseline != "static_compiled":  # what it holds was read by another cache
        yield spread("ttft_ms", "ms", first)
    if steps:
        yield spread("tpot_ms", "ms", steps)
        yield spread("tpot_mean_ms", "ms", means)
        yield spread("decode_tokens_s", "tokens/s", [1000 * len(ids) / mean for mean in means])
        for end, times in ends.items() if run.task.baseline != "static_compiled" else ():
            yield spread(f"e2e_{end}_ms", "ms", times)
    for part in ("prefill", "decode"):
        if found.get(f"peak_{part}_bytes"):
            found[f"peak_{part}_over_weights_bytes"] = found[f"peak_{part}_bytes"] - found["weights_bytes"]
    yield from (plain(name, "bytes", value) for name, value in found.items() if value is not None)
    if device != "cpu":
        yield from latency_floors(run, model, found["resident_bytes"], len(ids))


def latency_floors(run: Run, model: torch.nn.Module, held: int, batch: int) -> Iterator[Line]:
    """What the machine's bandwidth and rate would allow."""
    here, sizes = Machine(run.task.bandwidth, run.task.flops), Weights.of(model)
    element = DTYPES[run.dtype].itemsize
    method, length = run.choice().method, run.task.length
    if not method.reads:
        yield plain("tpot_floor_ms", "ms", decode_ms(here, sizes, held, batch, element))
    if run.task.baseline != "static_compiled":
        quota = None if method.reads or method.rereads else run.budget.rows(length, length)
        yield plain("ttft_floor_ms", "ms", prefill_ms(here, model, length, batch, run.block_size, quota))


def throughput(run: Run) -> Iterator[Line]:
    """The largest batch that fits, and tokens that it decodes in a second."""
    task, device, model = run.task, run.device, weights(run.checkpoint, run.dtype, run.device)
    own, ids = subject(model, run), tokens(run, model, 1)
    copied = task.fill == "replicated"

    def filled(batch: int) -> None:
        own.read(ids if copied else ids.repeat(batch, 1))
        if copied and batch > 1:
            own.replicate(batch)

    def fit(batch: int) -> bool:
        timing.clear(device)
        return fits(lambda: (filled(batch), answered(own, min(PROBE, max(task.ends)), device)), device)[0]

    if not fit(1):
        yield {"quantity": "throughput", "status": "out_of_memory"}
        return
    most = task.most_batch or (CPU_BATCH if device == "cpu" else None)
    largest, stamps = bisect(fit, guess(run, own, device), most), None
    while stamps is None and largest:  # the last tokens of a long answer may need more than the probe
        timing.clear(device)
        timing.forget_peak(device)
        _, stamps = fits(lambda: (filled(largest), answered(own, max(task.ends), device))[1], device)
        largest = largest if stamps else min(largest - 1, int(largest * 0.98))
    if not largest:
        yield {"quantity": "throughput", "status": "out_of_memory"}
        return
    between = stamps.between()
    warm = between[min(WARMED, len(between) // 2) :]
    yield plain("largest_batch", "prompts", largest)
    yield spread("tpot_ms", "ms", warm)
    yield spread("decode_tokens_s", "tokens/s", [1000 * largest / step for step in warm])
    yield plain("resident_bytes", "bytes", own.bytes().rows)
    if device != "cpu":
        yield plain("peak_decode_bytes", "bytes", timing.peak(device))


def guess(run: Run, own: Subject, device: str) -> int:
    """A batch that should just fit, from what one sample holds and what is free."""
    if device == "cpu":
        return CPU_BATCH
    one = max(1, own.bytes().total)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(2, 1 + int(0.9 * free / one))


def bisect(fit: Callable[[int], bool], first: int, most: int | None) -> int:
    """The largest batch that fits, to 2 % (exactly below 50), at most `most`; 1 does."""
    fitting, beyond = 1, None if most is None else most + 1
    at = first
    while beyond is None or beyond - fitting > max(1, fitting // 50):
        at = at if beyond is None else min(max(at, fitting + 1), beyond - 1)
        if fit(at):
            fitting, at = at, at + max(1, at // 8) if beyond is None or at == first else (at + beyond) // 2
        else:
            beyond, at = at, (fitting + at) // 2
    return fitting


def score(run: Run) -> Iterator[Line]:
    """The method's score: time, scratch, what it moves and computes, kernels."""
    task, device = run.task, run.device
    timing.clear(device)
    fit, made = fits(lambda: scoring(run), device)
    if fit:
        fit, times = fits(lambda: timing.calls(made.call, device, 10 * task.repeats, max(1, task.warmup)), device)
    if not fit:
        yield {"quantity": "scoring", "status": "out_of_memory"}
        return
    yield spread("scoring_ms", "ms", times)
    needs = score_needs(run.groups["method"]["name"], run.groups["method"], made.sizes)
    if needs is not None:
        yield plain("scoring_bytes", "bytes", needs[0])
        yield plain("scoring_operations", "operations", needs[1])
    if device == "cpu":
        return
    if needs is not None:
        yield plain("scoring_floor_ms", "ms", Machine(task.bandwidth, task.flops).ms(*needs))
    yield plain("scoring_scratch_bytes", "bytes", timing.scratch(made.call, device))
    kernels = timing.launches(made.call, device)
    yield plain("scoring_launches", "kernels", sum(count for count, _ in kernels.values()))
    for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1]):
        yield plain("kernel_us", "us", us) | {"count": count, "note": name[:120]}


def tokens(run: Run, model: torch.nn.Module, batch: int | None = None) -> Tensor:
    """(B, n) random tokens: of a static cache as many as it holds."""
    size = (batch or run.task.batch, run.task.rows or run.task.length)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(run.seed)).to(run.device)


def tried(own: Subject, ids: Tensor, count: int) -> None:
    """All of a trial but the times: a short answer, or long enough to have compiled what will run."""
    own.read(ids)
    for _ in own.tokens(min(count, WARMED)):
        pass


def answered(own: Subject, count: int, device: str) -> timing.Stamps:
    """Stamps of the tokens of an answer, the first of which is there already."""
    stamps = timing.Stamps(device)
    for _ in own.tokens(count):
        stamps.put()
    timing.now(device)
    return stamps


def memory(own: Subject, model: torch.nn.Module, device: str) -> dict[str, int | None]:
    """Bytes when the prompt is read: held, and allocated on the GPU with and without the weights."""
    held, total, here = own.bytes(), Weights.of(model).total, timing.allocated(device)
    found = {"resident_bytes": held.rows, "metadata_bytes": held.metadata, "state_bytes": held.state}
    found |= {"headroom_bytes": held.headroom, "weights_bytes": total, "allocated_bytes": here}
    return found | {"allocated_over_weights_bytes": None if here is None else here - total}


def spread(quantity: str, unit: str, values: list[float]) -> Line:
    own = asdict(Spread.of(values))
    return {"quantity": quantity, "unit": unit, "value": own.pop("median"), **own}


def plain(quantity: str, unit: str, value: float) -> Line:
    return {"quantity": quantity, "unit": unit, "value": value}
