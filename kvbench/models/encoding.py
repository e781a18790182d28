"""Encode texts. A begin token is put in front where the tokenizer asks for one; nothing is appended.

Some tokenizers append an end token to every text. A model that reads it at the end of a prompt takes the text for
finished.
"""

from typing import Any

ANY = "a"  # a text that every tokenizer can encode


def encode_text(tokenizer: Any, text: str, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text without the tokens that the tokenizer appends.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        special: Whether the tokenizer's special tokens are put in front.

    Returns:
        The ids, and for each of them the characters of the text where it begins and ends; (0, 0) for special tokens.
    """
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids, spans = found["input_ids"], found["offset_mapping"]
    kept = len(ids) - (len(find_appended(tokenizer)) if special else 0)
    return ids[:kept], spans[:kept]


def find_appended(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer puts behind every text."""
    own, whole = (tokenizer.encode(ANY, add_special_tokens=special) for special in (False, True))
    begin = next(i for i in range(len(whole)) if whole[i : i + len(own)] == own)
    return whole[begin + len(own) :]
