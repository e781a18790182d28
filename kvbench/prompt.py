"""From a sample's texts to token ids, split where the context ends.

The prompt is tokenised as one text, so that both values of `question` read the same tokens; a token that straddles the
end of the context belongs to the question.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from kvbench.method import Words
from kvbench.settings import SettingError
from kvbench.task import Sample


@dataclass(frozen=True)
class Prompt:
    """Token ids of the context and of what follows it (question, answer prefix)."""

    context: tuple[int, ...]
    rest: tuple[int, ...]
    prefix: int = 0  # tokens in front of the sample's own text

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.rest

    def hash(self) -> str:
        """Of all token ids and the split."""
        return hashlib.sha256(repr((self.context, self.rest)).encode()).hexdigest()[:16]


def template(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message, ("", "") where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    mark, day = "@kvbench@", "26 Jul 2024"  # a prompt must not change with the date: Llama 3's own default day
    fixed = {"date_string": day, "strftime_now": lambda form: day}
    for content in (mark, [{"type": "text", "text": mark}]):
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **fixed)
        if text.count(mark) == 1:
            before, _, after = text.partition(mark)
            return before, after
    raise SettingError("model: its chat template does not show a user's message exactly once")


def template_tokens(tokenizer: Any) -> int:
    """Tokens that a prompt has beside the sample's own texts: the chat template's, or those added by the tokenizer."""
    before, after = template(tokenizer)
    if before or after:
        return len(tokenizer.encode(before + after, add_special_tokens=False))
    return len(tokenizer.encode("", add_special_tokens=True))


def encode(tokenizer: Any, sample: Sample) -> Prompt:
    """The sample's prompt for this tokenizer; the chat template brings its own special tokens."""
    before, after = template(tokenizer) if sample.chat else ("", "")
    chat = bool(before or after)
    text = before + sample.context + sample.question + after + sample.answer_prefix
    found = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
    end = len(before) + len(sample.context)
    # special tokens in front have the empty span (0, 0); the first real span that reaches past `end` opens the rest
    split = next((i for i, (_, stop) in enumerate(found["offset_mapping"]) if stop > end), len(found["input_ids"]))
    ids = found["input_ids"]
    spans = found["offset_mapping"]
    prefix = next((i for i, (_, stop) in enumerate(spans) if stop > len(before)), len(ids))
    return Prompt(tuple(ids[:split]), tuple(ids[split:]), min(prefix, split))


def words(tokenizer: Any) -> Words:
    """How a method's own words become tokens; where there is no chat template a line break opens the answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Words(encode, tuple(encode(template(tokenizer)[1] or "\n")))
