"""What a method is: five questions about the rows that a layer holds, each with the full cache as its default.

Symbols: B samples, H KV heads, G query heads per KV head, T tokens of the block, n rows (the block's are the last T),
d head dimension. Rows come padded: `rows.mass` is 0 where a head has fewer rows (kvbench.interfaces.rows).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import SettingError, require_choice, require_int


@dataclass(frozen=True)
class Method(Hooks):
    """The full cache. A method states only what is its own; fields are its settings, from conf/method/<name>.yaml."""

    name: str
    decoding: bool = field(default=False, kw_only=True)
    """Cut while decoding too; else rows are appended."""
    decode_interval: int = field(default=1, kw_only=True)
    """Tokens between two cuts while decoding."""
    decode_size: int | None = field(default=None, kw_only=True)
    """Rows per layer and head that a cut while decoding leaves; None for the budget's."""

    def __post_init__(self) -> None:
        require_choice("method.decoding", self.decoding, (True, False))
        require_int("method.decode_interval", self.decode_interval, 1)
        if self.decode_size is not None:
            require_int("method.decode_size", self.decode_size, 2)
            if not self.decoding:
                raise SettingError(f"method.decode_size={self.decode_size}: only with method.decoding=true")

    # What a method is like. A subclass sets those that differ.

    scores = True
    """False for a method that leaves the choice of rows to `cut`."""
    sets_head_quotas = False
    """The method decides how many rows every head keeps (`head_quotas`); only allocator=uniform serves it."""
    weighs_values = False
    """The scores have the size of the values in them."""
    merges = False
    """Rows may come to stand for several tokens."""
    wants_lse = False
    """`Observation.lse` is computed for the method; attention takes longer then."""
    one_block = False
    """The whole prompt must be one block."""
    needs_extra_reads = False
    """The model reads about the prompt once more before it is cut (`extra_reads`)."""
    position_free = False
    """Scores depend on what the block shows and on the rows' distance to it alone, and nothing is remembered between
    blocks: every interval between two cuts does the same, and can run in a CUDA graph."""
    uses_cache_positions = False
    """Attention takes keys and queries at their slot among the rows held, not at their place."""
    attends_subset = False
    """The method holds every row and reads few: the budget is rows attended while decoding (`read`)."""
    token_by_token = False
    """Known tokens that follow the prefill (the question) are read one at a time."""

    @property
    def watches(self) -> bool:
        """Whether `update` must be asked about every token while decoding."""
        return self.decoding and self.overrides("update")

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        """SettingError unless the method can serve a model of `layers` layers with `heads` KV heads of `dim`, of which
        `sliding` keep their own cache. Asked before weights are loaded; for methods that read a file.
        """

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        """Why this method cannot work with them, in words that name the setting to change; None where it can."""
        if self.attends_subset and allocator.name != "uniform":
            return f"allocator={allocator.name}: {self.name} holds every row, nothing is shared; use allocator=uniform"
        if codec.packs and self.decoding:
            return (
                f"codec={codec.name}: {self.name} cuts while decoding, and packed groups are never repacked; "
                "use method.decoding=false or codec=raw"
            )
        if self.sets_head_quotas and allocator.name != "uniform":
            return f"allocator={allocator.name}: {self.name} shares rows out itself; use allocator=uniform"
        if self.needs_extra_reads and self.decoding:
            return f"method.decoding=true: {self.name} has scores of the prompt only; use method.decoding=false"
        if self.needs_extra_reads and allocator.cascades:
            return (
                f"allocator={allocator.name}: {self.name} cuts when the model has read about the prompt, and there are "
                "no queries to share rows by; use allocator=uniform, ada or pyramid"
            )
        if not self.scores and (allocator.cascades or not allocator.even):
            return f"allocator={allocator.name}: {self.name} has no scores to share rows by; use allocator=uniform"
        return None

    def skips_layer(self, layer: int, layers: int) -> bool:
        """True for a layer that is never cut (a method that skips some declares its own law in its config)."""
        return False

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """What to remember of what this layer just saw: values per row (B, H, n), kept with the rows through cuts as
        `rows.columns`; anything else goes into `state.layer` or `state.shared`.
        """
        return {}

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterable[ExtraRead]:
        """Say what the model shall read about the prompt `ids` (B, n), of which `prefix` are in front of the user's
        text. Asked only of a method that `needs_extra_reads`.

        The model reads each over the whole prompt, `update` sees it (`observation.about`), and the engine forgets all
        but what `update` put into the state. Then the layers are cut; `protect`, `protect_sinks`, `score` and
        `head_quotas` see no queries by then.
        """
        return ()

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """Return (H,) or (B, H) rows that each KV head of this layer may keep; a head with fewer keeps what it has.
        Asked only of a method that `sets_head_quotas`. `quota` is the mean over all layers and heads. The method may
        remember its choice in the state.
        """
        raise NotImplementedError(f"{self.name} leaves the shares to the allocator")

    def steps(self, tokens: int, quota: int | None) -> int:
        """How many of the `decode_interval` steps between two cuts it counts to read `tokens` tokens at once after the
        prompt. Default: one a token. `quota`: rows per head that the next cut leaves, None for all.
        """
        return tokens

    def forget(self, state: State) -> None:
        """Drop what is not needed any more: the prompt is read and cut."""

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        """(B, H, n) bool: first rows that are not to be scored away, or None. Asked when `protect` is asked. Where not
        all protected rows fit the quota, sinks stay longer than the rows of `protect`, and the first sink longest.
        """
        return None

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        """(B, H, n) bool: further rows that are not to be scored away (windows, recents), or None. Asked again for a
        smaller quota where an allocator cascades; `observation` has no queries, outputs or log-sum-exps by then.
        """
        return None

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        """(B, H, n): which rows matter, larger is kept. A pure function of its arguments."""
        raise NotImplementedError(f"{self.name} has no score")

    def select(self, scores: Tensor, quotas: Tensor) -> Tensor:
        """(B, H, n) bool: which stay. Default: each head's `quotas` (B, H) top rows, ties to the lower place."""
        return top_k_mask(scores, quotas)

    def merge(self, rows: Rows, kept: Tensor) -> Rows:
        """What becomes of the rest. Default: gone (mass 0)."""
        return rows.without(~kept)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        """Select and merge. A method whose every choice depends on the merge before overrides this one. `each`: the
        quota of all heads, where they have the same and the caller knows it without waiting for the device.
        """
        return self.merge(rows, self.select(scores, quotas))

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        """(B, H*G, n) bool: rows that each query head looks at while decoding, or None for all of them. `rows()` gives
        the rows when the answer needs them.
        """
        return None


def fit_protected(sinks: Tensor | None, recents: Tensor | None, rows: Rows, quota: int) -> Tensor:
    """(B, H, n) bool: protected rows that fit the quota. Sinks come before recents, the first sinks and the newest
    recents before the others. At least one row is left to the scores where the quota is over 1.
    """
    room = quota - 1 if quota > 1 else quota
    if sinks is None and recents is None:
        return rows.present.new_zeros(rows.present.shape)
    kept = None
    if sinks is not None:
        sinks = sinks & rows.present
        kept = sinks & (sinks.cumsum(-1) <= room)
    if recents is not None:
        recents = recents & rows.present
        if kept is not None:
            recents = recents & ~kept
            room = room - kept.sum(-1, keepdim=True)
        newer = recents.flip(-1).cumsum(-1).flip(-1)  # recents from here to the newest
        recents = recents & (newer <= room)
        kept = recents if kept is None else kept | recents
    return kept
