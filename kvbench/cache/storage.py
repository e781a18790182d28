"""Store the rows of one layer as one immutable value of tensors and lengths.

Every change returns a new value, which shares its tensors with the old one. An old value is therefore a snapshot: a
layer returns to it by holding it again. Contexts that share one prefill hold the same value.

The rows have two parts. The *cut part* is what the last eviction left. It is flat in the order (sample, head,
position), because heads may keep different numbers of rows. A codec that packs replaces it when the prefill ends, and
one that packs before attention with every block. The *tail*, (B, H, capacity, d), holds the tokens read since then,
from the left. Its capacity may exceed its length, so that rows have fixed addresses while a CUDA graph decodes. Only
the memory behind the tail's length is written in place, so nothing that belongs to a snapshot is overwritten.

Keys are stored as the model rotated them. If the codec takes them before QK norm and rotation, both parts hold them so,
and they are normed and rotated whenever the rows are viewed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.interfaces.codec import (
    Cuttable,
    Growable,
    ListingGrowing,
    Packed,
    Plain,
    Replicable,
    Stored,
    copy_samples,
    join,
)
from kvbench.interfaces.observation import KeyRotation
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.attention import RaggedRows
from kvbench.kernels.row_selection import gather_rows, kept_indices


class Packer(Protocol):
    """Whatever packs rows: a codec, or a codec whose hooks are checked."""

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> Packed:
        """See `kvbench.interfaces.codec.Codec.pack`."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of one layer. `bytes` counts every byte that they occupy.

    Symbols: B samples, H KV heads, R rows in the cut part, d head dimension. Raw values may have another one than keys.
    """

    shape: tuple[int, int] = (0, 0)
    """B and H."""
    seen: int = 0
    """Number of tokens that every head has read."""
    stored: Stored | None = None
    """Keys and values of the cut part; None before the first cut."""
    places: Tensor | None = None
    """Positions of the cut part, (R,) int32; None before the first cut."""
    mass: Tensor | None = None
    """Tokens that each row of the cut part stands for, (R,) int16 or int32, or how much it weighs in attention, in the
    dtype of `Rows.mass`; None if every row stands for one token.
    """
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The method's values for the first m rows, (B, H, m) by name."""
    lengths: Tensor | None = None
    """Rows of each head in the cut part, (B, H) int64; None before the first cut."""
    starts: Tensor | None = None
    """Index of each head's first row in the cut part, (B·H,) int64; None until attention needs it (`with_starts`)."""
    longest: int = 0
    """Rows of the longest head in the cut part."""
    even: bool = True
    """Whether all heads hold `longest` rows in the cut part."""
    tail: int = 0
    """Number of tokens in the tail."""
    tail_keys: Tensor | None = None
    """(B, H, capacity, d)"""
    tail_values: Tensor | None = None
    """(B, H, capacity, d)"""
    growing: ListingGrowing | None = None
    """Memory that packed rows have reserved for further tokens."""
    rotate: KeyRotation | None = None
    """Norms and rotates keys that are stored before both; None if keys are stored rotated."""

    @property
    def longest_head(self) -> int:
        """Number of rows of the longest head, tail included."""
        return self.longest + self.tail

    @property
    def mean_rows(self) -> float:
        """Mean number of rows per head over samples and heads, tail included."""
        cut = 0 if self.places is None else len(self.places) / (self.shape[0] * self.shape[1])
        return cut + self.tail

    @property
    def is_raw(self) -> bool:
        """Whether the rows are as the model attends to them, neither packed nor before rotation."""
        return self.rotate is None and (self.stored is None or isinstance(self.stored, Plain))

    def counts(self) -> Tensor:
        """Return the number of rows of each head, (B, H)."""
        cut = torch.zeros(self.shape, dtype=torch.int64) if self.lengths is None else self.lengths
        return cut + self.tail

    # changes: each returns a new value

    def append(self, keys: Tensor, values: Tensor, room: int = 0, rotate: KeyRotation | None = None) -> "StoredRows":
        """Append a block.

        Args:
            keys: (B, H, T, d)
            values: (B, H, T, d)
            room: Number of further tokens to reserve memory for if the tail must grow.
            rotate: Norms and rotates the keys, if they come before both. Then the keys of all blocks must.
        """
        batch, heads, tokens, _ = keys.shape
        need = self.tail + tokens
        tail_keys, tail_values = self.tail_keys, self.tail_values
        if tail_keys is None or tail_values is None or need > tail_keys.shape[2]:
            tail_keys = self._grown(keys, tail_keys, need + room)
            tail_values = self._grown(values, tail_values, need + room)
        tail_keys[:, :, self.tail : need] = keys
        tail_values[:, :, self.tail : need] = values
        return replace(
            self,
            shape=(batch, heads),
            tail=need,
            seen=self.seen + tokens,
            tail_keys=tail_keys,
            tail_values=tail_values,
            rotate=rotate,
        )

    def reserve(self, tokens: int) -> "StoredRows":
        """Reserve memory for further tokens behind the tail, so that their rows have fixed addresses."""
        like = self.tail_keys
        if like is None:
            assert self.stored is not None  # a layer without a tail was cut after every block
            keys = self.stored.read()[0]
            like = keys.new_empty(*self.shape, 0, keys.shape[1])
        elif self.tail + tokens <= like.shape[2]:
            return self
        keys, values = (self._grown(like, tail, self.tail + tokens) for tail in (self.tail_keys, self.tail_values))
        return replace(self, tail_keys=keys, tail_values=values)

    def without_room(self) -> "StoredRows":
        """Return the same rows without `starts`, which attention adds, and without memory for further tokens."""
        keys, values = (
            tail[:, :, : self.tail].contiguous() if tail is not None and self.tail else None
            for tail in (self.tail_keys, self.tail_values)
        )
        return replace(self, starts=None, growing=None, tail_keys=keys, tail_values=values)

    def copy_tail(self) -> "StoredRows":
        """Return these rows with a copy of the tail and of the memory reserved behind it."""
        if self.tail_keys is None or self.tail_values is None:
            return self
        return replace(self, tail_keys=self.tail_keys.clone(), tail_values=self.tail_values.clone())

    def take_tail(self, other: "StoredRows") -> None:
        """Overwrite the tail with that of rows of the same size, in place."""
        for into, source in ((self.tail_keys, other.tail_keys), (self.tail_values, other.tail_values)):
            if into is not None and source is not None:
                into.copy_(source)

    def copy_cut(self) -> "StoredRows":
        """Return a copy of rows that a cut has just left, plain and without a tail."""
        assert self.stored is not None  # they were cut
        keys, values = (tensor.clone() for tensor in self.stored.read())
        parts = {name: getattr(self, name) for name in ("places", "mass", "lengths", "starts")}
        parts = {name: tensor.clone() for name, tensor in parts.items() if tensor is not None}
        columns = {name: column.clone() for name, column in self.columns.items()}
        return replace(self, stored=Plain(keys, values), columns=columns, **parts)

    def reserve_packed(self, tokens: int, ahead: int) -> "StoredRows":
        """Reserve memory for further tokens behind packed rows.

        Args:
            tokens: Number of tokens.
            ahead: Number of tokens that may be taken back at once.
        """
        if self.growing is not None and self.growing.tokens >= tokens:
            return self
        assert self.places is not None  # packed rows are a cut part
        growing = cast(Growable, self.stored).growing(tokens, ahead, self.seen, self.places, self.mass)
        return replace(self, growing=cast(ListingGrowing, growing))

    def finish_growing(self, tokens: int) -> "StoredRows":
        """Take over the tokens that a CUDA graph has appended to packed rows, and free the memory reserved."""
        assert self.growing is not None and self.lengths is not None  # `reserve_packed`
        lengths = self.lengths + tokens
        return self._with_packed(self.growing.finish(tokens, lengths), lengths, tokens, self.seen + tokens)

    def finish_cut(
        self, tokens: int, places: Tensor, lengths: Tensor, longest: int, even: bool, columns: Mapping[str, Tensor]
    ) -> "StoredRows":
        """Take over the tokens that a CUDA graph has appended to packed rows, and what its cuts have left of all rows.

        These rows stay as they are, with the memory reserved.

        Args:
            tokens: Number of tokens.
            places: Positions of the rows that are left, (R,) int32 in the order (sample, head, position).
            lengths: Their number in each head, (B, H) int64.
            longest: Rows of the longest head.
            even: Whether all heads hold `longest` rows.
            columns: The method's values for the first rows, (B, H, m) by name.
        """
        grown = self.finish_growing(tokens)
        assert grown.places is not None and grown.lengths is not None  # packed rows are a cut part
        if len(places) == len(grown.places):
            return grown.with_columns(columns)

        def number(places: Tensor, lengths: Tensor) -> Tensor:
            heads = torch.arange(lengths.numel(), device=places.device)
            return heads.repeat_interleave(lengths.flatten(), output_size=len(places)) * grown.seen + places

        left = torch.zeros(lengths.numel() * grown.seen, dtype=torch.bool, device=places.device)
        left[number(places, lengths)] = True
        stored = cast(Cuttable, grown.stored).keep(left[number(grown.places, grown.lengths)])
        return replace(
            grown, stored=stored, places=places, lengths=lengths, longest=longest, even=even, columns=dict(columns)
        )

    def count_appended(self, tokens: int) -> "StoredRows":
        """Count tokens whose keys and values a CUDA graph has written behind the tail."""
        return replace(self, tail=self.tail + tokens, seen=self.seen + tokens)

    def with_columns(self, columns: Mapping[str, Tensor]) -> "StoredRows":
        """Return the same rows with other values of the method, (B, H, n) each."""
        return replace(self, columns=dict(columns))

    def with_starts(self) -> "StoredRows":
        """Return the same rows with `starts`, which attention over ragged rows needs."""
        if self.stored is None or self.lengths is None or self.starts is not None:
            return self
        lengths = self.lengths.flatten()
        return replace(self, starts=lengths.cumsum(0) - lengths)

    def keep(
        self,
        rows: Rows,
        even: bool,
        merged: bool,
        each: int | None = None,
        chosen: tuple[Tensor, Tensor] | None = None,
        weighed: bool = False,
    ) -> "StoredRows":
        """Keep the rows with mass > 0 and free everything else. A tail behind packed rows is packed before.

        Args:
            rows: All rows, padded. If keys are stored before rotation, they are those that are held.
            even: Whether all heads have the same number of rows that stay.
            merged: Whether a row may stand for several tokens.
            each: Number of rows of every head that stay, if it is the same and the caller knows it. On a GPU the host
                then does not wait for it.
            chosen: The `each` rows of every head that stay, if they are not those with mass > 0: their indices, as
                `kept_indices` counts them, and their number in each head, (B, H) int64.
            weighed: Whether the masses of merged rows are weights and no numbers of tokens.
        """
        if chosen is not None and each is not None:
            index, lengths = chosen
        else:
            present = rows.present
            lengths = present.sum(-1)
            if each is None or not present.is_cuda:
                counts = lengths.flatten().tolist()
                each, total = max(counts), sum(counts)
            else:
                total = lengths.numel() * each
            index = kept_indices(present, total)
        if self.stored is None or isinstance(self.stored, Plain):
            keys = rows.keys if self.rotate is None else self._held()[0]
            stored: Stored = Plain(*gather_rows(index, keys, rows.values))
        else:
            packed = self.pack_tail()  # which leaves every row at its index
            assert packed.places is not None  # packed rows are a cut part
            marks = torch.zeros_like(rows.places, dtype=torch.bool)
            marks.view(-1)[index] = True
            stored = cast(Cuttable, packed.stored).keep(marks[packed._spread(packed.places, absent=-1) >= 0])
        kept = StoredRows(
            self.shape,
            self.seen,
            stored=stored,
            places=rows.places.take(index).int(),
            mass=rows.mass.take(index).to(rows.mass.dtype if weighed else count_dtype(self.seen)) if merged else None,
            lengths=lengths,
            longest=each,
            even=even,
            rotate=self.rotate,
        )
        columns = {name: kept._spread(column.take(index)) for name, column in rows.columns.items()}
        return kept.with_columns(columns) if columns else kept

    def pack(self, codec: Packer) -> "StoredRows":
        """Let a codec pack all rows, the tail's too. Called when the prefill has ended and no cut follows."""
        if self.stored is None:
            assert self.tail_keys is not None  # the prompt has been read
            none = self.tail_keys.new_empty(0, self.tail_keys.shape[-1])
            places, lengths = none.new_empty(0, dtype=torch.int32), none.new_zeros(self.shape, dtype=torch.int64)
            return replace(self, stored=Plain(none, none), places=places, lengths=lengths).pack(codec)
        assert self.lengths is not None
        return replace(self, stored=codec.pack(*self.stored.read(), self.lengths)).pack_tail()

    def append_packed(
        self, codec: Packer, keys: Tensor, values: Tensor, rotate: KeyRotation | None = None
    ) -> "StoredRows":
        """Append a block and pack it at once. All rows are then packed. See `append`."""
        rows = self.append(keys, values, rotate=rotate)
        return rows.pack(codec) if self.stored is None else rows.pack_tail()

    def pack_tail(self) -> "StoredRows":
        """Pack the tail behind the packed rows and start a new tail."""
        if not self.tail:
            return self
        assert self.lengths is not None  # `pack` has made the cut part
        assert self.tail_keys is not None and self.tail_values is not None
        keys, values = (tail[:, :, : self.tail].flatten(0, 2) for tail in (self.tail_keys, self.tail_values))
        lengths = self.lengths + self.tail
        packed = cast(Packed, self.stored).extend(keys, values, lengths)
        return self._with_packed(packed, lengths, self.tail, self.seen)

    def _with_packed(self, packed: Packed, lengths: Tensor, tokens: int, seen: int) -> "StoredRows":
        """Return rows that are all packed: the cut part and, behind it, the last `tokens` of the `seen` tokens."""
        before, mass = self.lengths, self.mass
        assert before is not None and self.places is not None  # `pack` has made the cut part
        held = torch.full(self.shape, self.longest) if self.even else before.cpu()
        more = torch.full_like(held, tokens)
        places = torch.arange(seen - tokens, seen, dtype=torch.int32, device=before.device)
        if mass is not None:
            mass = join(mass, held, mass.new_ones(more.numel() * tokens), more)
        return StoredRows(
            self.shape,
            seen,
            stored=packed,
            places=join(self.places, held, places.repeat(before.numel()), more),
            mass=mass,
            columns=self.columns,
            lengths=lengths,
            longest=self.longest + tokens,
            even=self.even,
            rotate=self.rotate,
        )

    def replace_all(
        self,
        tokens: int,
        stored: Plain | None,
        places: Tensor | None,
        lengths: Tensor | None,
        longest: int,
        even: bool,
        columns: Mapping[str, Tensor],
        tail: Sequence[Tensor] | None,
        mass: Tensor | None = None,
    ) -> "StoredRows":
        """Return the rows that are held after `tokens` further tokens.

        Args:
            tokens: Number of tokens.
            stored: Keys and values of the cut part; None if nothing was cut.
            places: Positions of the cut part, (R,) int32; None if nothing was cut.
            lengths: Rows of each head in the cut part, (B, H) int64; None if nothing was cut.
            longest: Rows of the longest head in the cut part.
            even: Whether all heads hold `longest` rows in the cut part.
            columns: The method's values for the first rows, (B, H, m) by name.
            tail: Keys and values read since the last cut, (B, H, t, d) each; None for an empty tail.
            mass: Masses of the cut part, (R,); None if every row stands for one token.
        """
        keys, values = tail or (None, None)
        return StoredRows(
            self.shape,
            self.seen + tokens,
            stored=stored,
            places=places,
            mass=mass,
            columns=dict(columns),
            lengths=lengths,
            longest=longest,
            even=even,
            tail=0 if keys is None else keys.shape[2],
            tail_keys=keys,
            tail_values=values,
        )

    def without_cut(self) -> "StoredRows":
        """Return the same lengths without keys and values of the cut part, which `replace_all` then sets."""
        return replace(self, stored=None)

    def replicate(self, times: int, room: int) -> "StoredRows":
        """Copy the rows of one sample to several equal samples. A codec that packs them `replicates`.

        Args:
            times: Number of samples.
            room: Number of further tokens to reserve memory for.
        """

        def roomy(tail: Tensor | None) -> Tensor | None:
            if tail is None:
                return None
            grown = tail.new_empty(times, tail.shape[1], self.tail + room, tail.shape[3])
            grown[:, :, : self.tail] = tail[:, :, : self.tail]
            return grown

        stored, lengths = self.stored, copy_samples(self.lengths, times)
        if stored is not None and not isinstance(stored, Plain):
            stored = cast(Replicable, stored).replicate(times, lengths)
        return replace(
            self,
            shape=(self.shape[0] * times, self.shape[1]),
            stored=copy_samples(stored, times) if isinstance(stored, Plain) else stored,
            places=copy_samples(self.places, times),
            mass=copy_samples(self.mass, times),
            lengths=lengths,
            starts=None,
            growing=None,
            columns=copy_samples(self.columns, times),
            tail_keys=roomy(self.tail_keys),
            tail_values=roomy(self.tail_values),
        )

    # reading the rows

    def ragged(self) -> RaggedRows | None:
        """Return the cut part for attention over ragged rows, or None before the first cut.

        Call `with_starts` first.
        """
        if self.stored is None:
            return None
        assert self.starts is not None and self.lengths is not None  # `with_starts`
        return RaggedRows(*self.stored.read(), self.mass, self.starts, self.lengths.flatten(), self.longest, self.even)

    def attention_view(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values (B, H, n, d) and mass (B, H, n), or None for mass if every row exists with mass 1."""
        keys, values = self._held()
        if self.rotate is not None:
            uncut = self.even and self.longest_head == self.seen
            places = torch.arange(self.seen, device=keys.device) if uncut else self._places(keys).clamp(min=0)
            keys = self.rotate(keys, places.expand(1, 1, -1) if uncut else places)
        return keys, values, None if self.even and self.mass is None else self._mass(keys)

    def _held(self) -> tuple[Tensor, Tensor]:
        """Return keys, as they are stored, and values, (B, H, n, d) each."""
        parts = []
        if self.stored is not None:
            parts.append([self._spread(packed) for packed in self.stored.read()])
        if self.tail:
            assert self.tail_keys is not None and self.tail_values is not None
            parts.append([tail[:, :, : self.tail] for tail in (self.tail_keys, self.tail_values)])
        keys, values = parts[0] if len(parts) == 1 else (torch.cat(both, 2) for both in zip(*parts, strict=True))
        return keys, values

    def read_newest_keys(self, tokens: int) -> Tensor:
        """Return the keys of the last tokens as they are stored, (B, H, tokens, d)."""
        return self._held()[0][:, :, -tokens:]

    def _places(self, keys: Tensor) -> Tensor:
        """Return the positions of all rows, (B, H, n) int64, on the device of the keys; -1 for absent rows."""
        places = torch.arange(self.seen - self.tail, self.seen, device=keys.device).expand(*keys.shape[:2], -1)
        if self.stored is not None and self.places is not None:
            places = torch.cat([self._spread(self.places.long(), absent=-1), places], 2)
        return places

    def view(self) -> Rows:
        """Return all rows as a method sees them, padded."""
        keys, values, mass = self.attention_view()
        batch, heads = keys.shape[:2]
        places = self._places(keys)
        columns = {name: pad(column, (0, keys.shape[2] - column.shape[2])) for name, column in self.columns.items()}
        if mass is None:
            mass = torch.ones(batch, heads, keys.shape[2], dtype=mass_dtype(keys), device=keys.device)
        return Rows(keys, values, places, mass, MappingProxyType(columns))

    def head_places(self, sample: int, head: int) -> Tensor:
        """Return the positions of one head's rows, (n,) int64, ascending."""
        return self._head(self.view().places, sample, head)

    def head_masses(self, sample: int, head: int) -> Tensor:
        """Return how many tokens each of one head's rows stands for, (n,) int64, or its weight, (n,) float."""
        masses = self._head(self.view().mass, sample, head)
        return masses if self.mass is not None and self.mass.is_floating_point() else masses.long()

    @property
    def device(self) -> torch.device:
        """The device of the rows. The layer must have read a block."""
        like = self.tail_keys if self.places is None else self.places
        assert like is not None  # the layer has read a block
        return like.device

    def rank_of(self, places: Tensor) -> Tensor:
        """Return how many rows each head holds before each of m positions, (B, H, m) int64.

        It needs at most 13 bytes of memory per row.

        Args:
            places: The positions, (m,) int32 on the device of the rows.
        """
        wanted = places.expand(*self.shape, -1)
        cut = None
        if self.places is not None and self.lengths is not None:
            cut = torch.searchsorted(self._spread(self.places, absent=-1), wanted.contiguous())
            cut = cut if self.even else cut - (self.longest - self.lengths)[..., None]
        if cut is not None and not self.tail:
            return cut
        tail = (wanted - (self.seen - self.tail)).clamp(0, self.tail).long()
        return tail if cut is None else tail + cut

    def holds(self, places: Tensor) -> Tensor:
        """Return whether each head holds a row at each of m positions, (B, H, m) bool.

        Args:
            places: The positions, (m,) int64.
        """
        positions = places.to(self.device, torch.int32)
        return self.rank_of(positions + 1) > self.rank_of(positions)

    def bytes(self) -> "Bytes":
        """Return the bytes that the rows occupy, counted by the storages of their tensors."""
        return self._count_bytes() if self.growing is not None else self._bytes

    @cached_property
    def _bytes(self) -> "Bytes":
        """The bytes of all storages but those that grow."""
        return self._count_bytes()

    def _count_bytes(self) -> "Bytes":
        packed = count_bytes(self.stored.tensors()) if self.stored is not None else 0
        tail = count_bytes([self.tail_keys, self.tail_values])
        used = 0 if self.tail_keys is None or not tail else tail * self.tail // self.tail_keys.shape[2]
        metadata = count_bytes([self.places, self.mass, self.lengths, self.starts])
        reserved = 0 if self.growing is None else count_bytes(self.growing.tensors())
        return Bytes(packed + used, metadata, count_bytes(self.columns.values()), tail - used + reserved)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor by a name for messages."""
        tensors = {"keys": self.tail_keys, "values": self.tail_values, "places": self.places, "mass": self.mass}
        tensors |= {"lengths": self.lengths} | {f"columns[{name!r}]": column for name, column in self.columns.items()}
        if self.stored is not None:
            plain = isinstance(self.stored, Plain)
            for number, tensor in enumerate(self.stored.tensors()):
                tensors[("held keys", "held values")[number] if plain else f"packed tensor {number}"] = tensor
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _grown(self, like: Tensor, before: Tensor | None, capacity: int) -> Tensor:
        """Return a tail of this capacity, otherwise shaped like `like`, with the rows of the old tail."""
        grown = like.new_empty(*like.shape[:2], capacity, like.shape[3])
        if self.tail:
            assert before is not None
            grown[:, :, : self.tail] = before[:, :, : self.tail]
        return grown

    def _spread(self, packed: Tensor, absent: int = 0) -> Tensor:
        """Pad flat rows (R, …) to (B, H, longest, …). Absent rows are on the left and have the value `absent`."""
        assert self.lengths is not None  # there is a cut part
        batch, heads = self.lengths.shape
        if self.even:
            return packed.view(batch, heads, self.longest, *packed.shape[1:])
        index = torch.arange(self.longest, device=packed.device) - (self.longest - self.lengths)[..., None]
        present = index >= 0
        out = packed.new_full((batch, heads, self.longest, *packed.shape[1:]), absent)
        out[present] = packed
        return out

    def _mass(self, keys: Tensor) -> Tensor:
        assert self.places is not None  # there is a cut part
        mass = torch.ones_like(self.places) if self.mass is None else self.mass
        mass = self._spread(mass).to(mass_dtype(keys))
        return torch.cat([mass, mass.new_ones(*mass.shape[:2], self.tail)], 2)

    def _head(self, column: Tensor, sample: int, head: int) -> Tensor:
        here = column[sample, head]
        return here[len(here) - int(self.counts()[sample, head]) :]


@dataclass(frozen=True)
class Bytes:
    """The bytes that a layer or a cache occupies."""

    rows: int = 0
    """Keys and values of the rows held."""
    metadata: int = 0
    """Positions, masses, lengths and starts."""
    state: int = 0
    """What the method remembers."""
    headroom: int = 0
    """Memory reserved for further tokens."""
    recurrent: int = 0
    """Recurrent and convolutional states of the model's layers, which do not grow with the text."""

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.rows + other.rows,
            self.metadata + other.metadata,
            self.state + other.state,
            self.headroom + other.headroom,
            self.recurrent + other.recurrent,
        )

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.rows + self.metadata + self.state + self.headroom + self.recurrent


def count_dtype(seen: int) -> torch.dtype:
    """Return the dtype in which masses are stored: no row stands for more tokens than were seen."""
    return torch.int16 if seen < 1 << 15 else torch.int32


def count_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages behind these tensors. A storage that several tensors share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
