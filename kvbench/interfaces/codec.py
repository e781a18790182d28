"""The interface of a codec: it decides how the rows that stay are stored, as they are or in fewer bits.

Rows are flat, (R, d), in the order (sample, head, position). `lengths` (B, H) says how many of them belong to each
head. While the prompt is read, rows stay raw, so attention and every cut are exact. A codec that packs does so after
the last cut of the prompt, and packed rows are never written again, so that rounding happens once. Cuts while decoding
drop packed rows, if the codec can do so (`Packing.keeps`). A codec that packs before attention is the exception: the
model attends to its rounded rows from the first token on, and all cuts drop some of them.

Symbols: B samples, H KV heads, R rows of all heads together, d head dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.row_reader import ListedRows
from kvbench.interfaces.settings import check_settings
from kvbench.kernels.softmax_extras import SoftmaxExtras


class Angles(NamedTuple):
    """The rotary embedding of some tokens, which rotates r of the d channels, and pairs i and i + r/2 of them."""

    cos: Tensor
    """Cosines, (tokens, r). Both halves are equal."""
    sin: Tensor
    """Sines, (tokens, r)."""
    pairs: Tensor
    """Cosine and sine of each pair of channels side by side, (tokens, r/2, 2)."""


def join_angles(cos: Tensor, sin: Tensor) -> Angles:
    """Return the rotary embedding with these cosines and sines, (tokens, r) each."""
    half = cos.shape[1] // 2
    return Angles(cos, sin, torch.stack([cos[:, :half], sin[:, :half]], -1))


class Stored(Protocol):
    """Stored keys and values. Immutable, so that a snapshot of the cache stays valid."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the keys and the values, (R, d) each; keys as they were given, before or after rotation."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are held, so that their bytes can be counted."""


class Packed(Stored, Protocol):
    """Keys and values that a codec has packed."""

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "Packed":
        """Return the same rows, followed in each head by further ones.

        Args:
            keys: The further keys, (R', d).
            values: The further values, (R', d).
            lengths: Number of rows of each head, old and new ones together, (B, H).
        """


class Cuttable(Packed, Protocol):
    """Keys and values of a codec that packs `before_attention`, or that `keeps` some of its rows."""

    def keep(self, kept: Tensor) -> "Cuttable":
        """Return the rows that a cut leaves.

        Args:
            kept: Which rows stay, (R,) bool.
        """


class Replicable(Packed, Protocol):
    """Keys and values of a codec that `replicates`."""

    def replicate(self, times: int, lengths: Tensor) -> "Replicable":
        """Return the rows of the only sample for several equal samples.

        Args:
            times: Number of samples.
            lengths: Number of rows of each head, (times, H).
        """


class Growable(Packed, Protocol):
    """Keys and values of a codec that `grows`."""

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "Growing":
        """Return the same rows with memory for further tokens.

        Args:
            tokens: Number of further tokens.
            ahead: Number of tokens that may be taken back at once.
            seen: Number of tokens read so far, which is the position of the first further one.
            places: Position of each row, (R,) int32.
            mass: Tokens that each row stands for, (R,), at least 1; None for one each.
        """


class Growing(Protocol):
    """Packed rows with memory at fixed addresses, to which a CUDA graph appends tokens.

    Every operation on the rows reads the number of tokens from the device, so that the fixed arguments of a graph work
    for every token. The rows that were packed before are shared and never written.
    """

    @property
    def tokens(self) -> int:
        """Number of tokens that the memory has room for."""

    def begin(self) -> None:
        """Forget all tokens that were appended. Called before each graph that uses the memory is captured."""

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
        """Append a token and attend with it to all rows, its own included.

        The token attends to what `Packed.read` would give, and to its own row as it is, or packed if the codec
        packs `before_attention`. A step may be done again after up to `ahead` further ones (`Growable.growing`), and
        then writes the same.

        Args:
            queries: As projected, (B, Hq·d).
            keys: As projected, (B, H·d).
            values: As projected, (B, H·d).
            angles: The rotary embedding. The row at `step` belongs to this token. If the codec `takes_unrotated_keys`,
                of all positions, from 0 on.
            step: Number of tokens appended so far, int32 on the device.
            scaling: The factor of the logits.
            norms: The weights (d,) of the queries' and the keys' RMS norm, and its ε; None for no norm.
            implementation: Name of the kernels' implementation; None chooses one.
            extras: Sinks and cap of the layer's softmax; None for the plain one.

        Returns:
            The attention outputs, (B, Hq, 1, d).
        """

    def pack_due(self, number: int) -> None:
        """Pack what is due after the token of this number, counted from 0, and could not be packed by `attend`.

        Called between two replays of a graph, and again if the token is read again.
        """

    def finish(self, read: int, lengths: Tensor) -> "Packed":
        """Return the rows with the tokens appended, as `Packed.extend` gives them if called for each token.

        Args:
            read: Number of tokens appended, at least 1.
            lengths: Number of rows of each head, old and new ones together, (B, H).
        """

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the memory, so that their bytes can be counted."""


class CuttableGrowing(Growing, Protocol):
    """Growing rows of a codec that packs `before_attention`.

    A graph that cuts while it decodes attends to rows of its own memory, in which it moves what packed rows stand for.
    The codec only packs the tokens. `finish` is called whenever the layer needs packed rows, with more tokens each
    time, and `Cuttable.keep` then drops those that the graph has cut.
    """

    def append(self, keys: Tensor, values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Append a token, and return its keys and values as `Packed.read` would give them, (B, H·d) each.

        Args:
            keys: As projected if the codec `takes_unrotated_keys`, otherwise normed and rotated, (B, H·d).
            values: As projected, (B, H·d).
            step: Number of tokens appended so far, (1,) int64 on the device.
        """


MadeRows = tuple[Tensor, ...]
"""What a codec has made of listed rows (`ListingGrowing.make_rows`)."""


class ListingGrowing(Growing, Protocol):
    """Growing rows of a codec that `lists_rows`."""

    def make_rows(self, listed: ListedRows, query_heads: int, step: Tensor, implementation: str | None) -> MadeRows:
        """Make listed rows ready to be attended to, as far as possible without the token that is being read.

        This may be done before the token reaches the layer, beside the work of earlier layers.

        Args:
            listed: One list of single rows for all heads, which has the token's own row.
            query_heads: Number of query heads that attend to them.
            step: Number of tokens appended so far, int32 on the device.
            implementation: Name of the kernels' implementation; None chooses one.
        """

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
        made: MadeRows | None = None,
        counts: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Append a token and attend with it to some rows, its own included (`Growing.attend`).

        Args:
            queries: As projected, (B, Hq·d).
            keys: As projected, (B, H·d).
            values: As projected, (B, H·d).
            angles: See `Growing.attend`.
            step: Number of tokens appended so far, int32 on the device.
            scaling: The factor of the logits.
            norms: See `Growing.attend`.
            implementation: Name of the kernels' implementation; None chooses one.
            extras: See `Growing.attend`.
            made: What `make_rows` returned for the rows; None attends to all rows.
            counts: Where the number of rows attended to is added (`kernels.reconstruction.attend_compressed`).
        """


@dataclass(frozen=True)
class Plain:
    """Keys and values as the model wrote them."""

    keys: Tensor
    """(R, d)"""
    values: Tensor
    """(R, d)"""

    def read(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class Packing:
    """What is special about how a codec packs. One that packs after the last cut and is read back has none of it."""

    before_attention: bool = False
    """Whether every block is packed as it is read, so that the model attends to the packed rows of the block too.
    Packed rows are `Cuttable`, and if they grow, their memory is `CuttableGrowing`. Such a run shares a prefill only
    with runs of the same codec.
    """
    keeps: bool = False
    """Whether packed rows are `Cuttable` although they are packed after the last cut of the prompt. A method may then
    cut while decoding: it chooses among rows as the token has read them, its own one raw, which is packed before rows
    go. Not for codecs that pack rows in groups or wait for further ones. `before_attention` says the same.
    """
    takes_unrotated_keys: bool = False
    """Whether keys are stored as they are before QK norm and rotation, from the first token on. The layer norms and
    rotates what `Stored.read` returns. Answers are then read through the model's modules, unless packed rows grow.
    """
    joins_heads: bool = False
    """Whether all heads of a layer are packed together, so that they must hold the same rows."""
    token_by_token: bool = False
    """Whether tokens that follow the prefill are read one at a time."""
    interval: int = 1
    """Number of tokens between two times that rows are packed while decoding; 1 if every token is treated alike."""
    grows: bool = False
    """Whether packed rows are `Growable`. Otherwise an answer is read through the model's modules."""
    lists_rows: bool = False
    """Whether growing rows can attend to listed rows only (`ListingGrowing`)."""
    replicates: bool = False
    """Whether packed rows can be copied to further samples (`Replicable`), as `task.fill=replicated` does."""


PLAIN = Packing()


@dataclass(frozen=True)
class Codec(Hooks):
    """The base of every codec. Used as it is, rows stay as the model wrote them.

    A codec is a frozen dataclass; its fields are its settings, which Hydra reads from conf/codec/<name>.yaml. It
    overrides `pack`, which returns `Packed` rows. `kvbench.interfaces.row_codec` has the base of codecs that pack each
    row on its own: they override `encode` and `decode`, and need to know nothing of what follows here.
    """

    name: str
    """The name of the codec's file in conf/codec/."""

    def __post_init__(self) -> None:
        check_settings(self, "codec")

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> Packed:
        """Pack rows after the last cut of the prompt. Methods that cut while decoding need a codec that `keeps` rows.

        If it packs `before_attention`, this is called before the first block, without rows.

        Args:
            keys: (R, d). Before QK norm and rotation if the codec `takes_unrotated_keys`.
            values: (R, d)
            lengths: Number of rows of each head, (B, H).
        """
        raise NotImplementedError(f"{self.name} does not pack")

    @property
    def packs(self) -> bool:
        """Whether the codec packs rows. A codec whose layers have codecs that pack (`of_layer`) sets this."""
        return self.overrides("pack")

    @property
    def cuts_in_graph(self) -> bool:
        """Whether a CUDA graph that decodes may cut the rows: they are raw, or packed as they are read."""
        return not self.packs or (self.packing.before_attention and self.packing.grows)

    @property
    def packing(self) -> Packing:
        """What is special about how the codec packs."""
        return PLAIN

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that the codec reads from a file and needs beside the model."""
        return 0

    def check(self, layout: Layout) -> None:
        """Check that the codec can serve a model. Called before weights are loaded; for codecs that read a file.

        Args:
            layout: The model's layout. Layers with a sliding window keep their own cache, and no codec packs them.

        Raises:
            SettingError: The codec cannot serve this model.
        """

    def check_identity(self, identify: Callable[[], str]) -> None:
        """Check that the codec's file was made for the model of a run. Called before weights are loaded.

        Args:
            identify: Returns a text that identifies the model's weights, which may take time.

        Raises:
            SettingError: The file was made for another model.
        """

    def of_layer(self, layer: int, layers: int) -> "Codec":
        """Return the codec of one layer, for codecs that do not treat all layers alike.

        Args:
            layer: The index of the layer, from 0.
            layers: Number of layers.
        """
        return self

    def find_packed(self, packed: Packed, more: int = 0) -> tuple[int, int] | None:
        """Return start and stop of the rows that are packed, or None if other rows are packed in another head.

        Methods that read few of many rows may choose among these (`ReadRequest.packed`).

        Args:
            packed: What `pack` returned, or the rows that followed it.
            more: Number of tokens that have followed since, one by one.
        """
        return None

    def count_needs(self, packed: Packed, rows: float) -> tuple[int, int] | None:
        """Return the least work of a token that attends to some of the packed rows.

        Args:
            packed: What `pack` returned, or the rows that followed it.
            rows: Rows of each head that the token attends to, as the mean.

        Returns:
            Bytes that must be read, and operations that make rows of them. None if the bytes are the rows' share of all
            bytes, and making rows of them takes no time.
        """
        return None


def copy_samples(value: object, times: int) -> Any:
    """Return the same value with every tensor in it repeated along its first dimension, which is that of samples."""
    if isinstance(value, Tensor):
        return value.repeat(times, *(1 for _ in value.shape[1:])) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: copy_samples(entry, times) for key, entry in value.items()}
    if isinstance(value, tuple):
        copies = [copy_samples(part, times) for part in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: copy_samples(part, times) for name, part in parts.items()})
    return value


def join(rows: Tensor, counts: Tensor, more: Tensor, more_counts: Tensor) -> Tensor:
    """Append further rows to the rows of each head. If the counts lie on a GPU, the host waits for them.

    Args:
        rows: Flat rows, (R, …).
        counts: Number of them in each head, (B, H).
        more: The further rows, (R', …).
        more_counts: Number of them in each head, (B, H).

    Returns:
        Flat rows, (R + R', …). They may be `rows` or `more`, if there are no others.
    """
    if not len(rows) or not len(more):
        return more if len(more) else rows
    parts = [flat.split_with_sizes(sizes.flatten().tolist()) for flat, sizes in ((rows, counts), (more, more_counts))]
    return torch.cat([part for head in zip(*parts, strict=True) for part in head])


def split(rows: Tensor, counts: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Separate the first rows of each head from the others. If the counts lie on a GPU, the host waits for them.

    Args:
        rows: Flat rows, (R, …).
        counts: Number of them in each head, (B, H).
        first: Number of rows to separate from each head, (B, H).

    Returns:
        Copies of the first rows and of the others.
    """
    parts = rows.split_with_sizes(torch.stack([first, counts - first], -1).flatten().tolist())
    return torch.cat(parts[::2]), torch.cat(parts[1::2])
