"""Split the time of a decoded token by what it is spent on (task.measure=regions).

    model      projections, MLPs, norms, the rotary embedding and the logits
    attention  attention over the rows, also over rows that a codec packed
    method     scoring, choosing and cutting rows, and what the method remembers
    codec      packing rows, and making rows from packed ones
    rest       choosing the token, and counting rows and tokens

The same answer is decoded several times. The first time is not counted, because kernels are compiled and tuned then.
The second time gives the times of tokens, into which nothing enters that a profiler adds: the mean of those that are
split, and the median, the mean and the 99th percentile of the whole answer, which is longer. On a GPU the third one
runs under a profiler, which gives the time of every kernel; kernels that run at once share it. A kernel in a CUDA graph
does not say who launched it. So the fourth one launches the same steps without graphs. There the functions that are
running say whose the kernels are: the share of a region in a kernel's time there is its share of that kernel in the
graph. What is left of a token's mean time, as the gaps between kernels and the waits for the host, is `unattributed`.
On the CPU the third one is timed region by region. Timing it takes time itself, so that the regions of a tiny model
exceed the mean, and `unattributed` is negative.
"""

import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity as Activity

from kvbench.cache.policy import CachePolicy
from kvbench.efficiency.caches import KVBenchCache, draw_prompt, drop_warmed, load_model, spread_tokens
from kvbench.efficiency.measured_task import count_split, find_interval, list_ends, read_task
from kvbench.engine import timing
from kvbench.engine.graph_decoding import CHUNK
from kvbench.engine.graph_path import GraphPath
from kvbench.engine.replicate import can_replicate
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import Line, make_line, make_out_of_memory_line

MODEL, ATTENTION, METHOD, CODEC, REST = REGIONS = ("model", "attention", "method", "codec", "rest")
SKIPPED = CHUNK + 1  # tokens that are not split: the first one, and the first chunk, for which a graph is captured
PREFIX = "region: "  # of the marks in a trace
GPU_ALONE = (Activity.CUDA,)
Shares = Mapping[str, Mapping[str, float]]

# Packages whose functions work for a region; the longest name counts. Other functions work for their caller's region.
PACKAGES = {
    "kvbench.methods": METHOD, "kvbench.methods.codecs": CODEC, "kvbench.cache": REST, "kvbench.cache.eviction": METHOD,
    "kvbench.engine": REST, "kvbench.models": MODEL, "transformers": MODEL, "kvbench.kernels.fused_linear": MODEL,
    "kvbench.kernels.rope_append": MODEL, "kvbench.kernels.quantize": CODEC, "kvbench.kernels.reconstruction": CODEC,
    "kvbench.kernels.row_selection": METHOD, "kvbench.kernels.row_replacement": METHOD,
    "kvbench.kernels.row_shares": METHOD, "kvbench.kernels.rerotation": METHOD,
    "kvbench.kernels.accumulated_attention": METHOD,
}  # fmt: skip
FUNCTIONS = {("kvbench.cache.layer", "cut"): METHOD}
INSIDE = {METHOD: (CODEC,), CODEC: (ATTENTION,)}  # regions that may begin inside another one; by default all


class RegionWatch:
    """Says at each moment which region the running function works for. It is a function for `sys.settrace`.

    Attributes:
        seconds: The time of each region, without the time that watching takes.
    """

    def __init__(self, choice: CachePolicy, switch: Callable[[str], None]) -> None:
        """Begin in the region `rest`.

        Args:
            choice: The method and codec, whose own modules count as theirs wherever they lie.
            switch: Called with the name of each region that begins or goes on.
        """
        self.packages = {type(choice.method).__module__: METHOD, type(choice.codec).__module__: CODEC} | PACKAGES
        self.switch, self.known = switch, dict[CodeType, str | None]()
        self.seconds = dict.fromkeys(REGIONS, 0.0)
        self.open: list[tuple[FrameType | None, str]] = [(None, REST)]
        self.since = time.perf_counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """See a function begin. Returns what sees it end, if it works for another region than its caller."""
        self.count()
        (_, region), entered, seen = self.open[-1], self.find(frame), None
        if entered not in (None, region) and entered in INSIDE.get(region, REGIONS):
            self.open.append((frame, entered))
            self.switch(entered)
            frame.f_trace_lines, seen = False, self.see_end
        self.since = time.perf_counter()
        return seen

    def see_end(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        """See a function end. Its caller's region goes on."""
        if event == "return" and self.open[-1][0] is frame:
            self.count()
            self.open.pop()
            self.switch(self.open[-1][1])
            self.since = time.perf_counter()
        return self.see_end

    def count(self) -> None:
        """Add the time since the last look to the region that is open."""
        self.seconds[self.open[-1][1]] += time.perf_counter() - self.since

    def find(self, frame: FrameType) -> str | None:
        """Return the region that a function works for, or None for its caller's."""
        code = frame.f_code
        if code not in self.known:
            module = frame.f_globals.get("__name__") or ""
            self.known[code] = find_region(module, code.co_name, self.packages)
        return self.known[code]


def find_region(module: str, function: str, packages: Mapping[str, str] = PACKAGES) -> str | None:
    """Return the region that a function of a module works for, or None for its caller's."""
    if module.startswith("kvbench.kernels.") and function.startswith("attend"):
        return ATTENTION
    if (module, function) in FUNCTIONS:
        return FUNCTIONS[module, function]
    matches = [package for package in packages if f"{module}.".startswith(f"{package}.")]
    return packages[max(matches, key=len)] if matches else None


@contextmanager
def watch_regions(choice: CachePolicy, switch: Callable[[str], None]) -> Iterator[RegionWatch]:
    """Watch the regions of this thread's functions inside the `with` block."""
    watch, before = RegionWatch(choice, switch), sys.gettrace()
    switch(REST)
    sys.settrace(watch)
    try:
        yield watch
    finally:
        sys.settrace(before)


def measure_regions(run: RunSpec) -> list[Line]:
    """Return the lines of a run: the mean time of a token of `task.batch` copies of a prompt, and its regions."""
    task, model = read_task(run), load_model(run)
    cache, ids = KVBenchCache(model, run, max(list_ends(run))), draw_prompt(run, model, 1)

    def measure() -> list[Line]:
        copied = can_replicate(cache.choice.codec)
        cache.read(ids if copied else ids.repeat(task.batch, 1))
        if copied and task.batch > 1:
            cache.replicate(task.batch)
        return list(split_token(cache, count_split(run), max(list_ends(run))))

    timing.clear(run.device)
    lines, shortage = timing.try_in_memory(measure, run.device)
    return [make_out_of_memory_line("regions", shortage)] if shortage else lines


def split_token(cache: KVBenchCache, count: int, timed: int) -> Iterator[Line]:
    """Decode answers of `count` tokens and yield the lines of the split. The first `SKIPPED` tokens are left out.

    One answer has `timed` tokens, at least `count`, of which the spread of a token's time is taken.
    """
    for _ in range(2):
        times = cache.answer(timed)
    steps = times[SKIPPED - 1 : count - 1]
    mean = sum(steps) / len(steps)
    yield make_line("tpot_ms", "ms", spread_tokens([drop_warmed(times)], find_interval(cache.run)), cache.path)
    seconds = split_on_cpu(cache, count) if cache.run.device == "cpu" else split_on_gpu(cache, count)
    parts = {region: 1000 * seconds.get(region, 0.0) / len(steps) for region in REGIONS}
    yield make_line("tpot_mean_ms", "ms", mean, cache.path)
    for region, part in (parts | {"unattributed": mean - sum(parts.values())}).items():
        yield make_line(f"region_{region}_ms", "ms", part)


def split_on_cpu(cache: KVBenchCache, count: int) -> dict[str, float]:
    """Return the seconds of each region in an answer."""

    def read(rest: Callable[[], None]) -> dict[str, float]:
        with watch_regions(cache.choice, lambda _: None) as watch:
            rest()
        return watch.seconds

    return answer_with(cache, count, read)


def split_on_gpu(cache: KVBenchCache, count: int) -> dict[str, float]:
    """Return the seconds of each region's kernels in an answer."""
    kernels = answer_with(cache, count, lambda rest: sum_by_name(find_kernels(trace(rest, GPU_ALONE))))

    def read_without_graphs(rest: Callable[[], None]) -> Shares:
        path = cache.context.path
        if isinstance(path, GraphPath):
            path.batch.decoder.graphs.clear()  # the decoder launches each step itself then

        def marked() -> None:
            with watch_regions(cache.choice, mark):
                rest()

        return share_regions(trace(marked))

    shares = answer_with(cache, count, read_without_graphs)
    totals: Counter[str] = Counter()
    for name, seconds in kernels.items():
        for region, share in shares.get(name, {}).items():
            totals[region] += seconds * share
    return dict(totals)


def answer_with(cache: KVBenchCache, count: int, read: Callable[[Callable[[], None]], Any]) -> Any:
    """Generate an answer, and let `read` call the function that generates the tokens after the first `SKIPPED`.

    Every answer begins at the prompt's end, so that what a method or codec does now and then falls on the same tokens.
    """
    with closing(cache.generate(count)) as tokens:
        for _ in islice(tokens, SKIPPED):
            pass

        def rest() -> None:
            for _ in islice(tokens, count - SKIPPED):  # not what ends the answer, which is no token's time
                pass
            timing.now(cache.run.device)

        return read(rest)


def mark(region: str) -> None:
    """Note in a trace that a region begins or goes on."""
    with torch.profiler.record_function(PREFIX + region):
        pass


def trace(work: Callable[[], None], activities: Sequence[Any] = (*GPU_ALONE, Activity.CPU)) -> list[dict[str, Any]]:
    """Return the events of a call as torch.profiler writes them for Chrome. Fewer activities are faster to trace."""
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def find_kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a trace that occupied the GPU, with their seconds (`share`) where others ran beside them."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begins = np.array([event["ts"] for event in kernels])
    shares = share_time(begins, begins + [event["dur"] for event in kernels])
    return [
        event | {"name": name_kernel(event), "share": share / 1e6}
        for event, share in zip(kernels, shares.tolist(), strict=True)
    ]


def name_kernel(event: Mapping[str, Any]) -> str:
    """Return a kernel's name. In a graph a copy is a kernel (`memcpy32_post`), elsewhere an event of another kind."""
    name = str(event["name"])
    return next((kind for kind in ("memcpy", "memset") if name.lower().startswith(kind)), name)


def share_time(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the time of each interval, where intervals that overlap share the time.

    The sum is the length of the intervals' union.
    """
    points = np.unique(np.concatenate([begins, ends]))
    running = np.searchsorted(np.sort(begins), points, "right") - np.searchsorted(np.sort(ends), points, "right")
    steps = np.diff(points) / np.maximum(running[:-1], 1)
    passed = np.concatenate([[0.0], np.cumsum(steps)])
    shared: np.ndarray = passed[np.searchsorted(points, ends)] - passed[np.searchsorted(points, begins)]
    return shared


def sum_by_name(kernels: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the seconds of each kernel, by name."""
    seconds: Counter[str] = Counter()
    for event in kernels:
        seconds[event["name"]] += event["share"]
    return seconds


def share_regions(events: Sequence[dict[str, Any]]) -> Shares:
    """Return kernel -> region -> the part of the kernel's time that was launched for it, from a trace with marks."""
    marks = sorted(
        (event["ts"], event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    times = [at for at, _ in marks]
    by_kernel: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for event in find_kernels(events):
        at = launched.get(event["args"].get("correlation"))
        number = 0 if at is None else int(np.searchsorted(times, at, "right"))
        if number:
            by_kernel[event["name"]][marks[number - 1][1]] += event["share"]
    return {
        name: {region: seconds / by_region.total() for region, seconds in by_region.items()}
        for name, by_region in by_kernel.items()
        if by_region.total()
    }
