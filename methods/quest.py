"""quest: every row stays, and each query head looks at the pages that could hold its largest logits.

Source: the Quest paper (arXiv 2406.10774), Algorithm 1; mit-han-lab/Quest, evaluation/quest_attention.py (accuracy) and
quest/utils/controller.py (CUDA path). Rows lie in pages of P; with the elementwise bounds of a page's post-RoPE keys,
u_page = Σ_d max(q_d·low_d, q_d·high_d). Each query head looks at all rows of its max(least, ⌊min(quota, n)/P⌋) pages
of largest u, ties to the older page; `quota`, the budget, is rows looked at. The first layers look at everything, and
so does a block of several tokens. The last, partial page competes like any other (evaluation code), or is always one
of the pages (CUDA path). A quota of all rows looks at all rows: there the code may leave out one page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.page_bounds import page_bounds, page_upper_bounds
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import require_choice, require_int


@dataclass(frozen=True)
class Quest(Method):
    """`page` P; `least` pages; `dense_layers` first layers that look at everything; `question` dense: known tokens
    after the prefill are one block, tokens: they take the sparse path one by one; `force_last`: the newest page is
    always looked at.
    """

    page: int
    least: int
    dense_layers: int
    question: str
    force_last: bool

    scores = False
    attends_subset = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.page", self.page, 1)
        require_int("method.least", self.least, 1)
        require_int("method.dense_layers", self.dense_layers, 0)
        require_choice("method.question", self.question, ("dense", "tokens"))
        require_choice("method.force_last", self.force_last, (True, False))

    @property
    def token_by_token(self) -> bool:
        return self.question == "tokens"

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        if observation.layer >= self.dense_layers:
            self.bounds(rows.keys, state)
        return {}

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        queries, quota = request.queries, request.quota
        held = request.first + queries.shape[2]
        pages, chosen = -(-held // self.page), max(self.least, min(held, quota or held) // self.page)
        dense = request.layer < self.dense_layers or queries.shape[2] > 1
        if dense or quota is None or quota >= held or chosen >= pages:
            return None
        above = page_upper_bounds(queries[:, :, 0], *self.bounds(rows().keys, state))
        if self.force_last:
            above[..., -1] = torch.inf
        return top_k_mask(above, chosen).repeat_interleave(self.page, -1)[..., :held]

    def bounds(self, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Of all pages; those that were whole before are not looked at again."""
        own = state.layer
        if own.get("rows") != keys.shape[2]:
            done = own.get("rows", 0) // self.page
            low, high = page_bounds(keys[:, :, done * self.page :], self.page)
            if done:
                low, high = (torch.cat([own[k][:, :, :done], new], 2) for k, new in (("low", low), ("high", high)))
            own |= {"low": low, "high": high, "rows": keys.shape[2]}
        return own["low"], own["high"]
