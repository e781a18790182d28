"""Measure latency (task.measure=latency): time to the first token, per token and to the end, and bytes, of one batch.

The time to the first token is taken over `repeats` prefills, and `answers` of them are followed by the answer. The time
per output token has a median, a mean and a 99th percentile over steps, without the first WARMED steps, which prepare
later ones. The end-to-end time runs from the prompt to a token.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvbench.efficiency.caches import (
    CacheUnderTest,
    draw_prompt,
    drop_warmed,
    load_model,
    make_cache_under_test,
    spread_tokens,
)
from kvbench.efficiency.measured_task import WARMED, find_interval, find_machine, list_ends, read_task
from kvbench.efficiency.roofline import Machine, WeightSizes, decode_ms, make_needs, prefill_ms
from kvbench.engine import timing
from kvbench.engine.timing import spread, try_in_memory
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line


def measure_latency(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: times to the first token, per token and to the end, and bytes."""
    task, device, model = read_task(run), run.device, load_model(run)
    every, cache, ids = list_ends(run), make_cache_under_test(model, run), draw_prompt(run, model)
    answer = max(every)
    for _ in range(task.warmup):
        cache.drop()
        timing.clear(device)
        _, shortage = try_in_memory(lambda: warm_up(cache, ids, answer if task.answers else 1), device)
        if shortage:
            yield make_out_of_memory_line("latency", shortage)
            return
    first: list[float] = []
    timed: list[list[float]] = []
    means: list[float] = []
    captures: list[float] = []
    ends: dict[int, list[float]] = {end: [] for end in every}
    sizes: dict[str, int] = {}
    for number in range(task.repeats):
        cache.drop()
        timing.clear(device)
        timing.forget_peak(device)
        begin = timing.now(device)
        _, shortage = try_in_memory(lambda: cache.read(ids), device)
        if shortage:
            yield make_out_of_memory_line("latency", shortage)
            return
        first.append(1000 * (timing.now(device) - begin))
        sizes |= measure_memory(cache, model, device)
        if task.baseline != "static_compiled":
            sizes |= measure_peak("peak_prefill_bytes", device)
        if number >= task.answers:
            continue
        timing.forget_peak(device)
        between, shortage = try_in_memory(lambda: cache.answer(answer), device)
        if shortage:
            yield make_out_of_memory_line("answer", shortage)
            break
        timed.append(drop_warmed(between))
        means.append(sum(between) / len(between))
        for end, times in ends.items():
            times.append(sum(between[: end - 1]))
        captures.append(cache.capture_ms)
        sizes |= measure_peak("peak_decode_bytes", device)
    if task.baseline != "static_compiled":  # whose prompt another cache reads
        yield make_line("ttft_ms", "ms", spread(first))
    if timed:
        yield make_line("tpot_ms", "ms", spread_tokens(timed, find_interval(run)), cache.path)
        yield make_line("tpot_mean_ms", "ms", spread(means))
        yield make_line("decode_tokens_s", "tokens/s", spread([1000 * len(ids) / mean for mean in means]))
        yield make_line("capture_ms", "ms", spread(captures))  # of graphs, once an answer; part of the end-to-end time
        for end, times in ends.items():
            yield make_line(f"answer_{end}_ms", "ms", spread(times))  # from the first token on
            if task.baseline != "static_compiled":
                whole = [sum(parts) for parts in zip(first, captures, times, strict=False)]
                yield make_line(f"e2e_{end}_ms", "ms", spread(whole))
    for part in ("prefill", "decode"):
        if f"peak_{part}_bytes" in sizes:
            sizes[f"peak_{part}_over_weights_bytes"] = sizes[f"peak_{part}_bytes"] - sizes["weights_bytes"]
    yield from (make_line(name, "bytes", value) for name, value in sizes.items())
    machine = find_machine(run)
    if machine is not None:
        yield from compute_floors(run, machine, model, cache, len(ids), sizes["resident_bytes"])


def compute_floors(
    run: RunSpec, machine: Machine, model: torch.nn.Module, cache: CacheUnderTest, batch: int, before: int
) -> Iterator[Line]:
    """Yield the shortest times that the machine's bandwidth and rate allow, after an answer of the cache.

    The cache's rows had `before` bytes when the answer began.
    """
    task = read_task(run)
    method, length = run.choice().method, task.length
    yield make_line("tpot_floor_ms", "ms", compute_tpot_floors(run, machine, model, cache, batch, before)[0])
    if task.baseline != "static_compiled":
        quota = None if method.attends_subset or method.needs_extra_reads else run.budget.rows(length, length)
        needs = make_needs(model, batch, run.groups["method"], run.groups["codec"])
        read = partial(prefill_ms, machine, model, length, batch, run.block_size)
        yield make_line("ttft_floor_ms", "ms", read(quota) if needs is None else read(quota, needs))
        if needs is not None:
            yield make_line("ttft_full_floor_ms", "ms", read(None))


def compute_tpot_floors(
    run: RunSpec, machine: Machine, model: torch.nn.Module, cache: CacheUnderTest, batch: int, before: int
) -> tuple[float, float]:
    """Return the shortest time of a token in ms, and the shortest one if it first reads and then computes.

    The time is the mean over the cache's answers, before which its rows had `before` bytes.
    """
    read, after = cache.bytes_per_token(), cache.bytes_after()
    if read in (before, after):  # a token reads all rows, and each token adds one
        read = (before + after) // 2
    return decode_ms(machine, WeightSizes.of(model), read, batch, cache.operations_per_token())


def warm_up(cache: CacheUnderTest, ids: Tensor, count: int) -> None:
    """Do everything that a trial does, untimed, with an answer long enough to compile what will run."""
    cache.read(ids)
    cache.answer(count, WARMED)


def measure_memory(cache: CacheUnderTest, model: torch.nn.Module, device: str) -> dict[str, int]:
    """Return the bytes after the prompt was read: held, and on a GPU allocated with and without the weights."""
    held, total, here = cache.bytes(), WeightSizes.of(model).total, timing.allocated(device)
    sizes = {"resident_bytes": held.rows, "metadata_bytes": held.metadata, "state_bytes": held.state}
    sizes |= {"headroom_bytes": held.headroom, "weights_bytes": total}
    return sizes if here is None else sizes | {"allocated_bytes": here, "allocated_over_weights_bytes": here - total}


def measure_peak(name: str, device: str) -> dict[str, int]:
    """Return the peak of the bytes on a GPU under this name, {} on the CPU."""
    peak = timing.peak(device)
    return {} if peak is None else {name: peak}
