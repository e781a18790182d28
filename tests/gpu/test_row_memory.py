"""Does one memory for the rows of all answers attend as fast as today's kernels do?

Three ways attend with one token of each answer: to rows of all answers in one memory (`attend_ragged` with starts and
lengths on the device), to rows where they lie (`attend_joined`, which is given distances), and to what a lone answer or
answers of one method have today. All give the same outputs. The table in docs/architecture.md is what

    python -m pytest tests/gpu/test_row_memory.py -m rest -s -p no:benchmark

prints: the mean time of a CUDA graph of one call for each layer, 180 replays.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.joined_rows import Part, attend_joined, join_parts

pytestmark = [
    pytest.mark.gpu, pytest.mark.rest, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
]  # fmt: skip
LARGE, SMALL = (8, 4, 128), (3, 3, 64)  # KV heads, query heads of each, head dimension: Llama-3.1-8B and SmolLM2-135M
CASES = {  # what is attended to -> rows of each answer, shape, layers
    "one answer, 32k rows": ([32768], LARGE, 32),
    "one answer, 128k rows": ([131072], LARGE, 16),
    "one answer, 1,639 rows": ([1639], LARGE, 32),
    "16 answers, 1,639 rows each": ([1639] * 16, LARGE, 32),
    "16 answers, 32k rows each": ([32768] * 16, LARGE, 4),
    "13 answers, 32k and cut to 10 % and 30 %": ([32768, *[3277, 9830] * 6], LARGE, 32),
    "26 answers of a small model, 4k, 10 % and 30 %": ([4096, *[410, 1229] * 6] * 2, SMALL, 30),
}
APPENDED, ROOM = 33, 100  # rows behind the prompt's, and memory for more
Way = Callable[[int], Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def hold_apart(keys: Tensor, values: Tensor) -> Part:
    """An answer's rows (H, n, d) as they lie today: those of the prompt, and a tail with room."""
    heads, rows, dim = keys.shape
    old = rows - APPENDED
    starts, lengths = torch.arange(heads, device="cuda") * old, torch.full((heads,), old, device="cuda")
    held = [own[:, :old].reshape(-1, dim).contiguous() for own in (keys, values)]
    tails = torch.zeros(2, 1, heads, APPENDED + ROOM, dim, device="cuda", dtype=keys.dtype)
    tails[0, 0, :, :APPENDED], tails[1, 0, :, :APPENDED] = keys[:, old:], values[:, old:]
    return Part(RaggedRows(*held, None, starts, lengths, old, True), tails[0], tails[1], 0)


def hold_together(answers: list[tuple[Tensor, Tensor]]) -> RaggedRows:
    """The rows of all answers in one memory, each head's with room behind them."""
    keys, values = (
        torch.cat([torch.nn.functional.pad(own[side], (0, 0, 0, ROOM)).flatten(0, 1) for own in answers])
        for side in (0, 1)
    )
    lengths = torch.tensor([own.shape[1] for own, _ in answers for _ in own], device="cuda")
    starts = (lengths + ROOM).cumsum(0) - lengths - ROOM
    return RaggedRows(keys, values, None, starts, lengths, int(lengths.max()) + ROOM)


def make_ways(lengths: list[int], shape: tuple[int, int, int], layers: int) -> dict[str, Way]:
    """Each way: the number of a layer -> the outputs of attention there."""
    heads, group, dim = shape
    queries, scaling = draw(len(lengths), heads * group, 1, dim), dim**-0.5
    none, step = draw(len(lengths), heads, 0, dim), torch.tensor(APPENDED - 1, dtype=torch.int32, device="cuda")
    together, apart, joined, slots = [], [], [], []
    for _ in range(layers):
        answers = [(draw(heads, rows, dim), draw(heads, rows, dim)) for rows in lengths]
        together.append(hold_together(answers))
        apart.append([hold_apart(*own) for own in answers])
        joined.append(join_parts(apart[-1]))
        if len(set(lengths)) == 1:
            slots.append([torch.stack(side) for side in zip(*answers, strict=True)])
    ways: dict[str, Way] = {
        "one memory": lambda layer: attend_ragged(queries, together[layer], none, none, scaling)[0],
        "where they lie": lambda layer: attend_joined(queries, joined[layer], scaling, step),
    }
    if len(lengths) == 1:
        ways["today, appended"] = lambda layer: attend_ragged(
            queries, apart[layer][0].held, apart[layer][0].tail_keys, apart[layer][0].tail_values, scaling, tail=1,
            step=step,
        )[0]  # fmt: skip
    if slots:
        ways["today, in slots"] = lambda layer: attend_ragged(queries, None, *slots[layer], scaling)[0]
    return ways


def measure(way: Way, layers: int) -> float:
    """Return the milliseconds of one call for each layer."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for layer in range(layers):
            way(layer)
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for layer in range(layers):
            way(layer)
    for _ in range(5):
        graph.replay()
    begin.record()
    for _ in range(180):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 180


@pytest.mark.parametrize("case", CASES)
def test_all_ways_attend_alike(case):
    ways = make_ways(*CASES[case])
    expected, times = ways["one memory"](0), {}
    for name, way in ways.items():
        torch.testing.assert_close(way(0), expected, rtol=0, atol=2e-3)
        times[name] = measure(way, CASES[case][2])
        print(f"{case:48} {name:16} {times[name]:.3f} ms {times[name] / times['one memory']:.2f}")
    del ways
    torch.cuda.empty_cache()
