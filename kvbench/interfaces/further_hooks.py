"""What a method may declare and answer beside a score. Each declaration and each hook has a default.

The author of a score need not read this. The order is: what a method declares, hooks about models and prompts, hooks
about quotas, hooks of a cut, hooks while decoding, and what the engine asks, which follows from the others.

Symbols are those of `kvbench.interfaces.method`.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from kvbench.interfaces.captured import Captured
from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.tensor_files import ModelFile
from kvbench.kernels import cut_order

WANTED: Mapping[str, str] = {
    "lse": "attention then uses a slower kernel that returns it",
    "unrotated_keys": "answers are then read through the model's modules",
    "hidden": "answers are then read through the model's modules",
    "normed_hidden": "answers are then read through the model's modules",
    "gradient": "extra reads are then differentiated (`objective`)",
}
"""What a method may want of an `Observation`, and what that costs."""

REFUSABLE: Mapping[str, str] = {
    "decoding": "method.decoding=true",
    "allocator": "every allocator but uniform",
    "uneven_allocator": "allocators that give the heads of a layer different numbers of rows",
    "cascading_allocator": "allocators that cut a layer again",
    "codec": "codecs that pack rows",
    "block_size": "a prompt that is read in several blocks",
    "rope_switch": "models whose rotary frequencies change with the length of the text",
    "softcap": "models that cap the logits of attention",
}
"""What a method may refuse."""


class FurtherHooks(Hooks):
    """What a method may declare and answer beside a score."""

    name: str
    decoding: bool
    budget_setting: str | None

    # What a method declares. A subclass sets what differs, as a class attribute or as a property.

    @property
    def wants(self) -> tuple[str, ...]:
        """Fields of `Observation` that are None unless the method wants them: names of `WANTED`."""
        return ()

    @property
    def refusals(self) -> Mapping[str, str]:
        """What the method cannot work with, by the names of `REFUSABLE`, and why. The reason follows the method's name
        and ends with the setting to use: "scores all heads alike; use allocator=uniform".
        """
        return {}

    @property
    def captured(self) -> Captured | None:
        """How the hooks behave in CUDA graphs; None if the model's modules must decode."""
        return None

    @property
    def file(self) -> ModelFile | None:
        """The file that the method needs beside the model, if it was made for one model."""
        return None

    @property
    def merges(self) -> bool:
        """Whether a row may stand for several tokens after a cut, or weigh more or less in attention."""
        return self.weighs_rows or self.overrides("merge")

    @property
    def weighs_rows(self) -> bool:
        """Whether `merge` returns as `Rows.mass` how much each row weighs in attention, any number above 0, instead of
        a number of tokens. Each row that stays then stands for its own token, and the other tokens are gone.
        """
        return False

    @property
    def weighs_values(self) -> bool:
        """Whether the scores already contain the size of the values. CriticalKV refuses such a method as its base."""
        return False

    @property
    def sets_head_quotas(self) -> bool:
        """Whether the method decides how many rows each head keeps, by `head_quotas` within the budget or by
        `count_rows` if there is none. It then requires allocator=uniform.
        """
        return self.budget_setting is not None or self.overrides("head_quotas")

    @property
    def needs_extra_reads(self) -> bool:
        """Whether the model must read further tokens about the prompt before the prompt is cut (`extra_reads`). The
        prompt must then be one block.
        """
        return self.overrides("extra_reads")

    @property
    def uses_cache_positions(self) -> bool:
        """Whether attention rotates keys and queries by their slot among the rows held, instead of their position."""
        return False

    @property
    def takes_rotation(self) -> bool:
        """Whether the method needs `Observation.rotation`, or keys that it can norm and rotate as the model does."""
        return "rope_switch" in self.refusals or "unrotated_keys" in self.wants or self.uses_cache_positions

    @property
    def token_by_token(self) -> bool:
        """Whether known tokens that follow the prefill, such as the question, are read one at a time."""
        return False

    # Hooks about models and prompts.

    def check(self, layout: Layout) -> None:
        """Check that the method can serve a model. Called before weights are loaded; for methods that read a file.

        Args:
            layout: The model's layout. Layers with a sliding window keep their own cache, and no method cuts them.

        Raises:
            SettingError: The method cannot serve this model.
        """

    def skips_layer(self, layer: int, layers: int) -> bool:
        """Return True for a layer that is never cut.

        The rows of such a layer come on top of the budget. A method that skips layers says so in its config.
        """
        return False

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
        """Return the number whose gradients an extra read gives, without dimensions. Called if the method wants
        `gradient`.

        `update` sees such a read when the whole model has read it. Its activations are held until then.

        Args:
            hidden: Hidden states of the read that leave the last layer, before the final norm, (B, T, hidden).
        """
        raise NotImplementedError(f"{self.name} has no objective")

    def forget(self, state: State) -> None:
        """Drop what the method no longer needs. Called when the prompt has been read and cut."""

    # Hooks about quotas.

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

    # Hooks of a cut.

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
            scores: (B, H, n), with -inf for absent rows and +inf for protected ones. The masses of the rows stand in
                their place if the method has no `score`.
            quotas: Rows that each head keeps, (B, H).
            protected: Rows that stay whatever their score, (B, H, n) bool: the protected ones, and those that the
                allocator calls safe.
            each: The quota of every head, if all are equal and the caller knows it without waiting for the device.
        """
        return rows.without(~self.select(scores, quotas))

    # Hooks while decoding.

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        """Return the rows that each query head attends to while decoding, (B, H*G, n) bool, or None for all rows.

        A method that overrides this hook keeps every row (but see `attends_subset`). Its budget is the number of rows
        attended to.

        Args:
            request: The queries that are about to attend.
            rows: Returns the layer's rows. Call it only if the answer depends on them, because it takes time.
            state: What the method remembers.
        """
        return None

    def steps(self, tokens: int, quota: int | None) -> int:
        """Return how many of the `decode_interval` steps it counts to read several tokens at once after the prompt.

        Args:
            tokens: Number of tokens that are read at once.
            quota: Rows per head that the next cut leaves, None for all.
        """
        return tokens

    # What the engine asks. It follows from the hooks that a method overrides.

    @property
    def scores(self) -> bool:
        """Whether the method scores rows, as opposed to choosing them in `cut`, `read` or `count_rows` alone."""
        return self.overrides("score") or not self.overrides("cut", "read", "count_rows")

    @property
    def attends_subset(self) -> bool:
        """Whether the method keeps every row and attends to only some of them while decoding. A method that has `read`
        and evicts rows too sets this to False, and the budget says how many rows stay.
        """
        return self.overrides("read")

    @property
    def cuts(self) -> bool:
        """Whether the method may evict rows."""
        hooks = "score", "select", "merge", "cut", "protect", "head_quotas", "count_rows"
        return not self.attends_subset and self.overrides(*hooks)

    @property
    def one_block(self) -> bool:
        """Whether the whole prompt must be read as one block."""
        return self.needs_extra_reads or "block_size" in self.refusals

    @property
    def watches(self) -> bool:
        """Whether the engine must call `update` for every decoded token."""
        return self.decoding and self.overrides("update")
