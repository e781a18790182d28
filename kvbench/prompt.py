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

from kvbench.observation import Words
from kvbench.settings import SettingError, summarize
from kvbench.task import Sample

DAY = "26 Jul 2024"  # a prompt must not change with the date: Llama 3's own default day
TODAY = {"date_string": DAY, "strftime_now": lambda form: DAY}  # for a chat template


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


def template(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message, ("", "") where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    parts = _parts(tokenizer, ("user",))
    if parts is None:
        raise SettingError("model: its chat template does not show a user's message exactly once")
    return parts[0], parts[1]


def between_turns(tokenizer: Any) -> tuple[str, str, str]:
    """What the chat template puts in front of an earlier answer beside what opened it, between it and the user's next
    message, and after that; "" each where there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "", ""
    (before, opening), parts = template(tokenizer), _parts(tokenizer, ("user", "assistant", "user"))
    if parts is None or parts[0] != before or not parts[1].startswith(opening):
        raise SettingError("model: its chat template does not show the turns of a conversation as they were read")
    return parts[1].removeprefix(opening), parts[2], parts[3]


def _parts(tokenizer: Any, roles: tuple[str, ...]) -> list[str] | None:
    """What the chat template puts before, between and after messages of these roles; None where it does not show each
    once and in order.
    """
    marks = [f"@kvbench{index}@" for index in range(len(roles))]
    for wrapped in (False, True):
        contents = [[{"type": "text", "text": mark}] if wrapped else mark for mark in marks]
        messages = [{"role": role, "content": own} for role, own in zip(roles, contents, strict=True)]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **TODAY)
        except Exception as error:  # the template is data, rendered in a sandbox: it may fail in any way
            raise SettingError(f"model: its chat template cannot be rendered ({summarize(error)})") from None
        if all(text.count(mark) == 1 for mark in marks):
            parts = []
            for mark in marks:
                before, found, text = text.partition(mark)
                if not found:
                    return None
                parts.append(before)
            return [*parts, text]
    return None


def template_tokens(tokenizer: Any) -> int:
    """Tokens that a prompt has beside the sample's own texts: the chat template's, or those added by the tokenizer."""
    before, after = template(tokenizer)
    if before or after:
        return len(tokenizer.encode(before + after, add_special_tokens=False))
    return len(tokenizer.encode("", add_special_tokens=True))


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
    lead, opening, closing = between_turns(tokenizer) if sample.chat else ("", "", "")
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
    before, after = template(tokenizer) if sample.chat else ("", "")
    turns = tuple(zip(sample.solved, (after, before), strict=False)) if before or after else ()
    context = sample.context
    for place, own in reversed(turns):
        context = context[:place] + own + context[place:]
    text = before + context + sample.question + after + sample.answer_prefix
    begin = len(before)
    prompt = divide(tokenizer, text, begin, begin + len(context), special=not (before or after))
    for place, own in turns:
        ends = (end if end <= place else max(place, end - len(own)) for end in prompt.ends)
        prompt = replace(prompt, ends=array("I", ends))
    return prompt


def divide(tokenizer: Any, text: str, begin: int, end: int, special: bool) -> Prompt:
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


def words(tokenizer: Any) -> Words:
    """How a method's own words become tokens; where there is no chat template a line break opens the answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Words(encode, tuple(encode(template(tokenizer)[1] or "\n")))
