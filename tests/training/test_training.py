"""The embedded models' files, and what version 2 was trained with: recipe, samples, look-ahead, training."""

import json
import queue
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from shutil import copytree
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.cli import evaluate as evaluate_command
from kvbench.cli import train as train_command
from kvbench.config.compose import compose_config
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.training import evaluate, train, training_data
from kvbench.training.architecture import Llama
from kvbench.training.recipe import Recipe, load_recipe
from kvbench.validation import SettingError

STAGES = "stages=[[0, 128], [0.5, 256]]"
TINY = [STAGES, "hidden=64", "layers=1", "heads=1", "kv_heads=1", "inner=64", "context=256", "tokens=512",
        "look_ahead=4", "places=32"]  # fmt: skip
ASKED = ("task.subtasks=[niah_multikey_2,niah_multivalue,ruler_qa_squad]", "task.length=1024", "task.samples=3",
         "budget=0.25", "device=cpu")  # fmt: skip


@pytest.fixture(scope="module")
def maker():
    return training_data.SampleMaker("test", training_data.load_tokenizer(REFERENCE), Recipe(confusable=1.0))


def test_the_embedded_model_is_whole_and_small():
    shards = [path.stat().st_size for path in REFERENCE.glob("*.safetensors")]
    assert shards and max(shards) <= 15_000_000 and sum(shards) <= 32_000_000
    assert AutoTokenizer.from_pretrained(REFERENCE).bos_token_id == 0


def test_settings_of_a_recipe(tmp_path):
    own = Recipe().with_settings(["layers=2", STAGES, "rate=1", 'mix={"ledger": 2}'])
    assert (own.layers, own.rate, own.stages, own.mix) == (2, 1.0, ((0, 128), (0.5, 256)), {"ledger": 2})
    own.save(tmp_path)
    assert load_recipe(tmp_path) == own
    assert load_recipe(REFERENCE).config() == json.loads(
        (REFERENCE / "config.json").read_text()
    )  # the shipped weights' own
    assert own.lengths(0.4) == [128] and own.lengths(0.5) == [128, 256]
    kinds = ("depth=2", "layers=two", "layers=true", "layers=1.5", "stages=3", "mix=[1]", "rate", "hidden=Infinity")
    values = ("rate=NaN", "rate=-1", "tokens=0", "kv_heads=0", "kv_heads=3", "turns=1.5", "turns=0.9", "context=1024",
              "stages=[]", "stages=[1, 2]", "stages=[[0.5, 128]]", "stages=[[0, 128], [0, 256]]", "stages=[[0, 1]]",
              "warmup=0", "look_ramp=0", "steady=1", "look_ahead=1")  # fmt: skip
    for wrong in (*kinds, *values):
        with pytest.raises(SettingError, match=wrong.partition("=")[0]):
            Recipe().with_settings([wrong])
    for mix in ({"ledgers": 5}, {"ledger": "x"}, {"ledger": -1}, dict.fromkeys(training_data.NAMES, 0)):
        with pytest.raises(SettingError, match="mix"):
            training_data.compute_shares(Recipe(mix=mix))


def test_no_sample_is_waited_for_that_cannot_be():
    own = Recipe().with_settings(["ledgers=1", "turns=0", "needles=0"])
    with pytest.raises(ValueError, match="no sample of 128 tokens"):
        training_data.SampleMaker("test", training_data.load_tokenizer(REFERENCE), own).sample(128)
    full = queue.Queue()
    full.put("what a worker died of")
    with pytest.raises(train.NoSamples, match="0 of 1 workers"):
        next(train.receive_batches(full, [SimpleNamespace(is_alive=lambda: False)]))


@pytest.fixture
def scores(tmp_path) -> Callable[..., dict[str, float]]:
    """Runs methods with the shipped weights on one prefill; gives their mean scores."""

    def run(question: str, *methods: str) -> dict[str, float]:
        asked = [f"question={question}", *ASKED]
        runs = [RunSpec.from_config(compose_config([*asked, f"method={method}"])) for method in methods]
        folders = execute_runs(runs, tmp_path, Resources(runs[0]))
        return {
            name: mean(r["score"] for r in own.records().values()) for name, own in zip(methods, folders, strict=True)
        }

    return run


@pytest.mark.full
def test_the_shipped_weights_keep_what_informed_methods_keep(scores):
    """SnapKV, which sees the question, far above StreamingLLM and that above random."""
    seen = scores("visible", "snapkv", "sink", "random")
    assert seen["snapkv"] > 90 > 50 > seen["sink"] > seen["random"] + 10, seen


@pytest.mark.full
def test_the_shipped_weights_keep_keys_that_differ_where_the_question_is_hidden(scores):
    unseen = scores("hidden", "keydiff", "sink")
    assert unseen["keydiff"] > unseen["sink"] + 20, unseen


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
    made = training_data.make_batch(maker, 512, 0.0)
    length, offsets = 512, maker.recipe.offsets
    assert made.ids.shape == (maker.recipe.tokens // length, length + 1)
    assert [*offsets] == [*range(2, 41)] and made.pairs.shape == (39, maker.recipe.places)
    answers = made.weights > 1.5 * training_data.CONTEXT
    for offset, places, targets in zip(offsets, made.pairs, made.targets, strict=True):
        rows, inside = places // length, places % length
        assert (inside + offset <= length).all()
        assert (made.ids[rows, inside + offset] == targets).all() and answers[rows, inside + offset].all()
        assert (made.ids[rows, inside] != training_data.PAD).all()


def test_where_the_look_ahead_looks_from(maker):
    """Two answers, each with a question of 60 tokens: never from the context or the other one, and as often as said."""
    ids = np.arange(301)[None]
    spans = [(0, 100, 160, 190), (0, 190, 250, 280)]  # row, question, answer, end
    pairs, targets = training_data.draw_look_ahead(maker, ids, spans)
    counts = dict.fromkeys(("end", "rest", "answer"), 0)
    for offset, places, tokens in zip(maker.recipe.offsets, pairs, targets, strict=True):
        assert (places + offset == tokens).all()
        for place, token in zip(places, tokens, strict=True):
            _, asked, answer, end = next(span for span in spans if span[2] <= token < span[3])
            assert asked <= place < end
            counts["answer" if place >= answer else "end" if place >= answer - training_data.WINDOW else "rest"] += 1
    weight = dict.fromkeys(counts, 0.0)  # what the three kinds of places should have, all offsets alike
    for offset in maker.recipe.offsets:
        own = {"answer": 0.0, "end": 0.0, "rest": 0.0}
        for place in range(-offset, 30 - offset):
            own["answer"] += training_data.IN_ANSWER * (place >= 0)
            own["end"] += -training_data.WINDOW <= place < 0
            own["rest"] += training_data.BEFORE * (place < -training_data.WINDOW)
        for kind, share in own.items():
            weight[kind] += share / sum(own.values())
    for kind, share in weight.items():
        assert counts[kind] / pairs.size == pytest.approx(share / len(maker.recipe.offsets), abs=0.02)


def test_the_trained_model_is_transformers_llama(tmp_path):
    own = Recipe().with_settings([*TINY, "layers=2", "heads=2"])
    model = Llama(own, seed=1)
    train.save_model(model, tmp_path)
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
    looked = model.compute_look_ahead_loss(last, pairs, tokens[:, 1:].flatten()[pairs])  # maps begin as the identity
    torch.testing.assert_close(looked.flatten(), losses.flatten()[pairs.flatten()])


def test_large_weights_are_shards_that_transformers_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SHARD", 300_000)
    model = Llama(Recipe().with_settings(TINY), seed=1)
    train.save_model(model, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    held = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all((held[name] == weight).all() for name, weight in model.export().items())


def run_training(folder: Path, *given: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.TrainingLog, "EVERY", 1)
        return train_command.main(["--out", str(folder), "--workers", "1", "--device", "cpu", *given])


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A tiny training's folder after two steps."""
    folder = tmp_path_factory.mktemp("training")
    assert run_training(folder, "--minutes", "60", "--steps", "2", *TINY) == 0
    return folder


@pytest.fixture
def trained(begun, tmp_path):
    """A copy of the folder, and the command."""
    folder = copytree(begun, tmp_path / "own")
    return folder, lambda *given, out=folder: run_training(out, *given)


def test_a_training_is_paused_and_resumed(trained, monkeypatch):
    folder, command = trained
    first = json.loads((folder / "train.json").read_text())
    assert first["step"] == 2 and first["sessions"] == 1 and first["begun_with"] is None
    begun, begin = [], train.Training.begin

    def watched(self, *given):
        begin(self, *given)
        begun.append({name: weight.clone() for name, weight in self.model.state_dict().items()})

    monkeypatch.setattr(train.Training, "begin", watched)
    saved = torch.load(folder / train.STATE)["model"]
    assert command("--resume", "--steps", "1") == 0
    assert all(torch.equal(begun[0][name], weight) for name, weight in saved.items())
    second = json.loads((folder / "train.json").read_text())
    assert second["step"] == 3 and second["sessions"] == 2 and second["spent"] > first["spent"]
    assert command("--resume", "--pause", "0.0001") == 0  # not before a step
    third = json.loads((folder / "train.json").read_text())
    assert third["step"] == 4 and third["sessions"] == 3
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(line["loss"] < 12 for line in lines)
    assert all(line["scores"].keys() == line["answers"].keys() and min(line["scores"].values()) >= 0 for line in lines)


def test_a_training_refuses_what_it_cannot_use(trained, tmp_path, capsys):
    folder, command = trained
    other, cut = tmp_path / "other", tmp_path / "cut"
    copytree(folder, cut)
    (cut / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(64)}, cut / "model.safetensors")
    for given, line in (
        (["--weights", str(tmp_path / "none")], "no folder"),
        (["--weights", str(folder)], "hidden_size is 64, the recipe's 320"),
        (["--weights", str(cut), *TINY], "10 weights are missing"),
        (["--workers", "0"], "--workers=0"), (["--minutes", "0"], "--minutes=0.0"), (["--pause", "-1"], "--pause=-1.0"),
        (["--steps", "0"], "--steps=0"), (["--device", "tpu"], "--device=tpu"), (["--resume"], "--resume"),
        (["mix={\"sums\": 1}"], "mix=sums"), (["--frob"], "--frob"),
    ):  # fmt: skip
        assert command(*given, out=other) == 2 and line in capsys.readouterr().err
        assert not other.exists()
    for given in (["--minutes", "1"], ["--resume", "--minutes", "1"], ["--resume", "bogus=1"]):
        assert command(*given) == 2 and "--resume" in capsys.readouterr().err


def test_an_evaluation_adds_to_its_file(trained, monkeypatch, capsys):
    folder, _ = trained
    out = folder / "scores.json"
    (folder / "config.json").write_text((folder / "config.json").read_text().replace(": 256,", ": 1024,"))

    def evaluated(*given):
        return evaluate_command.main(["--model", str(folder), "--samples", "1", "--steps", "0", *given])

    monkeypatch.setattr(evaluate, "SUBTASKS", ("ruler_qa_squad",))
    threads = SimpleNamespace(Pool=ThreadPool)  # no processes to start
    monkeypatch.setattr(evaluate.multiprocessing, "get_context", lambda method: threads)
    assert evaluated("--lengths", "512") == evaluated() == 0
    held = json.loads(out.read_text())
    assert [(one["task"], one["length"], one["samples"]) for one in held["scores"]] == [
        ("ruler_qa_squad", 512, 1), ("ruler_qa_squad", 1024, 1),
    ]  # fmt: skip
    monkeypatch.setattr(evaluate, "generate_answers", None)  # nothing is made again
    assert evaluated() == 0 and json.loads(out.read_text()) == held
    assert evaluated("--samples", "2", "--seconds", "0") == 1 and json.loads(out.read_text()) == held
    out.write_text(json.dumps(held | {"weights": "other"}))
    wrong = {("--lengths", "2048"): "--lengths=2048", ("--samples", "0"): "--samples=0", (): "weights other, now"}
    capsys.readouterr()
    for given, line in wrong.items():
        assert evaluated(*given) == 2 and line in capsys.readouterr().err
    shipped = json.loads((REFERENCE / "scores.json").read_text())
    assert shipped["weights"] == Checkpoint("", str(REFERENCE)).identity()
