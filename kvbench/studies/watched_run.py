"""Watch a run of any method while it reads a prompt and an answer that is given: queries, outputs, and rows held."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from kvbench.cache.policy import CachePolicy
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import Observation, PromptEncoder, ReadRequest
from kvbench.interfaces.rows import Rows
from kvbench.studies.row_attention import attend_rows
from kvbench.studies.study import refuse_extras
from kvbench.studies.watched_method import watch_method


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


def send(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers on a device. The host does not wait for what the device does."""
    return torch.tensor(numbers).to(device, non_blocking=True)


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
        context.extend(send(reading.question, device)[None])
    return context


def answer_greedily(context: GenerationContext, reading: Reading) -> tuple[int, ...]:
    """Answer behind a prompt, forget the answer, and return its tokens."""
    with context.branch():
        return tuple(int(token) for token in context.generate(reading.tokens, Sampling(0.0, 1.0), reading.stop))


def read_answer(context: GenerationContext, answer: Sequence[int]) -> None:
    """Read the tokens of an answer that is given, one by one if the method looks at every token."""
    method, device = context.choice.method, context.last_logits.device
    size = 1 if method.decoding or method.attends_subset else len(answer)
    for part in send(answer, device)[None].split(size, dim=1):
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
        self.copies = not compared and (not whole or choice.codec.packing.before_attention)
        self.merges = method.merges and not method.weighs_rows
        self.needles = dict[torch.device, Tensor]()  # their positions on each device
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
        tokens = answer_greedily(self.context, self.reading)
        self.watching = self.context.defers_faults = True
        return tokens

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
        refuse_extras(observation, "diagnose")
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
                sums = attend_rows(queries, observation.first, [rows], layer.scaling, lse=True)[1]
                assert sums is not None
                layer.sums.append(sums)
        if not observation.decoding:
            if reading.needles and not self.merges and not self.method.attends_subset:
                self._note_deaths(layer, rows.places[0], observation.first)
            layer.size = layer.size or tokens
            layer.blocks += 1

    def _note_deaths(self, layer: LayerTrace, places: Tensor, stop: int) -> None:
        """Note which needles before `stop` are gone, given the positions of the rows that are held, (H, n)."""
        device = places.device
        if device not in self.needles:
            self.needles[device] = send(self.reading.needles, device)
        needles = self.needles[device]
        if layer.died is None:
            layer.died = torch.full((len(places), len(needles)), inf, device=device)
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
