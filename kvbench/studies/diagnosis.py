"""Measure why a method loses points: how far its attention outputs are from those of a full cache, and what it dropped.

A prompt is read into a full cache, which answers greedily. The same prompt and the same answer are then read into the
cache of a *cell*: a method, an allocator, a codec, a budget and a block size. Both runs are watched at the last tokens
that are known before the answer (the part `prompt`) and at the first tokens of the answer (`answer`). Layers with a
sliding window are left out, because no method cuts them.

For a query head, with p the softmax over all rows of the cell's run and o the output of that attention:

    local         ‖o' − o‖ / ‖o‖, where o' is the output of the same query over the rows that the method holds. At the
                  answer, o' is what the run computed. At the prompt, o' is computed over the rows that are held when
                  the answer begins, and a query that none of these rows precedes has o' = 0
    accumulated   ‖o' − o‖ / ‖o‖, where o' is what the run computed and o what the full cache's run computed for the
                  same token
    dropped       1 − Σ p over the rows that are held (that are read, if the method reads few of many rows)
    recall        the share of the oracle's rows that are held when the answer begins; 0 if none is held

Errors and masses are means over the tokens of a part. The *oracle* knows the answer: it keeps those rows of the prompt
that the full cache's answer attends to most, by the sum of p over the answer's tokens and the query heads of a KV head.
`top_k` keeps as many rows in each KV head as the method holds. `top_p` keeps the fewest rows with a share of the mass
that the prompt's rows get. `random` keeps as many rows as the method, drawn without replacement. All three are
evaluated in the full cache's run, so they have local errors and dropped masses, and no accumulated ones.

What this means for methods of other kinds:

* A method that merges (`Method.merges`) has rows that stand for several tokens. Their tokens are not dropped, so
  `dropped` is 1 − Z'/Z, where Z sums exp(logit) over all rows, and Z' sums mass · exp(logit) over the rows held. Recall
  and the tokens of the answers are left out, because nobody knows in which row a token went. A method that weighs rows
  (`Method.weighs_rows`) drops the other tokens, and counts like one that evicts.
* A method that reads few of many rows (`Method.attends_subset`) holds all rows. Its rows are those that a query head
  reads for a token, and the oracle of this token and head keeps as many. The prompt was read in full, so the part
  `prompt` and the tokens of the answers are left out.
* A codec's rows are compared as they are read back. If it packs before attention, all rows of the run are packed, and
  its error is in the accumulated error only.
* A method that attends by slots in place of positions (`Method.uses_cache_positions`) has no local error at the prompt,
  because a query's slot then depends on the token that asks.

All rows of the cell's run are those of the full cache if the prompt is read as one block. In several blocks, keys and
values differ from the second layer on, so the run keeps a copy of what each block wrote, which is one more full cache.

Outputs that a run computed in bfloat16 differ from an exact attention by about 0.3 %, which no local error at the
answer falls below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.kernels.row_selection import top_k_mask
from kvbench.store.study_lines import DIAGNOSIS, Line
from kvbench.studies.row_attention import (
    attend_rows,
    attend_sets,
    attend_weighted,
    find_error,
    join_places,
    sum_weights,
    weigh_rows,
)
from kvbench.studies.watched_run import LayerTrace, Reading, WatchedRun, mark_places

PROMPT, ANSWER = "prompt", "answer"
TOP_K, TOP_P, RANDOM = "top_k", "top_p", "random"
REFERENCES = (TOP_K, TOP_P, RANDOM)
LARGEST = {"cuda": 1 << 31, "cpu": 1 << 24}  # bytes of the probabilities of the layers that are diagnosed at once


def choose_mass(importance: Tensor, share: float) -> Tensor:
    """Return the fewest entries of the last dimension that have a share of its sum, as bool of the same shape."""
    ordered, order = importance.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    chosen = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


def join_tokens(layers: Sequence[LayerTrace], name: str) -> Tensor:
    """Join what layers showed of the watched tokens: tensors (H·G, t, d) for each block to one (L·H·G, w + t, d)."""
    blocks = zip(*(getattr(layer, name) for layer in layers), strict=True)
    return torch.cat([torch.cat(block) for block in blocks], 1)


def join_marks(layers: Sequence[LayerTrace], heads: int, end: int) -> Tensor:
    """Join the rows that layers attended to: (L·H, 1 or G, blocks, end) bool. Rows of later blocks are not marked.

    Args:
        layers: The layers.
        heads: Number of their KV heads, L·H.
        end: Number of rows after the last block.
    """
    blocks = [torch.cat(pieces) for pieces in zip(*(layer.held for layer in layers), strict=True)]
    padded = [pad(marks, (0, end - marks.shape[1])) for marks in blocks]
    return torch.stack(padded, 1).unflatten(0, (heads, -1))


def pad_marks(marks: Tensor, rows: int) -> Tensor:
    """Mark further rows, so that there are `rows` of them in the last dimension."""
    return pad(marks, (0, rows - marks.shape[-1]), value=True)


def choose_references(weights: Tensor, held: Tensor, share: float, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Choose the prompt's rows of each reference.

    Args:
        weights: The full cache's attention from the answer to the prompt's rows, (L·H, G, t, n).
        held: The rows that the method holds or reads, (L·H, 1 or G, 1 or t, n) bool.
        share: The share of the mass that `top_p` keeps.
        seeds: Seeds of the random rows of each layer.

    Returns:
        For each reference the rows, of the shape of `held`.
    """
    alike = [place for place in (1, 2) if held.shape[place] == 1]
    importance = weights.sum(alike, keepdim=True) if alike else weights
    quotas = held.sum(-1).view(1, -1)
    generator, shape = torch.Generator(weights.device), held.unflatten(0, (len(seeds), -1)).shape[1:]
    drawn = torch.cat(
        [torch.rand(shape, generator=generator.manual_seed(seed), device=weights.device) for seed in seeds]
    )
    chosen = {
        name: top_k_mask(scores.reshape(1, quotas.shape[1], -1), quotas).view_as(held)
        for name, scores in ((TOP_K, importance), (RANDOM, drawn))
    }
    return chosen | {TOP_P: choose_mass(importance, share)}


Found = dict[str, Tensor]
"""What is found of layers, by the name of the quantity: (L, H·G) of query heads or (L, H) of KV heads."""


@dataclass(frozen=True)
class Attention:
    """The attention of watched tokens to all rows of a run, in some layers.

    Attributes:
        weights: Probabilities, (L·H, G, t, n).
        outputs: (L·H, G, t, d)
        sums: Log-sum-exps, (L·H, G, t), if the cell's method merges.
    """

    weights: Tensor
    outputs: Tensor
    sums: Tensor | None = None

    def at(self, tokens: slice) -> "Attention":
        """Return the attention of some of the tokens."""
        sums = None if self.sums is None else self.sums[:, :, tokens]
        return Attention(self.weights[:, :, tokens], self.outputs[:, :, tokens], sums)

    def find_dropped(self, marks: Tensor, held: Tensor | None) -> Tensor:
        """Return the mass that was dropped, the mean over tokens, (L·H, G).

        Args:
            marks: The rows that are held, (L·H, 1 or G, 1 or t, n) bool.
            held: Log-sum-exps over the rows held of a method that merges; None for any other.
        """
        if self.sums is not None and held is not None:
            return 1 - (held - self.sums).exp().mean(-1)
        return 1 - sum_weights(self.weights, marks).mean(-1)


@dataclass(frozen=True)
class Comparison:
    """A cell's run beside the full cache's, of the same prompt and answer.

    Attributes:
        full: The full cache's run.
        run: The cell's run.
    """

    full: WatchedRun
    run: WatchedRun

    def split(self) -> Iterator[list[int]]:
        """Yield the layers in groups that are diagnosed at once, because a GPU waits for the host if each is alone.

        Layers of a group lie on one device, and one copy of their probabilities takes at most `LARGEST` bytes, unless
        one layer alone takes more.
        """
        reading, group, before = self.run.reading, list[int](), None
        for index, layer in self.run.layers.items():
            queries = layer.queries[0]
            size = torch.promote_types(queries.dtype, torch.float32).itemsize * len(queries)
            size *= (reading.window + reading.tokens) * (reading.known + reading.tokens)
            most = LARGEST[queries.device.type] // size
            alike = queries.device, layer.scaling, len(queries), [len(held) for held in layer.held]
            if group and (alike != before or len(group) >= most):
                yield group
                group = []
            group.append(index)
            before = alike
        if group:
            yield group

    @property
    def parts(self) -> dict[str, slice]:
        """Where the tokens of each part stand among the watched ones, counted from the end."""
        reading, layer = self.run.reading, next(iter(self.run.layers.values()))
        answer = sum(queries.shape[1] for queries in layer.queries) - reading.window
        parts = {ANSWER: slice(-answer, None)}
        if not self.run.method.attends_subset:
            parts[PROMPT] = slice(-answer - reading.window, -answer)
        return parts

    def diagnose(self, indexes: Sequence[int]) -> Found:
        """Return what the module's docstring defines for some layers."""
        reading, run, parts = self.run.reading, self.run, self.parts
        method, layers = run.method, [run.layers[index] for index in indexes]
        begin = [run.begin[index].view() for index in indexes]
        heads, answer = sum(rows.heads for rows in begin), -parts[ANSWER].start
        queries, outputs = join_tokens(layers, "queries"), join_tokens(layers, "outputs")
        exact_outputs = join_tokens([self.full.layers[index] for index in indexes], "outputs")
        read = join_marks(layers, heads, reading.known + answer)
        held = read
        if not method.attends_subset:
            held = mark_places(join_places([rows.places[0] for rows in begin]), reading.known)[:, None, None]
        exact, quantities = self.compare_references(indexes, held[..., : len(reading.ids)])

        # At the prompt, the full cache's run computed the same, unless rows or queries differ.
        alike = PROMPT in parts and not (run.copies or reading.question)
        watched = answer if alike else -min(part.start for part in parts.values())
        keys, values = zip(*(run.list_rows(index, self.full) for index in indexes), strict=True)
        scaling, first = layers[0].scaling, reading.known + answer - watched
        weights, sums = weigh_rows(queries[:, -watched:], first, keys, scaling, lse=run.merges)
        dense = Attention(weights, attend_weighted(weights, values), sums)
        for part, tokens in parts.items():
            mine = (exact if part == PROMPT and alike else dense).at(tokens)
            if part == ANSWER:
                reached, marks, sums = outputs[:, tokens], read, None
                if run.merges:
                    sums = torch.cat(
                        [torch.cat(block) for block in zip(*(layer.sums for layer in layers), strict=True)], -1
                    )
            else:
                first = reading.known - reading.window
                reached, sums = attend_rows(queries[:, tokens], first, begin, scaling, run.merges)
                reached, marks = reached.flatten(0, 1), pad_marks(held, mine.weights.shape[3])
            if part == ANSWER or not method.uses_cache_positions:
                quantities[f"local_{part}"] = find_error(reached, mine.outputs.flatten(0, 1))
            quantities[f"dropped_{part}"] = mine.find_dropped(marks, sums)
            quantities[f"accumulated_{part}"] = find_error(outputs[:, tokens], exact_outputs[:, tokens])
        return {name: value.reshape(len(indexes), -1) for name, value in quantities.items()}

    def compare_references(self, indexes: Sequence[int], held: Tensor) -> tuple[Attention, Found]:
        """Return the full cache's attention in some layers, and what is found of the references and of the rows held.

        Args:
            indexes: The layers.
            held: The rows of the prompt that the method holds or reads, (L·H, 1 or G, 1 or t, n) bool.
        """
        reading, run, parts = self.run.reading, self.run, self.parts
        layers = [self.full.layers[index] for index in indexes]
        queries, watched = join_tokens(layers, "queries"), -min(part.start for part in parts.values())
        keys, values = zip(*(self.full.list_rows(index, None) for index in indexes), strict=True)
        first = reading.known - parts[ANSWER].start - watched
        weights, sums = weigh_rows(queries[:, -watched:], first, keys, layers[0].scaling, lse=run.merges)
        of_answer = weights[:, :, parts[ANSWER], : held.shape[3]]
        seeds = [reading.seed + index for index in indexes]
        references = choose_references(of_answer, held, reading.share, seeds)
        sets = torch.stack([torch.ones_like(held), *references.values()], 1)
        outputs, mass = attend_sets(weights, values, pad_marks(sets, weights.shape[3]))
        quantities: Found = {}
        quantities["rows"], quantities[f"{TOP_P}_rows"] = (
            rows.mean(-1, dtype=outputs.dtype).mean(-1) for rows in (held, references[TOP_P])
        )
        if not run.merges:
            quantities["recall"] = ((references[TOP_K] & held).sum(-1) / held.sum(-1).clamp(min=1)).mean(-1)
        for part, tokens in parts.items():
            local = find_error(outputs[1:, :, :, tokens], outputs[0, :, :, tokens])
            dropped = 1 - (mass[1:] / mass[0])[..., tokens].mean(-1)
            for number, name in enumerate(references):
                quantities[f"{name}_local_{part}"], quantities[f"{name}_dropped_{part}"] = (
                    local[number],
                    dropped[number],
                )
        return Attention(weights, outputs[0], sums), quantities


def list_lines(full: WatchedRun, run: WatchedRun, cell: str, sample: int) -> Iterator[Line]:
    """Yield the lines of a cell and a prompt.

    The run's own quantities have a line for each layer and head, and every quantity has its mean over heads for each
    layer, and its mean over layers. The rows of the answers' tokens, the needles, have these lines for each layer:

        needle         for each KV head that lost a needle, the block after which the row was gone, from 1. `x` is the
                       needle's position and `y` the sample
        needles_held   the share of the KV heads that hold all needles when the answer begins
        needles_left   the share of needles and KV heads that are left after block `x` of the sample `y`
        needles_lost   the block in which the median head lost its first needle; none if it lost none

    Args:
        full: The full cache's run.
        run: The cell's run.
        cell: The name of the cell, which is the series of the lines.
        sample: The index of the prompt.
    """
    means: dict[str, list[float]] = {}
    both = Comparison(full, run)
    groups = [(indexes, both.diagnose(indexes)) for indexes in both.split()]
    joined = [torch.cat(list(quantities.values()), 1).flatten() for _, quantities in groups]
    numbers = iter(
        torch.cat([vector.to(joined[0].device) for vector in joined]).tolist()
    )  # the host waits once for all
    full.context.raise_faults()
    run.context.raise_faults()
    for index, sizes in ((index, quantities) for indexes, quantities in groups for index in indexes):
        for name, size in ((name, value.shape[1]) for name, value in sizes.items()):
            per_head = list(islice(numbers, size))
            means.setdefault(name, []).append(sum(per_head) / size)
            yield Line(DIAGNOSIS, name, means[name][-1], cell, index, n=size)
            if not name.startswith(REFERENCES):
                for head, value in enumerate(per_head):
                    yield Line(DIAGNOSIS, name, value, cell, index, head)
        for line in list_needles(run.reading, run.layers[index], cell, index, sample):
            if line.quantity == "needles_held":
                means.setdefault(line.quantity, []).append(line.value)
            yield line
    for name, values in means.items():
        yield Line(DIAGNOSIS, name, sum(values) / len(values), cell, n=len(values))


def list_needles(reading: Reading, layer: LayerTrace, cell: str, index: int, sample: int) -> Iterator[Line]:
    """Yield the lines about the rows of the answers' tokens (`list_lines`), none if they are not watched."""
    if layer.died is None:
        return
    died, needles = layer.died.cpu(), torch.tensor(reading.needles)
    for head, needle in (died < inf).nonzero().tolist():
        place = float(needles[needle])
        yield Line(DIAGNOSIS, "needle", float(died[head, needle]), cell, index, head, place, sample)
    yield Line(DIAGNOSIS, "needles_held", float((died == inf).all(1).double().mean()), cell, index, n=len(died))
    for block in range(1, layer.blocks + 1):
        read = needles < block * layer.size
        if bool(read.any()):
            left = float((died[:, read] > block).double().mean())
            yield Line(DIAGNOSIS, "needles_left", left, cell, index, x=block, y=sample, n=int(read.sum()) * len(died))
    median = float(died.amin(1).sort().values[(len(died) - 1) // 2])
    if median < inf:
        yield Line(DIAGNOSIS, "needles_lost", median, cell, index, n=len(died))
