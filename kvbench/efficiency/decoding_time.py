"""Time the tokens of an answer (task.measure=decoding), of one prompt and of a batch of its copies, from one prefill.

The batch is `task.batch`, or as many copies as fit. With a codec whose packed rows cannot be copied, the whole batch is
read. Each answer begins at the prompt's end. The time per output token has a median, a mean and a 99th percentile over
steps, without the first WARMED steps.
"""

from collections.abc import Iterator

import torch

from kvbench.efficiency.caches import (
    KVBenchCache,
    ReplicableCache,
    draw_prompt,
    drop_warmed,
    load_model,
    make_replicable_cache,
    spread_tokens,
)
from kvbench.efficiency.latency import compute_tpot_floors
from kvbench.efficiency.measured_task import find_interval, find_machine, list_ends, read_task
from kvbench.efficiency.throughput import guess_batch
from kvbench.engine import timing
from kvbench.engine.replicate import can_replicate
from kvbench.engine.timing import spread, try_in_memory
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line


def measure_decoding(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: times per token and bytes, of one prompt and (`batched_`) of a batch."""
    task, device, model = read_task(run), run.device, load_model(run)
    cache, ids = make_replicable_cache(model, run), draw_prompt(run, model, 1)
    timing.clear(device)
    _, shortage = try_in_memory(lambda: cache.read(ids), device)
    if shortage:
        yield make_out_of_memory_line("decoding", shortage)
        return
    yield from time_tokens(run, model, cache, 1, "")
    if task.batch == 1:
        return
    batch = min(task.batch, guess_batch(cache, device))
    copied = not isinstance(cache, KVBenchCache) or can_replicate(run.choice().codec)
    _, shortage = try_in_memory(lambda: cache.replicate(batch) if copied else cache.read(ids.repeat(batch, 1)), device)
    if shortage:
        yield make_out_of_memory_line("batched_tpot_ms", shortage)
        return
    yield make_line("batched_prompts", "prompts", batch)
    yield from time_tokens(run, model, cache, batch, "batched_")


def time_tokens(run: RunSpec, model: torch.nn.Module, cache: ReplicableCache, batch: int, kind: str) -> Iterator[Line]:
    """Answer `task.repeats` times and yield the lines, whose names begin with `kind`."""
    task = read_task(run)
    timed: list[list[float]] = []
    captures: list[float] = []
    before = cache.bytes().rows
    yield make_line(f"{kind}resident_bytes", "bytes", before)
    for _ in range(task.repeats):
        between, shortage = try_in_memory(lambda: cache.answer(max(list_ends(run))), run.device)
        if shortage:
            yield make_out_of_memory_line(f"{kind}tpot_ms", shortage)
            return
        timed.append(drop_warmed(between))
        captures.append(cache.capture_ms)
    yield make_line(f"{kind}tpot_ms", "ms", spread_tokens(timed, find_interval(run)), cache.path)
    yield make_line(f"{kind}tokens_s", "tokens/s", spread([1000 * batch * len(times) / sum(times) for times in timed]))
    yield make_line(f"{kind}capture_ms", "ms", spread(captures))
    machine = find_machine(run)
    if machine is not None:
        floor, in_turn = compute_tpot_floors(run, machine, model, cache, batch, before)
        yield make_line(f"{kind}tpot_floor_ms", "ms", floor)
        yield make_line(f"{kind}tpot_floor_in_turn_ms", "ms", in_turn)  # if it first reads and then computes
