"""Encode texts. A begin token is put in front where the tokenizer asks for one; nothing is appended.

Some tokenizers append an end token to every text. A model that reads it at the end of a prompt takes the text for
finished.
"""

from typing import Any

from kvbench.validation import SettingError

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


def find_ids_beyond(tokenizer: Any, embeddings: int, name: str) -> frozenset[int]:
    """Return the ids of special tokens for which the model has no embedding, such as one for padding.

    They do no harm while no prompt contains them. More embeddings than tokens do none either.

    Args:
        tokenizer: The model's tokenizer.
        embeddings: The model's vocabulary size.
        name: What the message names.

    Raises:
        SettingError: Another token has no embedding, because the tokenizer belongs to another model.
    """
    vocabulary = tokenizer.get_vocab().values()
    beyond = frozenset(token for token in vocabulary if token >= embeddings)
    known = tokenizer.added_tokens_decoder
    if any(token not in known or not known[token].special for token in beyond):
        raise SettingError(
            f"{name}: its tokenizer gives ids up to {max(vocabulary)}, but the model has embeddings for 0 to "
            f"{embeddings - 1}; the model needs its own tokenizer"
        )
    return beyond
