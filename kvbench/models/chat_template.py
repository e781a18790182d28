"""Find the texts that a model's chat template puts around and between messages."""

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from types import MappingProxyType

from kvbench.config.catalogue import TimeLimitReached, limit_seconds
from kvbench.interfaces.observation import PromptEncoder
from kvbench.models.encoding import FastTokenizer, encode_text
from kvbench.validation import SettingError, summarize

DAY = "26 Jul 2024"  # a prompt must not change with the date; this is Llama 3's default
TODAY = {"date_string": DAY, "strftime_now": lambda form: DAY}  # arguments of a chat template
TEMPLATE_SECONDS = 5  # limit for rendering a template; a usual one takes a millisecond
THOUGHT_END = "</think>"
SYSTEM_ROLE = (
    "{{% set messages = [{{'role': 'system', 'content': {text} if messages[0].content is string else "
    "[{{'type': 'text', 'text': {text}}}]}}] + messages %}}\n"
)
SYSTEM_IN_MESSAGE = (
    "{{% set messages = [{{'role': messages[0].role, 'content': ({spaced} if messages[0].content is string else "
    "[{{'type': 'text', 'text': {spaced}}}]) + messages[0].content}}] + messages[1:] %}}\n"
)
TURNS = ("user", "assistant", "user")  # roles of a conversation that waits for its second answer


def settle_template(tokenizer: FastTokenizer, system: str | None, thinking: str | None) -> tuple[FastTokenizer, bool]:
    """Return a tokenizer whose chat template begins with a system prompt and thinks, or does not.

    Assignments in front of the template do that, so that whoever renders it need not know.

    Args:
        tokenizer: The model's tokenizer. It does not change.
        system: The system prompt, or None. Where the template has no system role, the first message begins with it.
        thinking: "on" and "off" set `enable_thinking`; None leaves it to the template.

    Returns:
        The tokenizer, and whether the system prompt is part of the first message.

    Raises:
        SettingError: There is no template, it does not know `enable_thinking`, or it shows no system prompt.
    """
    setting = f"model.thinking={thinking}" if thinking else f"task.system={system}"
    if system is None and thinking is None:
        return tokenizer, False
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError(f"{setting}: the model has no chat template; null")
    split_template(tokenizer)  # refuses what cannot be rendered
    template, settled = tokenizer.get_chat_template(), copy(tokenizer)
    if thinking:
        if "enable_thinking" not in template:
            raise SettingError(f"{setting}: the model's chat template does not know enable_thinking; null")
        template = settled.chat_template = (
            f"{{% set enable_thinking = {'true' if thinking == 'on' else 'false'} %}}\n{template}"
        )
    if system is None:
        return settled, False
    for merged, form in ((False, SYSTEM_ROLE), (True, SYSTEM_IN_MESSAGE)):
        settled.chat_template = form.format(text=repr(system), spaced=repr(f"{system}\n\n")) + template
        with suppress(SettingError):  # many templates without the role raise an error
            if system.strip() in split_template(settled)[0]:
                return settled, merged
    raise SettingError(f"{setting}: the model's chat template does not show it; null")


def split_template(tokenizer: FastTokenizer) -> tuple[str, str]:
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


def split_turns(tokenizer: FastTokenizer) -> tuple[str, str, str, str]:
    """Return what the chat template puts around the earlier turns of a conversation.

    Returns:
        Four texts: what stands before an earlier answer, besides the text that opened it; what stands between the
        answer and the user's next message; what stands after that message; and the end of the text that opens an
        answer if the template leaves it out before an earlier answer, which only a finished thought may be. All are ""
        without a template.

    Raises:
        SettingError: The template shows the turns in another way than they were read.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "", "", ""
    (before, opening), parts = split_template(tokenizer), _render_parts(tokenizer, TURNS)
    if parts is not None and parts[0] == before:
        if parts[1].startswith(opening):
            return parts[1].removeprefix(opening), parts[2], parts[3], ""
        thought = opening.removeprefix(parts[1])
        if thought != opening and THOUGHT_END in thought:
            return "", parts[2], parts[3], thought
    raise SettingError("model: its chat template must show the turns of a conversation as they were read")


def show_message(tokenizer: FastTokenizer, role: str, text: str) -> str:
    """Return a message as the chat template shows it. Many templates strip spaces and line breaks from its ends.

    Args:
        tokenizer: The model's tokenizer.
        role: "user" or "assistant".
        text: The message.

    Raises:
        SettingError: The template shows the ends of the message in another way.
    """
    core = text.strip()
    if core == text or not getattr(tokenizer, "chat_template", None):
        return text
    lead, tail = (text, "") if not core else text.split(core)
    roles = TURNS if role == "assistant" else ("user",)
    place = roles.index(role)
    parts = [_render_parts(tokenizer, roles, around) for around in ({}, {place: (lead, tail)})]
    if None not in parts:
        (before, after), (own_before, own_after) = ((texts or [])[place : place + 2] for texts in parts)
        if own_before.startswith(before) and own_after.endswith(after):
            return own_before.removeprefix(before) + core + own_after.removesuffix(after)
    raise SettingError(f"model: its chat template must show a message of the {role}, at most without its outer spaces")


def find_end(tokenizer: FastTokenizer) -> int | None:
    """Return the id of the token that the chat template writes behind an answer; None if it writes none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    with suppress(SettingError):  # a template of single questions cannot show an answer
        parts = _render_parts(tokenizer, ("user", "assistant"), opens=False)
        behind = parts[-1].lstrip() if parts else ""
        known = {added.content: token for token, added in tokenizer.added_tokens_decoder.items()}
        matches = [content for content in known if behind.startswith(content)]
        return known[max(matches, key=len)] if matches else None
    return None


def _render_parts(
    tokenizer: FastTokenizer,
    roles: tuple[str, ...],
    around: Mapping[int, tuple[str, str]] = MappingProxyType({}),
    opens: bool = True,
) -> list[str] | None:
    """Return what the chat template puts before, between and after messages of these roles.

    Args:
        tokenizer: The model's tokenizer.
        roles: The messages' roles.
        around: For the number of a message, what stands before and after its text, as part of the message.
        opens: Whether the template opens an answer at the end.

    Returns:
        One text more than there are messages; None if the template does not show each message exactly once, in order.
    """
    marks = [f"@kvbench{index}@" for index in range(len(roles))]
    for wrapped in (False, True):
        texts = [mark.join(around.get(index, ("", ""))) for index, mark in enumerate(marks)]
        contents = [[{"type": "text", "text": text}] if wrapped else text for text in texts]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            with limit_seconds(TEMPLATE_SECONDS):  # no limit in other threads; the main one encodes the first sample
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens, **TODAY)
        except TimeLimitReached:
            raise SettingError(f"model: its chat template takes longer than {TEMPLATE_SECONDS} s") from None
        except Exception as error:  # the template is data and may fail in any way
            raise SettingError(f"model: its chat template cannot be rendered ({summarize(error)})") from None
        if all(text.count(mark) == 1 for mark in marks):
            parts = []
            for mark in marks:
                before, shown, text = text.partition(mark)
                if not shown:
                    return None
                parts.append(before)
            return [*parts, text]
    return None


def count_template_tokens(tokenizer: FastTokenizer) -> int:
    """Return how many tokens the chat template, or else the tokenizer, adds to the sample's own texts."""
    before, after = split_template(tokenizer)
    if before or after:
        return len(tokenizer.encode(before + after, add_special_tokens=False))
    return len(encode_text(tokenizer, "")[0])


def make_prompt_encoder(tokenizer: FastTokenizer) -> PromptEncoder:
    """Make the encoder of a method's own words. Without a chat template a line break opens the answer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return PromptEncoder(encode, tuple(encode(split_template(tokenizer)[1] or "\n")))
