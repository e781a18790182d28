"""What a model's chat template puts around and between messages."""

from typing import Any

from kvbench.interfaces.observation import PromptEncoder
from kvbench.validation import SettingError, summarize

DAY = "26 Jul 2024"  # a prompt must not change with the date: Llama 3's own default day
TODAY = {"date_string": DAY, "strftime_now": lambda form: DAY}  # for a chat template


def split_template(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message, ("", "") where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    parts = _render_parts(tokenizer, ("user",))
    if parts is None:
        raise SettingError("model: its chat template does not show a user's message exactly once")
    return parts[0], parts[1]


def split_turns(tokenizer: Any) -> tuple[str, str, str]:
    """What the chat template puts in front of an earlier answer beside what opened it, between it and the user's next
    message, and after that; "" each where there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "", ""
    (before, opening), parts = split_template(tokenizer), _render_parts(tokenizer, ("user", "assistant", "user"))
    if parts is None or parts[0] != before or not parts[1].startswith(opening):
        raise SettingError("model: its chat template does not show the turns of a conversation as they were read")
    return parts[1].removeprefix(opening), parts[2], parts[3]


def _render_parts(tokenizer: Any, roles: tuple[str, ...]) -> list[str] | None:
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


def count_template_tokens(tokenizer: Any) -> int:
    """Tokens that a prompt has beside the sample's own texts: the chat template's, or those added by the tokenizer."""
    before, after = split_template(tokenizer)
    if before or after:
        return len(tokenizer.encode(before + after, add_special_tokens=False))
    return len(tokenizer.encode("", add_special_tokens=True))


def make_prompt_encoder(tokenizer: Any) -> PromptEncoder:
    """How a method's own words become tokens; where there is no chat template a line break opens the answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return PromptEncoder(encode, tuple(encode(split_template(tokenizer)[1] or "\n")))
