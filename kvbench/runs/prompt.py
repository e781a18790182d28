"""Turn a sample's texts into token ids, split where the context ends.

The prompt is tokenised as one text, so that both values of `question` read the same tokens. A token that straddles the
end of the context belongs to the question.

The messages are those that the chat template shows: many templates strip spaces and line breaks from their ends.

A later turn of a conversation does not change the tokens that were read before. Its ids are those that the tokenizer
gives for the whole conversation, behind the ones that were read. If the whole begins with other ids, because a token
would span the beginning of an answer or because the template leaves out a thought that it opened the answer with, only
what follows is read, and `Prompt.retokenized` counts the differences. Behind an answer of the model's own, whose ids
stay as they were generated, come the ids of what the template writes there.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import show_message, split_template, split_turns
from kvbench.models.encoding import FastTokenizer, encode_text
from kvbench.threads import map_in_threads

# Texts that take the place of an answer. The first one that shares no token with the text behind it is used. The empty
# one never shares a token.
STAND_INS = ("x", ".", "\n", "0", "")


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
        retokenized: How many tokens that were read before this turn the tokenizer does not give for the whole
            conversation.
    """

    context: tuple[int, ...]
    rest: tuple[int, ...]
    prefix: int = 0
    earlier: tuple[tuple[int, ...], ...] = ()
    unknown: int = 0
    ends: Sequence[int] = ()
    retokenized: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids that are known before the model answers. Its own answers to earlier turns are not."""
        return sum((self.context, *self.earlier, self.rest), ())

    def hash(self) -> str:
        """Hash all token ids and the split."""
        pieces = (self.context, self.rest, *((self.earlier,) if self.earlier else ()))
        return hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]


def encode_all(tokenizer: FastTokenizer, samples: Iterable[Sample]) -> dict[str, tuple[Sample, Prompt]]:
    """Encode samples. Return sample and prompt by uid, in the samples' order; ValueError if a uid occurs twice."""
    encoded: dict[str, tuple[Sample, Prompt]] = {}

    def encode_turns(turns: Sequence[Sample]) -> list[tuple[Sample, Prompt]]:
        return list(zip(turns, _encode_turns(tokenizer, turns), strict=True))

    for sample, prompt in chain.from_iterable(map_in_threads(encode_turns, _group_turns(samples))):
        if sample.uid in encoded:
            raise ValueError(f"{sample.uid}: two samples with this uid")
        encoded[sample.uid] = sample, prompt
    return encoded


def _group_turns(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples of each conversation together, and every other sample alone."""
    turns: list[Sample] = []
    for sample in samples:
        if turns and not (sample.conversation and sample.conversation == turns[-1].conversation):
            yield turns
            turns = []
        turns.append(sample)
    if turns:
        yield turns


def encode(tokenizer: FastTokenizer, sample: Sample) -> Prompt:
    """Encode a sample that follows no other."""
    [prompt] = _encode_turns(tokenizer, [sample])
    return prompt


@dataclass(frozen=True)
class _Read:
    """The text of a conversation that was read.

    If the model has given answers of its own, whose text is not known, it begins with a stand-in for the last one.

    Attributes:
        text: The text.
        shown: The same as the chat template shows it to later turns.
        ids: The ids of `text` as they were read.
        special: Whether the tokenizer's special tokens stand in front.
    """

    text: str
    shown: str
    ids: tuple[int, ...]
    special: bool


def _encode_turns(tokenizer: FastTokenizer, turns: Sequence[Sample]) -> Iterator[Prompt]:
    """Encode the turns of a conversation, or a single sample."""
    read, prompt = _encode_opening(tokenizer, turns[0])
    yield prompt
    before_own = 0  # `retokenized` of the turns before the model's last own answer, which `read` no longer has
    for before, sample in pairwise(turns):
        lead, between, closing, thought = split_turns(tokenizer) if sample.chat else ("", "", "", "")
        asked = show_message(tokenizer, "user", sample.question) if sample.chat else sample.question
        text, changed, unknown = between + asked + closing + sample.answer_prefix, 0, prompt.unknown
        if before.said is None:
            unknown, before_own = unknown + before.max_new_tokens, prompt.retokenized
            read, rest = _encode_behind_own(tokenizer, text)
        else:
            text = lead + (show_message(tokenizer, "assistant", before.said) if sample.chat else before.said) + text
            shown = read.shown
            if thought:
                shown = shown.removesuffix(before.answer_prefix).removesuffix(thought) + before.answer_prefix
            read, rest, changed = _encode_behind(tokenizer, replace(read, shown=shown), text)
        earlier = (*prompt.earlier, prompt.rest)
        prompt = Prompt(prompt.context, rest, prompt.prefix, earlier, unknown, prompt.ends, before_own + changed)
        yield prompt


def _encode_behind(tokenizer: FastTokenizer, read: _Read, text: str) -> tuple[_Read, tuple[int, ...], int]:
    """Encode a text that follows what was read.

    The ids are those that the whole has behind the ones that were read. If the tokenizer gives other ids for what was
    read, they are the whole's ids from the beginning of the text on, or, if a token of the whole spans this place,
    those that the text has behind a stand-in.

    Returns:
        What is read then, the ids of the text, and how many of the ids read before are not the whole's.
    """
    ids, spans = encode_text(tokenizer, read.text + text, read.special)
    kept, border = len(read.ids), len(read.text)
    if tuple(ids[:kept]) == read.ids:
        rest = tuple(ids[kept:])
    else:
        first = next((place for place, (begin, end) in enumerate(spans) if end > border), len(spans))
        parted = first < len(spans) and spans[first][0] >= border
        rest = tuple(ids[first:]) if parted else _encode_behind_own(tokenizer, text)[1]
    after = _Read(read.text + text, read.shown + text, read.ids + rest, read.special)
    whole = ids if after.shown == after.text else encode_text(tokenizer, after.shown, read.special)[0]
    if tuple(whole[:kept]) == read.ids:
        return after, rest, 0
    others = Counter(read.ids) - Counter(whole[: len(whole) - len(rest)])
    return after, rest, max(1, others.total())


def _encode_behind_own(tokenizer: FastTokenizer, text: str) -> tuple[_Read, tuple[int, ...]]:
    """Encode a text that follows an answer of the model, whatever that is.

    A stand-in takes the answer's place, because some tokenizers begin a text with a token that never follows another.

    Returns:
        The stand-in and the text as what was read, and the ids of the text.
    """
    for stand_in in STAND_INS:
        ids, joint_ids = (tokenizer.encode(one, add_special_tokens=False) for one in (stand_in, stand_in + text))
        if joint_ids[: len(ids)] == ids:
            break
    return _Read(stand_in + text, stand_in + text, tuple(joint_ids), False), tuple(joint_ids[len(ids) :])


def _encode_opening(tokenizer: FastTokenizer, sample: Sample) -> tuple[_Read, Prompt]:
    """Encode a sample that follows no other. The chat template brings its own special tokens.

    A solved example gets the whole template too, with nothing after its answer, as NVIDIA/RULER writes it
    (scripts/data/prepare.py and common_words_extraction.py).
    """
    before, after = split_template(tokenizer) if sample.chat else ("", "")
    turns = tuple(zip(sample.solved, (after, before), strict=False)) if before or after else ()
    context = sample.context
    for place, template_text in reversed(turns):
        context = context[:place] + template_text + context[place:]
    message = context + sample.question
    shown = show_message(tokenizer, "user", message) if sample.chat else message
    cut = len(message.rstrip()) - len(shown.rstrip())  # characters that the template strips from the beginning
    text, begin, special = before + shown + after + sample.answer_prefix, len(before), not (before or after)
    end = min(max(len(context) - cut, 0), len(shown))
    prompt = encode_parts(tokenizer, text, begin, begin + end, special)
    if cut:
        prompt = replace(prompt, ends=array("I", (end + cut for end in prompt.ends)))
    for place, template_text in turns:
        ends = (end if end <= place else max(place, end - len(template_text)) for end in prompt.ends)
        prompt = replace(prompt, ends=array("I", ends))
    return _Read(text, text, prompt.ids, special), prompt


def encode_parts(tokenizer: FastTokenizer, text: str, begin: int, end: int, special: bool) -> Prompt:
    """Tokenize a whole prompt and split it at the end of its context.

    Args:
        tokenizer: The model's tokenizer, a fast one.
        text: The prompt with its chat template.
        begin: The character at which the sample's own text begins.
        end: The character at which the context ends.
        special: Whether the tokenizer's special tokens are added.
    """
    ids, spans = encode_text(tokenizer, text, special)
    stops = np.array([stop for _, stop in spans], dtype=np.uint32)

    def find_first(place: int) -> int:
        """Return the first token that reaches past a character. Special tokens in front have the empty span (0, 0)."""
        behind = stops > place
        return int(behind.argmax()) if behind.any() else len(ids)

    prefix, split = find_first(begin), find_first(end)
    ends = array("I")  # an array, because a long prompt has many
    ends.frombytes((np.maximum(stops[:split], begin) - np.uint32(begin)).tobytes())
    return Prompt(tuple(ids[:split]), tuple(ids[split:]), min(prefix, split), ends=ends)


def batch_key(sample: Sample, prompt: Prompt) -> tuple[Hashable, ...]:
    """Return what samples of one batch have in common."""
    ends = (sample.max_new_tokens, sample.min_new_tokens, sample.ends, sample.until)
    return len(prompt.context), len(prompt.rest), prompt.prefix, *ends
