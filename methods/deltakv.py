"""deltakv: keep every row; observation layers choose the compressed rows that the layers behind them read (DeltaKV).

Source: the DeltaKV paper; CURRENTF/Sparse-vLLM before 3652478, src/deltakv/modeling/token_select.py. `full_layers`
attend to all rows. A full layer whose successor is not full is an observation layer. For each decoded token it scores
the candidates by its own query q and hands the top ⌊n·r⌋ of n candidates, the same for all heads, to the layers behind
it, up to the next observation layer. Layers before the first full layer attend to all rows.

    s_j = max_h q_h·k_j        over all query heads h, without softmax and factor

With `smoothing` a > 0, a candidate that the layer has scored before gets a·(its last s_j) + (1 - a)·s_j, which is then
its last one. The source has a = 0.5 with omnikv_score_method=exp.

The budget is the ratio r; a whole number is the number of rows itself. ⌊n·r⌋ may be 0, where the source chooses a row.
Candidates are the rows that the codec has compressed, which is codec=delta in the paper's system. The other rows, sinks
and the newest, are always attended to. With a codec that does not tell what it has packed, such as raw, all rows are
candidates but for the first `sinks` and the last `recent`: the system's selection without its compression.

A block of several tokens, such as a question, attends to all rows and scores none, and so does the prefill. The source
can also select for each chunk of a prompt; that is off by default and left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowChoice, RowReader, Watcher
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_layers, scale_layers, setting
from kvbench.kernels.max_logits import max_logits
from kvbench.kernels.row_selection import top_k_mask, top_k_of_heads


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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("method.full_layers", self.full_layers, self.depth, least=1)

    def find_full_layers(self, layers: int) -> set[int]:
        """Return the layers that attend to all rows in a model of `layers` layers.

        Raises:
            SettingError: The model has fewer layers.
        """
        return set(scale_layers("method.full_layers", self.full_layers, self.depth, layers))

    def find_observation_layers(self, layers: int) -> set[int]:
        """Return the layers that choose rows in a model of `layers` layers."""
        full = self.find_full_layers(layers)
        return {layer for layer in full if layer + 1 < layers and layer + 1 not in full}

    def find_candidates(self, held: int, packed: tuple[int, int] | None) -> tuple[int, int]:
        """Return start and stop of the rows that a token chooses among.

        Args:
            held: Number of rows, the token's own included.
            packed: Start and stop of the rows that the codec has packed, or None if it tells of none.
        """
        start, stop = packed or (0, held)
        start = min(max(start, self.sinks), held)  # a short text holds sinks only
        return start, max(start, min(stop, held - self.recent))

    def check(self, layout: Layout) -> None:
        self.find_full_layers(layout.layers)

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        if request.queries.shape[2] > 1 or request.quota is None:
            return None
        shared, heads = state.shared, request.queries.shape[1]
        if request.layer in self.find_full_layers(request.layers):
            if request.layer in self.find_observation_layers(request.layers):
                shared |= {"look": self.choose(request, rows, state), "token": request.first}
            return None
        if shared.get("token") != request.first or shared["look"] is None:  # no observation layer has seen this token
            return None
        return shared["look"].to(request.queries.device)[:, None].expand(-1, heads, -1)

    def choose(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        """Return the rows to attend to, (B, n) bool, or None for all."""
        held = request.first + 1
        start, stop = self.find_candidates(held, request.packed)
        assert request.quota is not None  # `read` chooses rows only if there is a quota
        candidates = stop - start
        quota = count_chosen(candidates, request.quota, request.fraction)
        if quota == candidates and not (candidates and self.smoothing):
            return None
        scores = max_logits(request.queries[:, :, -1], rows().keys[:, :, start:stop], 1.0)
        if self.smoothing:
            last = state.layer.get("scores", scores[:, :0])
            known = last.shape[1]  # the number of candidates never falls
            smoothed = last * self.smoothing + scores[:, :known] * (1 - self.smoothing)
            scores = state.layer["scores"] = torch.cat([smoothed, scores[:, known:]], 1)
        if quota == candidates:
            return None
        chosen = top_k_mask(scores[:, None], quota)[:, 0]
        return torch.cat([chosen.new_ones(len(chosen), start), chosen, chosen.new_ones(len(chosen), held - stop)], 1)

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        if self.smoothing:
            return None
        observers = self.find_observation_layers(answer.layers) & {*answer.all_layers}
        return ObservationReader(self, answer, sorted(observers)) if observers <= {*answer.keys} else None

    captured = Captured(row_reader=row_reader, reads_packed=True)


def count_chosen(candidates: int, quota: int, fraction: Fraction | None) -> int:
    """Return how many of the candidates are chosen: a fraction of them, or `quota` if there is no fraction."""
    return min(candidates, quota if fraction is None else int(fraction * candidates))


class Choice:
    """What an observation layer chooses among, and how many rows, at each token of an answer.

    Every token lists equally many rows, because the operations of a CUDA graph are fixed. Where a token attends to
    fewer, the list has a row that never exists in their place.
    """

    def __init__(self, windows: list[tuple[int, int]], counts: list[int], seen: int, device: torch.device) -> None:
        """Make tables of all tokens.

        Args:
            windows: Start and stop of the candidates at each token.
            counts: How many of them it chooses.
            seen: Number of rows before the first of these tokens.
            device: Where the rows are.
        """
        self.windows, self.counts, self.absent = windows, counts, seen + len(counts)
        self.high = max((stop for start, stop in windows if start < stop), default=0)
        longest = max(seen + number + 1 - stop for number, (_, stop) in enumerate(windows))
        self.tables = torch.tensor([[*window, count] for window, count in zip(windows, counts, strict=True)]).to(device)
        self.first = torch.arange(max(start for start, _ in windows), device=device)
        self.newest = torch.arange(longest, device=device)

    def list_rows(self, batch: int, number: Tensor, last: Tensor) -> tuple[ListedRows, Watcher]:
        """List the rows that one token attends to.

        Args:
            batch: Number of samples.
            number: The number of the token, counted from 0, without dimensions.
            last: The token's own row, without dimensions.

        Returns:
            The rows, and what writes the chosen ones among them. It needs the observation layer's largest products.
        """
        table, most = self.tables.index_select(0, number[None])[0], max(self.counts)
        start, stop, count = table
        before = self.first.masked_fill(self.first >= start, self.absent)
        after = self.newest + stop
        after = after.masked_fill(after > last, self.absent)
        parts = [before, self.first.new_full((most,), self.absent), after]
        listed = torch.cat([part.expand(batch, 1, -1) for part in parts], 2)
        chosen = listed[:, :, len(before) : len(before) + most]
        counts = count.repeat(batch, 1) if most > min(self.counts) else None

        def watch(largest: Tensor) -> None:
            if most:
                top_k_of_heads(largest[:, :, : self.high], most, window=table[:2], counts=counts, into=chosen)

        return ListedRows(listed), watch

    def mark_rows(self, listed: Tensor, number: int) -> Tensor | None:
        """Return the rows that a token listed (B, 1, k), marked among those that it held, or None if these are all."""
        start, stop = self.windows[number]
        if self.counts[number] == stop - start:
            return None
        marks = listed.new_zeros(len(listed), self.absent + 1, dtype=torch.bool).scatter_(1, listed[:, 0], True)
        return marks[:, : self.absent - len(self.counts) + number + 1].clone()


class ObservationReader:
    """Chooses rows in the observation layers and hands them to the layers behind each."""

    def __init__(self, method: DeltaKV, answer: CapturedAnswer, observers: list[int]) -> None:
        self.answer, self.full = answer, method.find_full_layers(answer.layers)
        self.choices: dict[int, Choice] = {}  # of each observation layer; none if no budget is set
        self.chosen: Tensor | None = None  # rows that the last observation layer listed, (B, 1, k)
        if answer.quota is None:
            return
        for layer in observers:
            windows = [
                method.find_candidates(answer.seen + number + 1, answer.find_packed(layer, number))
                for number in range(answer.tokens)
            ]
            counts = [count_chosen(stop - start, answer.quota, answer.fraction) for start, stop in windows]
            self.choices[layer] = Choice(windows, counts, answer.seen, answer.keys[layer].device)

    def choose(self, last: Tensor) -> RowChoice:
        number, looks = last - self.answer.seen, dict[str, ListedRows]()  # of the last observation layer

        def choose(layer: int, queries: Tensor, keys: Tensor) -> ListedRows | Watcher | None:
            if layer not in self.full:
                return looks.get("rows")
            if layer not in self.choices:
                return None
            rows, watch = self.choices[layer].list_rows(len(queries), number, last)

            def take(largest: Tensor) -> None:
                watch(largest)
                looks["rows"] = rows
                if layer == max(self.choices):
                    if self.chosen is None:  # allocated before a graph is captured: graphs share what they allocate
                        self.chosen = torch.empty_like(rows.blocks)
                    self.chosen.copy_(rows.blocks)

            return take

        return choose

    def finish(self, seen: int) -> None:
        if self.chosen is not None and seen > self.answer.seen:
            look = self.choices[max(self.choices)].mark_rows(self.chosen, seen - self.answer.seen - 1)
            self.answer.states[self.answer.all_layers[0]].shared.update({"look": look, "token": seen - 1})
