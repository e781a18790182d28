"""From a sample's texts to token ids, split where the context ends.

The prompt is tokenised as one text, so that both values of `question` read the same tokens; a token that straddles the
end of the context belongs to the question. What was read stays as it was: what a later turn of a conversation adds (the
answer before, where the task gives it, and all from there to the next answer) is one text of its own. So its ids are
those of the chat template on the whole conversation but for two things: no token reaches across the beginning of an
answer, and where the template strips a message's spaces they stay.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import split_template, split_turns


@dataclass(frozen=True)
class Prompt:
    """Token ids of the context and of what follows it (question, answer prefix). Of a later turn of a conversation what
    the turns before read stands between as `earlier`, and `rest` begins with the answer before if the task gives one.
    """

    context: tuple[int, ...]
    rest: tuple[int, ...]
    prefix: int = 0  # tokens in front of the sample's own text
    earlier: tuple[tuple[int, ...], ...] = ()  # the `rest` of each turn before
    unknown: int = 0  # tokens that own answers of earlier turns have at most
    ends: Sequence[int] = ()  # of each token of the context: characters of the sample's context up to its end

    @property
    def ids(self) -> tuple[int, ...]:
        """All that is known of the prompt before an answer is: own answers of earlier turns are not."""
        return sum((self.context, *self.earlier, self.rest), ())

    def hash(self) -> str:
        """Of all token ids and the split."""
        pieces = (self.context, self.rest, *((self.earlier,) if self.earlier else ()))
        return hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]


def encode_all(tokenizer: Any, samples: Iterable[Sample]) -> dict[str, tuple[Sample, Prompt]]:
    """Sample and prompt by uid, in the samples' order."""
    found: dict[str, tuple[Sample, Prompt]] = {}
    last: tuple[Sample, Prompt] | None = None
    for sample in samples:
        if sample.uid in found:
            raise ValueError(f"{sample.uid}: two samples with this uid")
        if last is not None and sample.conversation and sample.conversation == last[0].conversation:
            prompt = _next_turn(tokenizer, sample, *last)
        else:
            prompt = encode(tokenizer, sample)
        last = found[sample.uid] = (sample, prompt)
    return found


def _next_turn(tokenizer: Any, sample: Sample, before: Sample, prompt: Prompt) -> Prompt:
    """The prompt of the turn that follows `before`, whose own is `prompt`."""
    lead, opening, closing = split_turns(tokenizer) if sample.chat else ("", "", "")
    said = "" if before.said is None else lead + before.said
    text = said + opening + sample.question + closing + sample.answer_prefix
    rest = tuple(tokenizer.encode(text, add_special_tokens=False))
    unknown = prompt.unknown + (before.max_new_tokens if before.said is None else 0)
    return Prompt(prompt.context, rest, prompt.prefix, (*prompt.earlier, prompt.rest), unknown, prompt.ends)


def encode(tokenizer: Any, sample: Sample) -> Prompt:
    """The sample's prompt for this tokenizer; the chat template brings its own special tokens.

    Around a solved example stands the whole template a second time, with nothing after the example's answer, as
    NVIDIA/RULER writes it (scripts/data/prepare.py and common_words_extraction.py).
    """
    before, after = split_template(tokenizer) if sample.chat else ("", "")
    turns = tuple(zip(sample.solved, (after, before), strict=False)) if before or after else ()
    context = sample.context
    for place, own in reversed(turns):
        context = context[:place] + own + context[place:]
    text = before + context + sample.question + after + sample.answer_prefix
    begin = len(before)
    prompt = encode_parts(tokenizer, text, begin, begin + len(context), special=not (before or after))
    for place, own in turns:
        ends = (end if end <= place else max(place, end - len(own)) for end in prompt.ends)
        prompt = replace(prompt, ends=array("I", ends))
    return prompt


def encode_parts(tokenizer: Any, text: str, begin: int, end: int, special: bool) -> Prompt:
    """The tokens of a whole prompt, whose own text begins at the character `begin` and whose context ends at `end`;
    `special`: with the tokenizer's special tokens.
    """
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    # special tokens in front have the empty span (0, 0); the first real span that reaches past `end` opens the rest
    split = next((i for i, (_, stop) in enumerate(found["offset_mapping"]) if stop > end), len(found["input_ids"]))
    ids = found["input_ids"]
    spans = found["offset_mapping"]
    prefix = next((i for i, (_, stop) in enumerate(spans) if stop > begin), len(ids))
    ends = array("I", (max(0, stop - begin) for _, stop in spans[:split]))  # a long prompt has many
    return Prompt(tuple(ids[:split]), tuple(ids[split:]), min(prefix, split), ends=ends)
