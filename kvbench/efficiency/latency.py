"""Measure latency (task.measure=latency): time to the first token, per token and to the end, and bytes, of one batch.

The time to the first token is taken over `repeats` prefills, and `answers` of them are followed by the answer. The time
per output token is the median over steps, without the first WARMED steps, which prepare later ones. The end-to-end time
runs from the prompt to a token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.efficiency.caches import (
    WARMED,
    CacheUnderTest,
    draw_prompt,
    drop_warmed,
    load_model,
    make_cache_under_test,
)
from kvbench.efficiency.measured_task import find_machine, read_task
from kvbench.efficiency.roofline import Machine, WeightSizes, decode_ms, prefill_ms
from kvbench.engine import timing
from kvbench.engine.timing import fits, spread
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line


def measure_latency(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: times to the first token, per token and to the end, and bytes."""
    task, device, model = read_task(run), run.device, load_model(run)
    answer, own, ids = max(task.ends), make_cache_under_test(model, run), draw_prompt(run, model)
    for _ in range(task.warmup):
        own.drop()
        timing.clear(device)
        fit, _ = fits(lambda: warm_up(own, ids, answer if task.answers else 1), device)
        if not fit:
            yield make_out_of_memory_line("latency")
            return
    first: list[float] = []
    steps: list[float] = []
    means: list[float] = []
    captures: list[float] = []
    ends: dict[int, list[float]] = {end: [] for end in task.ends}
    found: dict[str, int] = {}
    for number in range(task.repeats):
        own.drop()
        timing.clear(device)
        timing.forget_peak(device)
        begin = timing.now(device)
        fit, _ = fits(lambda: own.read(ids), device)
        if not fit:
            yield make_out_of_memory_line("latency")
            return
        first.append(1000 * (timing.now(device) - begin))
        found |= measure_memory(own, model, device)
        if task.baseline != "static_compiled":
            found |= measure_peak("peak_prefill_bytes", device)
        if number >= task.answers:
            continue
        timing.forget_peak(device)
        fit, between = fits(lambda: own.answer(answer), device)
        if not fit:
            yield make_out_of_memory_line("answer")
            break
        steps += drop_warmed(between)
        means.append(sum(between) / len(between))
        for end, times in ends.items():
            times.append(sum(between[: end - 1]))
        captures.append(own.capture_ms)
        found |= measure_peak("peak_decode_bytes", device)
    if task.baseline != "static_compiled":  # another cache read its prompt
        yield make_line("ttft_ms", "ms", spread(first))
    if steps:
        yield make_line("tpot_ms", "ms", spread(steps), own.path)
        yield make_line("tpot_mean_ms", "ms", spread(means))
        yield make_line("decode_tokens_s", "tokens/s", spread([1000 * len(ids) / mean for mean in means]))
        yield make_line("capture_ms", "ms", spread(captures))  # of graphs, once an answer; part of the end-to-end time
        for end, times in ends.items():
            yield make_line(f"answer_{end}_ms", "ms", spread(times))  # from the first token on
            if task.baseline != "static_compiled":
                whole = [sum(parts) for parts in zip(first, captures, times, strict=False)]
                yield make_line(f"e2e_{end}_ms", "ms", spread(whole))
    for part in ("prefill", "decode"):
        if f"peak_{part}_bytes" in found:
            found[f"peak_{part}_over_weights_bytes"] = found[f"peak_{part}_bytes"] - found["weights_bytes"]
    yield from (make_line(name, "bytes", value) for name, value in found.items())
    machine = find_machine(run)
    if machine is not None:
        yield from compute_floors(run, machine, model, own, len(ids))


def compute_floors(
    run: RunSpec, machine: Machine, model: torch.nn.Module, own: CacheUnderTest, batch: int
) -> Iterator[Line]:
    """Yield the shortest times that the machine's bandwidth and rate allow, after an answer of the cache."""
    task = read_task(run)
    method, length = run.choice().method, task.length
    yield make_line("tpot_floor_ms", "ms", compute_tpot_floors(run, machine, model, own, batch)[0])
    if task.baseline != "static_compiled":
        quota = None if method.attends_subset or method.needs_extra_reads else run.budget.rows(length, length)
        yield make_line("ttft_floor_ms", "ms", prefill_ms(machine, model, length, batch, run.block_size, quota))


def compute_tpot_floors(
    run: RunSpec, machine: Machine, model: torch.nn.Module, own: CacheUnderTest, batch: int
) -> tuple[float, float]:
    """Return the shortest time of a token in ms, and the shortest one if it first reads and then computes."""
    element, needs = run.torch_dtype.itemsize, (own.bytes_per_token(), own.operations_per_token())
    return decode_ms(machine, WeightSizes.of(model), needs[0], batch, element, needs[1])


def warm_up(own: CacheUnderTest, ids: Tensor, count: int) -> None:
    """Do everything that a trial does, untimed, with an answer long enough to compile what will run."""
    own.read(ids)
    own.answer(count, WARMED)


def measure_memory(own: CacheUnderTest, model: torch.nn.Module, device: str) -> dict[str, int]:
    """Return the bytes after the prompt was read: held, and on a GPU allocated with and without the weights."""
    held, total, here = own.bytes(), WeightSizes.of(model).total, timing.allocated(device)
    found = {"resident_bytes": held.rows, "metadata_bytes": held.metadata, "state_bytes": held.state}
    found |= {"headroom_bytes": held.headroom, "weights_bytes": total}
    return found if here is None else found | {"allocated_bytes": here, "allocated_over_weights_bytes": here - total}


def measure_peak(name: str, device: str) -> dict[str, int]:
    """Return the peak of the bytes on a GPU under this name, {} on the CPU."""
    peak = timing.peak(device)
    return {} if peak is None else {name: peak}
