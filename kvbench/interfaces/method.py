"""The interface of a method: a method decides which rows of a layer's KV cache stay.

A method is a frozen dataclass in a file of its own. Its fields are its settings, which Hydra reads from
conf/method/<name>.yaml. Its hooks answer questions about the rows that a layer holds. Every hook has a default, and all
defaults together keep the full cache, so a method overrides only the hooks that it needs. Most methods override
`protect` and `score`.

Symbols: B samples, H KV heads, G query heads per KV head, T tokens of the block that the layer just read, n rows (the
last T of them are the block's), d head dimension. Rows are padded to the longest head: `rows.mass` is 0 where a head
has fewer rows (kvbench.interfaces.rows).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, ReadRequest, State, StateCapture
from kvbench.interfaces.row_reader import CapturedAnswer, RowReader
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_settings, setting
from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import RECENTS, SINKS, Protection
from kvbench.validation import SettingError, require_choice


@dataclass(frozen=True)
class Method(Hooks):
    """The base of every method. Used as it is, it keeps the full cache."""

    name: str
    """The name of the method's file in conf/method/."""
    decoding: bool = setting(default=False, kw_only=True)
    """Whether rows are also evicted while decoding. If not, decoding appends rows."""
    decode_interval: int = setting(minimum=1, default=1, kw_only=True)
    """Number of tokens between two evictions while decoding."""
    decode_size: int | None = setting(minimum=2, default=None, kw_only=True)
    """Rows per layer and KV head that an eviction while decoding leaves. `None` leaves as many as the budget allows."""
    budget_setting: str | None = setting(default=None, kw_only=True)
    """Name of the setting that decides how many rows stay (`count_rows`), such as a threshold, as the method's file in
    conf/method/ states it. Its runs have budget=null. Such a method is not `capturable`. `None`: the budget decides.
    """

    def __post_init__(self) -> None:
        check_settings(self, "method")
        if self.decode_size is not None and not self.decoding:
            raise SettingError(f"method.decode_size={self.decode_size}: only with method.decoding=true")
        if self.budget_setting is not None:
            own = [field.name for field in fields(self) if field.name not in Method.__dataclass_fields__]
            require_choice("method.budget_setting", self.budget_setting, own)
            if self.attends_subset or self.capturable or self.needs_extra_reads:
                raise SettingError(
                    f"method.budget_setting={self.budget_setting}: {self.name} must not keep every row, be capturable "
                    "or need extra reads; use null"
                )

    # Properties of a method. A subclass sets those that differ, as a class attribute or as a property.

    @property
    def scores(self) -> bool:
        """Whether the method scores rows. If not, it chooses rows in `cut`."""
        return True

    @property
    def sets_head_quotas(self) -> bool:
        """Whether the method decides how many rows each head keeps, by `head_quotas` within the budget or by
        `count_rows` if there is none. It then requires allocator=uniform.
        """
        return self.budget_setting is not None

    @property
    def streams(self) -> bool:
        """Whether every head either keeps all rows or a number of them that stays while decoding (`head_quotas`), and
        `score` looks at nothing but positions. `rows` may then have no keys and values while a graph is captured.
        """
        return False

    @property
    def weighs_values(self) -> bool:
        """Whether the scores already contain the size of the values. CriticalKV refuses such a method as its base."""
        return False

    @property
    def merges(self) -> bool:
        """Whether a row may stand for several tokens after a cut."""
        return False

    @property
    def weighs_rows(self) -> bool:
        """Whether `merge` returns as `Rows.mass` how much each row weighs in attention, any number above 0, instead of
        a number of tokens. Each row that stays then stands for its own token, and the other tokens are gone.
        """
        return False

    @property
    def wants_lse(self) -> bool:
        """Whether the method needs `Observation.lse`. Attention then uses a slower kernel that returns it."""
        return False

    @property
    def wants_unrotated_keys(self) -> bool:
        """Whether the method needs `Observation.unrotated_keys`. Answers are then read through the model's modules."""
        return False

    @property
    def wants_hidden(self) -> bool:
        """Whether the method needs `Observation.hidden`. Answers are then read through the model's modules."""
        return False

    @property
    def wants_normed_hidden(self) -> bool:
        """Whether the method needs `Observation.normed_hidden`. Answers are then read through the model's modules."""
        return False

    @property
    def needs_fixed_rotation(self) -> bool:
        """Whether the method cannot serve a model whose rotary frequencies change with the length of the text."""
        return False

    @property
    def wants_gradient(self) -> bool:
        """Whether extra reads are differentiated (`objective`). `update` sees such a read when the whole model has read
        it, with `Observation.gradient`. Its activations are held until then.
        """
        return False

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that the method reads from a file and needs beside the model."""
        return 0

    @property
    def cuts(self) -> bool:
        """Whether the method may evict rows."""
        hooks = "score", "select", "merge", "cut", "protect", "head_quotas", "count_rows"
        return not self.attends_subset and self.overrides(*hooks)

    @property
    def one_block(self) -> bool:
        """Whether the whole prompt must be read as one block."""
        return False

    @property
    def needs_extra_reads(self) -> bool:
        """Whether the model must read further tokens about the prompt before the prompt is cut (`extra_reads`)."""
        return False

    @property
    def capturable(self) -> bool:
        """Whether the hooks can be captured in a CUDA graph, which then serves every position of an answer.

        Such hooks run the same operations on tensors at every token, remember nothing in the state (but see
        `capture_state`), and never wait for the device. `update` returns the same columns for every block. `cut` and
        `merge` leave the rows these columns, and return as many rows every time. While a graph is captured,
        `Observation.first` is a tensor on the device that broadcasts to `Rows.places`, so hooks may calculate with it
        and compare it with them, but not use it as a Python number. So is the quota of `protect` and `protect_sinks`,
        if it changes during the answer. Between two cuts, `update` gets rows of which some are absent and stand on the
        right (`Rows.list_newest`). The samples of a batch may be at different positions and follow different prompts.

        The only block of a prompt may also be captured, in one layer for others (`kvbench.engine.repeated_cuts`).
        `Observation.first` is a number then, and the state may be used as outside of a graph. Layers whose hooks ask
        for the layer's index, or change what all layers share, are not captured.
        """
        return False

    @property
    def moves_state(self) -> bool:
        """Whether `capture_state` and `release_state` move what the method remembers to fixed addresses and back."""
        return self.overrides("capture_state")

    @property
    def order_free(self) -> bool:
        """Whether a `capturable` method takes rows in any order.

        While it cuts after every token in a CUDA graph, it then gets them as they lie in memory, and `Rows.order` says
        in which order they stand in the text.
        """
        return False

    @property
    def uses_cache_positions(self) -> bool:
        """Whether attention rotates keys and queries by their slot among the rows held, instead of their position."""
        return False

    @property
    def attends_subset(self) -> bool:
        """Whether the method keeps every row and attends to only some of them while decoding (`read`). The budget is
        then the number of rows attended to.
        """
        return False

    @property
    def reads_packed(self) -> bool:
        """Whether `row_reader` can choose among rows that a codec has packed, whose keys it does not get."""
        return False

    @property
    def token_by_token(self) -> bool:
        """Whether known tokens that follow the prefill, such as the question, are read one at a time."""
        return False

    @property
    def watches(self) -> bool:
        """Whether the engine must call `update` for every decoded token."""
        return self.decoding and self.overrides("update")

    def check(self, layout: Layout) -> None:
        """Check that the method can serve a model. Called before weights are loaded; for methods that read a file.

        Args:
            layout: The model's layout. Layers with a sliding window keep their own cache, and no method cuts them.

        Raises:
            SettingError: The method cannot serve this model.
        """

    def check_identity(self, identify: Callable[[], str]) -> None:
        """Check that the method's file was made for the model of a run. Called before weights are loaded.

        Args:
            identify: Returns a text that identifies the model's weights, which may take time.

        Raises:
            SettingError: The file was made for another model.
        """

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        """Return why the method cannot work with this allocator and codec, or None if it can.

        The reason names the setting to change.
        """
        if self.attends_subset and allocator.name != "uniform":
            return (
                f"allocator={allocator.name}: {self.name} keeps every row, so there are none to share; "
                "use allocator=uniform"
            )
        if codec.joins_heads and self.cuts:
            return (
                f"codec={codec.name}: it stores all heads of a layer together, and {self.name} evicts rows, which "
                "kvbench does in each head on its own; use method=full, a method that reads few of many rows, or "
                "codec=raw"
            )
        if codec.takes_unrotated_keys and self.merges:
            return (
                f"codec={codec.name}: it stores keys before rotation, and {self.name} merges rotated ones; "
                "use codec=raw"
            )
        if codec.packs_before_attention and self.merges:
            return f"codec={codec.name}: its rows are packed, and {self.name} merges rows; use codec=raw"
        if codec.packs and not codec.packs_before_attention and self.decoding:
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
                f"allocator={allocator.name}: {self.name} cuts after the model has read about the prompt, and then no "
                "queries are left to share rows by; use allocator=uniform, ada or pyramid"
            )
        if not self.scores and (allocator.cascades or not allocator.even):
            return f"allocator={allocator.name}: {self.name} has no scores to share rows by; use allocator=uniform"
        return None

    def skips_layer(self, layer: int, layers: int) -> bool:
        """Return True for a layer that is never cut.

        The rows of such a layer come on top of the budget. A method that skips layers says so in its config.
        """
        return False

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return what to remember about the rows of the layer that just read a block.

        Called after every block of the prompt and after every decoded token. If `decoding` is not set, a CUDA graph
        leaves decoded tokens out. Their queries and keys are then seen by the reader of `row_reader`, if there is one.

        Args:
            observation: What the layer computed for the block.
            rows: The layer's rows, the block's included.
            state: Where the method keeps everything that is not a value per row.

        Returns:
            Values per row, (B, H, n) by name. They stay with their rows through cuts, as `rows.columns`.
        """
        return {}

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterable[ExtraRead]:
        """Return the tokens that the model must read about the prompt. Called only if `needs_extra_reads`.

        The model reads each of them after the whole prompt. `update` sees the read (`observation.about`), and the
        engine then forgets it, so only what `update` puts into the state remains. Afterwards the layers are cut:
        `protect`, `protect_sinks`, `score` and `head_quotas` then see no queries.

        Args:
            ids: Token ids of the prompt, (B, n).
            prefix: Number of tokens before the user's text.
            words: Turns the method's own words into token ids.
        """
        return ()

    def objective(self, hidden: Tensor) -> Tensor:
        """Return the number whose gradients an extra read gives, without dimensions. Called if `wants_gradient`.

        Args:
            hidden: Hidden states of the read that leave the last layer, before the final norm, (B, T, hidden).
        """
        raise NotImplementedError(f"{self.name} has no objective")

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """Return how many rows each KV head of this layer may keep. Called only if `sets_head_quotas`, and the budget
        decides.

        Args:
            quota: The mean over all layers and heads, which the result must respect.
            observation: What the layer computed for the block.
            state: The method may remember its choice here.

        Returns:
            (H,) or (B, H). A head with fewer rows keeps what it has.
        """
        raise NotImplementedError(f"{self.name} leaves the shares to the allocator")

    def count_rows(self, scores: Tensor) -> Tensor:
        """Return how many rows each head keeps, (B, H) int64. Called at every cut if there is a `budget_setting`.

        A head keeps at least one row and its protected ones, and no more than it holds.

        Args:
            scores: (B, H, n), with -inf for absent rows and +inf for protected ones. The scores of all other rows are
                finite.
        """
        raise NotImplementedError(f"{self.name} leaves the number of rows to the budget")

    def steps(self, tokens: int, quota: int | None) -> int:
        """Return how many of the `decode_interval` steps it counts to read several tokens at once after the prompt.

        Args:
            tokens: Number of tokens that are read at once.
            quota: Rows per head that the next cut leaves, None for all.
        """
        return tokens

    def forget(self, state: State) -> None:
        """Drop what the method no longer needs. Called when the prompt has been read and cut."""

    def capture_state(self, state: State, capture: StateCapture) -> State | None:
        """Return the state of a layer that `update` and `score` get inside a CUDA graph, or None if the modules must
        decode.

        A `capturable` method that remembers something while it decodes overrides this hook and `release_state`. The
        returned state holds tensors of its own, which `update` changes in place. Tokens may be undone, so what is
        remembered of one must not overwrite what tokens that are not undone need. Short blocks of a prompt are then
        left to the modules.

        Args:
            state: The state that the layer has now. It must not change.
            capture: How far the layer has read.
        """
        return state

    def release_state(self, captured: State, state: State, seen: int, since: int) -> None:
        """Leave the state of a layer as `update` would have left it outside of a CUDA graph.

        Args:
            captured: What `capture_state` returned, after further tokens.
            state: The state of the layer when it was captured.
            seen: Tokens read so far.
            since: Steps counted since the last cut, even if it evicted nothing.
        """

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        """Return which of the first rows stay whatever their score, (B, H, n) bool, or None. Called like `protect`.

        If the protected rows do not all fit the quota, the rows of `protect` go first, and the first sink goes last.
        """
        return None

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        """Return which other rows stay whatever their score, such as the last ones, (B, H, n) bool, or None.

        `quota` is the number of rows that each head may keep. Only `capturable` methods ever get a tensor, int64, which
        broadcasts to (B, H, 1).

        Called again with a smaller quota if the allocator cascades. The observation then has no queries, outputs or
        log-sum-exps.
        """
        return None

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        """Return how important each row is, (B, H, n). Rows with larger scores stay.

        This must be a pure function of its arguments.
        """
        raise NotImplementedError(f"{self.name} has no score")

    def select(self, scores: Tensor, quotas: Tensor) -> Tensor:
        """Return which rows stay, (B, H, n) bool.

        By default each head keeps its `quotas` (B, H) rows with the largest scores. Of equal scores the earlier row
        stays.
        """
        return cut_order.keep_best(scores, quotas)

    def merge(self, observation: Observation, rows: Rows, kept: Tensor, state: State) -> Rows:
        """Return the rows after a cut that keeps `kept` (B, H, n). By default the other rows are gone (mass 0).

        The observation is that of `score`, and has no queries after extra reads. The state must not change.
        """
        return rows.without(~kept)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        """Select rows and drop the others.

        A method overrides this hook, and not `merge`, if it cannot select all rows before it merges the first one.

        Args:
            rows: The layer's rows.
            scores: (B, H, n), with -inf for absent rows and +inf for protected ones.
            quotas: Rows that each head keeps, (B, H).
            protected: Rows that stay whatever their score, (B, H, n) bool: the protected ones, and those that the
                allocator calls safe.
            each: The quota of every head, if all are equal and the caller knows it without waiting for the device.
        """
        return rows.without(~self.select(scores, quotas))

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        """Return the rows that each query head attends to while decoding, (B, H*G, n) bool, or None for all rows.

        Args:
            request: The queries that are about to attend.
            rows: Returns the layer's rows. Call it only if the answer depends on them, because it takes time.
            state: What the method remembers.
        """
        return None

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        """Return an object that chooses the rows to attend to inside a CUDA graph, or None if `read` must do so.

        Called only if the method sets `attends_subset`. The reader must choose the rows that `read` would choose.
        """
        return None


def find_rows_without_votes(observation: Observation, rows: Rows, window: int) -> Tensor:
    """Return the rows that get no votes from the last queries, (B, H, n) bool: those of the last `window` tokens.

    If these are all rows that a head holds, only the rows of the block get none.
    """
    inside = rows.places >= observation.tokens - window
    may_cover = observation.each is None or observation.each <= window
    if observation.queries.shape[2] < window and may_cover:
        covered = (inside | ~rows.present).all(-1, keepdim=True)
        inside = torch.where(covered, rows.places >= observation.first, inside)
    return inside


def fit_protected(sinks: Tensor | None, recents: Tensor | None, rows: Rows, quota: int | Tensor) -> Protection:
    """Return the protected rows that fit the quota, in the order of `kvbench.kernels.cut_order`.

    Args:
        sinks: What `protect_sinks` returned.
        recents: What `protect` returned.
        rows: The layer's rows, in the order of the text.
        quota: Rows that each head may keep.
    """
    return cut_order.fit_protected({SINKS: sinks, RECENTS: recents}, rows.present, quota)
