"""hf_quantized: rows in 2, 4 or 8 bits as transformers' QuantizedCache stores them, by quanto or HQQ.

Sources: transformers, cache_utils.py (QuantizedLayer); optimum-quanto 0.2.7 (MaxOptimizer, quantize_affine); hqq 0.2.8
(core/quantize.py, core/optimize.py). Symbols: b bits, G group, R residual; low and high of a group of G neighbouring
channels of a row.

* quanto: s = (high - low)/(2^b - 1), q = round((x - low)/s), read as s·q + low. All steps are taken in the model's
  dtype, and s and low are stored in it. There s = 0 divides by zero; here such a group reads as low.
* hqq: f = (2^b - 1)/(high - low), but 1 if high - low is at most 1e-4, and at most 2e4; z = -low·f;
  q = round(x·f + z), read as (q - z)·(1/f). Steps are taken in float32; z and 1/f are stored in the model's dtype.
  `optimize` then moves z by HQQ's proximal solver, up to 20 times and while the mean error of all rows that are rounded
  together falls, so that rows depend on each other there. This is what hqq does unless it is told not to, and
  transformers does not tell it. On a GPU the solver computes in float16.

Rows are rounded after the prompt has been read exactly: all that the last cut leaves, and then R further rows whenever
so many have come. (If the prompt's last block has one token and is not cut, this one counts as a further row.) A token
attends to its own row as it is. Transformers' cache then also rounds anew what it had rounded before; kvbench rounds
every row once, because packed rows are never written again. In exact arithmetic both are the same for quanto and for
hqq without `optimize`; in 16 bits transformers' rows drift. A residual of 1 acts as 2 there.

Both groups are those that transformers' documentation recommends: axis 0 of quanto and axis 1 of HQQ. With the other
axis (quanto -1, HQQ 0) a group has rows of several tokens and heads, which eviction takes apart. It is not offered, and
neither are HQQ's 1 and 3 bits. G must divide the channels of a head, for the same reason.

Bytes of a row of d channels, keys and values each: d·b/8, and two numbers of the model's dtype for each group: 72 of
128 channels with b = 4, G = 64 and bfloat16. Up to R - 1 rows of each head are raw.

A CUDA graph attends to codes and raw rows as they lie. Between two of its tokens R rows are rounded, by the same
function and in the same order as without a graph, so that HQQ's solver sees the same rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbench.interfaces.codec import Angles, Codec, Packing, copy_samples, join, split
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.row_codec import Parts
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import CodedRows, CodedSide, Form, RawWindow, attend_coded, pack_codes, unpack_codes
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.validation import SettingError

FEW = 1 << 14  # rows of keys that are rounded together with those of values


@dataclass(frozen=True)
class HfQuantized(Codec):
    """Store rows in groups of a few bits, the newest ones raw."""

    backend: str = setting(choices=("quanto", "hqq"))
    """Which rule rounds."""
    bits: int = setting(choices=(2, 4, 8))
    """Bits of a number, b. 8 with hqq alone."""
    group: int = setting(minimum=1)
    """Channels that share a scale and a zero, G."""
    residual: int = setting(minimum=2)
    """Number of newest rows at which they are rounded, R."""
    optimize: bool = setting()
    """Whether HQQ's solver moves zeros."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "quanto" and self.bits == 8:
            raise SettingError("codec.bits=8: quanto's caches have 2 or 4; use codec.backend=hqq")
        if self.backend == "quanto" and self.optimize:
            raise SettingError("codec.optimize=true: quanto has no solver; false")
        if self.group * self.bits % 8:
            raise SettingError(f"codec.group={self.group}: groups of {self.bits} bits must fill whole bytes")

    @cached_property
    def packing(self) -> Packing:
        grows = self.group & (self.group - 1) == 0  # the kernels read no other groups
        return Packing(token_by_token=True, interval=self.residual, grows=grows, replicates=True)

    def check(self, layout: Layout) -> None:
        self.check_width(layout.dim)

    def check_width(self, dim: int) -> None:
        """Raise a SettingError if groups do not divide `dim` channels."""
        if dim % self.group:
            raise SettingError(f"codec.group={self.group}: {dim} channels per head do not divide into such groups")

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "HfRows":
        self.check_width(keys.shape[1])
        return HfRows(self, lengths, *self.encode_both(keys, values), keys[:0].clone(), values[:0].clone(), 0, True)

    def encode_both(self, keys: Tensor, values: Tensor) -> tuple[Parts, Parts]:
        """Round keys and values, (R, d) each. Few of them are rounded at once, since launches take longer than work."""
        if len(keys) > FEW:
            return self.encode(keys), self.encode(values)
        both = [part.unbind() for part in self.encode(torch.stack([keys, values]))]
        return tuple(part[0] for part in both), tuple(part[1] for part in both)

    def encode(self, rows: Tensor) -> Parts:
        """Round rows (…, R, d): codes (…, R, d·b/8), and two numbers a group, (…, R, d/G) each.

        They are s and low, or 1/f and z. HQQ's solver sees R rows together.
        """
        top = 2**self.bits - 1
        groups = rows.unflatten(-1, (-1, self.group))
        if self.backend == "hqq":
            groups = groups.float()
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        if self.backend == "quanto":
            scale, zero = (high - low) / top, low
            codes = ((groups - zero) / scale.masked_fill(scale == 0, 1.0)).round()
        else:
            spread = high - low
            factor = torch.where(spread <= 1e-4, 1.0, top / spread).clamp(max=2e4)
            zero = -low * factor
            if self.optimize:
                factor, zero = optimize_zeros(groups, factor, zero, top)
            codes, scale = (groups * factor + zero).round(), 1.0 / factor
        codes = codes.clamp(0, top).to(torch.uint8).flatten(-2)
        packed = pack_codes(codes.flatten(0, -2), self.bits).unflatten(0, codes.shape[:-1])
        return packed, scale.squeeze(-1).to(rows.dtype), zero.squeeze(-1).to(rows.dtype)

    def decode(self, parts: Parts) -> Tensor:
        """Return what `encode` has rounded, (R, d) in the dtype of scales."""
        packed, scale, zero = parts[0], parts[1][..., None], parts[2][..., None]
        groups = unpack_codes(packed, self.bits).unflatten(1, (-1, self.group)).to(scale.dtype)
        return (scale * groups + zero if self.backend == "quanto" else (groups - zero) * scale).flatten(1)

    def make_form(self, dtype: torch.dtype) -> Form:
        """Return how codes, with scales and zeros of `dtype`, are read."""
        scale = "range" if self.backend == "quanto" else "shift"
        return Form(f"uint{self.bits}", scale, self.group, stored=dtype, wide=True)


def optimize_zeros(groups: Tensor, factor: Tensor, zero: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return factors and zeros (…, R, groups, 1) after HQQ's solver, optimize_weights_proximal_legacy.

    It lowers the sizes of the errors to the power 0.7. Rounds end when the mean error of R rows stops falling.
    """
    dtype = torch.float16 if groups.device.type == "cuda" else torch.float32
    exact, factor, zero = groups.to(dtype), factor.to(dtype), zero.to(dtype)
    best = exact.new_full((*groups.shape[:-3], 1, 1, 1), torch.inf, dtype=torch.float32)
    falls = torch.ones_like(best, dtype=torch.bool)
    for _ in range(20 if groups.numel() else 0):
        codes = (exact * factor + zero).round().clamp(0, top)
        read = (codes - zero) / factor
        size = (exact - read).abs()
        rest = (size - 0.1 * size.pow(-0.3)).clamp(min=0.0) * (exact - read).sign()
        zero = torch.where(falls, (codes - (exact - rest) * factor).mean(-1, keepdim=True), zero)
        error = size.mean((-3, -2, -1), keepdim=True).float()
        falls = falls & (error < best)
        if not falls.any():
            break
        best = torch.where(falls, error, best)
    return factor, zero


@dataclass(frozen=True)
class HfRows:
    """Rounded rows, flat in the order (sample, head, position), and the newest ones raw."""

    codec: HfQuantized
    lengths: Tensor
    """Rows of every head, (B, H)."""
    keys: Parts
    values: Parts
    new_keys: Tensor
    """Raw keys, (B·H·waiting, d)."""
    new_values: Tensor
    waiting: int
    """Raw rows of each head."""
    fresh: bool
    """Whether the last rows of the prompt may follow: those behind the last cut."""

    def read(self) -> tuple[Tensor, Tensor]:
        counts = torch.full_like(self.lengths, self.waiting, device="cpu")
        rounded = self.lengths.cpu() - counts
        keys, values = (
            join(self.codec.decode(parts), rounded, raw, counts)
            for parts, raw in ((self.keys, self.new_keys), (self.values, self.new_values))
        )
        return keys, values

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, self.new_keys, self.new_values]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "HfRows":
        heads, dim = lengths.numel(), keys.shape[1]
        waiting = self.waiting + len(keys) // heads
        due = waiting - waiting % self.codec.residual
        if self.fresh and (waiting > 1 or not len(self.keys[0])):  # of the prompt; tokens of an answer come one by one
            due = waiting
        raw = [
            torch.cat([old.view(heads, self.waiting, dim), new.view(heads, waiting - self.waiting, dim)], 1)
            for old, new in ((self.new_keys, keys), (self.new_values, values))
        ]
        rest = [side[:, due:].flatten(0, 1).clone() for side in raw]
        rows = replace(self, lengths=lengths, new_keys=rest[0], new_values=rest[1], waiting=waiting - due, fresh=False)
        if not due:
            return rows
        counts = torch.full_like(lengths, due, device="cpu")
        rounded = lengths.cpu() - waiting
        codes = self.codec.encode_both(*(side[:, :due].flatten(0, 1) for side in raw))
        both = [
            tuple(join(old, rounded, new, counts) for old, new in zip(held, encoded, strict=True))
            for held, encoded in zip((self.keys, self.values), codes, strict=True)
        ]
        return replace(rows, keys=both[0], values=both[1])

    def replicate(self, times: int, lengths: Tensor) -> "HfRows":
        tensors = self.keys, self.values, self.new_keys, self.new_values
        keys, values, new_keys, new_values = copy_samples(tensors, times)
        return HfRows(self.codec, lengths, keys, values, new_keys, new_values, self.waiting, self.fresh)

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GrowingHf":
        return GrowingHf(self, tokens, ahead, mass)


class GrowingHf:
    """Codes, memory for those of further tokens, and a ring of the newest rows, which are raw.

    The ring has room for R rows, the token that is read, and the tokens that may be taken back.
    """

    def __init__(self, held: HfRows, tokens: int, ahead: int, mass: Tensor | None) -> None:
        """Allocate memory. See `Growable.growing`."""
        self.held, self.tokens, codec, like = held, tokens, held.codec, held.new_keys
        room = (held.waiting + tokens) // codec.residual * codec.residual
        rounded, form = held.lengths - held.waiting, codec.make_form(like.dtype)
        keys, values = (
            CodedSide(
                form, parts, tuple(part.new_empty(*rounded.shape, room, *part.shape[1:]) for part in parts), 1.0, None
            )
            for parts in (held.keys, held.values)
        )
        if mass is not None and held.waiting:
            mass, _ = split(mass, held.lengths, rounded)
        ring = like.new_empty(2, *rounded.shape, codec.residual + ahead + 1, like.shape[1])
        self.window = RawWindow(ring, held.waiting, codec.residual)
        starts = (rounded.flatten().cumsum(0) - rounded.flatten()).view_as(rounded)
        newest = ring[:, :, :, 0]
        self.rows = CodedRows(keys, values, rounded, starts, int(rounded.max()), mass, newest, False, self.window)

    def begin(self) -> None:
        for ring, raw in zip(self.window.ring, (self.held.new_keys, self.held.new_values), strict=True):
            ring[:, :, : self.held.waiting] = raw.view(*ring.shape[:2], self.held.waiting, ring.shape[3])

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Angles,
        step: Tensor,
        scaling: float,
        norms: tuple[Tensor, Tensor, float] | None,
        implementation: str | None,
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        queries = append(
            queries,
            keys,
            values,
            angles[0],
            angles[1],
            self.window.ring[0],
            self.window.ring[1],
            self.window.waiting,
            step,
            norms=norms,
            wraps=True,
            implementation=implementation,
        )
        return attend_coded(queries, self.rows, scaling, step, extras=extras, implementation=implementation)

    def pack_due(self, number: int) -> None:
        due = self.window.count_rounded(number + 1)
        if due == self.window.count_rounded(number):
            return
        here = slice(due - self.window.every, due)
        slots = self.window.find_slots(here.start, here.stop)
        raw = self.window.ring.index_select(3, slots)
        both = self.held.codec.encode_both(*raw.flatten(1, 3))
        for side, parts in zip((self.rows.keys, self.rows.values), both, strict=True):
            for memory, part in zip(side.more, parts, strict=True):
                memory[:, :, here] = part.unflatten(0, raw.shape[1:4])

    def finish(self, read: int, lengths: Tensor) -> HfRows:
        held, stop = self.held, self.window.waiting + read
        due = self.window.count_rounded(read)
        before, counts = self.rows.lengths.cpu(), torch.full_like(lengths, due, device="cpu")
        keys, values = (
            tuple(
                join(part, before, memory[:, :, :due].flatten(0, 2), counts)
                for part, memory in zip(side.held, side.more, strict=True)
            )
            for side in (self.rows.keys, self.rows.values)
        )
        raw = self.window.ring.index_select(3, self.window.find_slots(due, stop)).flatten(1, 3)
        return HfRows(held.codec, lengths, keys, values, raw[0], raw[1], stop - due, False)

    def tensors(self) -> list[Tensor]:
        return [*self.rows.keys.more, *self.rows.values.more, self.window.ring]
