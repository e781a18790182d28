"""quest: keep every row; each query head attends to the pages that could hold its largest logits.

Source: the Quest paper (arXiv 2406.10774), Algorithm 1; mit-han-lab/Quest, evaluation/quest_attention.py (accuracy) and
quest/utils/controller.py (CUDA path). Rows lie in pages of P rows. From the elementwise bounds of a page's post-RoPE
keys follows an upper bound of its logits:

    u_page = Σ_d max(q_d·low_d, q_d·high_d)

Each query head attends to all rows of the max(least, ⌊min(quota, n)/P⌋) pages with the largest u; of equal pages the
older one comes first. The budget is the number of rows attended to. The first layers attend to all rows, and so does a
block of several tokens. The last, partial page competes like any other (evaluation code) or is always chosen (CUDA
path). A quota of all rows attends to all rows; the source may then leave out one page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowChoice, RowReader
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.page_bounds import page_bounds, page_upper_bounds, update_page_bounds
from kvbench.kernels.row_selection import top_k_indices, top_k_mask


@dataclass(frozen=True)
class Quest(Method):
    """Attend only to the pages whose keys could give large logits."""

    page: int = setting(minimum=1)
    """Number of rows of a page, P."""
    least: int = setting(minimum=1)
    """Smallest number of pages."""
    dense_layers: int = setting(minimum=0)
    """Number of first layers that attend to all rows."""
    question: str = setting(choices=("dense", "tokens"))
    """How known tokens after the prefill are read: as one block that attends to all rows (dense), or one by one, each
    attending to its pages (tokens).
    """
    force_last: bool = setting()
    """Whether the newest page is always chosen."""

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
        pages, chosen = -(-held // self.page), self.count_pages(held, quota or held)
        dense = request.layer < self.dense_layers or queries.shape[2] > 1
        if dense or quota is None or quota >= held or chosen >= pages:
            return None
        above = page_upper_bounds(queries[:, :, 0], *self.bounds(rows().keys, state))
        if self.force_last:
            above[..., -1] = torch.inf
        return top_k_mask(above, chosen).repeat_interleave(self.page, -1)[..., :held]

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        held, quota = answer.seen + 1, answer.quota
        if quota is None:
            return PageReader(self, answer, None)
        chosen = self.count_pages(held, quota)
        if quota >= held or chosen >= -(-held // self.page):  # some tokens of the answer attend to all rows
            return None
        return PageReader(self, answer, chosen)

    captured = Captured(row_reader=row_reader)

    def count_pages(self, held: int, quota: int) -> int:
        """Return how many pages a query head attends to, of `held` rows."""
        return max(self.least, min(held, quota) // self.page)

    def bounds(self, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the bounds of all pages. Those of pages that were already full are reused."""
        stored = state.layer
        if stored.get("rows") != keys.shape[2]:
            done = stored.get("rows", 0) // self.page
            low, high = page_bounds(keys[:, :, done * self.page :], self.page)
            if done:
                low, high = (torch.cat([stored[k][:, :, :done], new], 2) for k, new in (("low", low), ("high", high)))
            stored |= {"low": low, "high": high, "rows": keys.shape[2]}
        return stored["low"], stored["high"]


class PageReader:
    """Chooses the pages of each token. The bounds of all pages that an answer may fill lie at fixed addresses."""

    def __init__(self, method: Quest, answer: CapturedAnswer, chosen: int | None) -> None:
        """Make the tables.

        Args:
            method: The method.
            answer: What the reader is made for.
            chosen: Number of pages that a query head attends to; None for all rows.
        """
        self.method, self.answer, self.chosen = method, answer, chosen
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}  # bounds of each layer that does not attend to all rows
        for layer in answer.all_layers:
            if layer >= method.dense_layers and chosen is not None:
                keys = answer.keys[layer]
                shape = *keys.shape[:2], -(-keys.shape[2] // method.page), keys.shape[3]
                known = method.bounds(keys[:, :, : answer.seen], answer.states[layer])
                self.tables[layer] = keys.new_zeros(shape), keys.new_zeros(shape)
                for table, bound in zip(self.tables[layer], known, strict=True):
                    table[:, :, : bound.shape[2]] = bound

    def choose(self, last: Tensor) -> RowChoice:
        page, newest = self.method.page, last // self.method.page

        def choose(layer: int, queries: Tensor, keys: Tensor) -> ListedRows | None:
            if layer not in self.tables or self.chosen is None:
                return None
            low, high = self.tables[layer]
            update_page_bounds(keys, low, high, last, page)
            above = page_upper_bounds(queries[:, :, 0], low, high, newest=newest, force_newest=self.method.force_last)
            return ListedRows(top_k_indices(above, self.chosen), page)

        return choose

    def finish(self, seen: int) -> None:
        for layer in self.answer.all_layers:
            state = self.answer.states[layer]
            if layer in self.tables:
                low, high = (table[:, :, : -(-seen // self.method.page)].clone() for table in self.tables[layer])
                state.layer.update({"low": low, "high": high, "rows": seen})
            elif layer >= self.method.dense_layers:
                self.method.bounds(self.answer.keys[layer][:, :, :seen], state)
