"""Leaving out the middle of a prompt that is too long, as LongBench does (THUDM/LongBench 2e00731, LongBench/pred.py).

The prompt is tokenised, special tokens included; of more than `most` tokens the first and the last most // 2 are
decoded, without special tokens, and joined. Then the prompt is split anew:

* where the end of the shortened prompt is still the whole question, there;
* where it is not (the question itself reaches into the middle, or decoding does not give it back to the letter), after
  the last kept token that the prompt has in common with its context.

Joined again, the two are the shortened prompt to the byte.
"""

from os.path import commonprefix

from kvbench.interfaces.task import Tokenizer

NOTHING, CONTEXT, QUESTION = "nothing", "context", "question"  # of what something was left out


def truncate_middle(tokenizer: Tokenizer, context: str, question: str, most: int) -> tuple[str, str, str]:
    """(context, question, of what something was left out) of a prompt of at most `most` tokens, at least 2."""
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
