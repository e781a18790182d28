"""The data on which `model=smollm2_long` is tuned: conversations of the tasks' forms, and plain text.

A sample follows from (seed, number, length) alone, so that any process can make any sample. Its kind is drawn by the
shares, its size between LEAST and all of the tokens asked for.

The ids of a prompt are those of the runner (kvbench/runs/prompt.py): chat template, question and answer prefix. An
answer's ids are those that the tokenizer gives for the answer alone, because a model generates them behind fixed ids.
The token that ends an answer is the one that the chat template writes there, at which the runner stops.

Plain text is documentation, packed once into a folder by `pack_texts`: docstrings of TRAINED packages, and of HELD_OUT
packages for the loss before and after the tuning.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import find_end, split_turns
from kvbench.models.encoding import FastTokenizer
from kvbench.runs.prompt import encode
from kvbench.training.token_sequences import find_packages, read_docstrings
from kvbench.training.tuning_tasks import KINDS, Conversation
from kvbench.training.tuning_texts import SEED
from kvbench.validation import SettingError, is_number, require_choice

TEXT = "text"
SHARES = {  # kind -> relative share of the samples
    **{"niah_single_1": 1, "niah_single_2": 2, "niah_single_3": 3, "niah_multikey_1": 3, "niah_multikey_2": 5},
    **{"niah_multikey_3": 9, "niah_multivalue": 4, "niah_multiquery": 4},
    **{"ruler_vt": 7, "ruler_cwe": 14, "ruler_fwe": 7, "ruler_qa_squad": 11, "ruler_qa_hotpot": 11},
    **{"scbench_kv": 1.5, "scbench_prefix_suffix": 1, "scbench_vt": 1.5, "scbench_qa_eng": 1.5},
    **{"scbench_choice_eng": 1, "scbench_many_shot": 0.5},
    **{"ledger": 2, "phonebook": 1, "magic_number": 1},
    TEXT: 8,
}
SEPARATOR = 0  # <|endoftext|> of SmolLM2 stands between texts, as in its pretraining
SHORT = 2048  # up to this length cwe and fwe have MORE times their shares: counting is learned on short lists first
MORE = {"ruler_cwe": 1.5, "ruler_fwe": 1.5}
LEAST = 0.7  # the smallest part of the tokens asked for that a sample is made for
FITTED = 0.75  # a sample is sized again if it has less than this part of the tokens it is made for
TRIES = 6  # sizes that are tried for one draw
DRAWS = 50  # draws of a kind until one fits the length
TRAINED = "torch", "transformers", "numpy", "sklearn", "scipy", "networkx"
HELD_OUT = "pandas", "sympy"
HELD_TOKENS, MOST_TOKENS = 400_000, 4_000_000


@dataclass(frozen=True)
class TuningSample:
    """A sample as token ids.

    Attributes:
        kind: One of SHARES.
        ids: At most as many as asked for.
        answers: (begin, end) of each span of `ids` that counts in the loss: an answer with the token that ends it, or
            all tokens of a plain text that have one before them.
    """

    kind: str
    ids: list[int]
    answers: list[tuple[int, int]]


class TuningData:
    """Draws samples.

    Args:
        tokenizer: The model's tokenizer, a fast one with a chat template.
        texts: Folder that `pack_texts` wrote; None without plain text.
        shares: Kind -> relative share, in place of SHARES.

    Raises:
        SettingError: A share is invalid, or there are no texts for the share of plain text.
    """

    def __init__(self, tokenizer: FastTokenizer, texts: Path | None, shares: Mapping[str, float] | None = None) -> None:
        self.tokenizer = tokenizer
        self.shares = dict(SHARES if shares is None else shares)
        for name, share in self.shares.items():
            require_choice("shares", name, (*KINDS, TEXT))
            if not (is_number(share) and share >= 0):
                raise SettingError(f"shares: {name} is {share}: a number of at least 0")
        if not any(self.shares.values()):
            raise SettingError("shares: no kind of sample is left")
        self._texts = None if texts is None else _load_tokens(texts / "train.npy")
        if self._texts is None and self.shares.get(TEXT):
            raise SettingError(f"shares: {TEXT} needs a folder of packed texts")
        self._coder = Coder(tokenizer)

    def draw(self, seed: int, number: int, length: int) -> TuningSample:
        """Draw sample `number` of a seed, with at most `length` tokens.

        Raises:
            ValueError: No kind fits into the length.
        """
        rng = random.Random(f"{SEED}/{seed}/{number}/{length}")
        shares = {name: share * (MORE.get(name, 1) if length <= SHORT else 1) for name, share in self.shares.items()}
        for _ in range(DRAWS):
            [kind] = rng.choices(list(shares), list(shares.values()))
            name = f"{SEED}/{seed}/{number}/{length}/{rng.getrandbits(64)}"
            made = self._draw_text(name, length) if kind == TEXT else self._draw_kind(kind, name, length)
            if made is not None:
                return made
        raise ValueError(f"no sample of {length} tokens in {DRAWS} draws: the kinds do not fit")

    def draw_kind(self, kind: str, seed: int, number: int, length: int) -> TuningSample | None:
        """Draw a sample of one kind; None if it does not fit the length."""
        name = f"{SEED}/{kind}/{seed}/{number}/{length}"
        return self._draw_text(name, length) if kind == TEXT else self._draw_kind(kind, name, length)

    def _draw_text(self, name: str, length: int) -> TuningSample | None:
        assert self._texts is not None  # no share without texts
        if len(self._texts) < length:
            return None
        start = random.Random(name).randrange(len(self._texts) - length + 1)
        return TuningSample(TEXT, self._texts[start : start + length].tolist(), [(1, length)])

    def _draw_kind(self, kind: str, name: str, length: int) -> TuningSample | None:
        """Draw a conversation whose size fits: the same draws are made with another number of units if it does not."""
        made = KINDS[kind]
        target = length * random.Random(f"{name}/size").uniform(LEAST, 1.0)
        units, per_unit = int((target - made.rest) / made.unit), made.unit
        best: TuningSample | None = None
        for _ in range(TRIES):
            conversation = made.make(random.Random(name), max(units, 1), length)
            if conversation is None:
                return best
            ids, answers = self._coder.encode(conversation)
            if len(ids) <= length:
                best = TuningSample(kind, ids, answers)
                if len(ids) >= FITTED * target:
                    break
            elif units <= 2:
                break
            per_unit = max(0.5 * made.unit, (len(ids) - made.rest) / max(units, 1))
            change = int((0.95 * target - len(ids)) / per_unit)
            if change == 0:
                break
            units += change
        return best


class Coder:
    """Encodes conversations as the runner does."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        end = find_end(tokenizer)
        if end is None:
            raise SettingError("model: a chat template that writes a token behind an answer")
        self.end = end
        lead, between, self._closing, thought = split_turns(tokenizer)
        if lead or thought or not between.startswith(tokenizer.decode([end])):
            raise SettingError("model: a chat template that shows an earlier answer as it was generated")
        self._between = between.removeprefix(tokenizer.decode([end]))  # the token itself belongs to the answer

    def encode(self, conversation: Conversation) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a conversation, and the spans of its answers with their end tokens."""
        first, *later = conversation.turns
        prompt = encode(self.tokenizer, to_sample(conversation))
        ids, spans = list(prompt.ids), []
        for place, turn in enumerate((first, *later)):
            if place:
                ids += self._encode(self._between + turn.question + self._closing + turn.prefix)
            answer = [*self._encode(turn.answer), self.end]
            if turn.counts:
                spans.append((len(ids), len(ids) + len(answer)))
            ids += answer
        return ids, spans

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def to_sample(conversation: Conversation) -> Sample:
    """Return the first turn as a sample of a task."""
    first, context = conversation.turns[0], conversation.context
    return Sample("", "", context, first.question, first.prefix, (), 1, solved=conversation.solved)


def pack_texts(
    tokenizer: FastTokenizer, folder: Path, trained: Sequence[str] = TRAINED, held_out: Sequence[str] = HELD_OUT
) -> dict[str, object]:
    """Write the tokens of packages' docstrings into a folder: train.npy and held_out.npy (uint16), and texts.json.

    Raises:
        SettingError: A package is missing, or is in both lists.
    """
    if both := set(trained) & set(held_out):
        raise SettingError(f"packages: {', '.join(sorted(both))}: for the training or held out, not both")
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, object] = {}
    for name, packages, most in (("train", trained, MOST_TOKENS), ("held_out", held_out, HELD_TOKENS)):
        versions, parts, count = find_packages(packages), [], 0
        for text in read_docstrings(packages, 0):
            ids = tokenizer.encode(text, add_special_tokens=False)
            parts.append(np.array([SEPARATOR, *ids], np.uint16))
            count += len(parts[-1])
            if count >= most:
                break
        tokens = np.concatenate(parts)[:most]
        np.save(folder / f"{name}.npy", tokens)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        written[name] = {"packages": versions, "tokens": len(tokens), "digest": digest}
    (folder / "texts.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return written


def held_out_text(folder: Path) -> NDArray[np.uint16]:
    """Return the tokens of the documentation that is held out, shape (n,), with id 0 in front of each text."""
    return _load_tokens(folder / "held_out.npy")


def _load_tokens(path: Path) -> NDArray[np.uint16]:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise SettingError(f"texts={path}: not the tokens of packed texts ({error})") from None
