"""Decoding by a step of its own: a token through the modules' weights, over rows whose addresses are fixed. On a GPU it
is captured once as a CUDA graph and replayed for every token, with nothing asked of the host in between.

It serves what only appends while decoding. Rows are a layer's cut part and, behind it, a tail with room for the tokens
to come; which of the room is used stands on the device (`step`).
"""

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvbench.kernels.append import append
from kvbench.kernels.attend import attend_ragged
from kvbench.kernels.project import gated, project
from kvbench.layer import Choice, Layer
from kvbench.model import Weights

CHUNK = 16  # tokens between two looks of the host at what was decoded


Norms = tuple[Tensor, Tensor, float] | None  # of queries and keys: weights (d,) and ε


def through(
    weights: Weights, ids: Tensor, attend: Callable[[int, Sequence[Tensor], Norms], Tensor], implementation: str | None
) -> Tensor:
    """Hidden states (B·T, hidden) of tokens (B, T) behind the last layer. `attend`: layer, projected queries, keys and
    values (B·T, heads·d), norms to outputs (B, Hq, T, d).
    """
    own, epsilon = {"implementation": implementation}, weights.epsilon
    x = embedding(ids.flatten(), weights.embed)
    for index, block in enumerate(weights.blocks):
        three = project(x, block.project, biases=block.biases, norm=(block.norms[0], epsilon), **own)
        outputs = attend(index, three, None if block.head_norms is None else (*block.head_norms, epsilon))
        outputs = outputs.transpose(1, 2).reshape(len(x), -1)
        (x,) = project(outputs, [block.output], residual=x, **own)
        inner = gated(x, block.gate, block.up, (block.norms[1], epsilon), **own)
        (x,) = project(inner, [block.down], residual=x, **own)
    return x


@cache
def aside(gpu: int) -> torch.cuda.Stream:
    """Where graphs are made: one stream a GPU, since cuBLAS keeps a workspace for each stream that it ever ran on."""
    return torch.cuda.Stream(gpu)


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is done once before it is recorded."""
    side = aside(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph


def appends(choice: Choice) -> bool:
    """Whether between two cuts nothing happens to a layer while decoding but that rows are appended and looked at."""
    method = choice.method
    return not (method.reads or method.rolls or method.watches or choice.codec.packs)


class Decoder:
    """Up to `tokens` further tokens of B samples, the first of which is `first` (B,)."""

    def __init__(
        self, weights: Weights, layers: Sequence[Layer], seen: int, first: Tensor, tokens: int,
        pick: Callable[[Tensor, Tensor], Tensor], draws: Tensor, implementation: str | None = None,
    ) -> None:  # fmt: skip
        """`seen`: tokens read before; `pick`: logits (B, vocab) and draws (B,) to token ids; draws (B, tokens), a
        number in [0, 1) for each token to be picked.
        """
        self.weights, self.layers, self.implementation = weights, layers, implementation
        self.pick, self.draws, self.left = pick, draws, tokens
        device = first.device
        for layer in layers:
            layer.reserve(tokens)
        self.step = torch.zeros((), dtype=torch.int32, device=device)
        self.token = first.clone()
        self.tokens = torch.zeros(len(first), tokens + 1, dtype=torch.int64, device=device)
        self.tokens[:, 0] = first
        places = torch.arange(seen, seen + tokens, device=device)
        self.angles = [part[0].to(weights.embed.dtype) for part in weights.rotation(places[None])]
        self.held = [layer.rows.ragged() for layer in layers]
        self.logits = torch.empty(0)
        self.read = 0  # tokens read that were asked for
        self.ahead: list[Tensor] = []  # tokens that were decoded and not asked for yet
        self.stamps: list[float] = []  # seconds from the first step to each decoded token
        self.graph: torch.cuda.CUDAGraph | None = None
        self.begin: torch.cuda.Event | float | None = None
        if device.type == "cuda" and implementation != "reference":  # which waits for the host
            self.graph = capture(self.one)
            self.back(0)  # what was written while it was recorded is written again

    def one(self) -> None:
        """Read the token and pick the next."""
        weights = self.weights
        x = through(weights, self.token[:, None], self.attend, self.implementation)
        own = {"implementation": self.implementation}
        (self.logits,) = project(x, [weights.head], norm=(weights.norm, weights.epsilon), **own)
        at = self.step.long().view(1)
        self.token.copy_(self.pick(self.logits, self.draws.index_select(1, at).squeeze(1)))
        self.tokens.index_copy_(1, at + 1, self.token[:, None])
        self.step += 1

    @property
    def done(self) -> bool:
        """Whether all that there is room for was read."""
        return self.left == 0 and not self.ahead

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        """Outputs (B, Hq, 1, d) of one layer."""
        rows, own = self.layers[index].rows, {"implementation": self.implementation}
        tail = rows.tail_keys, rows.tail_values
        queries = append(*projected, *self.angles, *tail, rows.tail, self.step, norms=norms, **own)
        scaling = self.weights.scaling
        return attend_ragged(queries, self.held[index], *tail, scaling, tail=rows.tail + 1, step=self.step, **own)[0]

    def next(self) -> tuple[Tensor, float]:
        """Read the last token that was given and return the one after it, (B,) on the CPU, and the seconds from the
        first reading to then.
        """
        if not self.ahead:
            count, first = min(CHUNK, self.left), int(self.tokens.shape[1] - 1 - self.left)
            if self.begin is None:
                self.begin = self.clock()
            ends = [self.replay() for _ in range(count)]
            self.left -= count
            self.ahead = list(self.tokens[:, first + 1 : first + 1 + count].cpu().unbind(1))
            self.stamps += [elapsed(self.begin, end) for end in ends]
        self.read += 1
        return self.ahead.pop(0), self.stamps[self.read - 1]

    def replay(self) -> "torch.cuda.Event | float":
        """One step, and the moment of its end."""
        if self.graph is None:
            self.one()
        else:
            self.graph.replay()
        return self.clock()

    def clock(self) -> "torch.cuda.Event | float":
        """This moment: of the GPU's work, which the host does not wait for, or of the host's."""
        if self.graph is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def back(self, step: int) -> None:
        """Return to the state in which `step` tokens were read."""
        self.step.fill_(step)
        self.token.copy_(self.tokens[:, step])

    def close(self) -> Tensor:
        """Count what was read and return the logits (B, vocab) of the last token of it."""
        if self.ahead and self.read:
            self.back(self.read - 1)
            self.replay()
        for layer in self.layers:
            layer.grow(self.read)
        return self.logits.clone()


def elapsed(begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    """Seconds."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
