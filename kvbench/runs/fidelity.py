"""How close the predictions of a compressed cache are to those of the full cache, where scores cannot tell.

A score says right or wrong; on a weak model, or at a generous budget, many methods score alike. `fidelity=true`
therefore lets the model read the first `TOKENS` tokens of the right answer behind the compressed cache, whatever it
would have answered itself (teacher forcing), and records for every sample

    nll   −1/n Σ_t log q_t(y_t), the mean negative log-likelihood of the answer's tokens y_1 … y_n
    kl    1/n Σ_t KL(p_t ‖ q_t), the mean divergence from the full cache's predictions

in nats a token. q_t is the next-token distribution behind the prompt and y_1 … y_{t−1} under the method, p_t the same
under the full cache. A record of the full cache keeps p_t for the `TOP` most likely tokens. The rest of the vocabulary
counts as one outcome, so `kl` is a lower bound of the divergence over all tokens (data processing inequality; Cover &
Thomas, Elements of Information Theory, 2.8), and close to it where the rest is unlikely.

A method that cuts or chooses rows while decoding reads the answer token by token, as it would its own. Others read it
at once, which gives the same predictions.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.generation import Answer, GenerationContext, require_logits
from kvbench.engine.joint_decoding import Session, finish_answer
from kvbench.engine.spending import spend
from kvbench.engine.timing import now

TOKENS = 16  # tokens of an answer that are read: few, because some methods read them one by one
FILL = 8  # given answers that are read together have a multiple of so many tokens
TOP = 64  # tokens of a distribution that are kept, the most likely ones
STEP = 1 << 32  # above any token id
ROUNDING = 1e-6  # rounding error of a sum of float32 probabilities


@dataclass(frozen=True, eq=False)
class ForcedTokens:
    """A `TokenChooser` that picks given tokens and keeps the logits of each step.

    Attributes:
        ids: The tokens, shape (B, n).
        logits: Where the logits go, shape (B, n, vocab).

    The number that `Context.generate` hands to `pick` holds both the step and the token, because a CUDA graph records
    `pick` once and repeats it for all steps.
    """

    ids: Tensor
    logits: Tensor

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """Return steps with token ids, shape (B, tokens); zeros behind the last of `ids` are not used."""
        count = self.ids.shape[1]
        return pad(self.ids.cpu() + STEP * torch.arange(count), (0, tokens - count))

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Return the token ids of one step, shape (B,)."""
        self.logits.index_copy_(1, draws[:1] // STEP, logits[:, None].to(self.logits.dtype))
        return draws % STEP


def predict(
    context: GenerationContext, answers: Sequence[Sequence[int]], joins: bool = False
) -> Session[tuple[Tensor, float]]:
    """Let the context read answers that are given, and forget them.

    Args:
        context: What was read so far, B samples.
        answers: Token ids for each sample, at least one for some sample; shorter ones are filled up.
        joins: Whether other contexts may read such answers at the same time. The tokens are then read one by one, and
            filled up to a multiple of `FILL`, because only answers of one length are decoded together.

    Returns:
        A session with the log-probabilities of the next token in front of each token of the answers, shape
        (B, longest, vocab), float32 or wider, and the seconds that reading took. They do not count the time in which
        answers that will be read together wait for each other. It raises a NumericalError if logits are not finite.
    """
    device = context.last_logits.device
    ids = pad_sequence([torch.tensor(tokens, dtype=torch.int64) for tokens in answers], batch_first=True).to(device)
    longest, method = ids.shape[1], context.choice.method
    joins = joins and context.weights is not None
    if joins:
        # the model's modules refuse tokens beyond the window
        room = FILL if context.window is None else context.window - context.seen - longest
        ids = pad(ids, (0, min(-longest % FILL, max(0, room))))
    begin, seconds = now(context.device), None
    with context.branch():
        if ids.shape[1] == 1:
            logits = context.last_logits[:, None]
        elif joins or method.decoding or method.attends_subset:
            logits = context.last_logits.new_empty(*ids.shape, context.last_logits.shape[1])
            answer = Answer(context, ids.shape[1], ForcedTokens(ids, logits), frozenset())
            yield from finish_answer(answer, lambda _: True)
            seconds = context.capture_ms / 1000 + context.stamps[-1]
        else:
            with spend("comparing"):
                logits = torch.cat([context.last_logits[:, None], context.extend(ids[:, :-1])], dim=1)
                require_logits(logits, context.model)
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = logits[:, :longest].to(wide).log_softmax(-1)
    return predicted, now(context.device) - begin if seconds is None else seconds


def mean_nll(predicted: Tensor, answer: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of an answer's n tokens, in nats, from log-probabilities (n, vocab)."""
    ids = torch.tensor(answer, device=predicted.device)
    return -float(predicted.gather(1, ids[:, None]).double().mean())


def pack_predictions(predicted: Tensor) -> str:
    """Pack the `TOP` most likely tokens of n distributions, shape (n, vocab), and their log-probabilities into a text.

    The text is the base64 of n rows of ids (uint32, little-endian) and then n rows of log-probabilities (float32).
    """
    values, ids = predicted.topk(min(TOP, predicted.shape[1]), dim=1)
    parts = (ids.cpu().numpy().astype("<u4"), values.cpu().numpy().astype("<f4"))
    return base64.b64encode(b"".join(part.tobytes() for part in parts)).decode()


def unpack_predictions(text: str, count: int) -> tuple[Tensor, Tensor]:
    """Unpack ids and log-probabilities (float64), both of shape (count, TOP)."""
    raw = np.frombuffer(base64.b64decode(text), "<u4").reshape(2, count, -1)
    return torch.from_numpy(raw[0].astype(np.int64)), torch.from_numpy(raw[1].copy().view("<f4").astype(np.float64))


def kl_divergence(full: str, predicted: Tensor) -> float:
    """Return the mean of KL(p ‖ q) over n tokens, in nats.

    The divergence is taken over the `TOP` tokens of p and all other tokens as one.

    Args:
        full: The full cache's predictions p, from `pack_predictions`.
        predicted: Log-probabilities q, shape (n, vocab).
    """
    ids, p = unpack_predictions(full, len(predicted))
    q = predicted.gather(1, ids.to(predicted.device)).double().cpu()
    p_rest, q_rest = (1 - log_probs.exp().sum(1) for log_probs in (p, q))
    rest = torch.where(p_rest > ROUNDING, p_rest * (p_rest / q_rest.clamp(min=ROUNDING)).clamp(min=ROUNDING).log(), 0.0)
    return max(0.0, float(((p.exp() * (p - q)).sum(1) + rest).mean()))
