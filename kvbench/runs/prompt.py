"""Turn a sample's texts into token ids, split where the context ends.

The prompt is tokenised as one text, so that both values of `question` read the same tokens. A token that straddles the
end of the context belongs to the question.

A later turn of a conversation does not change the tokens that were read before. The text that it adds (the answer
before it, if the task gives one, and everything up to the next answer) is tokenised by itself. Its ids are therefore
those of the chat template on the whole conversation, with two exceptions: no token spans the beginning of an answer,
and spaces stay that the template would strip from a message.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import split_template, split_turns
from kvbench.threads import map_in_threads


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt.

    Attributes:
        context: Ids of the context.
        rest: Ids of what follows it: question and answer prefix. In a later turn of a conversation it begins with the
            answer before, if the task gives one.
        prefix: Number of tokens before the sample's own text.
        earlier: The `rest` of each earlier turn.
        unknown: The most tokens that the model's own answers to earlier turns can have.
        ends: For each token of the context, the characters of the sample's context up to the token's end.
    """

    context: tuple[int, ...]
    rest: tuple[int, ...]
    prefix: int = 0
    earlier: tuple[tuple[int, ...], ...] = ()
    unknown: int = 0
    ends: Sequence[int] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids that are known before the model answers. Its own answers to earlier turns are not."""
        return sum((self.context, *self.earlier, self.rest), ())

    def hash(self) -> str:
        """Hash all token ids and the split."""
        pieces = (self.context, self.rest, *((self.earlier,) if self.earlier else ()))
        return hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]


def encode_all(tokenizer: Any, samples: Iterable[Sample]) -> dict[str, tuple[Sample, Prompt]]:
    """Encode samples. Return sample and prompt by uid, in the samples' order; ValueError if a uid occurs twice."""
    found: dict[str, tuple[Sample, Prompt]] = {}
    last: tuple[Sample, Prompt] | None = None

    def add_previous() -> Iterator[tuple[Sample | None, Sample]]:
        before = None
        for sample in samples:
            yield before, sample
            before = sample

    def encode_opening(pair: tuple[Sample | None, Sample]) -> tuple[Sample, Prompt | None]:
        before, sample = pair
        follows = before is not None and sample.conversation and sample.conversation == before.conversation
        return sample, None if follows else encode(tokenizer, sample)

    for sample, opening in map_in_threads(encode_opening, add_previous()):
        if sample.uid in found:
            raise ValueError(f"{sample.uid}: two samples with this uid")
        if opening is None:
            assert last is not None
            opening = _next_turn(tokenizer, sample, *last)
        last = found[sample.uid] = (sample, opening)
    return found


def _next_turn(tokenizer: Any, sample: Sample, before: Sample, prompt: Prompt) -> Prompt:
    """Encode the turn that follows the sample `before` with its `prompt`."""
    lead, opening, closing = split_turns(tokenizer) if sample.chat else ("", "", "")
    said = "" if before.said is None else lead + before.said
    text = said + opening + sample.question + closing + sample.answer_prefix
    rest = tuple(tokenizer.encode(text, add_special_tokens=False))
    unknown = prompt.unknown + (before.max_new_tokens if before.said is None else 0)
    return Prompt(prompt.context, rest, prompt.prefix, (*prompt.earlier, prompt.rest), unknown, prompt.ends)


def encode(tokenizer: Any, sample: Sample) -> Prompt:
    """Encode a sample for a tokenizer. The chat template brings its own special tokens.

    A solved example gets the whole template too, with nothing after its answer, as NVIDIA/RULER writes it
    (scripts/data/prepare.py and common_words_extraction.py).
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
    """Tokenize a whole prompt and split it at the end of its context.

    Args:
        tokenizer: The model's tokenizer, a fast one.
        text: The prompt with its chat template.
        begin: The character at which the sample's own text begins.
        end: The character at which the context ends.
        special: Whether the tokenizer's special tokens are added.
    """
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids, stops = found["input_ids"], np.array([stop for _, stop in found["offset_mapping"]], dtype=np.uint32)

    def find_first(place: int) -> int:
        """Return the first token that reaches past a character. Special tokens in front have the empty span (0, 0)."""
        behind = stops > place
        return int(behind.argmax()) if behind.any() else len(ids)

    prefix, split = find_first(begin), find_first(end)
    ends = array("I")  # an array, because a long prompt has many
    ends.frombytes((np.maximum(stops[:split], begin) - np.uint32(begin)).tobytes())
    return Prompt(tuple(ids[:split]), tuple(ids[split:]), min(prefix, split), ends=ends)


def batch_key(sample: Sample, prompt: Prompt) -> tuple[Any, ...]:
    """Return what samples of one batch have in common."""
    ends = (sample.max_new_tokens, sample.min_new_tokens, sample.ends, sample.until)
    return len(prompt.context), len(prompt.rest), prompt.prefix, *ends
