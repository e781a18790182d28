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
    recall        the share of the oracle's rows that are held when the answer begins

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.cache.policy import CachePolicy
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import Observation, PromptEncoder, ReadRequest
from kvbench.interfaces.rows import Rows
from kvbench.kernels.row_selection import top_k_mask
from kvbench.store.study_lines import DIAGNOSIS, Line
from kvbench.studies.watched_method import watch_method

PROMPT, ANSWER = "prompt", "answer"
TOP_K, TOP_P, RANDOM = "top_k", "top_p", "random"
REFERENCES = (TOP_K, TOP_P, RANDOM)
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Reading:
    """What is read and watched.

    Attributes:
        ids: Token ids of the prompt, which the method cuts; of the context if the question is hidden.
        question: Token ids that follow it; () unless the question is hidden.
        prefix: Number of tokens before the user's text.
        seed: Seed of the sample.
        stop: Token ids that end an answer.
        window: Number of tokens before the answer that are watched.
        tokens: Most tokens of the answer that are watched. An end token is one of them.
        share: The share of the mass that the rows of `top_p` have.
        needles: Positions of the answers' tokens in the prompt.
        words: Turns a method's own words to the model into token ids.
    """

    ids: tuple[int, ...]
    question: tuple[int, ...] = ()
    prefix: int = 0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    window: int = 32
    tokens: int = 16
    share: float = 0.95
    needles: tuple[int, ...] = ()
    words: PromptEncoder = field(default_factory=PromptEncoder)

    @property
    def known(self) -> int:
        """Number of tokens that are known before the answer."""
        return len(self.ids) + len(self.question)


@dataclass
class LayerTrace:
    """What a layer of a run shows, without the dimension of the sample.

    Attributes:
        scaling: The factor of the logits.
        queries: Queries of the watched tokens, (H·G, t, d) for each block.
        outputs: Their attention outputs.
        keys: Keys as each block wrote them, (H, t, d), of the blocks that the full cache's run does not have alike.
        values: The same for values.
        held: Rows that are attended to, for each block of the answer, by position: (H, n) bool, or (H·G, n).
        sums: Log-sum-exps over the rows attended to of a method that merges, (H, G, t) for each block of the answer.
        died: For each KV head and each needle, the number of the block, from 1, after which its row was gone; inf if
            it is held. (H, needles)
        blocks: Number of blocks of the prompt read so far.
        size: Number of tokens of the first of them.
    """

    scaling: float = 0.0
    queries: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    died: Tensor | None = None
    blocks: int = 0
    size: int = 0


def read_until_answer(
    model: torch.nn.Module,
    choice: CachePolicy,
    budget: Budget,
    block_size: int | None,
    reading: Reading,
    defers_faults: bool = False,
) -> GenerationContext:
    """Read a prompt, and its question if it is hidden, as a run does; return the context."""
    device, room = next(model.parameters()).device, len(reading.question) + reading.tokens
    seeds = (reading.seed,)
    context = GenerationContext(
        model, choice, budget, block_size, seeds, reading.prefix, reading.words, compile=False, answer=room
    )
    context.defers_faults = defers_faults
    context.prefill(torch.tensor([reading.ids], device=device))
    if reading.question:
        context.extend(torch.tensor([reading.question], device=device))
    return context


def answer_greedily(context: GenerationContext, reading: Reading) -> tuple[int, ...]:
    """Answer behind a prompt, forget the answer, and return its tokens."""
    with context.branch():
        return tuple(int(token) for token in context.generate(reading.tokens, Sampling(0.0, 1.0), reading.stop))


def read_answer(context: GenerationContext, answer: Sequence[int]) -> None:
    """Read the tokens of an answer that is given, one by one if the method looks at every token."""
    method, device = context.choice.method, context.last_logits.device
    size = 1 if method.decoding or method.attends_subset else len(answer)
    ids = torch.tensor([answer]).to(device, non_blocking=True)  # the host does not wait for the prompt
    for part in ids.split(size, dim=1):
        context.extend(part)


class WatchedRun:
    """A run that has read a prompt, reads an answer behind it, and what it shows meanwhile.

    Attributes:
        context: The run's cache.
        layers: What each layer showed, by its index.
        begin: The rows that each layer held when the answer began, as `kvbench.cache.storage.StoredRows`.
        copies: Whether what each block of the prompt wrote is copied.
        compared: Whether this is the full cache's run. Its cache holds all rows, so none are copied or marked.
        watching: Whether `look` is called.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        choice: CachePolicy,
        budget: Budget,
        block_size: int | None,
        reading: Reading,
        compared: bool = False,
    ) -> None:
        """Read the prompt, and watch what the method sees."""
        self.reading, self.compared, method = reading, compared, choice.method
        self.method, self.layers, self.reads = method, dict[int, LayerTrace](), dict[int, Tensor | None]()
        whole = block_size is None or block_size >= len(reading.ids)
        self.copies = not compared and (not whole or choice.codec.packs_before_attention)
        self.merges = method.merges and not method.weighs_rows
        self.watching, reads = True, self.look_at_reads if method.attends_subset else None
        watched = watch_method(method, self.look, reads, lambda: self.watching)
        choice = CachePolicy(watched, choice.allocator, choice.codec)
        self.context = context = read_until_answer(model, choice, budget, block_size, reading, not compared)
        self.begin = {layer.index: layer.rows for layer in context.own_layers}
        for index, layer in self.layers.items():
            if layer.died is not None:
                self._note_deaths(layer, self.begin[index].view().places[0], len(reading.ids))

    def answer(self) -> tuple[int, ...]:
        """Answer greedily, forget the answer, and return its tokens.

        Nobody looks, because the tokens would be chosen much more slowly. `read` shows them at once.
        """
        self.watching = False
        found = answer_greedily(self.context, self.reading)
        self.watching = self.context.defers_faults = True
        return found

    def read(self, answer: Sequence[int]) -> None:
        """Read an answer, unless one was read before."""
        if self.context.seen == self.reading.known:
            read_answer(self.context, answer)

    def look_at_reads(self, request: ReadRequest, chosen: Tensor | None) -> None:
        """Remember which rows a layer is about to read."""
        self.reads[request.layer] = chosen

    def look(self, observation: Observation, rows: Rows) -> None:
        """Remember what a layer shows of a block."""
        if observation.about is not None:
            return
        layer, reading = self.layers.setdefault(observation.layer, LayerTrace()), self.reading
        layer.scaling = observation.scaling
        queries, tokens, stop = observation.queries[0], observation.queries.shape[2], observation.tokens
        wanted = min(tokens, stop - (reading.known - reading.window))
        if wanted > 0:
            layer.queries.append(queries[:, -wanted:].clone())
            layer.outputs.append(observation.outputs[0, :, -wanted:].clone())
        if self.compared:
            return
        if observation.decoding or self.copies:
            layer.keys.append(rows.keys[0, :, -tokens:].clone())
            layer.values.append(rows.values[0, :, -tokens:].clone())
        if observation.decoding and observation.first >= reading.known:
            chosen = self.reads.get(observation.layer)
            held = mark_places(rows.places[0], stop) if chosen is None else chosen[0]
            layer.held.append(held)
            if self.merges:
                sums = attend_rows(queries, observation.first, rows, layer.scaling, lse=True)[1]
                assert sums is not None
                layer.sums.append(sums)
        if not observation.decoding:
            if reading.needles and not self.merges and not self.method.attends_subset:
                self._note_deaths(layer, rows.places[0], observation.first)
            layer.size = layer.size or tokens
            layer.blocks += 1

    def _note_deaths(self, layer: LayerTrace, places: Tensor, stop: int) -> None:
        """Note which needles before `stop` are gone, given the positions of the rows that are held, (H, n)."""
        needles = torch.tensor(self.reading.needles, device=places.device)
        if layer.died is None:
            layer.died = torch.full((len(places), len(needles)), inf, device=places.device)
        gone = ~mark_places(places, self.reading.known)[:, needles] & (needles < stop)
        layer.died = layer.died.where(~gone | (layer.died < inf), float(layer.blocks))

    def list_rows(self, index: int, full: "WatchedRun | None") -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of all rows of a layer, as this run wrote them.

        Args:
            index: The layer.
            full: The full cache's run, which has the prompt's rows if they were not copied; None for its own.

        Returns:
            Pieces (H, n, d) of consecutive rows, which are not joined, because that would copy them.
        """
        layer = self.layers[index]
        if full is None:
            rows = self.context.layers[index]
            assert rows is not None
            keys, values, _ = rows.rows.attention_view()
            return [keys[0]], [values[0]]
        keys, values = torch.cat(layer.keys, 1), torch.cat(layer.values, 1)
        if self.copies:
            return [keys], [values]
        [before], [values_before] = full.list_rows(index, None)
        prompt = len(self.reading.ids)
        return [before[:, :prompt], keys], [values_before[:, :prompt], values]


def mark_places(places: Tensor, tokens: int) -> Tensor:
    """Return which positions rows have, (H, tokens) bool, from places (H, n), which are -1 for absent rows."""
    marks = torch.zeros(len(places), tokens + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(1, places.where(places >= 0, tokens), True)[:, :tokens]


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the products (H, a, c) of matrices (H, a, b) and (H, b, c), in at least float32.

    A GPU multiplies 16-bit numbers exactly and adds the products in float32.
    """
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALVES:
        return torch.bmm(left, right, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return left.to(dtype) @ right.to(dtype)


def weigh_rows(
    queries: Tensor, first: int, keys: Sequence[Tensor], scaling: float, mass: Tensor | None = None,
    places: Tensor | None = None, lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return softmax(q·k·scaling + log mass) over the rows up to the query's position, and its log-sum-exps.

    Args:
        queries: Queries of consecutive tokens, (H·G, t, d).
        first: Position of the first of them.
        keys: Pieces (H, n, d) of consecutive rows.
        scaling: The factor of the logits.
        mass: Number of tokens that each row stands for, (H, n), 0 for absent rows; None for one each.
        places: Positions of the rows, (H, n); None for 0 … n − 1.
        lse: Whether the log-sum-exps are returned.

    Returns:
        The probabilities (H, G, t, n), 0 for a query that no row precedes, and the log-sum-exps (H, G, t) or None, in
        at least float32.
    """
    tokens = queries.shape[1]
    grouped = queries.unflatten(0, (len(keys[0]), -1)).flatten(1, 2)
    found = [multiply(grouped, own.mT) for own in keys]
    logits = (found[0] if len(found) == 1 else torch.cat(found, 2)).mul_(scaling)
    if mass is not None:
        logits += mass.log()[:, None]
    logits = logits.unflatten(1, (-1, tokens))
    last = torch.arange(first, first + tokens, device=logits.device)[:, None]
    if places is None:  # only rows of these tokens may lie behind one
        later = torch.arange(first, logits.shape[3], device=logits.device) > last
        logits[..., first:].masked_fill_(later, -inf)
    else:
        logits.masked_fill_(places[:, None, None] > last, -inf)
    weights = logits.softmax(-1)
    return weights if places is None else weights.nan_to_num_(0), logits.logsumexp(-1) if lse else None


def attend_rows(
    queries: Tensor, first: int, rows: Rows, scaling: float, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs (H, G, t, d) and log-sum-exps of attention to rows; see `weigh_rows`."""
    weights, sums = weigh_rows(queries, first, [rows.keys[0]], scaling, rows.mass[0], rows.places[0], lse)
    return attend_weighted(weights, [rows.values[0]]), sums


def attend_weighted(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return the outputs (H, G, t, d) of weights (H, G, t, n) on pieces of values, (H, n, d)."""
    parts = weights.flatten(1, 2).split([own.shape[1] for own in values], 2)
    found = [multiply(round_weights(part, own), own) for part, own in zip(parts, values, strict=True)]
    return sum(found[1:], found[0]).unflatten(1, weights.shape[1:3])


def round_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights as they are multiplied with values: on a GPU in their 16 bits, as fused attention does it."""
    return weights.to(values.dtype) if values.is_cuda and values.dtype in HALVES else weights


def sum_weights(weights: Tensor, marks: Tensor) -> Tensor:
    """Return the weights on marked rows, (H, G, t), from (H, G, t, n) and (H, 1 or G, 1 or t, n) bool."""
    if marks.shape[1] == marks.shape[2] == 1:
        return (weights.flatten(1, 2) @ marks[:, 0, 0, :, None].to(weights.dtype)).view(weights.shape[:3])
    return (weights * marks).sum(-1)


def attend_sets(weights: Tensor, values: Tensor, sets: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Attend to sets of rows, given the attention to all of them.

    Args:
        weights: Probabilities over all rows, (H, G, t, n).
        values: (H, n, d)
        sets: The rows of each set, (H, 1 or G, 1 or t, n) bool, of one shape.

    Returns:
        For each set the outputs (H, G, t, d), 0 without a row, and the mass of its rows (H, G, t).
    """
    if sets[0].shape[1] == sets[0].shape[2] == 1:  # the same rows for all queries: the probabilities are read once
        heads, rows, dim = values.shape
        weights = round_weights(weights, values)
        values = values.to(weights.dtype)
        # For each row its values times 1 or 0 in each set, then these factors, in a memory that GPUs read fast.
        masks, width = torch.stack([own[:, 0, 0] for own in sets], -1).to(values.dtype), len(sets) * dim
        wide = values.new_empty(heads, rows, width + -(-len(sets) // 8) * 8)
        torch.mul(values[:, :, None], masks[..., None], out=wide[..., :width].unflatten(-1, (len(sets), dim)))
        wide[..., width:] = pad(masks, (0, wide.shape[2] - width - len(sets)))
        joined = multiply(weights.flatten(1, 2), wide).unflatten(1, weights.shape[1:3])
        outputs = joined[..., :width].unflatten(-1, (len(sets), dim)).unbind(-2)
        kept = joined[..., width : width + len(sets)].unbind(-1)
    else:
        chosen = [weights * own for own in sets]
        outputs = tuple(attend_weighted(own, [values]) for own in chosen)
        kept = tuple(own.sum(-1) for own in chosen)
    return [
        (output / mass.clamp(min=torch.finfo(mass.dtype).tiny)[..., None], mass)
        for output, mass in zip(outputs, kept, strict=True)
    ]


def find_error(outputs: Tensor, exact: Tensor) -> Tensor:
    """Return ‖o' − o‖ / ‖o‖ as a mean over tokens, from o' and o (…, t, d). In the wider dtype of both."""
    wide = torch.promote_types(outputs.dtype, exact.dtype)
    size = exact.to(wide).norm(dim=-1).clamp(min=torch.finfo(wide).tiny)
    return ((outputs.to(wide) - exact.to(wide)).norm(dim=-1) / size).mean(-1)


def choose_mass(importance: Tensor, share: float) -> Tensor:
    """Return the fewest entries of the last dimension that have a share of its sum, as bool of the same shape."""
    ordered, order = importance.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    chosen = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


def join_marks(held: Sequence[Tensor], heads: int, end: int) -> Tensor:
    """Join marks of rows that blocks of tokens attended to.

    Args:
        held: For each block, (H or H·G, n) bool, where n grows.
        heads: Number of KV heads, H.
        end: Number of rows after the last block.

    Returns:
        (H, 1 or G, blocks, end) bool. Rows of later blocks are not marked.
    """
    padded = [pad(own, (0, end - own.shape[-1])) for own in held]
    return torch.stack(padded, 1).unflatten(0, (heads, -1))


def pad_marks(marks: Tensor, rows: int) -> Tensor:
    """Mark further rows, so that there are `rows` of them in the last dimension."""
    return pad(marks, (0, rows - marks.shape[-1]), value=True)


def choose_references(weights: Tensor, held: Tensor, share: float, seed: int) -> dict[str, Tensor]:
    """Choose the prompt's rows of each reference.

    Args:
        weights: The full cache's attention from the answer to the prompt's rows, (H, G, t, n).
        held: The rows that the method holds or reads, (H, 1 or G, 1 or t, n) bool.
        share: The share of the mass that `top_p` keeps.
        seed: Seed of the random rows.

    Returns:
        For each reference the rows, of the shape of `held`.
    """
    alike = [place for place in (1, 2) if held.shape[place] == 1]
    importance = weights.sum(alike, keepdim=True) if alike else weights
    quotas = held.sum(-1).view(1, -1)
    generator = torch.Generator(weights.device).manual_seed(seed)
    drawn = torch.rand(held.shape, generator=generator, device=weights.device)
    chosen = {
        name: top_k_mask(scores.reshape(1, quotas.shape[1], -1), quotas).view_as(held)
        for name, scores in ((TOP_K, importance), (RANDOM, drawn))
    }
    return chosen | {TOP_P: choose_mass(importance, share)}


Found = dict[str, Tensor]
"""What is found of a layer, by the name of the quantity: (H·G,) of query heads or (H,) of KV heads."""


@dataclass(frozen=True)
class Attention:
    """The attention of watched tokens to all rows of a run, in one layer.

    Attributes:
        weights: Probabilities, (H, G, t, n).
        outputs: (H, G, t, d)
        sums: Log-sum-exps, (H, G, t), if the cell's method merges.
    """

    weights: Tensor
    outputs: Tensor
    sums: Tensor | None = None

    def at(self, tokens: slice) -> "Attention":
        """Return the attention of some of the tokens."""
        sums = None if self.sums is None else self.sums[:, :, tokens]
        return Attention(self.weights[:, :, tokens], self.outputs[:, :, tokens], sums)

    def find_dropped(self, marks: Tensor, held: Tensor | None) -> Tensor:
        """Return the mass that was dropped, the mean over tokens, (H, G).

        Args:
            marks: The rows that are held, (H, 1 or G, 1 or t, n) bool.
            held: Log-sum-exps over the rows held of a method that merges; None for any other.
        """
        if self.sums is not None and held is not None:
            return 1 - (held - self.sums).exp().mean(-1)
        return 1 - sum_weights(self.weights, marks).mean(-1)


def diagnose_layer(full: WatchedRun, run: WatchedRun, index: int) -> Found:
    """Return what the module's docstring defines for a layer.

    Args:
        full: The full cache's run.
        run: The cell's run, of the same prompt and answer.
        index: The layer.
    """
    reading, method, own = run.reading, run.method, run.layers[index]
    queries, outputs, exact_outputs = (
        torch.cat(tensors, 1) for tensors in (own.queries, own.outputs, full.layers[index].outputs)
    )
    answer = queries.shape[1] - reading.window
    parts = {ANSWER: slice(-answer, None)}  # places among the watched tokens
    if not method.attends_subset:
        parts[PROMPT] = slice(-answer - reading.window, -answer)
    begin = run.begin[index].view()
    read = join_marks(own.held, begin.keys.shape[1], reading.known + answer)
    held = read if method.attends_subset else mark_places(begin.places[0], reading.known)[:, None, None]
    exact, found = diagnose_references(full, run, index, parts, held[..., : len(reading.ids)])

    # At the prompt, the full cache's run computed the same, unless rows or queries differ.
    alike = PROMPT in parts and not (run.copies or reading.question)
    watched = answer if alike else -min(part.start for part in parts.values())
    keys, values = run.list_rows(index, full)
    first = reading.known + answer - watched
    weights, sums = weigh_rows(queries[:, -watched:], first, keys, own.scaling, lse=run.merges)
    dense = Attention(weights, attend_weighted(weights, values), sums)
    for part, tokens in parts.items():
        mine = (exact if part == PROMPT and alike else dense).at(tokens)
        if part == ANSWER:
            reached, marks = outputs[:, tokens].view_as(mine.outputs), read
            sums = torch.cat(own.sums, -1) if run.merges else None
        else:
            first = reading.known - reading.window
            reached, sums = attend_rows(queries[:, tokens], first, begin, own.scaling, run.merges)
            marks = pad_marks(held, mine.weights.shape[3])
        if part == ANSWER or not method.uses_cache_positions:
            found[f"local_{part}"] = find_error(reached, mine.outputs)
        found[f"dropped_{part}"] = mine.find_dropped(marks, sums)
        found[f"accumulated_{part}"] = find_error(outputs[:, tokens], exact_outputs[:, tokens])
    return {name: value.flatten() for name, value in found.items()}


def diagnose_references(
    full: WatchedRun, run: WatchedRun, index: int, parts: Mapping[str, slice], held: Tensor
) -> tuple[Attention, Found]:
    """Return the full cache's attention in a layer, and what is found of the references and of the rows held.

    Args:
        full: The full cache's run.
        run: The cell's run, of the same prompt and answer.
        index: The layer.
        parts: The places of each part among the watched tokens, counted from the end.
        held: The rows of the prompt that the method holds or reads, (H, 1 or G, 1 or t, n) bool.
    """
    reading, layer = run.reading, full.layers[index]
    queries, watched = torch.cat(layer.queries, 1), -min(part.start for part in parts.values())
    keys, values = full.list_rows(index, None)
    first = reading.known + queries.shape[1] - reading.window - watched
    weights, sums = weigh_rows(queries[:, -watched:], first, keys, layer.scaling, lse=run.merges)
    of_answer = weights[:, :, parts[ANSWER], : held.shape[3]]
    references = choose_references(of_answer, held, reading.share, reading.seed + index)
    sets = [pad_marks(rows, weights.shape[3]) for rows in (torch.ones_like(held), *references.values())]
    (outputs, total), *attended = attend_sets(weights, values[0], sets)
    found: Found = {}
    found["rows"], found[f"{TOP_P}_rows"] = (
        rows.mean(-1, dtype=outputs.dtype).mean(-1) for rows in (held, references[TOP_P])
    )
    if not run.merges:
        found["recall"] = ((references[TOP_K] & held).sum(-1) / held.sum(-1)).mean(-1)
    for name, (reached, mass) in zip(references, attended, strict=True):
        for part, tokens in parts.items():
            found[f"{name}_local_{part}"] = find_error(reached[:, :, tokens], outputs[:, :, tokens])
            found[f"{name}_dropped_{part}"] = 1 - (mass / total)[:, :, tokens].mean(-1)
    return Attention(weights, outputs, sums), found


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
    layers = {index: diagnose_layer(full, run, index) for index in run.layers}
    joined = [torch.cat(list(found.values())) for found in layers.values()]
    numbers = torch.cat([own.to(joined[0].device) for own in joined]).tolist()  # the host waits for all layers at once
    full.context.raise_faults()
    run.context.raise_faults()
    for index, layer in run.layers.items():
        found = layers[index]
        for name, size in zip(found, map(len, found.values()), strict=True):
            own, numbers = numbers[:size], numbers[size:]
            means.setdefault(name, []).append(sum(own) / size)
            yield Line(DIAGNOSIS, name, means[name][-1], cell, index, n=size)
            if not name.startswith(REFERENCES):
                for head, value in enumerate(own):
                    yield Line(DIAGNOSIS, name, value, cell, index, head)
        for line in list_needles(run.reading, layer, cell, index, sample):
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
