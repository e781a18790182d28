"""The embedded models' files, and what version 2 was trained with: recipe, samples, look-ahead, training."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.model import EMBEDDED_MODELS, REFERENCE
from kvbench.reference import data, train
from kvbench.reference.model import Llama
from kvbench.reference.recipe import Recipe, load
from kvbench.settings import SettingError
from kvbench.tables import EMBEDDED_MODELS as MARKED

TINY = ["hidden=64", "layers=1", "heads=1", "kv_heads=1", "inner=64", "context=256", "tokens=512", "look_ahead=8"]
STAGES = "stages=[[0, 128], [0.5, 256]]"


@pytest.fixture(scope="module")
def maker():
    return data.Maker("test", data.load(REFERENCE), Recipe(confusable=1.0))


def test_every_embedded_model_is_whole_and_small():
    assert set(EMBEDDED_MODELS) == set(MARKED)
    for folder in EMBEDDED_MODELS.values():
        shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
        assert shards and max(shards) <= 15_000_000 and sum(shards) <= 32_000_000
        assert AutoTokenizer.from_pretrained(folder).bos_token_id == 0


def test_settings_of_a_recipe(tmp_path):
    own = Recipe().changed(["layers=2", STAGES, "rate=1", 'mix={"ledger": 2}'])
    assert (own.layers, own.rate, own.stages, own.mix) == (2, 1.0, ((0, 128), (0.5, 256)), {"ledger": 2})
    own.save(tmp_path)
    assert load(tmp_path) == own
    assert load(REFERENCE).config() == json.loads((REFERENCE / "config.json").read_text())  # the shipped weights' own
    assert own.lengths(0.4) == [128] and own.lengths(0.5) == [128, 256]
    for wrong in ("depth=2", "layers=two", "layers=true", "stages=3", "mix=[1]", "rate"):
        with pytest.raises(SettingError, match=wrong.partition("=")[0]):
            Recipe().changed([wrong])


@pytest.mark.parametrize(
    "name, units",
    [("niah_multiquery", 300), ("niah_multikey_3", 4), ("ruler_vt", 12), ("ruler_cwe", 120), ("ruler_fwe", 200),
     ("ruler_qa_hotpot", 8), ("scbench_kv", 10), ("scbench_vt", 10), ("scbench_qa_eng", 10), ("scbench_choice_eng", 10),
     ("scbench_many_shot", 12),
     ("ledger", 20), ("magic_number", 200)],
)  # fmt: skip
def test_a_sample_has_the_tokens_of_its_prompt(maker, name, units):
    pieces = next(found for found in (maker.pieces(name, units, 1024) for _ in range(20)) if found)
    made = maker.encode(name, pieces, 1024)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    answers = [piece for piece in pieces if piece.answer]
    assert [tokenizer.decode(made.ids[a:b], skip_special_tokens=True) for _, a, b in made.spans] == [
        piece.text for piece in answers
    ]
    _, answer, end = made.spans[0]
    first = "".join(piece.text for piece in pieces[: pieces.index(answers[0])])
    assert made.ids[:answer] == tokenizer(first).input_ids
    assert len(made.ids) == len(made.weights)
    assert set(made.weights[answer:end]) == {answers[0].weight} and made.weights[0] == 0
    assert made.ids[-1] == tokenizer.eos_token_id


def test_confusable_values_are_all_different_and_alike(maker):
    draws = maker.families["niah_multikey_2"].draw(30, maker.rng, maker.texts, 1024)
    maker._confuse(draws)
    values = [*draws["values"][0], *(value for _, value in draws["others"])]
    assert len(set(values)) == len(values) and all(len(value) == 7 and value.isdigit() for value in values)
    for value in values:
        assert max(sum(x == y for x, y in zip(value, other, strict=True)) for other in values if other != value) > 3


def test_the_look_ahead_asks_questions_for_tokens_of_their_answers(maker):
    made = data.batch(maker, 512, 0.0)
    length, offsets = 512, maker.recipe.offsets
    assert made.ids.shape == (maker.recipe.tokens // length, length + 1)
    assert [*offsets] == [*range(2, 41)]
    answers = made.weights > 1.5 * data.CONTEXT
    for offset, places, targets in zip(offsets, made.pairs, made.targets, strict=True):
        rows, inside = places // length, places % length
        assert (inside + offset <= length).all()
        assert (made.ids[rows, inside + offset] == targets).all() and answers[rows, inside + offset].all()
        assert (made.ids[rows, inside] != data.PAD).all()


def test_the_trained_model_is_transformers_llama(tmp_path):
    own = Recipe().changed([*TINY, "layers=2", "heads=2"])
    model = Llama(own, seed=1)
    train.save(model, tmp_path)
    with torch.no_grad():  # what was saved, in bf16
        for weight in model.weights:
            weight.copy_(weight.bfloat16())
    tokens = torch.randint(3, 4096, (2, 65), generator=torch.Generator().manual_seed(0))
    losses, last = model(tokens[:, :-1], tokens[:, 1:])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-4, atol=1e-4)
    again = Llama(own, seed=2)
    again.take(tmp_path)
    torch.testing.assert_close(again(tokens[:, :-1], tokens[:, 1:])[0], losses)
    pairs = torch.randint(128, (len(own.offsets), 2))
    looked = model.look(last, pairs, tokens[:, 1:].flatten()[pairs])  # maps begin as the identity
    torch.testing.assert_close(looked.flatten(), losses.flatten()[pairs.flatten()])


def test_large_weights_are_shards_that_transformers_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SHARD", 300_000)
    model = Llama(Recipe().changed(TINY), seed=1)
    train.save(model, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    held = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all((held[name] == weight).all() for name, weight in model.export().items())


def test_a_training_is_paused_and_resumed(tmp_path, monkeypatch, capsys):
    def train_to(folder, *given):
        monkeypatch.setattr("sys.argv", ["train", "--out", str(folder), "--workers", "1", *given])
        return train.answered(train.main)

    def run(*given):
        return train_to(tmp_path, *given)

    assert run("--resume") == 2 and "--resume" in capsys.readouterr().err
    monkeypatch.setattr(train.Log, "EVERY", 1)
    assert run("--minutes", "0.5", "--steps", "2", "--set", *TINY, STAGES) == 0
    first = json.loads((tmp_path / "train.json").read_text())
    assert first["step"] == 2 and first["sessions"] == 1
    other = tmp_path / "other"
    for weights, line in ((tmp_path / "none", "no folder"), (tmp_path, "hidden_size is 64, the recipe's 320")):
        assert train_to(other, "--weights", str(weights)) == 2 and line in capsys.readouterr().err
        assert not other.exists()
    assert run("--minutes", "1") == 2 and "--resume" in capsys.readouterr().err
    assert run("--resume", "--steps", "1") == 0
    second = json.loads((tmp_path / "train.json").read_text())
    assert second["step"] == 3 and second["sessions"] == 2 and second["spent"] > first["spent"]
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["loss"] < 12 for line in lines)
