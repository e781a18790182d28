"""Attend through torch's scaled_dot_product_attention, which needs no memory for logits if it has a fused kernel."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvbench.kernels.attention.reference import CHUNK, visible_mask
from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits, weigh_logits

PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, mass: Tensor | None, scaling: float, look: Tensor | None
) -> Tensor:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    if mass is None and look is None and tokens == rows:
        with avoid_plans(queries):
            return scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=heads != query_heads
            )
    # the query heads of a group become further queries, so keys and values are read once for the whole group
    groups = query_heads // heads
    grouped = queries.reshape(batch, heads, groups, tokens, dim)
    outputs = torch.empty_like(grouped)
    step = max(1, CHUNK // (batch * query_heads * rows))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        bias = _bias(batch, heads, groups, tokens, start, stop, mass, look, rows, queries)
        some = grouped[..., start:stop, :].reshape(batch, heads, -1, dim)
        with avoid_plans(queries):
            output = scaled_dot_product_attention(some, keys, values, attn_mask=bias, scale=scaling)
        outputs[..., start:stop, :] = output.view(batch, heads, groups, stop - start, dim)
    return outputs.view_as(queries)


def avoid_plans(queries: Tensor) -> AbstractContextManager[None]:
    """Keep torch from choosing cuDNN, which plans anew for every number of rows: for every token of an answer."""
    return sdpa_kernel(PLANLESS) if queries.is_cuda else nullcontext()


def attend_sdpa_lse(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the outputs and the log-sum-exp (B, Hq, T) of a whole prompt on the CPU.

    torch's fused kernel computes both, but its public function returns only the outputs.
    """
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    outputs, lse = fused(queries, keys, values, 0.0, True, scale=scaling)
    return outputs, lse.to(torch.promote_types(lse.dtype, torch.float32))


def cudnn_serves(queries: Tensor, keys: Tensor) -> bool:
    """Return whether cuDNN's attention, the fastest for long blocks on Hopper, supports these tensors."""
    if not queries.is_cuda or queries.dtype not in (torch.bfloat16, torch.float16):
        return False
    given = torch.backends.cuda.SDPAParams(queries, keys, keys, None, 0.0, True, queries.shape[1] != keys.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(given, False)


def attend_cudnn(
    queries: Tensor, earlier: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the log-sum-exp (B, Hq, T) of a block over itself, causal, and over all earlier rows.

    `earlier` are keys and values (B, H, m, d). Two calls without a mask are joined by their log-sum-exps.
    """
    fused = torch.ops.aten._scaled_dot_product_cudnn_attention
    outputs, lse = fused(queries, keys, values, None, True, 0.0, True, scale=scaling)[:2]
    lse = lse.view(queries.shape[:3])
    if earlier is None:
        return outputs, lse
    others, other = fused(queries, *earlier, None, True, 0.0, False, scale=scaling)[:2]
    other = other.view(lse.shape)
    share = torch.sigmoid(other - lse)[..., None].to(outputs.dtype)  # the earlier rows' share of the softmax
    return torch.lerp(outputs, others, share), torch.logaddexp(lse, other)


def _bias(
    batch: int,
    heads: int,
    groups: int,
    tokens: int,
    start: int,
    stop: int,
    mass: Tensor | None,
    look: Tensor | None,
    rows: int,
    like: Tensor,
) -> Tensor | None:
    """Return the log mass, -inf where a query does not see a row: (B or 1, H or 1, groups·(stop - start), rows)."""
    if mass is None and look is None:
        if tokens == 1:
            return None
        seen = visible_mask(tokens, start, stop, rows, like.device)
        return seen.expand(groups, -1, -1).reshape(1, 1, -1, rows)
    bias = like.new_zeros(1, 1, 1, 1, rows) if mass is None else mass.log().to(like.dtype)[:, :, None, None]
    if tokens > 1:
        bias = bias.masked_fill(~visible_mask(tokens, start, stop, rows, like.device), -torch.inf)
    if look is not None:
        bias = bias.masked_fill(~look.view(batch, heads, groups, 1, rows), -torch.inf)
    bias = bias.expand(-1, -1, groups, stop - start, rows)
    return bias.reshape(*bias.shape[:2], -1, rows)


def attend_windowed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None,
    extras: SoftmaxExtras | None = None,
    *,
    chunk: int | None = None,
    first: int = 0,
) -> Tensor:
    """Attend within a sliding window, or within chunks: query i sees row j if i // chunk = j // chunk.

    Args:
        queries: (B, Hq, T, d)
        keys: (B, H, n, d). The last T rows are the block: query t sees rows up to n - T + t.
        values: (B, H, n, e)
        scaling: The factor of the logits.
        window: Number of last rows that a query sees; None for all.
        extras: Sinks and cap of the softmax; None for the plain one.
        chunk: Number of tokens of a chunk; None for no chunks.
        first: Position of the first row in the text, where chunks are counted from its beginning.

    Returns:
        The outputs, (B, Hq, T, e).
    """
    if extras is not None:
        return attend_windowed_extras(queries, keys, values, scaling, window, extras)
    tokens, rows = queries.shape[2], keys.shape[2]
    step = max(1, CHUNK // (queries.shape[0] * queries.shape[1] * rows))
    batch, heads = queries.shape[:2]
    # tokens lie behind each other, because some models call `view` on the outputs with tokens first
    outputs = queries.new_empty(batch, tokens, heads, values.shape[3]).transpose(1, 2)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        seen = visible_mask(tokens, start, stop, rows, keys.device)
        if window is not None:
            last = torch.arange(start, stop, device=keys.device)[:, None] + rows - tokens
            seen = seen & (torch.arange(rows, device=keys.device) > last - window)
        if chunk is not None:
            places = torch.arange(first, first + rows, device=keys.device) // chunk
            seen = seen & (places == places[start + rows - tokens : stop + rows - tokens, None])
        outputs[:, :, start:stop] = attend_masked(queries[:, :, start:stop], keys, values, scaling, seen)
    return outputs


@announced
def attend_windowed_extras(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None,
    extras: SoftmaxExtras,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Attend within a window with sinks or a cap, which torch's kernels have not. Arguments as of `attend_windowed`.

    In the reference each chunk of queries reads only the rows of its windows.
    """
    width = values.shape[3]  # the Triton kernel reads values as wide as keys
    if width == keys.shape[3] and choose_implementation("attend_windowed", implementation, queries) == "triton":
        from kvbench.kernels.attention.triton import attend_triton

        rows = keys.shape[2]
        return attend_triton(queries, None, keys, values, scaling, rows, rows, False, None, None, extras, window)[0]
    tokens, rows = queries.shape[2], keys.shape[2]
    reach = rows if window is None else min(window, rows)
    step = max(1, min(reach, CHUNK // (2 * queries.shape[0] * queries.shape[1] * reach)))
    outputs = queries.new_empty(*queries.shape[:3], width)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        last = torch.arange(start, stop, device=keys.device)[:, None] + rows - tokens
        read = slice(max(0, rows - tokens + start - reach + 1), rows - tokens + stop)
        place = torch.arange(read.start, read.stop, device=keys.device)
        seen = (place <= last) & (place > last - reach)
        given = queries[:, :, start:stop], keys[:, :, read], values[:, :, read]
        outputs[:, :, start:stop] = attend_masked(*given, scaling, seen, extras)
    return outputs


def attend_masked(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    seen: Tensor,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    """Attend with queries (B, Hq, T, d) to the keys and values (B, H, n, d) of the rows that `seen` (T, n) marks."""
    if extras is not None:
        dtype = torch.promote_types(queries.dtype, torch.float32)
        grouped = queries.unflatten(1, (keys.shape[1], -1)).to(dtype)
        logits = cap_logits(grouped @ keys[:, :, None].to(dtype).mT * scaling, extras).masked_fill(~seen, -torch.inf)
        outputs = weigh_logits(logits, extras) @ values[:, :, None].to(dtype)
        return outputs.flatten(1, 2).to(queries.dtype)
    with avoid_plans(queries):
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scaling, enable_gqa=keys.shape[1] != queries.shape[1]
        )
