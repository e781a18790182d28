"""Compare the full cache with transformers' eager attention, with a model's own weights (law 1)."""

import torch
from torch import Tensor

from kvbench.cache.policy import choose_cache
from kvbench.engine.context import PromptContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.models.transformers_port import use_attention
from kvbench.validation import SettingError

BLOCK = 128  # tokens that are read at once
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' spread; rounding of other dtypes is larger
ROUNDED = 0.1


@torch.no_grad()
def check_full_cache(model: torch.nn.Module, ids: Tensor) -> float:
    """Check that the full cache gives the logits of one pass of transformers' eager attention without a cache.

    A token counts by the mean square of its logits' differences, and a text by the median of its tokens: experts that
    rounding exchanges change few tokens, another attention changes all.

    Args:
        model: A supported transformers model.
        ids: Token ids, (1, n).

    Returns:
        The difference, as a part of the logits' spread.

    Raises:
        SettingError: It is larger than what rounding explains.
    """
    with use_attention(model, "eager"):
        truth = model(input_ids=ids, use_cache=False).logits[0].float()
    blocks: list[Tensor] = []
    policy = choose_cache(Method("full"), Allocator("uniform"), Codec("raw"))
    context = PromptContext(model, policy, Budget(1.0), BLOCK, (0,), compile=False)
    context.prefill(ids, lambda logits: blocks.append(logits[0].float()))
    errors = (torch.cat(blocks) - truth).square().mean(-1).sqrt() / truth.std()
    error, limit = errors.median().nan_to_num(torch.inf).item(), LIMITS.get(next(model.parameters()).dtype, ROUNDED)
    if error > limit:
        raise SettingError(
            f"model: with its weights, the full cache's logits differ by {error:.1e} of their spread from those of "
            f"transformers' eager attention, over {ids.shape[1]} tokens; kvbench cannot read this model"
        )
    return error
