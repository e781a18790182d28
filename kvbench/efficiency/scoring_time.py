"""Time a method's score alone (task.measure=scoring), on random rows and queries in the shape of one layer of a model.

No weights are needed. The timed calls are those of the engine after a block was read: `update` if the method has it,
and then `score`, or `cut` for a method without scores (CentroidKV's matching and merging).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.efficiency.measured_task import find_machine, read_task
from kvbench.efficiency.roofline import compute_score_needs
from kvbench.engine import timing
from kvbench.engine.timing import spread, try_in_memory
from kvbench.interfaces.method import Method, fit_protected
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.dispatch import force_implementation
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line
from kvbench.validation import SettingError


@dataclass(frozen=True)
class ScoreCall:
    """A call that can be timed, and the sizes of what it reads, for `roofline.compute_score_needs`."""

    call: Callable[[], Any]
    sizes: dict[str, int]


def measure_scoring(run: RunSpec) -> Iterator[Line]:
    """Yield the lines of a run: the score's time, scratch memory, bytes, operations and kernels."""
    task, device = read_task(run), run.device
    timing.clear(device)
    made, shortage = try_in_memory(lambda: prepare_score(run), device)
    if not shortage:
        call, count = made.call, 10 * task.repeats
        times, shortage = try_in_memory(lambda: timing.calls(call, device, count, max(2, task.warmup)), device)
    if shortage:
        yield make_out_of_memory_line("scoring", shortage)
        return
    yield make_line("scoring_ms", "ms", spread(times))
    needs = compute_score_needs(run.groups["method"]["name"], run.groups["method"], made.sizes)
    if needs is not None:
        yield make_line("scoring_bytes", "bytes", needs[0])
        yield make_line("scoring_operations", "operations", needs[1])
        machine = find_machine(run)
        if machine is not None:
            yield make_line("scoring_floor_ms", "ms", machine.ms(*needs))
    if device == "cpu":
        return
    yield make_line("scoring_scratch_bytes", "bytes", timing.scratch(made.call))
    kernels = timing.launches(made.call)
    yield make_line("scoring_launches", "kernels", sum(count for count, _ in kernels.values()))
    for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1]):
        yield make_line("kernel_us", "us", us, name[:120]) | {"count": count}


def prepare_score(run: RunSpec) -> ScoreCall:
    """Prepare the score of a run's method on `task.length` rows, whose last `block_size` (or all) are the new block.

    Raises:
        SettingError: The method does not score when a block was read.
    """
    method, task = run.choice().method, read_task(run)
    if method.attends_subset or method.needs_extra_reads or method.name == "full":
        raise SettingError(f"task.measure=scoring: {method.name} scores nothing when a block was read")
    config = run.checkpoint.config().get_text_config(decoder=True)
    shape, dtype = run.checkpoint.layout(), run.torch_dtype
    query_heads, tokens = config.num_attention_heads, min(run.block_size or task.length, task.length)
    generator = torch.Generator(run.device).manual_seed(run.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=run.device, dtype=dtype)

    batch, rows = task.batch, make_rows(normal, task.batch, shape.heads, task.length, shape.dim)
    lse = None
    if "lse" in method.wants:  # for normally distributed logits: log of the number of rows, plus half the variance
        seen_rows = torch.arange(task.length - tokens + 1, task.length + 1, device=run.device)
        lse = (seen_rows.to(rows.mass.dtype).log() + 0.5).expand(batch, query_heads, tokens).contiguous()
    layers = shape.held
    observation = Observation(
        normal(batch, query_heads, tokens, shape.dim),
        normal(batch, query_heads, tokens, shape.dim),
        lse,
        shape.dim**-0.5,
        normal(config.hidden_size, query_heads * shape.dim),
        PlainRotation(shape.dim),
        layers[len(layers) // 2],
        shape.layers,
        task.length - tokens,
        task.length,
        True,
        False,
        layers,
        unrotated_keys=normal(batch, shape.heads, tokens, shape.dim) if "unrotated_keys" in method.wants else None,
        hidden=normal(batch, tokens, config.hidden_size) if "hidden" in method.wants else None,
    )
    quota = run.budget.rows(task.length, task.length) or task.length
    sizes = {"batch": batch, "heads": shape.heads, "group": query_heads // shape.heads, "rows": task.length}
    sizes |= {"tokens": tokens, "dim": shape.dim, "hidden": config.hidden_size, "element": dtype.itemsize}
    seeds = (run.seed,) * batch
    shared: dict[str, Any] = {}  # a middle layer finds what the first one made for all

    @torch.inference_mode()
    def call() -> Any:
        with force_implementation(task.implementation):
            return call_method(method, observation, rows, State(seeds, {}, shared), quota)

    return ScoreCall(call, sizes)


def call_method(method: Method, observation: Observation, rows: Rows, state: State, quota: int) -> Any:
    """Call a method as the engine does after a block (kvbench.cache.layer)."""
    if method.overrides("update"):
        columns = {**rows.columns, **method.update(observation, rows, state)}
        rows = Rows(rows.keys, rows.values, rows.places, rows.mass, columns)
    if method.scores:
        return method.score(observation, rows, state)
    sinks, recents = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
    protected = fit_protected(sinks, recents, rows, quota).kept
    quotas = torch.full(rows.mass.shape[:2], quota, device=rows.mass.device)
    after = method.cut(rows, rows.mass, quotas, protected, quota)
    return [after.keys, after.values, after.mass]


def make_rows(normal: Callable[..., Tensor], batch: int, heads: int, count: int, dim: int) -> Rows:
    """Make `count` rows for each head, all present, each of one token."""
    keys, values = normal(batch, heads, count, dim), normal(batch, heads, count, dim)
    places = torch.arange(count, device=keys.device).expand(batch, heads, -1)
    return Rows(keys, values, places, torch.ones(places.shape, device=keys.device, dtype=mass_dtype(keys)))


@dataclass(frozen=True)
class PlainRotation:
    """A plain rotary embedding: positions (B, n) -> cos and sin, (B, n, d). Its kind does not change a score's cost."""

    dim: int
    theta: float = 10000.0

    def __call__(self, places: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.dim, 2, device=places.device, dtype=torch.float32) / self.dim
        angles = (places[..., None].float() * self.theta**-steps).repeat(1, 1, 2)
        return angles.cos(), angles.sin()
