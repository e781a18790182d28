"""Decode over latent rows in Triton, in four launches: append, logits, sums of latents, joined sums times U.

If latents are rounded, a fifth one does this after the first.

README.md says what decides the time, and why the logits are a launch of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, add_tile, cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.latent_attention.rounding import EIGHT, LARGEST, LEAST
from kvbench.kernels.latent_attention.rows import LatentRows, Side, find_unit
from kvbench.kernels.quantize.triton import EVEN
from kvbench.kernels.rope_append.triton import rotate_head
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

CORES = 132  # multiprocessors that the rows are split over
LATENTS = 128  # most latents of a row that a program multiplies with U at once; twice as many if codes have 4 bits
KEPT = 128 * 1024  # most bytes of U that a program keeps in shared memory
SMALL = 64 * 1024  # most of these bytes if a multiprocessor is to run two programs
NARROW = 64  # most latents of a row if a multiprocessor is to run further programs
REGISTERS = 168  # registers of a thread with at most NARROW latents; then three programs fit a multiprocessor
BY_ROW = 16  # least queries of a group whose logits are stored row by row
WIDE = 256  # most channels of the keys that a program makes at once
ROWS = 64  # rows of a tile, as many as the matrix units take at least
ASKING = 64  # most queries of a group that a program sums latents for
JOINED = 4096  # most latents of sums that are joined at once
BLOCK = 32  # latents of a program that appends, and channels of one that joins


@triton.jit
def _find_pair(pair, turning, dim):
    """Return the two channels of a head that its rotation mixes, by the pair's number.

    The channels behind the first `turning` ones are not rotated and form pairs too.
    """
    half = turning // 2
    turns = pair < half
    return tl.where(turns, pair, pair + half), tl.where(turns, pair + half, pair + dim // 2)


@triton.jit
def _point(addresses, index, like):
    """Read a pointer to numbers of `like`'s type from a table of addresses, which are multiples of 16."""
    return tl.multiple_of(tl.load(addresses + index).to(like.dtype), [16])


@triton.jit(do_not_specialize=["seen", "room"])
def _append(
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    out,
    step,
    addresses,
    ranks,
    more_keys,
    more_values,
    seen,
    room,
    groups,
    query_heads,
    width,
    turning,
    dim,
    epsilon,
    s_q,
    s_k,
    s_v,
    NORM: tl.constexpr,
    KEY_BIAS: tl.constexpr,
    VALUE_BIAS: tl.constexpr,
    RK: tl.constexpr,
    RV: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Rotate one query head of one token, or make some latents of its keys or values of one group.

    With ROUNDED the memory has room for the latents of one token, which `_round` reads.
    """
    b, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    since = tl.load(step)
    if index < query_heads:
        column = tl.arange(0, D)
        source = queries + b * s_q + index * dim
        turned = rotate_head(source, query_norm, cos, sin, seen + since, column, turning, dim, epsilon, out, NORM)
        tl.store(out + (b * query_heads + index) * dim + column, turned, mask=column < dim)
    else:
        number = (index - query_heads) // BLOCKS
        latent = (index - query_heads) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        is_value, group = number >= groups, number % groups
        rank = tl.load(ranks + number)
        down = _point(addresses, 4 * groups + number, keys)
        bias = _point(addresses, 6 * groups + number, keys)
        source = tl.where(is_value, values + b * s_v, keys + b * s_k) + group * width
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, W):
            part = first + tl.arange(0, W)
            x = tl.load(source + part, mask=part < width, other=0.0).to(tl.float32)  # (W,)
            if KEY_BIAS or VALUE_BIAS:
                has = (is_value & VALUE_BIAS) | ((is_value == 0) & KEY_BIAS)
                x -= tl.load(bias + part, mask=has & (part < width), other=0.0).to(tl.float32)  # (W,)
                x = x.to(keys.dtype.element_ty).to(tl.float32)
            where = (latent < rank)[:, None] & (part < width)[None]
            # (BLOCK, W)
            matrix = tl.load(down + latent[:, None] * width + part[None], mask=where, other=0.0).to(tl.float32)
            total += tl.sum(matrix * x[None], 1)
        line = group * tl.num_programs(0) + b
        if not ROUNDED:
            line = line * room + since
        tl.store(more_keys + line * RK + latent, total, mask=(latent < rank) & (is_value == 0))
        tl.store(more_values + line * RV + latent, total, mask=(latent < rank) & is_value)


@triton.jit(do_not_specialize=["room"])
def _round(
    keys,
    values,
    step,
    ranks,
    more_keys,
    more_values,
    key_steps,
    value_steps,
    key_zeros,
    value_zeros,
    room,
    groups,
    key_clip,
    value_clip,
    RK: tl.constexpr,
    RV: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Round the latents of a token's keys or values of a group, (G, B, RK) and (G, B, RV), and store their codes."""
    b, number = tl.program_id(0), tl.program_id(1)
    is_value, group = number >= groups, number % groups
    rank, line = tl.load(ranks + number), (group * tl.num_programs(0) + b).to(tl.int64)
    eight, within = tl.arange(0, R // EIGHT), tl.arange(0, EIGHT)
    latent = eight[:, None] * EIGHT + within[None]
    known = latent < rank
    # (R // EIGHT, EIGHT)
    x = tl.load(keys + line * RK + latent, mask=known & (is_value == 0), other=0.0).to(tl.float32)
    x += tl.load(values + line * RV + latent, mask=known & is_value, other=0.0).to(tl.float32)  # (R // EIGHT, EIGHT)
    clip = tl.where(is_value, value_clip, key_clip)
    low = clip * tl.min(tl.min(tl.where(known, x, float("inf")), 1), 0)
    high = clip * tl.max(tl.max(tl.where(known, x, float("-inf")), 1), 0)
    most = 2.0**BITS - 1
    size = tl.minimum(tl.div_rn(tl.maximum(high - low, LEAST), most), LARGEST).to(tl.float16)
    unit = size.to(tl.float32)
    zero = tl.minimum(tl.maximum(tl.div_rn(-low, unit), 0.0), most)
    zero = (zero + EVEN) - EVEN
    share = tl.div_rn(x, tl.broadcast_to(unit, x.shape))
    share = tl.minimum(tl.maximum(share, -2 * most), 2 * most)  # farther away than any code
    code = tl.minimum(tl.maximum((share + EVEN) - EVEN + zero, 0.0), most).to(tl.int32)
    line = line * room + tl.load(step)
    for bit in tl.static_range(BITS):
        byte = tl.sum((code >> bit & 1) << within[None], 1).to(tl.uint8)
        at = eight * BITS + bit
        here = eight < rank // EIGHT
        tl.store(more_keys + line * (RK * BITS // EIGHT) + at, byte, mask=here & (is_value == 0))
        tl.store(more_values + line * (RV * BITS // EIGHT) + at, byte, mask=here & is_value)
    tl.store(key_steps + line, size, mask=is_value == 0)
    tl.store(value_steps + line, size, mask=is_value)
    tl.store(key_zeros + line, zero.to(tl.uint8), mask=is_value == 0)
    tl.store(value_zeros + line, zero.to(tl.uint8), mask=is_value)


@triton.jit
def _find_rows(
    addresses,
    start,
    group,
    groups,
    side,
    index,
    room,
    rank,
    more,
    more_steps,
    more_zeros,
    PITCH: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
):
    """Find the latents, s and z of a sample's held and appended rows, for keys (`side` 0) or values (1).

    Returns pointers to the first latent, s and z of the held and of the appended rows, and the size of a held row's
    latents. PITCH is the size of an appended row's latents.
    """
    size = rank * BITS // EIGHT if BITS else rank
    first = index.to(tl.int64) * room
    held = _point(addresses, side * groups + group, more) + start * size
    steps = _point(addresses, (8 + side) * groups + group, more_steps) + start
    zeros = _point(addresses, (10 + side) * groups + group, more_zeros) + start
    return held, more + first * PITCH, steps, more_steps + first, zeros, more_zeros + first, size


@triton.constexpr_function
def _list_factors(bits, eight):
    """Return Σ_b 2^(8·(bits − 1) − 7·b). No two products of a bit meet, so nothing is carried."""
    return sum(1 << (eight * (bits - 1) - (eight - 1) * bit) for bit in range(bits))


@triton.jit
def _load_latents(
    source,
    like,
    line,
    pitch,
    here,
    rank,
    first,
    N: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
):
    """Load R latents of the N rows at `line`, from number `first` on, (N, R), or their codes in the type of `like`.

    They are zero where there is no row (`here`) or no latent.
    """
    if BITS:
        return _load_codes(source, line, pitch, here, rank, first, N, R, BITS, EIGHT).to(like.dtype.element_ty)
    else:
        latent = first + tl.arange(0, R)
        where = here[:, None] & (latent < rank)[None]
        return tl.load(source + (line * pitch)[:, None] + latent[None], mask=where, other=0.0)  # (N, R)


@triton.jit
def _load_codes(
    source, line, pitch, here, rank, first, N: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, EIGHT: tl.constexpr
):
    """Return the codes of R latents, (N, R) float32. Of eight codes, byte b has the bits of weight 2^b."""
    eight = first // EIGHT + tl.arange(0, R // EIGHT)
    where = here[:, None] & (eight < rank // EIGHT)[None]
    if BITS == 3:
        at = source + (line * pitch)[:, None] + (eight * BITS)[None]
        word = tl.zeros([N, R // EIGHT], tl.uint32)
        for byte in tl.static_range(BITS):
            word |= tl.load(at + byte, mask=where, other=0).to(tl.uint32) << (EIGHT * byte)  # (N, R // EIGHT)
    else:
        words = source.to(tl.pointer_type(tl.uint32 if BITS == 4 else tl.uint16))
        # (N, R // EIGHT)
        word = tl.load(words + (line * (pitch // BITS))[:, None] + eight[None], mask=where, other=0).to(tl.uint32)
    ones: tl.constexpr = 0x01010101 >> (EIGHT * (4 - BITS))
    gather: tl.constexpr = _list_factors(BITS, EIGHT)  # brings the bits of a code, one in each byte, together
    bits = (word[:, :, None] >> tl.arange(0, EIGHT).to(tl.uint32)[None, None]) & ones
    codes = (bits * gather >> (EIGHT * (BITS - 1))) & (2**BITS - 1)
    return tl.reshape(codes, [N, R]).to(tl.float32)


@triton.jit
def _load_columns(
    up,
    heads,
    rank,
    first,
    dim,
    turning,
    first_head,
    R: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Load U's rows of some heads as columns, (R, HEADS·DP), from latent `first` on. A pair is two neighbours."""
    column, latent = tl.arange(0, HEADS * DP), first + tl.arange(0, R)
    pair, head = column % DP // 2, first_head + column // DP
    one, two = _find_pair(pair, turning, dim)
    channel = head * dim + tl.where(column % 2 == 0, one, two)
    where = (latent < rank)[:, None] & ((pair < dim // 2) & (head < heads))[None]
    u = tl.load(up + channel[None] * rank + latent[:, None], mask=where, other=0.0)  # (R, HEADS * DP)
    return u.to(tl.float32) if CAST else u


@triton.jit
def _multiply(
    source,
    like,
    line,
    pitch,
    here,
    rank,
    first,
    u,
    k,
    N: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Add the product of some latents of rows (`_load_latents`) with their columns u to k."""
    h = _load_latents(source, like, line, pitch, here, rank, first, N, R, BITS, EIGHT)
    return tl.dot(h.to(tl.float32) if CAST else h, u, k, input_precision="ieee")  # (N, HEADS * DP)


@triton.jit
def _restore(k, total, steps, zeros, line, here):
    """Return rows (N, W) from k, the products of their codes with U. `total` (W,) are the sums of U's columns."""
    unit = tl.load(steps + line, mask=here, other=0.0).to(tl.float32)  # (N,)
    zero = tl.load(zeros + line, mask=here, other=0).to(tl.float32)  # (N,)
    return (k - zero[:, None] * total[None]) * unit[:, None]


@triton.jit
def _split_pairs(word, like):
    """Return the cosines and the sines that words hold side by side, as float32."""
    if like.dtype.element_ty == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    elif like.dtype.element_ty == tl.float16:
        cos, sin = (
            word.to(tl.int16).to(tl.float16, bitcast=True),
            (word >> 16).to(tl.int16).to(tl.float16, bitcast=True),
        )
        return cos.to(tl.float32), sin.to(tl.float32)
    else:
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _turn_and_ask(
    k,
    bias,
    key_norm,
    word,
    like,
    q,
    heads,
    dim,
    turning,
    epsilon,
    first_head,
    part,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Return the products of keys (N, HEADS·DP), which are normed and rotated first, with queries, (N, M)."""
    pair = tl.arange(0, DP // 2)
    low, high = _find_pair(pair, turning, dim)
    x, y = tl.split(tl.reshape(k, [N, HEADS, DP // 2, 2]))
    if BIAS:
        head = first_head + tl.arange(0, HEADS)
        where = (head < heads)[:, None] & (pair < dim // 2)[None] & (part == 0)  # the bias counts once
        # (HEADS, DP // 2)
        x += tl.load(bias + head[:, None] * dim + low[None], mask=where, other=0.0).to(tl.float32)[None]
        # (HEADS, DP // 2)
        y += tl.load(bias + head[:, None] * dim + high[None], mask=where, other=0.0).to(tl.float32)[None]
    if NORM:
        inverse = (1.0 / tl.sqrt(tl.sum(x * x + y * y, 2) / dim + epsilon))[:, :, None]
        x *= inverse * tl.load(key_norm + low, mask=pair < dim // 2, other=0.0).to(tl.float32)[None, None]  # (DP // 2,)
        # (DP // 2,)
        y *= inverse * tl.load(key_norm + high, mask=pair < dim // 2, other=0.0).to(tl.float32)[None, None]
    c, s = _split_pairs(word[:, None], like)
    k = tl.reshape(tl.join(x * c - y * s, y * c + x * s), [N, HEADS * DP])
    return tl.dot(k.to(q.dtype), q, input_precision="ieee")  # (N, M)


@triton.jit
def _find_pitches(held_tiles, room, queries, N: tl.constexpr, BY_ROW: tl.constexpr):
    """Return the distance between the logits of two rows, that of two queries, and the number of a group's logits.

    They are stored row by row (BY_ROW) or query by query.
    """
    places = tl.multiple_of((held_tiles + tl.cdiv(room, N)) * N, [N])
    size = places.to(tl.int64) * queries
    if BY_ROW:
        return queries, 1, size
    else:
        return 1, places, size


@triton.jit
def _store_logits(
    logits,
    into,
    mark,
    line,
    left,
    query,
    asking,
    heads,
    each,
    is_new,
    row_pitch,
    query_pitch,
    N: tl.constexpr,
    MARKS: tl.constexpr,
):
    """Store the logits of a tile, of which the first `left` rows exist."""
    here = line < left
    if MARKS:
        marked = (here & (is_new == 0))[:, None] & asking[None]
        holds = tl.load(mark + line[:, None] * heads + (query // each)[None], mask=marked, other=1)  # (N, M)
        logits = tl.where(holds != 0, logits, float("-inf"))
    logits = tl.where(here[:, None], logits, float("-inf"))
    tl.store(into + line[:, None] * row_pitch + query[None] * query_pitch, logits, mask=asking[None])


@triton.jit(do_not_specialize=["seen", "room", "held_tiles", "splits"])
def _weigh(
    queries,
    angles,
    key_norm,
    step,
    addresses,
    ranks,
    counts,
    starts,
    positions,
    places,
    marks,
    more_keys,
    more_steps,
    more_zeros,
    logits,
    seen,
    room,
    held_tiles,
    splits,
    groups,
    heads,
    each,
    dim,
    turning,
    epsilon,
    scale,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    PLACES: tl.constexpr,
    MARKS: tl.constexpr,
    KEEP: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    RK: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAST: tl.constexpr,
    STILL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Compute what some latents add to the logits of some KV heads of a group, for every `splits`-th tile of its rows.

    `heads` is the number of KV heads of a group, `each` that of the queries of a KV head. Logits are in base 2. Rows
    that a head does not hold and places of a tile without a row get -inf. `angles` are words of a cosine and a sine,
    STILL that of channels that are not rotated, 0 if there are none. With KEEP U stays in shared memory. With AHEAD the
    compiler starts to read the next tile before this one is rotated.
    """
    programs = tl.cdiv(heads, HEADS)
    place, split, part = tl.program_id(0) // programs, tl.program_id(1), tl.program_id(2)
    first_head = tl.program_id(0) % programs * HEADS
    b, group = place // groups, place % groups
    places_total = tl.num_programs(0) // programs
    index = group * (places_total // groups) + b
    since, count = tl.load(step), tl.load(counts + index).to(tl.int32)
    rank = tl.multiple_of(tl.load(ranks + group), [UNIT])
    up = _point(addresses, 2 * groups + group, queries)
    # the queries (HEADS·DP, M), zero outside their own head
    column, query = tl.arange(0, HEADS * DP), tl.arange(0, M)
    pair, head = column % DP // 2, first_head + column // DP
    one, two = _find_pair(pair, turning, dim)
    channel = tl.where(column % 2 == 0, one, two)
    there = (pair < dim // 2) & (head < heads)
    asking = (query < HEADS * each) & (first_head + query // each < heads)
    mine = (column // DP)[:, None] == (query // each)[None]
    q = tl.load(
        queries + ((place * heads + first_head) * each + query)[None] * dim + channel[:, None],
        mask=mine & asking[None] & there[:, None],
        other=0.0,
    )  # (HEADS * DP, M)
    if CAST:
        q = q.to(tl.float32)
    bias = _point(addresses, 6 * groups + group, queries)
    pair = tl.arange(0, DP // 2)
    if KEEP:
        u = _load_columns(up, heads, rank, part * R, dim, turning, first_head, R, DP, HEADS, CAST)
        if BITS:
            sums = tl.sum(u.to(tl.float32), 0)
    start = tl.load(starts + index)
    held, appended, held_steps, more_steps, held_zeros, more_zeros, size = _find_rows(
        addresses, start, group, groups, 0, index, room, rank, more_keys, more_steps, more_zeros, RK, BITS, EIGHT
    )
    first_place = start
    if PLACES:
        first_place = tl.load(places + index)
    row_pitch, query_pitch, place_size = _find_pitches(held_tiles, room, heads * each, N, BY_ROW)
    logits += (part * places_total + place) * place_size + first_head * each * query_pitch
    tiles = tl.cdiv(count, N)
    total = tl.cdiv(tl.maximum(tiles + tl.cdiv(since + 1, N) - split, 0), splits)
    line = tl.arange(0, N)
    k = tl.zeros([N, HEADS * DP], tl.float32)
    for turn in range(0, total):
        tile = split + turn * splits
        is_new = tile >= tiles
        first = tl.where(is_new, tile - tiles, tile) * N
        left = tl.where(is_new, since + 1, count) - first
        here = line < left
        at = first + line  # the positions
        if PLACES:
            at = tl.load(positions + first_place + at, mask=here & (is_new == 0), other=0)  # (N,)
        at = tl.where(is_new, seen + first + line, at)
        turns = here[:, None] & ((pair < turning // 2)[None] if STILL else True)
        word = tl.load(angles + at[:, None] * (turning // 2) + pair[None], mask=turns, other=0)  # (N, DP // 2)
        if STILL:
            word = tl.where(pair[None] < turning // 2, word, STILL)
        pitch = tl.multiple_of(tl.where(is_new, RK, size), [UNIT])
        source = tl.where(is_new, appended, held) + first.to(tl.int64) * pitch
        steps = tl.where(is_new, more_steps, held_steps) + first
        zeros = tl.where(is_new, more_zeros, held_zeros) + first
        into = logits + (tl.where(is_new, held_tiles * N, 0) + first).to(tl.int64) * row_pitch
        mark = marks + (first_place + first) * heads + first_head
        if KEEP:
            k = _multiply(
                source,
                queries,
                line,
                pitch,
                here,
                rank,
                part * R,
                u,
                tl.zeros([N, HEADS * DP], tl.float32),
                N,
                R,
                BITS,
                EIGHT,
                CAST,
            )
            if BITS:
                k = _restore(k, sums, steps, zeros, line, here)
            if left > 0 if AHEAD else True:  # always true; the compiler reads the next tile before a condition
                products = _turn_and_ask(
                    k,
                    bias,
                    key_norm,
                    word,
                    queries,
                    q,
                    heads,
                    dim,
                    turning,
                    epsilon,
                    first_head,
                    part,
                    NORM,
                    BIAS,
                    N,
                    DP,
                    HEADS,
                )
                _store_logits(
                    products * scale,
                    into,
                    mark,
                    line,
                    left,
                    query,
                    asking,
                    heads,
                    each,
                    is_new,
                    row_pitch,
                    query_pitch,
                    N,
                    MARKS,
                )
        else:
            k, sums = tl.zeros([N, HEADS * DP], tl.float32), tl.zeros([HEADS * DP], tl.float32)
            for latent in range(0, rank, R):
                some = _load_columns(up, heads, rank, latent, dim, turning, first_head, R, DP, HEADS, CAST)
                k = _multiply(source, queries, line, pitch, here, rank, latent, some, k, N, R, BITS, EIGHT, CAST)
                if BITS:
                    sums += tl.sum(some.to(tl.float32), 0)
            if BITS:
                k = _restore(k, sums, steps, zeros, line, here)
            products = _turn_and_ask(
                k,
                bias,
                key_norm,
                word,
                queries,
                q,
                heads,
                dim,
                turning,
                epsilon,
                first_head,
                part,
                NORM,
                BIAS,
                N,
                DP,
                HEADS,
            )
            _store_logits(
                products * scale,
                into,
                mark,
                line,
                left,
                query,
                asking,
                heads,
                each,
                is_new,
                row_pitch,
                query_pitch,
                N,
                MARKS,
            )
    if total < 0:  # never true; but a product that is used behind the loop may be waited for later
        tl.store(logits + line, tl.sum(k, 1))


@triton.jit(do_not_specialize=["room", "held_tiles", "splits"])
def _sum(
    logits,
    step,
    addresses,
    ranks,
    counts,
    starts,
    like,
    more_values,
    more_steps,
    more_zeros,
    part_acc,
    part_max,
    part_norm,
    room,
    held_tiles,
    splits,
    groups,
    queries,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    RV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    EIGHT: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Sum the latents of the values of every `splits`-th tile of a group's rows, weighed by the softmax of M logits."""
    place, split = tl.program_id(0), tl.program_id(1)
    b, group = place // groups, place % groups
    index = group * (tl.num_programs(0) // groups) + b
    since, count = tl.load(step), tl.load(counts + index).to(tl.int32)
    rank = tl.multiple_of(tl.load(ranks + groups + group), [UNIT])
    held, appended, held_steps, more_steps, held_zeros, more_zeros, row = _find_rows(
        addresses,
        tl.load(starts + index),
        group,
        groups,
        1,
        index,
        room,
        rank,
        more_values,
        more_steps,
        more_zeros,
        RV,
        BITS,
        EIGHT,
    )
    row_pitch, query_pitch, place_size = _find_pitches(held_tiles, room, queries, N, BY_ROW)
    logits += place * place_size
    query, latent, line = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, R), tl.arange(0, N)
    asking = query < queries
    tiles = tl.cdiv(count, N)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, R], tl.float32)
    for tile in range(split, tiles + tl.cdiv(since + 1, N), splits):
        is_new = tile >= tiles
        first = tl.where(is_new, tile - tiles, tile) * N
        here = line < tl.where(is_new, since + 1, count) - first
        pitch = tl.multiple_of(tl.where(is_new, RV, row), [UNIT])
        source = tl.where(is_new, appended, held) + first.to(tl.int64) * pitch
        steps = tl.where(is_new, more_steps, held_steps) + first
        zeros = tl.where(is_new, more_zeros, held_zeros) + first
        h = _load_latents(source, like, line, pitch, here, rank, 0, N, R, BITS, EIGHT)
        if BITS:
            h = _restore(h.to(tl.float32), tl.full([R], 1.0, tl.float32), steps, zeros, line, here).to(h.dtype)
        logits_at = logits + (tl.where(is_new, held_tiles * N, 0) + first).to(tl.int64) * row_pitch
        where = asking[:, None] & here[None]
        logits_at += line[None] * row_pitch + query[:, None] * query_pitch
        tile_logits = tl.load(logits_at, mask=where, other=float("-inf"))  # (M, N)
        for part in tl.static_range(1, PARTS):
            tile_logits += tl.load(logits_at + part * tl.num_programs(0) * place_size, mask=where, other=0.0)  # (M, N)
        if CAP is not None:
            hidden = tile_logits == float("-inf")
            tile_logits = tl.where(hidden, tile_logits, cap_tile(tile_logits, CAP))
        m, norm, acc = add_tile(tile_logits, h.to(tl.float32) if CAST else h, m, norm, acc)
    part = ((place * splits + split) * queries + query).to(tl.int64)
    tl.store(part_acc + part[:, None] * R + latent[None], acc, mask=asking[:, None])
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


@triton.jit(do_not_specialize=["splits"])
def _join(
    part_acc,
    part_max,
    part_norm,
    addresses,
    ranks,
    outputs,
    sinks,
    splits,
    groups,
    heads,
    each,
    dim,
    BIAS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Join the sums of one query, and its head's sink, and map them to some channels of its output."""
    head, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    queries = heads * each
    place, query = head // queries, head % queries
    group = place % groups
    rank = tl.load(ranks + groups + group)
    latent = tl.arange(0, R)
    top = float("-inf")
    for first in range(0, splits, JOINED):
        split = first + tl.arange(0, JOINED)
        part = (place * splits + split) * queries + query
        # (JOINED,)
        top = tl.maximum(top, tl.max(tl.load(part_max + part, mask=split < splits, other=float("-inf")), 0))
    if sinks is not None:
        sink = tl.load(sinks + head % (groups * queries)).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    total = 0.0
    acc = tl.zeros([R], tl.float32)
    for first in range(0, splits, JOINED):
        split = first + tl.arange(0, JOINED)
        part = (place * splits + split) * queries + query
        weight = tl.exp2(tl.load(part_max + part, mask=split < splits, other=float("-inf")) - top)  # (JOINED,)
        total += tl.sum(weight * tl.load(part_norm + part, mask=split < splits, other=0.0), 0)  # (JOINED,)
        some = tl.load(
            part_acc + part[:, None].to(tl.int64) * R + latent[None], mask=(split < splits)[:, None], other=0.0
        )  # (JOINED, R)
        acc += tl.sum(some * weight[:, None], 0)
    whole = total
    if sinks is not None:
        whole += tl.exp2(sink - top)
    row = query // each * dim + channel
    up = _point(addresses, 3 * groups + group, outputs)
    where = (channel < dim)[:, None] & (latent < rank)[None]
    matrix = tl.load(up + row[:, None] * rank + latent[None], mask=where, other=0.0).to(tl.float32)  # (BLOCK, R)
    output = tl.sum(matrix * (acc / whole)[None], 1)
    if BIAS:
        bias = _point(addresses, 7 * groups + group, outputs)
        more = tl.load(bias + row, mask=channel < dim, other=0.0).to(tl.float32)  # (BLOCK,)
        if sinks is not None:  # the rows' probabilities add up to less than 1
            more *= total / whole
        output += more
    tl.store(outputs + head.to(tl.int64) * dim + channel, output, mask=channel < dim)


def append_latents_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: LatentRows,
    step: Tensor,
    norm: tuple[Tensor, float] | None,
) -> Tensor:
    dim, width = rows.dim, len(rows.keys.up[0])
    query_heads = queries.shape[1] // dim
    out = torch.empty(rows.batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    weight, epsilon = norm or (queries, 0.0)
    sides, bits = (rows.keys, rows.values), rows.keys.bits
    most = max(side.largest_rank for side in sides)
    blocks = triton.cdiv(most, BLOCK)
    made = [queries.new_empty(rows.groups, rows.batch, 1, side.largest_rank) if bits else side.more for side in sides]
    _append[(rows.batch, query_heads + 2 * rows.groups * blocks)](
        queries,
        keys,
        values,
        cos,
        sin,
        weight,
        out,
        step,
        rows.addresses,
        rows.ranks,
        *made,
        rows.seen,
        rows.room,
        rows.groups,
        query_heads,
        width,
        cos.shape[1],
        dim,
        epsilon,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        NORM=norm is not None,
        KEY_BIAS=rows.keys.bias is not None,
        VALUE_BIAS=rows.values.bias is not None,
        RK=made[0].shape[3],
        RV=made[1].shape[3],
        D=triton.next_power_of_2(dim),
        W=min(256, triton.next_power_of_2(width)),
        BLOCK=BLOCK,
        BLOCKS=blocks,
        ROUNDED=bits > 0,
        num_warps=4,
    )
    if bits:
        more, steps, zeros = zip(*map(list_memory, sides), strict=True)
        _round[(rows.batch, 2 * rows.groups)](
            *made,
            step,
            rows.ranks,
            *more,
            *steps,
            *zeros,
            rows.room,
            rows.groups,
            *(side.rounding.clip for side in sides if side.rounding),
            RK=made[0].shape[3],
            RV=made[1].shape[3],
            R=max(2 * EIGHT, triton.next_power_of_2(most)),
            BITS=bits,
            EIGHT=EIGHT,
            LEAST=LEAST,
            LARGEST=LARGEST,
            EVEN=EVEN,
            num_warps=4,
        )
    return out


def list_memory(side: Side) -> tuple[Tensor, ...]:
    """Return the memory for further latents, s and z. Without rounding it is three times that of the latents."""
    return side.own_tensors if side.bits else side.own_tensors * 3


def attend_latents_triton(
    queries: Tensor,
    pairs: Tensor,
    rows: LatentRows,
    scaling: float,
    step: Tensor,
    norm: tuple[Tensor, float] | None,
    extras: SoftmaxExtras | None,
) -> Tensor:
    batch, query_heads, _, dim = queries.shape
    groups, heads = rows.groups, rows.heads // rows.groups
    each = query_heads // rows.heads
    exact = queries.dtype == torch.float32
    shape = choose_shape(rows.keys.largest_rank, heads, each, dim, exact, norm is not None, rows.keys.bits)
    cast = is_interpreting() and queries.dtype == torch.bfloat16
    terms, size = shape.pop("PARTS"), shape["N"]
    held_tiles = triton.cdiv(rows.longest, size)
    tiles = held_tiles + triton.cdiv(rows.room, size)
    logits = torch.empty(terms, batch * groups, tiles * size, heads * each, dtype=torch.float32, device=queries.device)
    weight, epsilon = norm or (queries, 0.0)
    words, turning = view_words(pairs), 2 * pairs.shape[1]
    still = 0 if turning == shape["DP"] else view_words(pairs.new_tensor([1, 0], device="cpu")).item()
    programs = batch * groups * triton.cdiv(heads, shape["HEADS"])
    kept = 2 * shape["HEADS"] * shape["DP"] * shape["R"]
    splits = split_rows(programs * terms, held_tiles, 3 if "maxnreg" in shape else 1 + (kept <= SMALL))
    by_row = heads * each >= BY_ROW
    # the parts of a tile's latents lie apart in the grid: a multiprocessor is likely to run both, which share angles
    _weigh[programs, splits, terms](
        queries.contiguous(),
        words,
        weight,
        step,
        rows.addresses,
        rows.ranks,
        rows.counts,
        rows.starts,
        rows.counts if rows.positions is None else rows.positions,
        rows.places,
        rows.counts if rows.marks is None else rows.marks.view(torch.int8),
        *list_memory(rows.keys),
        logits,
        rows.seen,
        rows.room,
        held_tiles,
        splits,
        groups,
        heads,
        each,
        dim,
        turning,
        epsilon,
        scaling * LOG2E.value,
        NORM=norm is not None,
        BIAS=rows.keys.bias is not None,
        PLACES=rows.positions is not None,
        MARKS=rows.marks is not None,
        UNIT=find_unit(rows.keys),
        RK=rows.keys.more.shape[3],
        BITS=rows.keys.bits,
        EIGHT=EIGHT,
        BY_ROW=by_row,
        CAST=cast,
        STILL=still,
        **shape,
    )
    rank = triton.next_power_of_2(max(16, rows.values.largest_rank))
    some = min(ASKING, triton.next_power_of_2(max(16, heads * each)))
    turns = triton.cdiv(heads * each, some)
    splits = split_rows(batch * groups * turns, held_tiles, 4 if rank <= NARROW else 2)
    parts = [
        torch.empty(batch * groups, splits, heads * each, *more, dtype=torch.float32, device=queries.device)
        for more in ((rank,), (), ())
    ]
    _sum[batch * groups, splits, turns](
        logits,
        step,
        rows.addresses,
        rows.ranks,
        rows.counts,
        rows.starts,
        queries,
        *list_memory(rows.values),
        *parts,
        rows.room,
        held_tiles,
        splits,
        groups,
        heads * each,
        UNIT=find_unit(rows.values),
        PARTS=terms,
        R=rank,
        RV=rows.values.more.shape[3],
        M=some,
        N=size,
        BITS=rows.values.bits,
        EIGHT=EIGHT,
        BY_ROW=by_row,
        CAST=cast,
        CAP=find_cap(extras),
        **choose_stages(rank, some, exact, rows.values.bits),
    )
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    _join[batch * query_heads, triton.cdiv(dim, BLOCK)](
        *parts,
        rows.addresses,
        rows.ranks,
        outputs,
        get_sinks(extras),
        splits,
        groups,
        heads,
        each,
        dim,
        BIAS=rows.values.bias is not None,
        R=rank,
        BLOCK=BLOCK,
        JOINED=max(1, JOINED // rank),
        num_warps=4,
    )
    return outputs


def view_words(pairs: Tensor) -> Tensor:
    """Return pairs of numbers of 2 or 4 bytes each, (…, 2), as words, (…)."""
    return pairs.view(torch.int32 if pairs.element_size() == 2 else torch.int64)[..., 0]


def split_rows(programs: int, tiles: int, each: int) -> int:
    """Return into how many parts `tiles` tiles are split for so many programs, `each` of them on a multiprocessor."""
    return max(1, min(each * CORES // programs, tiles))


def choose_shape(
    rank: int, heads: int, each: int, dim: int, exact: bool, normed: bool, bits: int = 0
) -> dict[str, int]:
    """Return the sizes of a program that computes logits.

    Args:
        rank: The largest rank.
        heads: KV heads of a group.
        each: Queries of a KV head.
        dim: Head dimension.
        exact: Whether products are of float32 numbers, which the matrix units do not take.
        normed: Whether keys are normed, which needs all their latents.
        bits: Bits of a code, or 0. Codes take registers until they are numbers.
    """
    wide, latents = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(rank))
    if not normed and not exact:
        even = triton.cdiv(rank, LATENTS) % 2 == 0  # twice as many latents need no more padding
        twice = bits == 4 and even and 4 * wide * LATENTS <= SMALL
        latents = min(latents, 2 * LATENTS if twice else LATENTS)
    taken = 1
    while (
        not exact
        and 2 * taken <= heads
        and 2 * taken * wide <= (WIDE // 2 if bits else WIDE)
        and 4 * taken * wide * latents <= KEPT
    ):
        taken *= 2
    kept = not exact and 2 * taken * wide * latents <= KEPT
    narrow = kept and latents <= NARROW and not normed and not bits
    return {
        "KEEP": kept,
        "PARTS": triton.cdiv(rank, latents) if kept else 1,
        "R": latents if kept else 16 if exact else 64,
        "DP": wide,
        "HEADS": taken,
        "M": max(16, triton.next_power_of_2(taken * each)),
        "N": 32 if exact else ROWS,
        "AHEAD": not narrow,
        "num_warps": 4,
        "num_stages": 2 if latents <= 256 and not exact else 1,
    } | ({"maxnreg": REGISTERS} if narrow else {})


def choose_stages(rank: int, queries: int, exact: bool, bits: int = 0) -> dict[str, int]:
    """Return the warps of a program that sums latents, and how many tiles it holds."""
    stages = 3 if rank <= 256 and not exact else 2
    few = not bits or rank <= (256 if bits == 4 and queries <= 16 else 128)  # codes take registers
    return {"num_warps": 4 if rank * queries <= 8192 and few else 8, "num_stages": stages}
