"""Encode texts. A begin token is put in front where the tokenizer asks for one; nothing is appended.

Some tokenizers append an end token to every text. A model that reads it at the end of a prompt takes the text for
finished.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvbench.interfaces.task import Tokenizer
from kvbench.validation import SettingError

ANY = "a"  # a text that every tokenizer can encode
PART = "\ufffd"  # what a tokenizer shows of tokens that end within a character
MOST_PARTS = 4  # tokens that one character may need: a byte each


class AddedToken(Protocol):
    """A token that a tokenizer has beside those of its vocabulary's model."""

    content: str
    special: bool


class FastTokenizer(Tokenizer, Protocol):
    """The part of a fast Hugging Face tokenizer that kvbench uses."""

    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, AddedToken]

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., return_offsets_mapping: bool = ..., verbose: bool = ...
    ) -> Mapping[str, Any]: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]], **options: object) -> str: ...

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool = ...) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str: ...

    def get_chat_template(self) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


def encode_text(tokenizer: FastTokenizer, text: str, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text without the tokens that the tokenizer appends.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        special: Whether the tokenizer's special tokens are put in front.

    Returns:
        The ids, and for each of them the characters of the text where it begins and ends; (0, 0) for special tokens.
    """
    encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids, spans = encoding["input_ids"], encoding["offset_mapping"]
    kept = len(ids) - (len(find_appended(tokenizer)) if special else 0)
    return ids[:kept], spans[:kept]


def find_appended(tokenizer: FastTokenizer) -> list[int]:
    """Return the ids that the tokenizer puts behind every text."""
    plain, whole = (tokenizer.encode(ANY, add_special_tokens=special) for special in (False, True))
    begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[begin + len(plain) :]


def find_ids_beyond(tokenizer: FastTokenizer, embeddings: int, name: str) -> frozenset[int]:
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


def find_text(tokenizer: FastTokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return the positions of the tokens that show a text wherever it stands among token ids, ascending.

    Args:
        tokenizer: The tokenizer of the ids.
        ids: Token ids.
        text: The text, not empty. A token that shows only a part of its first or last word counts.
    """
    shown, owners, place = "", list[range](), 0  # owners: of each character
    for piece, count in decode_pieces(tokenizer, ids):
        shown += piece
        owners += [range(place, place + count)] * len(piece)
        place += count
    begins = [match.start() for match in re.finditer(f"(?={re.escape(text)})", shown)]
    return sorted({place for begin in begins for owner in owners[begin : begin + len(text)] for place in owner})


def decode_pieces(tokenizer: FastTokenizer, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the text that one token adds to those before it, with 1, or that several tokens of a character add.

    A token is decoded behind the ones before it, because some tokenizers drop the space in front of a first one.
    """

    def decode(start: int, stop: int) -> str:
        return tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)

    before = start = 0
    for stop in range(1, len(ids) + 1):
        piece = decode(before, stop)[len(decode(before, start)) :]
        if not piece.endswith(PART) or stop - start == MOST_PARTS or stop == len(ids):
            yield piece, stop - start
            before, start = start, stop
