"""kvzip: keep the rows that the model attends to when it is asked to repeat the text (KVzip).

Source: the KVzip paper (arXiv 2505.23416); snu-mllab/KVzip, model/wrapper.py, attention/score.py; NVIDIA/kvpress,
kvzip_press.py. After the prompt the model repeats the text, one chunk of it in a read (kvbench.interfaces.repeating).
Then

    s_j = max over the queries of the read and over the group's query heads of p_j

where p is a softmax over the rows of the prefix, of the chunk and of the read itself.

KVzip+ (`norms`; NVIDIA/kvpress, kvzip_press.py, kvzip_plus_normalization; the KVzap paper, arXiv 2601.07891) compares
what row j adds to the residual stream with what is there:

    s_j = max over queries t and query heads g of p_{g,t,j}·‖W_o^g v_j‖₂ / ‖h_t‖₂

W_o^g is the output projection of query head g, v_j the value, and h_t the hidden state of query t that enters the
layer. By default kvbench takes h_t before the layer's norm, because that is the stream to which attention adds. kvpress
0.5.5 reads h_t at the attention module, behind the norm, where its length differs less between tokens (`behind_norm`).

The prefix is what stands before the user's text. It is neither repeated nor cut. With `sinks`, as in kvpress, that many
first rows of the prompt are safe instead, even if the prefix is shorter or empty. The other rows of a longer prefix
score 0, and the softmax contains those sinks that stand before the chunk. (Without a chat template the source also
repeats the tokenizer's first token.)

With scope=model the rows of all layers and heads compete for the whole budget. With scope=head every head has its
quota, or what an allocator gives it. kvbench's own choices: the prefix counts in the budget, every head keeps at least
one row, the softmax is in float32, and ties go to the lower layer, head and position. (The source keeps what is
strictly above a threshold, which may be fewer rows than asked.)
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.repeating import RepeatScores
from kvbench.interfaces.rows import mass_dtype
from kvbench.interfaces.settings import setting


@dataclass(frozen=True)
class KVzip(RepeatScores):
    """Score rows by the attention they receive while the model repeats the prompt."""

    norms: bool = setting()
    """Whether attention is weighed by the projected values and the hidden states (KVzip+)."""
    behind_norm: bool = setting()
    """Whether KVzip+ takes the hidden states behind the layer's norm."""

    @property
    def wants(self) -> tuple[str, ...]:
        return ("normed_hidden" if self.behind_norm else "hidden",) if self.norms else ()

    @property
    def weighs_values(self) -> bool:
        return self.norms

    def weigh(self, observation: Observation) -> Tensor | None:
        if not self.norms:
            return None
        hidden = observation.normed_hidden if self.behind_norm else observation.hidden
        assert hidden is not None  # the method wants it
        return 1 / hidden.to(mass_dtype(observation.queries)).norm(dim=-1)
