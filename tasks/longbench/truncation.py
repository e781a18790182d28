"""Leave out the middle of a prompt that is too long, as LongBench does (THUDM/LongBench 2e00731, LongBench/pred.py).

The prompt is tokenised with special tokens. If it has more than `most` tokens, the first and the last most // 2 of them
are decoded without special tokens and joined. Then the shortened prompt is split into context and question again:

* If it still ends with the whole question, it is split there.
* If not (the question reaches into the middle, or decoding changes its text), it is split after the last kept token
  that the prompt has in common with its context.

Context and question together are the shortened prompt to the byte.
"""

from os.path import commonprefix

from kvbench.interfaces.task import Tokenizer

NOTHING, CONTEXT, QUESTION = "nothing", "context", "question"  # the part that was shortened


def truncate_middle(tokenizer: Tokenizer, context: str, question: str, most: int) -> tuple[str, str, str]:
    """Shorten a prompt.

    Args:
        tokenizer: The model's tokenizer.
        context: The prompt's context.
        question: The text that follows the context.
        most: The most tokens of the prompt, at least 2.

    Returns:
        The context, the question, and the part that was shortened: NOTHING, CONTEXT or QUESTION.
    """
    ids = tokenizer.encode(context + question)
    if len(ids) <= most:
        return context, question, NOTHING

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    half, last = most // 2, len(ids) - most // 2
    tail = text(ids[last:])
    kept = text(ids[:half]) + tail
    if tail.endswith(question):
        place = len(kept) - len(question)
        return kept[:place], kept[place:], CONTEXT
    ends = len(commonprefix([ids, tokenizer.encode(context)]))
    place = len(commonprefix([kept, text(ids[: min(ends, half)]) + text(ids[last:ends])]))
    return kept[:place], kept[place:], CONTEXT if ends >= last else QUESTION
