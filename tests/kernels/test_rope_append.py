"""Queries rotated, keys and values written: Triton and the reference against transformers' own modules."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kvbench.kernels.rope_append import append
from tests.support.kernel_checks import BOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUND = 2**-7 if DEVICE == "cuda" else 2**-5  # of products and sums to bfloat16; the interpreter cuts off instead


def made(*size, dtype):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE, dtype)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [None, Qwen3RMSNorm, Gemma3RMSNorm])
@BOTH
@pytest.mark.parametrize(("batch", "tokens", "heads", "group", "dim"), [(1, 1, 2, 4, 64), (2, 3, 1, 3, 24)])
def test_it_does_what_the_modules_do(batch, tokens, heads, group, dim, implementation, normed, dtype):
    projected = [made(batch * tokens, n * dim, dtype=dtype) for n in (heads * group, heads, heads)]
    angles = made(9, dim // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = (torch.full((batch, heads, 12, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    step = torch.tensor(2, dtype=torch.int32, device=DEVICE)
    scales = [made(dim, dtype=dtype) + i for i in range(2)]
    factors = [1.0 + scale.float() for scale in scales] if normed is Gemma3RMSNorm else scales
    norms = (*factors, 1e-6) if normed else None
    found = append(
        *projected, cos, sin, keys, values, 4, step, norms=norms, implementation=implementation
    )  # fmt: skip
    apart = [x.view(batch, tokens, -1, dim) for x in projected]
    if normed:
        for i, scale in enumerate(scales):
            module = normed(dim, 1e-6).to(DEVICE, dtype)
            module.weight.data = scale
            apart[i] = module(apart[i]).detach()
    queries, own, value = (x.transpose(1, 2) for x in apart)
    expected = apply_rotary_pos_emb(queries, own, cos[None, 2 : 2 + tokens], sin[None, 2 : 2 + tokens])
    bound = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else ROUND * float(expected[0].abs().max())}
    assert torch.allclose(found, expected[0], **bound)
    assert torch.allclose(keys[:, :, 6 : 6 + tokens], expected[1], **bound)
    assert torch.equal(values[:, :, 6 : 6 + tokens], value)
    for written in (keys, values):
        assert written[:, :, :6].isnan().all() and written[:, :, 6 + tokens :].isnan().all()


@BOTH
def test_a_token_goes_to_the_slot_of_each_head(implementation):
    projected = [made(2, n * 16, dtype=torch.float32) for n in (6, 3, 3)]
    angles = made(4, 16, dtype=torch.float32)
    step, slots = torch.tensor(2, dtype=torch.int32, device=DEVICE), torch.tensor([[4, 0, 2], [1, 3, 3]]).int()
    plain, chosen = ([torch.zeros(2, 3, 5, 16, device=DEVICE) for _ in range(2)] for _ in range(2))
    given = *projected, angles.cos(), angles.sin()
    found = [
        append(*given, *plain, 0, step, implementation=implementation),
        append(*given, *chosen, 0, step, slots=slots.to(DEVICE), implementation=implementation),
    ]
    assert torch.equal(*found)
    for one, other in zip(plain, chosen, strict=True):
        for b, h in ((b, h) for b in range(2) for h in range(3)):
            assert torch.equal(other[b, h, slots[b, h]], one[b, h, 2]) and other[b, h].any(-1).sum() == 1


@BOTH
def test_heads_may_have_room_for_different_numbers_of_rows(implementation):
    projected = [made(2, n * 16, dtype=torch.float32) for n in (6, 3, 3)]
    angles = made(4, 16, dtype=torch.float32)
    step, slots = torch.tensor(2, dtype=torch.int32, device=DEVICE), torch.tensor([[4, 0, 2], [1, 3, 3]])
    lengths = torch.tensor([[5, 1, 3], [2, 4, 5]])
    starts = (lengths.flatten().cumsum(0) - lengths.flatten()).view(2, 3)
    padded = [torch.zeros(2, 3, 5, 16, device=DEVICE) for _ in range(2)]
    ragged = [torch.zeros(20, 16, device=DEVICE) for _ in range(2)]
    given, more = (*projected, angles.cos(), angles.sin()), {"implementation": implementation}
    found = append(*given, *ragged, 0, step, slots=slots.to(DEVICE), starts=starts.to(DEVICE), **more)
    assert torch.equal(append(*given, *padded, 0, step, slots=slots.to(DEVICE), **more), found)
    here = torch.arange(5, device=DEVICE) < lengths.to(DEVICE)[..., None]
    assert all(torch.equal(one[here], other) for one, other in zip(padded, ragged, strict=True))


@BOTH
def test_samples_may_be_at_different_positions(implementation):
    projected = [made(4, n * 16, dtype=torch.float32) for n in (6, 3, 3)]  # two tokens of each sample
    angles = made(9, 16, dtype=torch.float32)
    step, offsets = torch.tensor(2, dtype=torch.int32, device=DEVICE), torch.tensor([4, 1], device=DEVICE)
    room = [torch.zeros(2, 3, 5, 16, device=DEVICE) for _ in range(2)]
    table, more = (angles.cos(), angles.sin()), {"implementation": implementation}
    found = append(*projected, *table, *room, 1, step, offsets=offsets, **more)
    for b, offset in enumerate(offsets.tolist()):
        own, alone = [x.view(2, 2, -1)[b] for x in projected], [torch.zeros(1, 3, 5, 16, device=DEVICE) for _ in room]
        queries = append(*own, *(part[offset:] for part in table), *alone, 1, step, **more)
        assert torch.equal(queries[0], found[b])
        assert all(torch.equal(one[0], other[b]) for one, other in zip(alone, room, strict=True))


@BOTH
def test_the_tail_may_be_a_ring(implementation):
    projected = [made(2, n * 16, dtype=torch.float32) for n in (6, 3, 3)]
    angles = made(9, 16, dtype=torch.float32)
    given, step = (*projected, angles.cos(), angles.sin()), torch.tensor(7, dtype=torch.int32, device=DEVICE)
    line, ring = ([torch.zeros(2, 3, size, 16, device=DEVICE) for _ in range(2)] for size in (12, 5))
    queries = append(*given, *line, 4, step, implementation=implementation)
    assert torch.equal(append(*given, *ring, 4, step, wraps=True, implementation=implementation), queries)
    for row, slots in zip(line, ring, strict=True):
        assert torch.equal(slots[:, :, 1], row[:, :, 11]) and slots.any((0, 1, 3)).tolist() == [0, 1, 0, 0, 0]


def test_channels_beyond_the_rotation_stay():
    projected = [made(1, n * 24, dtype=torch.float32) for n in (4, 2, 2)]
    angles = made(3, 8, dtype=torch.float32)
    step = torch.tensor(1, dtype=torch.int32, device=DEVICE)
    found = []
    for name in ("reference", "triton"):
        room = [torch.zeros(1, 2, 5, 24, device=DEVICE) for _ in range(2)]
        found.append([append(*projected, angles.cos(), angles.sin(), *room, 1, step, implementation=name), *room])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert torch.equal(found[1][0][0, :, 0, 8:], projected[0].view(4, 24)[:, 8:])


@BOTH
def test_keys_may_be_written_as_projected(implementation):
    """While queries are normed and rotated, into memory in which the keys and values of a row lie together."""
    projected = [made(2, n * 16, dtype=torch.float32) for n in (6, 3, 3)]
    angles, norms = made(4, 16, dtype=torch.float32), (*(made(16, dtype=torch.float32) for _ in range(2)), 1e-6)
    step, room = torch.tensor(2, dtype=torch.int32, device=DEVICE), torch.zeros(2, 5, 2, 3, 16, device=DEVICE)
    given, more = (*projected, angles.cos(), angles.sin()), {"norms": norms, "implementation": implementation}
    plain = [torch.zeros(2, 3, 5, 16, device=DEVICE) for _ in range(2)]
    found = append(*given, *room.transpose(1, 3).unbind(2), 1, step, rotates_keys=False, **more)
    assert torch.equal(found, append(*given, *plain, 1, step, **more))
    assert torch.equal(room[:, 3].flatten(1), torch.cat(projected[1:], 1)) and room.any((0, 2, 3, 4)).sum() == 1


def test_what_does_not_fit_is_refused():
    room, step = torch.zeros(1, 2, 5, 24), torch.tensor(0, dtype=torch.int32)
    x, angles = torch.zeros(1, 48), torch.zeros(3, 24)
    with pytest.raises(ValueError, match="for 2 heads of 24"):
        append(x[:, :40], x, x, angles, angles, room, room, 0, step)
    with pytest.raises(ValueError, match="cos"):
        append(x, x, x, angles, angles[:2], room, room, 0, step)
    with pytest.raises(ValueError, match=r"starts \(1, 2\) in rows \(1, 2, 5, 24\)"):
        slots = torch.zeros(1, 2, dtype=torch.int64)
        append(x, x, x, angles, angles, room, room, 0, step, slots=slots, starts=slots)
    with pytest.raises(ValueError, match="2 tokens of 1 samples into a ring"):
        append(*(3 * [x.repeat(2, 1)]), angles, angles, room, room, 0, step, wraps=True)
    with pytest.raises(ValueError, match=r"offsets \(2,\) for batch 1"):
        append(x, x, x, angles, angles, room, room, 0, step, offsets=torch.zeros(2))


def ahead():
    from kvbench.kernels.rope_append.triton import _append

    real = {"step": "*i32", "slots": "*i64", "starts": "*i64", "offsets": "*i64", "epsilon": "fp32"}
    real |= {"query_norm": "*fp32", "key_norm": "*fp32"}
    real |= dict.fromkeys(("NORM", "SLOTS", "STARTS", "OFFSETS", "ROTATE", "RING", "D"), "constexpr")
    whole = ("tail", "tokens", "heads", "query_heads", "dim", "turning")
    types = {
        name: real.get(name, "i32" if name in whole or name[:2] in ("s_", "sk", "sv") else "*bf16")
        for name in _append.arg_names
    }
    for own in (False, True):
        yield (
            _append,
            types,
            {"NORM": own, "SLOTS": not own, "STARTS": not own, "OFFSETS": not own, "ROTATE": own}
            | {"RING": 145 if own else 0, "D": 128},
            {"num_warps": 2},
        )
