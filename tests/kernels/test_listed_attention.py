"""Attention over listed rows: Triton against a loop over heads in float64."""

import pytest
import torch

from kvbench.kernels.listed_attention import attend_listed
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # batch, KV heads, group, rows, newest row, dim, lists, block, blocks, after
    "pages": (2, 2, 4, 90, 70, 16, 8, 16, 3, None),
    "the newest page is not whole": (1, 2, 1, 40, 33, 24, 2, 8, 5, None),
    "one list and a tail": (2, 2, 3, 200, 130, 16, 1, 1, 20, 120),
    "a tail of one row": (1, 1, 8, 64, 50, 64, 1, 1, 9, 50),
    "many": (1, 2, 2, 700, 690, 16, 4, 4, 100, None),
    "a list per KV head": (2, 3, 4, 200, 130, 24, 3, 1, 90, None),
    "a list per KV head and a tail": (1, 2, 7, 100, 90, 64, 2, 1, 30, 80),
}


def case(name, dtype):
    batch, heads, group, rows, newest, dim, lists, size, listed, after = CASES[name]
    draw = torch.Generator().manual_seed(rows)
    queries = torch.randn(batch, heads * group, 1, dim, generator=draw)
    keys, values = (torch.randn(batch, heads, rows + 3, dim, generator=draw)[:, :, :rows] for _ in range(2))
    keys[:, :, newest + 1 :] = values[:, :, newest + 1 :] = torch.nan  # behind the newest row is nothing
    end = newest // size + 1 if after is None else after // size
    blocks = torch.stack([torch.randperm(end, generator=draw)[:listed] for _ in range(batch * lists)])
    blocks[:, 0] = torch.where((blocks == end - 1).any(-1), blocks[:, 0], end - 1)  # the newest block is listed
    own = [part.to(DEVICE, dtype) for part in (queries, keys, values)]
    return own, blocks.view(batch, lists, listed).to(DEVICE), size, newest, after


def attend_by_head(queries, keys, values, blocks, size, newest, after, sinks=None, cap=None):
    """Outputs and the number of rows attended to."""
    outputs, count = torch.zeros_like(queries), 0
    for b in range(len(queries)):
        for head in range(queries.shape[1]):
            own = blocks[b, head * blocks.shape[1] // queries.shape[1]].tolist()
            rows = {block * size + row for block in own for row in range(size)} | set(
                range(after or newest + 1, newest + 1)
            )
            rows = sorted(row for row in rows if row <= newest)
            kv = head * keys.shape[1] // queries.shape[1]
            logits = keys[b, kv, rows] @ queries[b, head, 0] * 0.3
            weights = (logits if cap is None else cap * (logits / cap).tanh()).exp()
            weights /= weights.sum() + (0 if sinks is None else sinks[head].exp())
            outputs[b, head, 0] = weights @ values[b, kv, rows]
            count += len(rows)
    return outputs, count


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
@pytest.mark.parametrize("name", CASES)
def test_only_listed_rows_are_attended_to(name, implementation, dtype):
    own, blocks, size, newest, after = case(name, dtype)
    last, step = torch.tensor(newest, device=DEVICE), torch.tensor(1, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    found = attend_listed(
        *own, blocks, size, last, 0.3, after=after, counts=(counts, step), implementation=implementation
    )
    exact, count = attend_by_head(*(part.double() for part in own), blocks, size, newest, after)
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-5) * exact.abs().max()
    assert counts.tolist() == [0, count, 0]
    again = attend_listed(*own, blocks, size, last, 0.3, after=after, implementation=implementation)
    assert torch.equal(found, again)


@BOTH
@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize("name", ["pages", "one list and a tail", "a list per KV head"])
def test_sinks_and_caps(name, programs, implementation, monkeypatch):
    monkeypatch.setattr("kvbench.kernels.listed_attention.triton.PROGRAMS", programs)
    own, blocks, size, newest, after = case(name, torch.float32)
    sinks = torch.linspace(-2, 5, own[0].shape[1], device=DEVICE)
    given = own, blocks, size, newest, after
    exact, _ = attend_by_head(*(part.double() for part in own), *given[1:], sinks.double(), 0.7)
    found = attend_listed(
        *own, blocks, size, torch.tensor(newest, device=DEVICE), 0.3, after=after,
        extras=SoftmaxExtras(sinks, 0.7), implementation=implementation,
    )  # fmt: skip
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@BOTH
@pytest.mark.parametrize("name", ["pages", "one list and a tail", "a list per KV head"])
def test_blocks_that_do_not_exist_fill_a_list(name, implementation):
    own, blocks, size, newest, after = case(name, torch.float32)
    exact, count = attend_by_head(*(part.double() for part in own), blocks, size, newest, after)
    none = torch.full_like(blocks, own[1].shape[2])
    counts, step = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor(0, device=DEVICE)
    found = attend_listed(
        *own, torch.cat([none, blocks, none], 2), size, torch.tensor(newest, device=DEVICE), 0.3, after=after,
        counts=(counts, step), implementation=implementation,
    )  # fmt: skip
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max() and counts.tolist() == [count]


def test_what_does_not_fit_is_refused():
    queries, rows, last = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 9, 8), torch.tensor(3)
    for blocks in (
        torch.zeros(1, 3, 3, dtype=torch.int64),
        torch.zeros(1, 4, 3),
        torch.zeros(1, 4, 0, dtype=torch.int64),
    ):
        with pytest.raises(ValueError, match="^attend_listed: blocks"):
            attend_listed(queries, rows, rows, blocks, 1, last, 1.0)
    with pytest.raises(ValueError, match="^attend_listed: queries"):
        attend_listed(queries.expand(1, 4, 2, 8), rows, rows, torch.zeros(1, 4, 3, dtype=torch.int64), 1, last, 1.0)


def ahead():
    from kvbench.kernels.listed_attention.triton import _listed

    kinds = dict.fromkeys(("queries", "keys", "values", "outputs", "sinks"), "*bf16") | {
        "scale": "fp32",
        "step": "*i32",
    }
    kinds |= dict.fromkeys(("blocks", "last", "counts"), "*i64")
    kinds |= dict.fromkeys(("part_acc", "part_max", "part_norm"), "*fp32")
    for shared in (False, True):
        constants = {
            "SIZE": 1 if shared else 16,
            "TAIL": shared,
            "COUNT": True,
            "SINGLE": False,
            "M": 16,
            "N": 128,
            "D": 128,
            "CAST": False,
            **({"CAP": 50.0} if shared else {"CAP": None, "sinks": None}),
        }
        pointers = kinds if shared else {name: kind for name, kind in kinds.items() if name != "sinks"}
        yield list_kernel(_listed, pointers, constants, num_warps=4, num_stages=2)
