"""Time the tokens of an answer (task.measure=decoding), of one prompt and of a batch of its copies, from one prefill.

The batch is `task.batch`, or as many copies as fit. It continues where the answer of the one prompt ended. With a codec
whose packed rows cannot be copied, the whole batch is read. The time per output token is the median over steps, without
the first WARMED steps.
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
)
from kvbench.efficiency.latency import compute_tpot_floors
from kvbench.efficiency.measured_task import find_machine, read_task
from kvbench.efficiency.throughput import guess_batch
from kvbench.engine import timing
from kvbench.engine.replicate import can_replicate
from kvbench.engine.timing import fits, spread
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line


def measure_decoding(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: times per token and bytes, of one prompt and (`batched_`) of a batch."""
    task, device, model = read_task(run), run.device, load_model(run)
    own, ids = make_replicable_cache(model, run), draw_prompt(run, model, 1)
    timing.clear(device)
    fit, _ = fits(lambda: own.read(ids), device)
    if not fit:
        yield make_out_of_memory_line("decoding")
        return
    yield from time_tokens(run, model, own, 1, "")
    if task.batch == 1:
        return
    batch = min(task.batch, guess_batch(own, device))
    copied = not isinstance(own, KVBenchCache) or can_replicate(run.choice().codec)
    fit, _ = fits(lambda: own.replicate(batch) if copied else own.read(ids.repeat(batch, 1)), device)
    if not fit:
        yield make_out_of_memory_line("batched_tpot_ms")
        return
    yield make_line("batched_prompts", "prompts", batch)
    yield from time_tokens(run, model, own, batch, "batched_")


def time_tokens(run: RunSpec, model: torch.nn.Module, own: ReplicableCache, batch: int, kind: str) -> Iterator[Line]:
    """Answer `task.repeats` times and yield the lines, whose names begin with `kind`."""
    task = read_task(run)
    steps: list[float] = []
    captures: list[float] = []
    yield make_line(f"{kind}resident_bytes", "bytes", own.bytes().rows)
    for _ in range(task.repeats):
        fit, between = fits(lambda: own.answer(max(task.ends)), run.device)
        if not fit:
            yield make_out_of_memory_line(f"{kind}tpot_ms")
            return
        steps += drop_warmed(between)
        captures.append(own.capture_ms)
    yield make_line(f"{kind}tpot_ms", "ms", spread(steps), own.path)
    yield make_line(f"{kind}tokens_s", "tokens/s", spread([1000 * batch / step for step in steps]))
    yield make_line(f"{kind}capture_ms", "ms", spread(captures))
    machine = find_machine(run)
    if machine is not None:
        floor, in_turn = compute_tpot_floors(run, machine, model, own, batch)
        yield make_line(f"{kind}tpot_floor_ms", "ms", floor)
        yield make_line(f"{kind}tpot_floor_in_turn_ms", "ms", in_turn)  # if it first reads and then computes
