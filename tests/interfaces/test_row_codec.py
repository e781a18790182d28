"""A codec of two functions, the one of docs/add-a-codec.md, and what it returns wrongly."""

from dataclasses import dataclass, field

import pytest
import torch

import kvbench
from kvbench.cache.policy import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing, Plain
from kvbench.interfaces.method import Method
from kvbench.interfaces.row_codec import RowCodec
from kvbench.validation import ContractError
from tests.docs.pages import read_blocks
from tests.support.repository import ROOT
from tests.support.tiny_models import distinct, ids, tiny


@dataclass(frozen=True)
class Signed(RowCodec):
    """Stores signs as one byte each, and the largest size of a row."""

    def encode(self, rows):
        return rows.sign().to(torch.int8), rows.abs().amax(1)

    def decode(self, parts, dtype):
        return parts[0].to(dtype) * parts[1][:, None]


def test_the_documented_codec_stores_halves():
    names: dict = {}
    for block in read_blocks(ROOT / "docs" / "add-a-codec.md"):
        if block.file == "methods/codecs/half.py":
            exec(compile(block.text, block.name, "exec"), names)
    prompt, codec = distinct(40), names["Half"]("half")
    raw = kvbench.prefill(tiny("llama"), prompt, "snapkv", 0.5, method_args={"window": 4})
    held = kvbench.prefill(tiny("llama"), prompt, "snapkv", 0.5, codec=codec, method_args={"window": 4})
    assert held.bytes.rows * 2 == raw.bytes.rows and codec.packs and not Codec("raw").packs
    torch.testing.assert_close(held.extend(ids(3)), raw.extend(ids(3)), atol=1e-2, rtol=0)


def test_rows_of_ragged_heads_are_followed_by_others_and_copied_to_samples():
    rows, more = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).split([5, 2])
    lengths = torch.tensor([[4, 1]])
    packed = Signed("signed").pack(rows, rows * 2, lengths)
    keys, values = packed.extend(more, more, lengths + 1).read()
    every = torch.cat([rows[:4], more[:1], rows[4:], more[1:]])
    assert torch.equal(keys, every.sign() * every.abs().amax(1, keepdim=True))
    assert torch.equal(values[:4], 2 * keys[:4]) and sum(own.nbytes for own in packed.tensors()) == 2 * 5 * (4 + 4)
    twice = packed.replicate(2, lengths.repeat(2, 1)).read()[0]
    assert torch.equal(twice, packed.read()[0].repeat(2, 1))


@dataclass(frozen=True)
class Oldest(Method):
    """Evicts the oldest row at every token, and notes the rows that it is shown."""

    notes: list = field(default_factory=list)

    def score(self, observation, rows, state):
        self.notes.append(rows)
        return rows.places.double()


def test_a_cut_while_decoding_chooses_among_rows_as_the_token_read_them():
    """Its own row is raw, and packed before rows go. The others are not packed again, in branches and copies too."""
    spy = Oldest("oldest", decoding=True)
    context = GenerationContext(
        tiny("llama"), choose_cache(spy, Allocator("uniform"), Signed("signed")), Budget(9), None, (0,)
    )
    context.prefill(distinct(20))
    before = context.own_layers[0].rows.view()
    answers = []
    for samples in (1, 1, 2):
        if samples > 1:
            replicate(context, samples, 4)
        with context.branch():
            spy.notes.clear()
            answers.append(context.extend(ids(1).expand(samples, 1)))
            shown, after = spy.notes[0], context.own_layers[0].rows.view()
        newest = shown.keys[:, :, -1:]
        for keys, held in ((shown.keys[:, :, :-1], before.keys), (after.keys[:, :, :-1], before.keys[:, :, 1:])):
            assert torch.equal(keys, held.expand_as(keys))
        assert torch.equal(after.keys[:, :, -1:], newest.sign() * newest.abs().amax(-1, keepdim=True))
        assert after.places.shape[2] == 9 and not torch.equal(after.keys[:, :, -1:], newest)
    assert torch.equal(answers[0], answers[1])
    torch.testing.assert_close(answers[2], answers[0].expand(2, -1, -1))


@pytest.mark.parametrize("wrong", [lambda rows: rows, lambda rows: (rows[:-1],)], ids=["no tuple", "a row less"])
def test_parts_without_a_row_each_are_named(wrong):
    codec = type("Wrong", (Signed,), {"encode": lambda self, rows: wrong(rows)})("wrong")
    line = "^codec=wrong: encode must return a tuple of tensors of 5 rows each$"
    with pytest.raises(ContractError, match=line):
        codec.pack(torch.ones(5, 4), torch.ones(5, 4), torch.tensor([[5]]))


@pytest.mark.parametrize(
    "name, value, line",
    [
        ("packing", True, "packing is True, expected a Packing"),
        (
            "packing",
            Packing(grows=True),
            "pack of layer 0 returned EncodedRows without growing, which packing promises by ",
        ),
        (
            "pack",
            lambda self, keys, values, lengths: Plain(keys, values),
            "pack of layer 0 returned Plain without keep, which packing promises by keeps",
        ),
        ("pack", lambda self, keys: keys, r"pack\(keys\) must take \(keys, values, lengths\), as kvbench calls it"),
    ],
)
def test_what_a_codec_declares_wrongly_is_named(name, value, line):
    codec = type("Wrong", (Signed,), {name: value})("wrong")
    with pytest.raises(ContractError, match=f"^codec=wrong: {line}"):
        kvbench.prefill(tiny("llama"), ids(20), codec=codec)
