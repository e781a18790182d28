"""omnikv: every row stays; a few filter layers choose which of the prompt's rows the layers behind them look at.

Source: the OmniKV paper (ICLR 2025); antgroup/OmniKV, modeling/omnikv.py, modeling/spec_cache.py and
configs/example.json. At each decoded token a filter layer scores the prompt's rows by its own queries and hands one
set of k rows, the same for all heads, to the layers behind it up to the next filter layer. Layers before the first
filter, filters, and `wait` layers behind each look at everything; all others at the k rows and every row after the
prompt. A block of several tokens looks at everything. k is the budget: rows of the prompt, the others come on top.

Score of row j, q the last w queries with weight a_t, maxima over all query heads:
last: max_h q_h·k_j of the token itself; softmax_last: the same after softmax over the prompt's rows;
uniform, exp: Σ_t a_t max_h softmax_j(q_{t,h}·k_j) with a_t = 1, or 2^-age. There the window's own rows of the prompt,
while it has some, are not scored: they are looked at, and k shrinks by their number, to 1 at least.
The code rotates the window's queries all by the current position; here each keeps its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import SettingError, require_choice, require_int


@dataclass(frozen=True)
class OmniKV(Method):
    """`filters`: layers that choose, of a model of `depth` layers, and in proportion for one of another depth (None:
    exactly those); `wait`: dense layers behind a filter; `selector`: last | softmax_last | uniform | exp; `window`:
    queries of the last two.
    """

    filters: tuple[int, ...]
    depth: int | None
    wait: int
    selector: str
    window: int

    scores = False
    attends_subset = True

    def __post_init__(self) -> None:
        super().__post_init__()
        filters = list(self.filters)
        if not filters or sorted(set(filters)) != filters or not all(isinstance(i, int) and i >= 0 for i in filters):
            raise SettingError(f"method.filters={filters}: layers from 0 on, ascending")
        if self.depth is not None:
            require_int("method.depth", self.depth, filters[-1] + 1)
        require_int("method.wait", self.wait, 0)
        require_choice("method.selector", self.selector, ("last", "softmax_last", "uniform", "exp"))
        require_int("method.window", self.window, 1)

    def filter_of(self, layer: int, layers: int) -> int | None:
        """The last filter at or before a layer, None before the first; SettingError for a filter that is not there."""
        own = [i * layers // self.depth for i in self.filters] if self.depth else list(self.filters)
        if own[-1] >= layers:
            raise SettingError(f"method.filters={own}: the model has layers 0 to {layers - 1}")
        return max((i for i in own if i <= layer), default=None)

    @property
    def windowed(self) -> bool:
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
            state.shared["look"] = self.choose(queries, keys, quota, decoded, request.scaling, state)
        if layer <= chooser + self.wait or "look" not in state.shared:  # a filter with a sliding window chooses nothing
            return None
        after = queries.new_ones(len(queries), request.first + 1 - prompt, dtype=torch.bool)
        look = torch.cat([state.shared["look"].to(after.device), after], 1)
        return look[:, None].expand(-1, queries.shape[1], -1)

    def choose(self, queries: Tensor, keys: Tensor, quota: int, decoded: int, scaling: float, state: State) -> Tensor:
        """(B, prompt) bool: rows to look at; `decoded` tokens were read after the prompt, this one included."""
        prompt = keys.shape[2]
        own = min(max(0, self.window - decoded), prompt) if self.windowed else 0  # the prompt's rows in the window
        if self.windowed:
            queries = self.recent(queries, state)
        scores = self.score_rows(queries, keys[:, :, : prompt - own], scaling)
        chosen = top_k_mask(scores[:, None], max(1, quota - own))[:, 0]
        return torch.cat([chosen, chosen.new_ones(len(chosen), own)], 1)

    def score_rows(self, queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """(B, n) scores of keys (B, H, n, d) by queries (B, H·G, w, d), in float32 (float64 for float64 keys)."""
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        grouped = queries.to(dtype).unflatten(1, (keys.shape[1], -1))
        logits = grouped @ keys.to(dtype)[:, :, None].mT * scaling
        if self.selector == "last":
            return logits.amax((1, 2, 3))
        p = logits.softmax(-1).amax((1, 2))
        if self.selector == "exp":
            age = torch.arange(p.shape[1] - 1, -1, -1, device=p.device)
            p = p * 2.0 ** -age[:, None]
        return p.sum(1)

    def recent(self, queries: Tensor, state: State) -> Tensor:
        """(B, H·G, up to window, d): the newest queries, these included."""
        queries = queries[:, :, -self.window :]
        known = state.layer.get("queries", queries[:, :, :0])
        return torch.cat([known, queries], 2)[:, :, -self.window :].clone()
