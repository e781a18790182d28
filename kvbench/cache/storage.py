"""How one layer stores its rows: one immutable value of tensors and lengths.

Every change gives a new value, which shares its tensors with the one before. Whoever keeps a value has a snapshot: the
layer goes back to it by holding it again, and contexts that read one prompt together hold the same one.

The rows lie in two parts. The *cut part* is what the last eviction left, flat in the order (sample, head, position),
because heads may keep different numbers of rows; a codec that packs writes it smaller when the prefill ends. The *tail*
(B, H, capacity, d) has the tokens read since, from the left. Its capacity may be larger than its length, so that rows
have fixed addresses while a CUDA graph decodes. Only what lies behind the tail's length is ever written in place:
nothing that a snapshot counts is overwritten.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.interfaces.codec import Codec, Plain, Stored, join
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.attention import RaggedRows
from kvbench.kernels.row_selection import gather_rows, kept_indices


@dataclass(frozen=True)
class StoredRows:
    """The rows of one layer: R in the cut part, B samples, H KV heads. Every byte it owns is counted by `bytes`."""

    shape: tuple[int, int] = (0, 0)  # B, H
    seen: int = 0  # tokens read by every head
    stored: Stored | None = None  # the cut part's keys and values; None while nothing was cut
    places: Tensor | None = None  # (R,) int32
    mass: Tensor | None = None  # (R,) int16 or int32, None while every row stands for one token
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (B, H, m) a method's values for the first m rows
    lengths: Tensor | None = None  # (B, H) int64 rows of the cut part, None while nothing was cut
    starts: Tensor | None = None  # (B·H,) int64 first row of each head's, None until attention asks (`with_starts`)
    longest: int = 0  # rows of the longest head in the cut part
    even: bool = True  # all heads hold `longest` rows
    tail: int = 0  # tokens in the tail
    tail_keys: Tensor | None = None  # (B, H, capacity, d)
    tail_values: Tensor | None = None

    @property
    def longest_head(self) -> int:
        """Rows of the longest head, tail included."""
        return self.longest + self.tail

    @property
    def mean_rows(self) -> float:
        """Rows per head, tail included, mean over samples and heads."""
        cut = 0 if self.places is None else len(self.places) / (self.shape[0] * self.shape[1])
        return cut + self.tail

    @property
    def is_raw(self) -> bool:
        """Whether what is held is as the model wrote it."""
        return self.stored is None or isinstance(self.stored, Plain)

    def counts(self) -> Tensor:
        """(B, H) rows held by every head."""
        cut = torch.zeros(self.shape, dtype=torch.int64) if self.lengths is None else self.lengths
        return cut + self.tail

    # changes: each returns the new value

    def append(self, keys: Tensor, values: Tensor, room: int = 0) -> "StoredRows":
        """Read a block: keys and values (B, H, T, d). `room`: tokens to reserve beyond it if the tail must grow."""
        batch, heads, tokens, _ = keys.shape
        need = self.tail + tokens
        own = self
        if self.tail_keys is None or need > self.tail_keys.shape[2]:
            own = replace(self, tail_keys=self._grown(keys, self.tail_keys, need + room),
                          tail_values=self._grown(keys, self.tail_values, need + room))  # fmt: skip
        own.tail_keys[:, :, self.tail : need] = keys
        own.tail_values[:, :, self.tail : need] = values
        return replace(own, shape=(batch, heads), tail=need, seen=self.seen + tokens)

    def reserve(self, tokens: int) -> "StoredRows":
        """Make room for further tokens behind the tail, so that their rows have fixed addresses."""
        like = self.tail_keys
        if like is None:
            keys = self.stored.read()[0]
            like = keys.new_empty(*self.shape, 0, keys.shape[1])
        elif self.tail + tokens <= like.shape[2]:
            return self
        keys, values = (self._grown(like, own, self.tail + tokens) for own in (self.tail_keys, self.tail_values))
        return replace(self, tail_keys=keys, tail_values=values)

    def count_appended(self, tokens: int) -> "StoredRows":
        """Count tokens whose keys and values were written behind the tail."""
        return replace(self, tail=self.tail + tokens, seen=self.seen + tokens)

    def with_columns(self, columns: Mapping[str, Tensor]) -> "StoredRows":
        """The same rows with these values of a method beside them, (B, H, n) each."""
        return replace(self, columns=dict(columns))

    def with_starts(self) -> "StoredRows":
        """The same rows with the first row of each head in the cut part, which attention over ragged rows needs."""
        if self.stored is None or self.starts is not None:
            return self
        lengths = self.lengths.flatten()
        return replace(self, starts=lengths.cumsum(0) - lengths)

    def keep(self, rows: Rows, even: bool, merged: bool, each: int | None = None) -> "StoredRows":
        """Hold the rows with mass > 0 and free everything else. `even`: all heads have the same number of them, `each`
        where the caller knows it (on a GPU nothing waits then, nor is it checked); `merged`: a row may stand for
        several tokens.
        """
        present = rows.present
        lengths = present.sum(-1)
        if each is None or not present.is_cuda:
            counts = lengths.flatten().tolist()
            each, total = max(counts), sum(counts)
        else:
            total = lengths.numel() * each
        index = kept_indices(present, total)
        spread = replace(self, lengths=lengths, longest=each, even=even)
        narrow = torch.int16 if self.seen < 1 << 15 else torch.int32  # no row stands for more tokens than were seen
        return StoredRows(
            self.shape, self.seen,
            stored=Plain(*gather_rows(index, rows.keys, rows.values)),
            places=rows.places.flatten()[index].int(),
            mass=rows.mass.flatten()[index].to(narrow) if merged else None,
            columns={name: spread._spread(column.flatten()[index]) for name, column in rows.columns.items()},
            lengths=lengths, longest=each, even=even,
        )  # fmt: skip

    def pack(self, codec: Codec) -> "StoredRows":
        """Let a codec that packs write all rows, the tail's too: the prefill is over, and with it the cutting."""
        own = self
        if self.stored is None:
            none = self.tail_keys.new_empty(0, self.tail_keys.shape[-1])
            places, lengths = none.new_empty(0, dtype=torch.int32), none.new_zeros(self.shape, dtype=torch.int64)
            own = replace(self, stored=Plain(none, none), places=places, lengths=lengths)
        return replace(own, stored=codec.pack(*own.stored.read(), own.lengths)).pack_tail()

    def pack_tail(self) -> "StoredRows":
        """Write the tail behind the packed rows; a new tail starts."""
        if not self.tail:
            return self
        before, more, mass = self.lengths, torch.full_like(self.lengths, self.tail), self.mass
        places = torch.arange(self.seen - self.tail, self.seen, dtype=torch.int32, device=before.device)
        if mass is not None:
            mass = join(mass, before, mass.new_ones(more.numel() * self.tail), more)
        rows = [tail[:, :, : self.tail].flatten(0, 2) for tail in (self.tail_keys, self.tail_values)]
        return StoredRows(
            self.shape, self.seen,
            stored=self.stored.extend(*rows, before + more),
            places=join(self.places, before, places.repeat(before.numel()), more),
            mass=mass, columns=self.columns, lengths=before + more,
            longest=self.longest + self.tail, even=self.even,
        )  # fmt: skip

    def replace_all(
        self, stored: Plain, places: Tensor, tail: Sequence[Tensor] | None, length: int, seen: int
    ) -> "StoredRows":
        """Hold other rows in their place, as many as before in the cut part. `tail`: keys and values (B, H, t, d) with
        `length` tokens, None for none; `seen`: tokens read.
        """
        keys, values = tail or (None, None)
        return replace(self, stored=stored, places=places, seen=seen, tail=length, tail_keys=keys, tail_values=values)

    def without_cut(self) -> "StoredRows":
        """The same lengths without the cut part's keys and values: `replace_all` brings others."""
        return replace(self, stored=None)

    def replicate(self, times: int, room: int) -> "StoredRows":
        """The rows of one sample as those of `times` equal samples, with room for `room` further tokens. Every tensor
        that holds rows has the sample first. Rows that a codec packed cannot be copied.
        """

        def copies(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.repeat(times, *(1 for _ in tensor.shape[1:]))

        def roomy(tail: Tensor | None) -> Tensor | None:
            if tail is None:
                return None
            grown = tail.new_empty(times, tail.shape[1], self.tail + room, tail.shape[3])
            grown[:, :, : self.tail] = tail[:, :, : self.tail]
            return grown

        return replace(
            self,
            shape=(self.shape[0] * times, self.shape[1]),
            stored=None if self.stored is None else Plain(*map(copies, self.stored.read())),
            places=copies(self.places), mass=copies(self.mass), lengths=copies(self.lengths), starts=None,
            columns={name: copies(column) for name, column in self.columns.items()},
            tail_keys=roomy(self.tail_keys), tail_values=roomy(self.tail_values),
        )  # fmt: skip

    # what is read of it

    def ragged(self) -> RaggedRows | None:
        """The cut part as attention takes it, None where nothing was cut. The rows must be `with_starts`."""
        if self.stored is None:
            return None
        return RaggedRows(*self.stored.read(), self.mass, self.starts, self.lengths.flatten(), self.longest, self.even)

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

    def head_places(self, sample: int, head: int) -> Tensor:
        """(n,) int64 places of one head's rows, ascending."""
        return self._head(self.view().places, sample, head)

    def head_masses(self, sample: int, head: int) -> Tensor:
        """(n,) tokens that each of one head's rows stands for."""
        return self._head(self.view().mass, sample, head)

    def rank_of(self, places: Sequence[int]) -> Tensor:
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
        packed = count_bytes(self.stored.tensors()) if self.stored is not None else 0
        tail = count_bytes([self.tail_keys, self.tail_values])
        used = tail * self.tail // self.tail_keys.shape[2] if tail else 0
        metadata = count_bytes([self.places, self.mass, self.lengths, self.starts])
        return Bytes(packed + used, metadata, count_bytes(self.columns.values()), tail - used)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name for messages."""
        found = {"keys": self.tail_keys, "values": self.tail_values, "places": self.places, "mass": self.mass}
        found |= {"lengths": self.lengths} | {f"columns[{name!r}]": own for name, own in self.columns.items()}
        if self.stored is not None:
            plain = isinstance(self.stored, Plain)
            for number, own in enumerate(self.stored.tensors()):
                found[("held keys", "held values")[number] if plain else f"packed tensor {number}"] = own
        return {name: own for name, own in found.items() if own is not None}

    def _grown(self, like: Tensor, before: Tensor | None, capacity: int) -> Tensor:
        """A tail of this capacity, shaped like `like`, with the rows of the one before."""
        grown = like.new_empty(*like.shape[:2], capacity, like.shape[3])
        if self.tail:
            grown[:, :, : self.tail] = before[:, :, : self.tail]
        return grown

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


def count_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
