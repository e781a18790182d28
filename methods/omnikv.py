"""omnikv: keep every row; a few filter layers choose the prompt's rows that the layers behind them attend to.

Source: the OmniKV paper (ICLR 2025); antgroup/OmniKV, modeling/omnikv.py, modeling/spec_cache.py and
configs/example.json. For each decoded token a filter layer scores the prompt's rows by its own queries. It hands one
set of k rows, the same for all heads, to the layers behind it, up to the next filter layer. Layers before the first
filter, the filters, and the `wait` layers behind each filter attend to all rows. The other layers attend to the k rows
and to every row after the prompt. A block of several tokens attends to all rows. k is the budget; it counts only rows
of the prompt. Symbols: q_{t,h} the query of token t in head h, of all query heads of the filter layer; the softmax runs
over the prompt's rows. The scores of row j are, by the setting `selector`:

    last          s_j = max_h q_{last,h}·k_j
    softmax_last  s_j = max_h softmax_j(q_{last,h}·k_j)
    uniform, exp  s_j = Σ_t a_t·max_h softmax_j(q_{t,h}·k_j),  a_t = 1 or a_t = 2^-age

The sum runs over the last w queries. Rows of the prompt that are inside this window are attended to without a score,
and k shrinks by their number, but not below 1.

The source rotates all queries of the window by the current position. Here each query keeps its own position.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowChoice, RowReader, Watcher
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_layers, scale_layers, setting
from kvbench.kernels.max_logits import max_logits
from kvbench.kernels.row_selection import top_k_mask, top_k_of_heads
from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits, weigh_logits
from kvbench.kernels.window_attention import window_statistics


@dataclass(frozen=True)
class OmniKV(Method):
    """Let filter layers choose which rows the layers behind them attend to."""

    filters: tuple[int, ...] = setting()
    """Layers that choose, in ascending order, of a model with `depth` layers."""
    depth: int | None = setting()
    """Number of layers that `filters` refers to. For another model the filters move in proportion. `None` takes exactly
    these layers in any model.
    """
    wait: int = setting(minimum=0)
    """Number of layers behind a filter that still attend to all rows."""
    selector: str = setting(choices=("last", "softmax_last", "uniform", "exp"))
    """How a filter scores rows."""
    window: int = setting(minimum=1)
    """Number of last queries that score with uniform and exp, w."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("method.filters", self.filters, self.depth, least=1)

    def filter_of(self, layer: int, layers: int) -> int | None:
        """Return the last filter at or before a layer, or None before the first filter.

        Raises:
            SettingError: The model has fewer layers than a filter needs.
        """
        filters = scale_layers("method.filters", self.filters, self.depth, layers)
        return max((i for i in filters if i <= layer), default=None)

    @property
    def windowed(self) -> bool:
        """Whether several queries score rows."""
        return self.selector in ("uniform", "exp")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        if self.filter_of(observation.layer, observation.layers) == observation.layer and self.windowed:
            state.layer["queries"] = self.recent(observation.queries, state)
        return {}

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        queries, layer, prompt, quota = request.queries, request.layer, request.prompt, request.quota
        chooser = self.filter_of(layer, request.layers)
        if queries.shape[2] > 1 or quota is None or quota >= prompt or chooser is None:
            return None
        if layer == chooser:
            decoded = request.first + 1 - prompt
            keys = rows().keys[:, :, :prompt]
            state.shared["look"] = self.choose(queries, keys, quota, decoded, request, state)
        # A filter layer with a sliding window chooses no rows.
        if layer <= chooser + self.wait or "look" not in state.shared:
            return None
        after = queries.new_ones(len(queries), request.first + 1 - prompt, dtype=torch.bool)
        look = torch.cat([state.shared["look"].to(after.device), after], 1)
        return look[:, None].expand(-1, queries.shape[1], -1)

    def choose(
        self, queries: Tensor, keys: Tensor, quota: int, decoded: int, request: ReadRequest, state: State
    ) -> Tensor:
        """Return the rows to attend to, (B, prompt) bool.

        `decoded` is the number of tokens read after the prompt, this one included.
        """
        prompt = keys.shape[2]
        # the number of rows of the prompt that are inside the window
        inside = min(max(0, self.window - decoded), prompt) if self.windowed else 0
        if self.windowed:
            queries = self.recent(queries, state)
        scores = self.score_rows(queries, keys[:, :, : prompt - inside], request.scaling, request.extras)
        chosen = top_k_mask(scores[:, None], max(1, quota - inside))[:, 0]
        return torch.cat([chosen, chosen.new_ones(len(chosen), inside)], 1)

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        decoded = answer.seen + 1 - answer.prompt
        if self.windowed and decoded < self.window:  # rows of the prompt are still inside the window
            return None
        return FilterReader(self, answer)

    captured = Captured(row_reader=row_reader)

    def score_rows(self, queries: Tensor, keys: Tensor, scaling: float, extras: SoftmaxExtras | None = None) -> Tensor:
        """Score keys (B, H, n, d) by queries (B, H·G, w, d): (B, n) in float32, or float64 for float64 keys."""
        if self.selector == "last":
            return max_logits(queries[:, :, -1], keys, scaling)  # a cap does not change their order
        if self.selector == "softmax_last":
            return window_statistics(queries[:, :, -1:], keys, None, scaling, extras=extras)[0].amax((1, 2))
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        grouped = queries.to(dtype).unflatten(1, (keys.shape[1], -1))
        logits = cap_logits(grouped @ keys.to(dtype)[:, :, None].mT * scaling, extras)
        p = weigh_logits(logits, extras).amax((1, 2))
        if self.selector == "exp":
            age = torch.arange(p.shape[1] - 1, -1, -1, device=p.device)
            p = p * 2.0 ** -age[:, None]
        return p.sum(1)

    def recent(self, queries: Tensor, state: State) -> Tensor:
        """Return the newest queries, these included, (B, H·G, up to window, d)."""
        queries = queries[:, :, -self.window :]
        known = state.layer.get("queries", queries[:, :, :0])
        return torch.cat([known, queries], 2)[:, :, -self.window :].clone()


class FilterReader:
    """Chooses rows in the filter layers and hands them to the layers behind each.

    The last queries of a filter layer lie in a ring, with room for those that may be undone.
    """

    def __init__(self, method: OmniKV, answer: CapturedAnswer) -> None:
        self.method, self.answer = method, answer
        self.chooser = {layer: method.filter_of(layer, answer.layers) for layer in answer.all_layers}
        self.rings: dict[int, Tensor] = {}
        self.chosen: Tensor | None = None  # rows that the last filter layer chose, (B, 1, k)
        if method.windowed:
            size = method.window + answer.undone
            for layer in {
                chooser for chooser in self.chooser.values() if chooser is not None and chooser in answer.keys
            }:
                known = answer.states[layer].layer["queries"]
                ring = known.new_zeros(*known.shape[:2], size, known.shape[3])
                slots = torch.arange(answer.seen - known.shape[2], answer.seen, device=known.device) % size
                self.rings[layer] = ring.index_copy(2, slots, known)

    def choose(self, last: Tensor) -> RowChoice:
        method, answer = self.method, self.answer
        prompt, quota = answer.prompt, answer.quota
        looks: dict[str, ListedRows] = {}  # of the last filter layer
        ages = torch.arange(method.window - 1, -1, -1, device=last.device)

        def take(scores: Tensor) -> None:
            """List the rows with the largest of all heads' scores (B, H, n) for the layers behind."""
            assert quota is not None  # without a quota nothing is chosen
            top_rows = top_k_of_heads(scores, quota)
            if self.chosen is None:  # allocated before a graph is captured: graphs share what they allocate
                self.chosen = torch.empty_like(top_rows)
            self.chosen.copy_(top_rows)
            looks["rows"] = ListedRows(top_rows, after=prompt)

        def choose(layer: int, queries: Tensor, keys: Tensor) -> ListedRows | Watcher | None:
            chooser = self.chooser[layer]
            if layer in self.rings:
                ring = self.rings[layer]
                ring.index_copy_(2, (last % ring.shape[2])[None], queries)
                queries = ring.index_select(2, (last - ages) % ring.shape[2])
            if chooser is None or quota is None or quota >= prompt:
                return None
            if layer == chooser:
                if method.selector == "last":
                    return lambda largest: take(largest[:, :, :prompt])
                given = queries, keys[:, :, :prompt], answer.scaling, answer.extras.get(layer)
                take(method.score_rows(*given)[:, None])
            if layer <= chooser + method.wait:
                return None
            return looks.get("rows")

        return choose

    def finish(self, seen: int) -> None:
        for layer, ring in self.rings.items():
            slots = torch.arange(seen - self.method.window, seen, device=ring.device) % ring.shape[2]
            self.answer.states[layer].layer["queries"] = ring.index_select(2, slots)
        if self.chosen is not None and seen > self.answer.seen:
            shared = self.answer.states[self.answer.all_layers[0]].shared
            none = self.chosen.new_zeros(len(self.chosen), self.answer.prompt, dtype=torch.bool)
            shared["look"] = none.scatter_(1, self.chosen[:, 0], True)
