"""Decoding by a step of its own: a token through the modules' weights, over rows whose addresses are fixed. On a GPU it
is captured once as a CUDA graph and replayed for every token, with nothing asked of the host in between.

Where the token's row goes and what is attended over is the rows' affair: `GrowingRows` here, which only append, and
`SteadyRows` (kvbench.engine.fixed_quota_rows), which are cut.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.timing import Stamps
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.fused_linear import rms_norm_linear, rms_norm_swiglu
from kvbench.kernels.rope_append import append
from kvbench.models.decoder_weights import DecoderWeights

CHUNK = 16  # tokens between two looks of the host at what was decoded


Norms = tuple[Tensor, Tensor, float] | None  # of queries and keys: weights (d,) and ε


def forward_step(
    weights: DecoderWeights,
    ids: Tensor,
    attend: Callable[[int, Sequence[Tensor], Norms], Tensor],
    implementation: str | None,
) -> Tensor:
    """Hidden states (B·T, hidden) of tokens (B, T) behind the last layer. `attend`: layer, projected queries, keys and
    values (B·T, heads·d), norms to outputs (B, Hq, T, d).
    """
    own, epsilon = {"implementation": implementation}, weights.epsilon
    x = embedding(ids.flatten(), weights.embed)
    for index, block in enumerate(weights.blocks):
        three = rms_norm_linear(x, block.project, biases=block.biases, norm=(block.norms[0], epsilon), **own)
        outputs = attend(index, three, None if block.head_norms is None else (*block.head_norms, epsilon))
        outputs = outputs.transpose(1, 2).reshape(len(x), -1)
        (x,) = rms_norm_linear(outputs, [block.output], residual=x, **own)
        inner = rms_norm_swiglu(x, block.gate, block.up, (block.norms[1], epsilon), **own)
        (x,) = rms_norm_linear(inner, [block.down], residual=x, **own)
    return x


@cache
def capture_stream(gpu: int) -> torch.cuda.Stream:
    """Where graphs are made: one stream a GPU, since cuBLAS keeps a workspace for each stream that it ever ran on."""
    return torch.cuda.Stream(gpu)


def capture(work: Callable[[], None], pool: tuple[int, int] | None = None) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is done once before it is recorded. `pool`: memory of graphs that never run at once."""
    side = capture_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        work()
    return graph


def only_appends(choice: CachePolicy) -> bool:
    """Whether between two cuts nothing happens to a layer while decoding but that rows are appended and looked at."""
    method = choice.method
    return not (method.attends_subset or method.uses_cache_positions or method.watches or choice.codec.packs)


class StepRows(Protocol):
    """Rows of all layers, at fixed addresses, behind which a token's row is written. Tokens to come count from 0."""

    def cuts(self, number: int) -> bool:
        """Whether the layers are cut behind this token: another graph then."""

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """What reads a token in one layer after the other, see `forward_step`."""

    def advance(self, cuts: bool) -> None:
        """The token is through all layers."""

    def marked(self, tokens: Tensor) -> Tensor:
        """`tokens` (B,), or -1 for all where something went wrong, which `check` raises."""

    def check(self) -> None: ...

    def back(self, step: int) -> int:
        """Return to where `step` tokens were read, or to an earlier one that is still there; which it is."""

    def keep(self, read: int) -> None:
        """Let the layers count what was read so far: `read` tokens. There is no way back behind them."""


class GrowingRows:
    """A layer's cut part and, behind it, a tail with room for `tokens` to come behind `seen` others; which of the room
    is used stands on the device (`step`).
    """

    def __init__(
        self,
        weights: DecoderWeights,
        layers: Sequence[Layer],
        tokens: int,
        seen: int,
        implementation: str | None = None,
    ) -> None:
        self.weights, self.layers, self.implementation = weights, layers, implementation
        for layer in layers:
            layer.reserve(tokens)
            layer.rows = layer.rows.with_starts()
        places = torch.arange(seen, seen + tokens, device=weights.embed.device)
        self.angles = [part[0].to(weights.embed.dtype) for part in weights.rotation(places[None])]
        self.held = [layer.rows.ragged() for layer in layers]
        self.tails = [(layer.rows.tail_keys, layer.rows.tail_values, layer.rows.tail) for layer in layers]
        self.step = torch.zeros((), dtype=torch.int32, device=weights.embed.device)
        self.kept = 0  # tokens that the layers count

    def cuts(self, number: int) -> bool:
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        return self.attend

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        """Outputs (B, Hq, 1, d) of one layer."""
        *rows, tail = self.tails[index]
        own, scaling = {"implementation": self.implementation}, self.weights.scaling
        queries = append(*projected, *self.angles, *rows, tail, self.step, norms=norms, **own)
        return attend_ragged(queries, self.held[index], *rows, scaling, tail=tail + 1, step=self.step, **own)[0]

    def advance(self, cuts: bool) -> None:
        self.step += 1

    def marked(self, tokens: Tensor) -> Tensor:
        return tokens

    def check(self) -> None:
        """Nothing is scored."""

    def back(self, step: int) -> int:
        self.step.fill_(step)
        return step

    def keep(self, read: int) -> None:
        for layer in self.layers:
            layer.count_appended(read - self.kept)
        self.kept = read


class GraphDecoder:
    """Up to `tokens` further tokens of B samples, the first of which is `first` (B,)."""

    def __init__(
        self, weights: DecoderWeights, rows: StepRows, first: Tensor, tokens: int,
        pick: Callable[[Tensor, Tensor], Tensor], draws: Tensor, implementation: str | None = None,
    ) -> None:  # fmt: skip
        """`pick`: logits (B, vocab) and draws (B,) to token ids; draws (B, tokens), a number in [0, 1) for each token
        to be picked.
        """
        self.weights, self.rows, self.implementation = weights, rows, implementation
        self.pick, self.draws, self.left = pick, draws, tokens
        device = first.device
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # tokens read
        self.token = first.clone()
        self.tokens = torch.zeros(len(first), tokens + 1, dtype=torch.int64, device=device)
        self.tokens[:, 0] = first
        self.logits = weights.head.new_empty(len(first), len(weights.head))
        self.read = 0  # tokens read that were asked for
        self.ahead: list[Tensor] = []  # tokens that were decoded and not asked for yet
        self.stamps = Stamps(device.type)  # before the first step and after each
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # of a step, and of one that cuts
        if device.type == "cuda" and implementation != "reference":  # which waits for the host
            pool = torch.cuda.graph_pool_handle()
            for cuts in sorted({rows.cuts(number) for number in range(tokens)}):
                self.graphs[cuts] = capture(partial(self.one, cuts), pool)
        self.back(0)  # what was written while it was recorded is written again

    def one(self, cuts: bool) -> None:
        """Read the token and pick the next."""
        weights, own = self.weights, {"implementation": self.implementation}
        x = forward_step(weights, self.token[:, None], self.rows.reader(cuts), self.implementation)
        (logits,) = rms_norm_linear(x, [weights.head], norm=(weights.norm, weights.epsilon), **own)
        self.logits.copy_(logits)  # of whichever graph ran last
        self.token.copy_(self.pick(logits, self.draws.index_select(1, self.at).squeeze(1)))
        self.at += 1
        self.tokens.index_copy_(1, self.at, self.rows.marked(self.token)[:, None])
        self.rows.advance(cuts)

    @property
    def done(self) -> bool:
        """Whether all that there is room for was read."""
        return self.left == 0 and not self.ahead

    def next(self) -> tuple[Tensor, float]:
        """Read the last token that was given and return the one after it, (B,) on the CPU, and the seconds from the
        first reading to then.
        """
        if not self.ahead:
            self.rows.keep(self.read)
            if not self.read:
                self.stamps.put()
            count = min(CHUNK, self.left)
            for number in range(self.read, self.read + count):
                self.replay(number)
                self.stamps.put()
            self.left -= count
            self.ahead = list(self.tokens[:, self.read + 1 : self.read + 1 + count].cpu().unbind(1))
        self.read += 1
        token = self.ahead.pop(0)
        if token[0] < 0:
            self.rows.check()
        return token, self.stamps.after(self.read)

    def replay(self, number: int) -> None:
        """Read the `number`-th token."""
        cuts = self.rows.cuts(number)
        if self.graphs:
            self.graphs[cuts].replay()
        else:
            self.one(cuts)

    def back(self, step: int) -> int:
        """Return to the state in which `step` tokens were read, or to an earlier one; which it is."""
        step = self.rows.back(step)
        self.at.fill_(step)
        self.token.copy_(self.tokens[:, step])
        return step

    def close(self) -> Tensor:
        """Count what was read and return the logits (B, vocab) of the last token of it."""
        if self.ahead:
            for number in range(self.back(self.read - 1), self.read):
                self.replay(number)
        self.rows.keep(self.read)
        return self.logits
