"""deltakv: keep every row; observation layers choose the compressed rows that the layers behind them read (DeltaKV).

Source: the DeltaKV paper; CURRENTF/Sparse-vLLM before 3652478, src/deltakv/modeling/token_select.py. `full_layers`
attend to all rows. A full layer whose successor is not full is an observation layer. For each decoded token it scores
the candidates by its own query q and hands the top ⌊n·r⌋ of n candidates, the same for all heads, to the layers behind
it, up to the next observation layer. Layers before the first full layer attend to all rows.

    s_j = max_h q_h·k_j        over all query heads h, without softmax and factor

With `smoothing` a > 0, a candidate that the layer has scored before gets a·(its last s_j) + (1 - a)·s_j, which is then
its last one. The source has a = 0.5 with omnikv_score_method=exp.

The budget is the ratio r; a whole number is the number of rows itself. Candidates are the rows that the codec has
compressed, which is codec=delta in the paper's system. The other rows, sinks and the newest, are always attended to.
With a codec that does not tell what it has packed, such as raw, all rows are candidates but for the first `sinks` and
the last `recent`: the system's selection without its compression.

A block of several tokens, such as a question, attends to all rows and scores none, and so does the prefill. The source
can also select for each chunk of a prompt; that is off by default and left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_layers, scale_layers, setting
from kvbench.kernels.max_logits import max_logits
from kvbench.kernels.row_selection import top_k_mask


@dataclass(frozen=True)
class DeltaKV(Method):
    """Let observation layers choose which compressed rows the layers behind them attend to."""

    full_layers: tuple[int, ...] = setting()
    """Layers that attend to all rows, in ascending order, of a model with `depth` layers."""
    depth: int | None = setting()
    """Number of layers that `full_layers` refers to. For another model they move in proportion. `None` takes exactly
    these layers in any model.
    """
    sinks: int = setting(minimum=0)
    """First rows that are always attended to."""
    recent: int = setting(minimum=1)
    """Newest rows that are always attended to, the token's own included."""
    smoothing: float = setting(minimum=0, below=1)
    """Share of a candidate's last score in its next one, a."""

    scores = False
    attends_subset = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("method.full_layers", self.full_layers, self.depth, least=1)

    def find_full_layers(self, layers: int) -> set[int]:
        """Return the layers that attend to all rows in a model of `layers` layers.

        Raises:
            SettingError: The model has fewer layers.
        """
        return set(scale_layers("method.full_layers", self.full_layers, self.depth, layers))

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        self.find_full_layers(layers)

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        full = self.find_full_layers(request.layers)
        if request.queries.shape[2] > 1 or request.quota is None:
            return None
        shared, heads = state.shared, request.queries.shape[1]
        if request.layer in full:
            if request.layer + 1 < request.layers and request.layer + 1 not in full:
                shared |= {"look": self.choose(request, rows, state), "token": request.first}
            return None
        if shared.get("token") != request.first or shared["look"] is None:  # no observation layer has seen this token
            return None
        return shared["look"].to(request.queries.device)[:, None].expand(-1, heads, -1)

    def choose(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        """Return the rows to attend to, (B, n) bool, or None for all."""
        held = request.first + 1
        start, stop = request.packed or (0, held)
        start, stop = max(start, self.sinks), min(stop, held - self.recent)
        candidates = max(0, stop - start)
        quota = request.quota if request.fraction is None else int(request.fraction * candidates)
        assert quota is not None  # `read`
        if quota >= candidates and not (candidates and self.smoothing):
            return None
        scores = max_logits(request.queries[:, :, -1], rows().keys[:, :, start:stop], 1.0)
        if self.smoothing:
            last = state.layer.get("scores", scores[:, :0])
            known = last.shape[1]  # candidates only grow in number
            smoothed = last * self.smoothing + scores[:, :known] * (1 - self.smoothing)
            scores = state.layer["scores"] = torch.cat([smoothed, scores[:, known:]], 1)
        if quota >= candidates:
            return None
        chosen = top_k_mask(scores[:, None], quota)[:, 0]
        return torch.cat([chosen.new_ones(len(chosen), start), chosen, chosen.new_ones(len(chosen), held - stop)], 1)
