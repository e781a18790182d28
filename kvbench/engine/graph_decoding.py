"""Decode with kvbench's own forward step, over rows with fixed addresses.

The step uses the model's weights directly. On a GPU it is captured once as a CUDA graph and replayed for every token,
so the host does nothing in between. The rows (`StepRows`) say where a token's row goes, what leaves for it, and which
rows are attended to. Each kind serves some layers of some answers, and `kvbench.engine.batch_rows` puts the kinds
together:

- `AppendedRows` (appended_rows) only grow. `ReadRows` (read_rows) grow too, and a token attends to some of them.
- `ReplacedRows` (replaced_rows) give up a row for each token that does not fit.
- `FixedQuotaRows` (fixed_quota_rows) are cut after every few tokens.
- `UnevenRows` (uneven_rows) are too. Heads share a layer's rows, or hold more rows from cut to cut.
- `RingRows` (ring_rows) hold the windows of layers with a sliding window.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.sampling import mark_tokens
from kvbench.engine.streams import Beside, join_after
from kvbench.engine.timing import Stamps
from kvbench.kernels.dispatch import is_announcing
from kvbench.models.decoder_step import Attend, find_logits, forward_step
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import pause_garbage_collection

CHUNK = 16  # tokens that are decoded before the host reads them

Angles = tuple[Tensor, Tensor]  # cos and sin


def find_angles(
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]], first: int, end: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions from `first` to before `end`, (n, d) each, like a tensor of the model.

    Args:
        rotation: The model's rotation: positions (1, n) to cos and sin, (1, n, d) each.
        first: The first position.
        end: The position behind the last one.
        like: Gives device and dtype.
    """
    cos, sin = rotation(torch.arange(first, end, device=like.device)[None])
    return cos[0].to(like.dtype), sin[0].to(like.dtype)


def find_layer_angles(
    weights: DecoderWeights, layers: Sequence[int], first: int, end: int, like: Tensor
) -> list[Angles]:
    """Return for each layer what `find_angles` does. Layers that rotate alike share one pair of tables.

    Args:
        weights: The model's weights.
        layers: The model's indices of the layers.
        first: The first position.
        end: The position behind the last one.
        like: Gives device and dtype.
    """
    rotations = [weights.rotations[layer] for layer in layers]
    tables = {rotation: find_angles(rotation, first, end, like) for rotation in dict.fromkeys(rotations)}
    return [tables[rotation] for rotation in rotations]


def change_tables(tables: Sequence[Angles], change: Callable[[Tensor], Tensor]) -> list[Angles]:
    """Return the changed cos and sin of each layer. Layers that share a pair of tables share the changed one."""
    distinct = {id(cos): (cos, sin) for cos, sin in tables}
    changed = {key: (change(cos), change(sin)) for key, (cos, sin) in distinct.items()}
    return [changed[id(cos)] for cos, _ in tables]


@cache
def capture_stream(gpu: int) -> torch.cuda.Stream:
    """Return the stream on which graphs are captured: one per GPU, because cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(gpu, priority=-1)  # its kernels run before those of streams beside it


@cache
def keep_pool(gpu: int) -> torch.cuda.CUDAGraph:
    """Capture a graph whose memory pool all graphs of a GPU share. A pool lasts as long as one of its graphs.

    No graph needs anything that another one left in this memory. What a replay leaves there must be copied before
    another graph is replayed.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture_stream(gpu)), pause_garbage_collection():
        graph.capture_begin()
        torch.zeros(1, device=gpu)
        graph.capture_end()
    return graph


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `work`, which runs once before."""
    side = capture_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = record_launches(work)
    torch.cuda.current_stream().wait_stream(side)
    return graph


def record_launches(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what `work` launches, which does not run. Its kernels must be loaded already.

    `torch.cuda.graph` would first return all free memory to the GPU, which takes longer than to capture a step, and has
    to be asked for again. Here this is done only if memory does not suffice otherwise, because PyTorch does not do so
    itself during a capture.
    """
    with suppress(torch.cuda.OutOfMemoryError):
        return try_to_record(work)
    torch.cuda.empty_cache()  # not in an except block, whose error would keep tensors alive
    return try_to_record(work)


def forget_capture(gpu: int, pool: tuple[int, int]) -> None:
    """Tell PyTorch that a capture has ended that it could not end itself.

    Otherwise PyTorch believes that the capture goes on, and returns no free memory to the GPU any more. Versions of
    PyTorch that know of the end raise an error here, which is ignored.
    """
    keep_pool.cache_clear()
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(gpu, pool)
        torch._C._cuda_releasePool(gpu, pool)


def try_to_record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what `work` launches, if memory suffices.

    No garbage is collected meanwhile, because freeing another graph would end the capture. After an error, other graphs
    can be captured.
    """
    gpu, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
    pool = keep_pool(gpu).pool()
    with torch.cuda.stream(capture_stream(gpu)), pause_garbage_collection():
        graph.capture_begin(pool)
        try:
            work()
            graph.capture_end()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # it has ended, for example because `work` waited for the device
                forget_capture(gpu, pool)
            raise
    return graph


class StepRows:
    """Rows of some layers of one or several answers at fixed addresses, with memory for further tokens.

    Tokens count from 0. Answers count from 0 in the order of the samples. A kind of rows overrides what it needs.
    """

    indices: Sequence[int]
    """The model's indices of the layers."""
    beside: Beside | None = None
    """The work that reading a token does beside the current stream; None if there is none."""

    def cuts(self, number: int) -> bool:
        """Return whether the layers are cut after this token. Such tokens need a graph of their own."""
        return False

    def reader(self, cuts: bool) -> Attend:
        """Return the function that appends and attends in one layer, given by its place in `indices`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make memory ready to read a token, which capturing a graph does. Nothing of it is kept."""
        self.back(0)

    def settle(self) -> None:
        """Let the current stream wait for what reading the token still does on others."""
        if self.beside is not None:
            self.beside.settle()

    def advance(self, cuts: bool) -> None:
        """Count a token after all layers have read it, and `settle`."""
        raise NotImplementedError

    def pack_due(self, number: int) -> None:
        """Pack what is due after the token of this number, between two replays of a graph."""
        return

    def marked(self, tokens: Tensor) -> Tensor:
        """Return `tokens` (B,), or -1 for all of them after an error, which `check` raises."""
        return tokens

    def check(self) -> None:
        """Raise a ContractError after an error."""
        return

    def back(self, step: int) -> int:
        """Return to the state after `step` tokens, or to what `keep` gave the layers last if that one is lost.

        Returns the number of tokens. The rows of several answers only return to the state before the first token.
        """
        raise NotImplementedError

    def keep(self, read: int) -> None:
        """Give the layers of a lone answer the first `read` tokens, now or in `finish`. `back` cannot undo them."""
        return

    def finish(self, read: int, answer: int = 0) -> None:
        """Give the layers of an answer its first `read` tokens. Its rows are not used any more."""
        raise NotImplementedError

    def forget(self, read: int, answer: int = 0) -> None:
        """Let the layers of an answer count its first `read` tokens, whatever rows these leave, as `finish` does."""
        self.finish(read, answer)


def read_token(
    weights: DecoderWeights, rows: StepRows, tokens: Tensor, cuts: bool, implementation: str | None
) -> Tensor:
    """Read a token of each sample, (B,), into the rows, which do not count it yet. Returns its logits, (B, vocab)."""
    with join_after(rows.settle):
        x = forward_step(weights, tokens[:, None], rows.reader(cuts), implementation)
        return find_logits(weights, x, implementation)


class GraphDecoder:
    """Decodes up to `tokens` further tokens of B samples."""

    def __init__(
        self,
        weights: DecoderWeights,
        rows: StepRows,
        first: Tensor,
        tokens: int,
        pick: Callable[[Tensor, Tensor], Tensor],
        draws: Tensor,
        implementation: str | None = None,
    ) -> None:
        """Capture the graphs, if the device is a GPU.

        Args:
            weights: The model's weights.
            rows: The rows of all layers.
            first: The first token to read, (B,).
            tokens: Number of tokens to read at most.
            pick: Maps logits (B, vocab) and random numbers (B,) to token ids (B,).
            draws: A number in [0, 1) for each token to generate, (B, tokens).
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.weights, self.rows, self.implementation = weights, rows, implementation
        self.pick, self.draws, self.left = pick, draws, tokens
        device = first.device
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # tokens read
        self.token = first.clone()
        self.tokens = torch.zeros(len(first), tokens + 1, dtype=torch.int64, device=device)
        self.tokens[:, 0] = first
        self.logits = weights.head.new_empty(len(first), len(weights.head))
        self.read = 0  # tokens that were read and returned
        self.ahead: list[Tensor] = []  # tokens that were decoded but not yet returned
        self.stamps = Stamps(device.type)  # before the first step and after each
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # a step without and with a cut
        waits = implementation == "reference" or is_announcing()  # the reference waits for the host
        if device.type == "cuda" and not waits:
            for cuts in sorted({rows.cuts(number) for number in range(tokens)}):
                if self.graphs:
                    self.back(0)
                else:
                    self.rows.prepare()
                self.graphs[cuts] = capture(partial(self.one, cuts))
        self.back(0)

    def one(self, cuts: bool) -> None:
        """Read one token and pick the next one."""
        logits = read_token(self.weights, self.rows, self.token, cuts, self.implementation)
        self.logits.copy_(logits)  # both graphs write to the same tensor
        self.token.copy_(self.pick(logits, self.draws.index_select(1, self.at).squeeze(1)))
        self.at += 1
        marked = mark_tokens(self.rows.marked(self.token), logits)  # NaN logits come before other faults
        self.tokens.index_copy_(1, self.at, marked[:, None])
        self.rows.advance(cuts)

    @without_gradients
    def next(self) -> tuple[Tensor, float]:
        """Read the token that was generated last.

        Returns:
            The next token, (B,) on the CPU, and the seconds since the first step began. `NOT_FINITE` stands for a token
            that was chosen from logits that are not finite.
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
        if bool((token == -1).any()):
            self.rows.check()
        return token, self.stamps.after(self.read)

    def replay(self, number: int) -> None:
        """Read the token of this number."""
        cuts = self.rows.cuts(number)
        if self.graphs:
            self.graphs[cuts].replay()
        else:
            self.one(cuts)
        self.rows.pack_due(number)

    def back(self, step: int) -> int:
        """Return to the state after `step` tokens, or to an earlier one. Returns the number of tokens."""
        step = self.rows.back(step)
        self.at.fill_(step)
        self.token.copy_(self.tokens[:, step])
        return step

    def close(self) -> Tensor:
        """Give the layers the tokens that were returned, and return the logits of the last one, (B, vocab)."""
        if self.ahead:
            for number in range(self.back(self.read - 1), self.read):
                self.replay(number)
        self.rows.finish(self.read)
        return self.logits
