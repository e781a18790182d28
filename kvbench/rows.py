"""What a layer remembers: rows of key, value, place (original position) and mass (tokens a row stands for).

Attention over rows is softmax(q·k/√d + log mass)·v, so a head with fewer rows, an evicted row (mass 0) and a merged
row (mass n) are one formula. Symbols: B samples, H KV heads, n rows, T tokens of the block, d head dimension.

Storage is ragged. A layer holds a *cut* part, row after row in the order (sample, head, place), where every head has
as many rows as it may keep; and a *tail* (B, H, capacity, d) of what was read since the last cut. A codec that packs
takes both over when the prefill ends, and from then on each tail once it was attended to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.codec import Codec, Plain, Stored, join
from kvbench.kernels.attend import Ragged
from kvbench.kernels.compact import find, take


@dataclass(frozen=True)
class Rows:
    """All rows of a layer, padded to (B, H, n): absent rows have mass 0 and place -1 and stand on the left, so that
    the last T rows of every head are the block's and neighbours in a head are neighbours in place.
    """

    keys: Tensor  # (B, H, n, d), rotated as the model rotated them
    values: Tensor  # (B, H, n, d)
    places: Tensor  # (B, H, n) int64, ascending; -1 where absent
    mass: Tensor  # (B, H, n) float32 (float64 for float64 rows); 0 where absent
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # a method's values per row, (B, H, n)

    @cached_property
    def present(self) -> Tensor:
        """(B, H, n) bool."""
        return self.mass > 0

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    def __len__(self) -> int:
        return self.keys.shape[2]

    def without(self, gone: Tensor) -> "Rows":
        """The same rows with mass 0 where `gone` (B, H, n) is true."""
        return replace(self, mass=self.mass.masked_fill(gone, 0))


class LayerRows:
    """The storage of one layer: ragged cut part plus tail. Every byte it owns is counted by `tensors`."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.shape = (0, 0)  # B, H
        self.seen = 0  # tokens read by every head
        self.stored: Stored | None = None  # the cut part's keys and values, flat
        self.places: Tensor | None = None  # (R,) int32
        self.mass: Tensor | None = None  # (R,) int16 or int32, None while every row stands for one token
        self.columns: dict[str, Tensor] = {}  # (B, H, m) a method's values for the first m rows of the view
        self.lengths: Tensor | None = None  # (B, H) int64 rows of the cut part, None while nothing was cut
        self.starts: Tensor | None = None  # (B·H,) int64 first row of each head's, None until attention asks
        self.longest = 0  # rows of the longest head in the cut part
        self.even = True  # all heads hold `longest` rows
        self.tail = 0  # tokens in the tail
        self.tail_keys: Tensor | None = None  # (B, H, capacity, d)
        self.tail_values: Tensor | None = None

    @property
    def longest_head(self) -> int:
        """Rows of the longest head, tail included."""
        return self.longest + self.tail

    @property
    def mean_rows(self) -> float:
        """Rows per head, tail included, mean over samples and heads."""
        cut = 0 if self.places is None else len(self.places) / (self.shape[0] * self.shape[1])
        return cut + self.tail

    def append(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Read a block: keys and values (B, H, T, d). `room`: tokens to reserve beyond it if the tail must grow."""
        batch, heads, tokens, dim = keys.shape
        self.shape = batch, heads
        need = self.tail + tokens
        if self.tail_keys is None or need > self.tail_keys.shape[2]:
            grown = [keys.new_empty(batch, heads, need + room, dim) for _ in range(2)]
            if self.tail:
                grown[0][:, :, : self.tail] = self.tail_keys[:, :, : self.tail]
                grown[1][:, :, : self.tail] = self.tail_values[:, :, : self.tail]
            self.tail_keys, self.tail_values = grown
        self.tail_keys[:, :, self.tail : need] = keys
        self.tail_values[:, :, self.tail : need] = values
        self.tail = need
        self.seen += tokens

    def adopt(self, other: "LayerRows") -> None:
        """Hold the first block that `other` has just read, in its storage: nothing is copied. Both may write behind it,
        one after the other, if what the first one wrote is forgotten (`rewind`) before the other begins.
        """
        self.shape, self.seen, self.tail = other.shape, other.seen, other.tail
        self.tail_keys, self.tail_values = other.tail_keys, other.tail_values

    def reserve(self, tokens: int) -> None:
        """Make room for further tokens behind the tail, so that their rows have fixed addresses."""
        batch, heads = self.shape
        if self.tail_keys is None:
            like = self.stored.read()[0]
            self.tail_keys, self.tail_values = (like.new_empty(batch, heads, tokens, like.shape[1]) for _ in range(2))
        elif self.tail + tokens > self.tail_keys.shape[2]:
            for name in ("tail_keys", "tail_values"):
                before = getattr(self, name)
                grown = before.new_empty(batch, heads, self.tail + tokens, before.shape[3])
                grown[:, :, : self.tail] = before[:, :, : self.tail]
                setattr(self, name, grown)

    def grow(self, tokens: int) -> None:
        """Count tokens whose keys and values were written behind the tail."""
        self.tail += tokens
        self.seen += tokens

    @property
    def raw(self) -> bool:
        """Whether what is held is as the model wrote it."""
        return self.stored is None or isinstance(self.stored, Plain)

    def ragged(self) -> Ragged | None:
        """The cut part as attention takes it, None where nothing was cut."""
        if self.stored is None:
            return None
        if self.starts is None:
            lengths = self.lengths.flatten()
            self.starts = lengths.cumsum(0) - lengths
        return Ragged(*self.stored.read(), self.mass, self.starts, self.lengths.flatten(), self.longest, self.even)

    def attention_view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values (B, H, n, d) and mass (B, H, n), or None for mass where every row is present with mass 1."""
        parts = []
        if self.stored is not None:
            parts.append([self._spread(packed) for packed in self.stored.read()])
        if self.tail:
            parts.append([tail[:, :, : self.tail] for tail in (self.tail_keys, self.tail_values)])
        keys, values = parts[0] if len(parts) == 1 else (torch.cat(both, 2) for both in zip(*parts, strict=True))
        return keys, values, None if self.even and self.mass is None else self._mass(keys)

    def view(self) -> Rows:
        """All rows, as a method sees them."""
        keys, values, mass = self.attention_view()
        batch, heads = keys.shape[:2]
        places = torch.arange(self.seen - self.tail, self.seen, device=keys.device).expand(batch, heads, -1)
        if self.stored is not None:
            places = torch.cat([self._spread(self.places.long(), absent=-1), places], 2)
        columns = {name: pad(column, (0, keys.shape[2] - column.shape[2])) for name, column in self.columns.items()}
        if mass is None:
            mass = torch.ones(batch, heads, keys.shape[2], dtype=mass_dtype(keys), device=keys.device)
        return Rows(keys, values, places, mass, MappingProxyType(columns))

    def keep(self, rows: Rows, even: bool, merged: bool, each: int | None = None) -> None:
        """Hold the rows with mass > 0 and free everything else. `even`: all heads have the same number of them, `each`
        where the caller knows it (on a GPU nothing waits then, nor is it checked); `merged`: a row may stand for
        several tokens. A new tail starts, so views and marks stay what they were.
        """
        present = rows.present
        self.lengths, self.starts, self.even = present.sum(-1), None, even
        if each is None or not present.is_cuda:
            lengths = self.lengths.flatten().tolist()
            each, total = max(lengths), sum(lengths)
        else:
            total = self.lengths.numel() * each
        self.longest, index = each, find(present, total)
        self.stored = Plain(*take(index, rows.keys, rows.values))
        self.places = rows.places.flatten()[index].int()
        narrow = torch.int16 if self.seen < 1 << 15 else torch.int32  # no row stands for more tokens than were seen
        self.mass = rows.mass.flatten()[index].to(narrow) if merged else None
        self.columns = {name: self._spread(column.flatten()[index]) for name, column in rows.columns.items()}
        self.tail, self.tail_keys, self.tail_values = 0, None, None

    def settle(self) -> None:
        """The prefill is over, and with it the cutting: a codec that packs writes all rows, the tail's too."""
        if not self.codec.packs:
            return
        if self.stored is None:
            none = self.tail_keys.new_empty(0, self.tail_keys.shape[-1])
            self.stored, self.places = Plain(none, none), none.new_empty(0, dtype=torch.int32)
            self.lengths = none.new_zeros(self.shape, dtype=torch.int64)
        self.stored = self.codec.pack(*self.stored.read(), self.lengths)
        self.flush()

    def flush(self) -> None:
        """Hand the tail to a codec that packs. A new tail starts, so views and marks stay what they were."""
        if not self.codec.packs or not self.tail:
            return
        before, more = self.lengths, torch.full_like(self.lengths, self.tail)
        places = torch.arange(self.seen - self.tail, self.seen, dtype=torch.int32, device=before.device)
        self.places = join(self.places, before, places.repeat(before.numel()), more)
        if self.mass is not None:
            self.mass = join(self.mass, before, self.mass.new_ones(more.numel() * self.tail), more)
        self.lengths, self.longest = before + more, self.longest + self.tail
        rows = [tail[:, :, : self.tail].flatten(0, 2) for tail in (self.tail_keys, self.tail_values)]
        self.stored = self.stored.extend(*rows, self.lengths)
        self.tail, self.tail_keys, self.tail_values = 0, None, None

    def head_places(self, sample: int, head: int) -> Tensor:
        """(n,) int64 places of one head's rows, ascending."""
        return self._head(self.view().places, sample, head)

    def head_masses(self, sample: int, head: int) -> Tensor:
        """(n,) tokens that each of one head's rows stands for."""
        return self._head(self.view().mass, sample, head)

    def counts(self) -> Tensor:
        """(B, H) rows held by every head."""
        cut = torch.zeros(self.shape, dtype=torch.int64) if self.lengths is None else self.lengths
        return cut + self.tail

    def below(self, places: Sequence[int]) -> Tensor:
        """(B, H, m) int64: rows held in front of each of m places. It takes 13 bytes a row at most."""
        like = self.tail_keys if self.places is None else self.places
        wanted = torch.tensor(places, dtype=torch.int32, device=like.device).expand(*self.shape, -1)
        tail = (wanted - (self.seen - self.tail)).clamp(0, self.tail).long()
        if self.places is None:
            return tail
        cut = torch.searchsorted(self._spread(self.places, absent=-1), wanted.contiguous())
        return tail + cut - (self.longest - self.lengths)[..., None]

    def bytes(self) -> "Bytes":
        """What this layer occupies, counted on the storages it owns."""
        packed = size(self.stored.tensors()) if self.stored is not None else 0
        tail = size([self.tail_keys, self.tail_values])
        used = tail * self.tail // self.tail_keys.shape[2] if tail else 0
        metadata = size([self.places, self.mass, self.lengths, self.starts])
        return Bytes(packed + used, metadata, size(self.columns.values()), tail - used)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name for messages."""
        found = {"keys": self.tail_keys, "values": self.tail_values, "places": self.places, "mass": self.mass}
        found |= {"lengths": self.lengths} | {f"columns[{name!r}]": own for name, own in self.columns.items()}
        if self.stored is not None:
            plain = isinstance(self.stored, Plain)
            for number, own in enumerate(self.stored.tensors()):
                found[("held keys", "held values")[number] if plain else f"packed tensor {number}"] = own
        return {name: own for name, own in found.items() if own is not None}

    def mark(self) -> dict[str, object]:
        """What `rewind` needs to come back here: no copies, since nothing below the tail's end is ever overwritten."""
        return dict(vars(self))

    def rewind(self, mark: Mapping[str, object]) -> None:
        """Return to a mark."""
        vars(self).update(mark)

    def _spread(self, packed: Tensor, absent: int = 0) -> Tensor:
        """(R, …) packed rows as (B, H, longest, …), absent rows filled and on the left."""
        batch, heads = self.lengths.shape
        if self.even:
            return packed.view(batch, heads, self.longest, *packed.shape[1:])
        index = torch.arange(self.longest, device=packed.device) - (self.longest - self.lengths)[..., None]
        present = index >= 0
        out = packed.new_full((batch, heads, self.longest, *packed.shape[1:]), absent)
        out[present] = packed
        return out

    def _mass(self, keys: Tensor) -> Tensor:
        mass = torch.ones_like(self.places) if self.mass is None else self.mass
        mass = self._spread(mass).to(mass_dtype(keys))
        return torch.cat([mass, mass.new_ones(*mass.shape[:2], self.tail)], 2)

    def _head(self, column: Tensor, sample: int, head: int) -> Tensor:
        here = column[sample, head]
        return here[len(here) - int(self.counts()[sample, head]) :].long()


@dataclass(frozen=True)
class Bytes:
    """Bytes of a layer or a cache: keys and values of the rows held; places, masses, lengths; a method's state;
    room reserved for tokens to come.
    """

    rows: int = 0
    metadata: int = 0
    state: int = 0
    headroom: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.rows + other.rows,
            self.metadata + other.metadata,
            self.state + other.state,
            self.headroom + other.headroom,
        )

    @property
    def total(self) -> int:
        return self.rows + self.metadata + self.state + self.headroom


def size(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def mass_dtype(keys: Tensor) -> torch.dtype:
    """Masses are exact in float32 up to 2^24 tokens."""
    return torch.float64 if keys.dtype == torch.float64 else torch.float32
