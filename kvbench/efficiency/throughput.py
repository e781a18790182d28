"""Measure throughput (task.measure=throughput): the largest batch that fits, and the tokens it decodes in a second."""

from collections.abc import Callable, Iterator

import torch

from kvbench.efficiency.caches import (
    CacheUnderTest,
    draw_prompt,
    drop_warmed,
    load_model,
    make_replicable_cache,
    spread_tokens,
)
from kvbench.efficiency.measured_task import find_interval, list_ends, read_task
from kvbench.engine import timing
from kvbench.engine.timing import try_in_memory
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line

PROBE = 3  # tokens that a batch must decode to count as fitting
CPU_BATCH = 8  # largest batch that is tried on a CPU, where memory would run out too late


def measure_throughput(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: the largest batch that fits, and the tokens that it decodes in a second."""
    task, device, model = read_task(run), run.device, load_model(run)
    cache, ids = make_replicable_cache(model, run), draw_prompt(run, model, 1)
    copied = task.fill == "replicated"

    def answer(batch: int, most: int | None = None) -> tuple[list[float] | None, str]:
        """Return the milliseconds of a batch's steps, for at most `most` tokens, or None and what did not fit."""
        cache.drop()
        timing.clear(device)
        timing.forget_peak(device)
        return try_in_memory(lambda: fill_and_answer(batch, most), device)

    def fill_and_answer(batch: int, most: int | None) -> list[float]:
        cache.read(ids if copied else ids.repeat(batch, 1))
        if copied and batch > 1:
            cache.replicate(batch)
        return cache.answer(count, most)

    count, most = max(list_ends(run)), task.most_batch or (CPU_BATCH if device == "cpu" else None)
    largest, between, (_, shortage) = 0, None, answer(1, PROBE)
    if not shortage:
        largest = find_largest_batch(lambda batch: not answer(batch, PROBE)[1], guess_batch(cache, device), most)
    while between is None and largest:  # the last tokens of a long answer may need more than the probe
        between, shortage = answer(largest)
        largest = largest if between else min(largest - 1, int(largest * 0.98))
    if not largest or between is None:
        yield make_out_of_memory_line("throughput", shortage)
        return
    warm = drop_warmed(between)
    yield make_line("largest_batch", "prompts", largest)
    yield make_line("tpot_ms", "ms", spread_tokens([warm], find_interval(run)), cache.path)
    yield make_line("decode_tokens_s", "tokens/s", 1000 * largest * len(warm) / sum(warm))
    yield make_line("resident_bytes", "bytes", cache.bytes().rows)
    if (peak := timing.peak(device)) is not None:
        yield make_line("peak_decode_bytes", "bytes", peak)


def guess_batch(cache: CacheUnderTest, device: str) -> int:
    """Guess a batch that just fits from the bytes of one sample and the free memory."""
    if device == "cpu":
        return CPU_BATCH
    one = max(1, cache.bytes().total)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(2, 1 + int(0.9 * free / one))


def find_largest_batch(fit: Callable[[int], bool], first: int, most: int | None) -> int:
    """Find the largest batch that fits, to 2 % (exactly below 50) and at most `most`. A batch of 1 fits."""
    fitting, beyond = 1, None if most is None else most + 1
    at, step = first, max(1, first // 8)
    while beyond is None or beyond - fitting > max(1, fitting // 50):
        at = at if beyond is None else min(max(at, fitting + 1), beyond - 1)
        if not fit(at):
            beyond, at = at, (fitting + at) // 2
        elif beyond is None:
            fitting, at, step = at, at + step, 2 * step
        else:
            fitting, at = at, (at + beyond) // 2
    return fitting
