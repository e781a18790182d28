"""Find the texts that a model's chat template puts around and between messages."""

from typing import Any

from kvbench.interfaces.observation import PromptEncoder
from kvbench.validation import SettingError, summarize

DAY = "26 Jul 2024"  # a prompt must not change with the date; this is Llama 3's default
TODAY = {"date_string": DAY, "strftime_now": lambda form: DAY}  # arguments of a chat template


def split_template(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template puts before and after a user's message, or ("", "") without a template.

    Raises:
        SettingError: The template does not show the message exactly once.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    parts = _render_parts(tokenizer, ("user",))
    if parts is None:
        raise SettingError("model: its chat template must show a user's message exactly once")
    return parts[0], parts[1]


def split_turns(tokenizer: Any) -> tuple[str, str, str]:
    """Return what the chat template puts around the earlier turns of a conversation.

    Returns:
        Three texts: what stands before an earlier answer, besides the text that opened it; what stands between the
        answer and the user's next message; what stands after that message. All are "" without a template.

    Raises:
        SettingError: The template shows the turns in another way than they were read.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "", ""
    (before, opening), parts = split_template(tokenizer), _render_parts(tokenizer, ("user", "assistant", "user"))
    if parts is None or parts[0] != before or not parts[1].startswith(opening):
        raise SettingError("model: its chat template must show the turns of a conversation as they were read")
    return parts[1].removeprefix(opening), parts[2], parts[3]


def _render_parts(tokenizer: Any, roles: tuple[str, ...]) -> list[str] | None:
    """Return what the chat template puts before, between and after messages of these roles.

    Returns None if it does not show each message exactly once and in order.
    """
    marks = [f"@kvbench{index}@" for index in range(len(roles))]
    for wrapped in (False, True):
        contents = [[{"type": "text", "text": mark}] if wrapped else mark for mark in marks]
        messages = [{"role": role, "content": own} for role, own in zip(roles, contents, strict=True)]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **TODAY)
        except Exception as error:  # the template is data and may fail in any way
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
    """Return how many tokens the chat template, or else the tokenizer, adds to the sample's own texts."""
    before, after = split_template(tokenizer)
    if before or after:
        return len(tokenizer.encode(before + after, add_special_tokens=False))
    return len(tokenizer.encode("", add_special_tokens=True))


def make_prompt_encoder(tokenizer: Any) -> PromptEncoder:
    """Make the encoder of a method's own words. Without a chat template a line break opens the answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return PromptEncoder(encode, tuple(encode(split_template(tokenizer)[1] or "\n")))
