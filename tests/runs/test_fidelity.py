"""Predictions of a compressed cache are compared with the full cache's, and answers stay what they are."""

import copy
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvbench as package
from kvbench.cli import curves as curves_command
from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.joint_decoding import run_alone
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models import local_models
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.models.gguf import find_converted
from kvbench.runs import fidelity, responder, warming
from kvbench.runs.fidelity import kl_divergence, mean_nll, pack_predictions, predict, unpack_predictions
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.gguf_files import write_gguf
from tests.support.method_files import build_policy
from tests.support.recorded_runs import TIMES, read_runs
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, tiny

CONVERSATION = (
    "task=scbench",
    "task.subtasks=[scbench_kv]",
    "task.max_turns=2",
    "limit=1",
    "task.length=1000",
    "question=hidden",
)

KINDS = ("full", "tova", "snapkv", "kvzip", "centroidkv", "quest", "omnikv", "pqcache", "deltakv")  # of what is held
GREEDY = Sampling()
ANSWER = [5, 17, 9, 30, 44, 8]


def read(method: str, budget: float = 0.3, codec: str = "raw", tokens: int = 90, batch: int = 1) -> GenerationContext:
    """A prompt in the compressed cache of a tiny model."""
    choice = choose_cache(*build_policy(method, "uniform", "llama", codec))
    context = GenerationContext(tiny("llama"), choice, Budget(1.0 if method == "full" else budget), None, (0,) * batch)
    context.prefill(torch.cat([distinct(tokens, seed) for seed in range(batch)]))
    return context


def answer(context: GenerationContext, tokens: int) -> list[int]:
    return torch.stack(list(context.generate(tokens, GREEDY, frozenset())), 1)[0].tolist()


def test_the_full_cache_predicts_what_the_model_does():
    prompt, model = distinct(90), copy.deepcopy(tiny("llama")).double()
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor([ANSWER])], 1)).logits[0, 89:-1]
    expected = logits.log_softmax(-1)
    found = run_alone(predict(read("full"), [ANSWER]))[0][0]
    assert torch.allclose(found.double(), expected, atol=1e-4)
    mean = -sum(expected[place, token].item() for place, token in enumerate(ANSWER)) / len(ANSWER)
    assert mean_nll(found, ANSWER) == pytest.approx(mean, abs=1e-4)


@pytest.mark.cover
@pytest.mark.parametrize("codec", ["raw", "kivi"])
@pytest.mark.parametrize("method", choose_quick(list_choices("method"), *KINDS))
def test_an_answer_that_is_read_predicts_as_one_that_is_decoded(method, codec):
    try:
        context = read(method, codec=codec)
    except SettingError:  # what a codec cannot hold is refused
        assert codec == "kivi"
        return
    context.reserve(5)
    before, answers = context.bytes(), []
    for _ in range(2):
        with context.branch():
            answers.append(answer(context, 5))
        predicted = run_alone(predict(context, [answers[0]]))[0][0]
        assert predicted.argmax(-1).tolist() == answers[0]  # what was picked was the most likely token each time
    assert answers[0] == answers[1] and context.bytes() == before


@pytest.mark.parametrize("method", ["snapkv", "tova", "quest"])
def test_answers_of_a_batch_are_predicted_as_alone(method):
    both, _ = run_alone(predict(read(method, batch=2), [ANSWER, ANSWER[:2]]))
    for place, own in ((0, ANSWER), (1, ANSWER[:2])):
        choice = choose_cache(*build_policy(method, "uniform", "llama"))
        context = GenerationContext(tiny("llama"), choice, Budget(0.3), None, (0,))
        context.prefill(distinct(90, place))
        alone = run_alone(predict(context, [own]))[0][0]
        assert torch.allclose(both[place, : len(own)], alone, atol=1e-4)


def test_waiting_for_other_answers_takes_no_time():
    session = predict(read("tova"), [ANSWER])
    next(session)
    time.sleep(1)
    _, seconds = run_alone(session)
    assert 0 < seconds < 1


def test_one_token_needs_no_reading():
    context = read("tova")
    assert torch.equal(run_alone(predict(context, [[7]]))[0][0, 0], context.logits[0].float().log_softmax(-1))


def exact(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * (np.log(p) - np.log(q))).sum(1).mean())


def test_the_divergence_is_that_of_the_likely_tokens_and_the_rest(monkeypatch):
    generator = np.random.default_rng(0)
    p, q = (torch.from_numpy(3 * generator.normal(size=(5, 300))).log_softmax(-1) for _ in range(2))
    found = kl_divergence(pack_predictions(p), q)
    top = p.topk(fidelity.TOP, dim=1).indices
    parts = []
    for own in (p, q):
        likely = own.exp().gather(1, top)
        parts.append(torch.cat([likely, 1 - likely.sum(1, keepdim=True)], 1).numpy())
    assert found == pytest.approx(exact(*parts), abs=1e-5)
    everything = exact(p.exp().numpy(), q.exp().numpy())
    assert 0 < found <= everything + 1e-6
    monkeypatch.setattr(fidelity, "TOP", 300)
    assert kl_divergence(pack_predictions(p), q) == pytest.approx(everything, abs=1e-4)


def test_the_divergence_from_itself_is_zero_and_from_certainty_finite():
    p = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert kl_divergence(pack_predictions(p), p) == pytest.approx(0, abs=1e-6)
    certain = torch.full((4, 200), -200.0)
    certain[:, 3] = 0
    assert 1 < kl_divergence(pack_predictions(p), certain) < 1000


def test_packed_predictions_are_read_back():
    p = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found, values = unpack_predictions(pack_predictions(p), 3)
    expected = p.topk(fidelity.TOP, dim=1)
    assert torch.equal(found, expected.indices) and torch.equal(values, expected.values.double())
    few = torch.zeros(2, 5).log_softmax(-1)
    assert kl_divergence(pack_predictions(few), few) == pytest.approx(0, abs=1e-6)


SETTINGS = ("task.subtasks=[niah_single_1,niah_multivalue]", "task.length=512", "task.samples=1")


def by_uid(records: list[dict]) -> dict[str, dict]:
    return {record["uid"]: record for record in records}


@pytest.mark.parametrize("question", ["hidden", only_in_full("visible")])
def test_records_compare_and_stay_what_they_are(kvbench, tmp_path, question):
    own = (*SETTINGS, "method=tova", "budget=0.3", f"question={question}")
    for folder, more in (("plain", ()), ("compared", ("fidelity=true",))):
        code, out, err = kvbench(*own, f"results={tmp_path / folder}", *more)
        assert code == 0, err
    assert "NLL of the answer" in out and "KL from the full cache" in out and "nats a token" in " ".join(out.split())
    plain, compared = read_runs(tmp_path / "plain"), read_runs(tmp_path / "compared")
    for method in ("full", "tova"):
        assert plain[method][0].name != compared[method][0].name
        one, other = by_uid(plain[method][1]), by_uid(compared[method][1])
        assert one.keys() == other.keys()
        for uid in one:
            found = other[uid]["fidelity"]
            assert found["nll"] > 0 and (found["kl"] == 0) == (method == "full") and 0 < found["tokens"] <= 16
            assert other[uid]["fidelity_ms"] > 0 and ("predictions" in other[uid]) == (method == "full")
            skipped = {*TIMES, "fidelity", "fidelity_ms", "predictions", "peak_bytes"}
            assert {k: v for k, v in one[uid].items() if k not in skipped} == {
                k: v for k, v in other[uid].items() if k not in skipped
            }
            assert one[uid]["peak_bytes"] == other[uid]["peak_bytes"]


def test_a_sweep_makes_the_full_caches_predictions_once(kvbench, tmp_path, monkeypatch):
    made, readers = [], responder.Responder
    for module in (responder, warming):
        monkeypatch.setattr(module, "Responder", lambda run, bench: made.append(run) or readers(run, bench))
    code, _, err = kvbench("-m", *SETTINGS, "method=knorm,snapkv", "budget=0.3", "fidelity=true", "results=results")
    assert code == 0, err
    assert len(made) == 3  # the full cache's, and one for each method
    found = read_runs(tmp_path / "results")
    shared = {record["shared_prefill"] for _, records in found.values() for record in records}
    assert shared == {3}


def test_predictions_that_another_process_has_not_written_are_made(kvbench, tmp_path, monkeypatch):
    own = (*SETTINGS, "limit=1", "method=knorm", "budget=0.3", "fidelity=true")
    assert kvbench(*own, f"results={tmp_path / 'one'}")[0] == 0
    monkeypatch.setattr("kvbench.store.run_folder.RunFolder.record", lambda *_: None)
    assert kvbench(*own, f"results={tmp_path / 'other'}")[0] == 0
    one, other = (by_uid(read_runs(tmp_path / name)["knorm"][1]) for name in ("one", "other"))
    for uid in one:
        assert one[uid]["fidelity"] == pytest.approx(other[uid]["fidelity"])


@pytest.mark.full
def test_turns_of_a_conversation_are_made_after_those_before_them(kvbench, tmp_path, monkeypatch):
    own = (*CONVERSATION, "method=knorm", "budget=0.5", "fidelity=true")
    assert kvbench(*own, f"results={tmp_path / 'one'}")[0] == 0
    monkeypatch.setattr("kvbench.store.run_folder.RunFolder.record", lambda *_: None)
    assert kvbench(*own, f"results={tmp_path / 'other'}")[0] == 0
    one, other = (by_uid(read_runs(tmp_path / name)["knorm"][1]) for name in ("one", "other"))
    assert len(one) > 1 and len({record["fidelity"]["kl"] for record in one.values()}) == len(one)
    for uid in one:
        assert one[uid]["fidelity"] == pytest.approx(other[uid]["fidelity"], abs=1e-9)


def test_the_full_cache_keeps_predictions_whatever_the_settings_that_do_not_matter(kvbench, tmp_path):
    own = (*SETTINGS, "limit=1", "fidelity=true", f"results={tmp_path / 'r'}")
    assert kvbench(*own, "method=full", "block_size=64", "allocator=ada")[0] == 0
    assert kvbench(*own, "method=knorm", "budget=0.3")[0] == 0
    assert all(record["fidelity"]["kl"] > 0 for record in read_runs(tmp_path / "r")["knorm"][1])


@pytest.mark.full
def test_runs_with_and_without_fidelity_stand_side_by_side(kvbench, tmp_path, capsys):
    own = (*SETTINGS, "limit=1", "method=knorm", f"results={tmp_path / 'r'}")
    for budget, more in ((0.3, ()), (0.3, ("fidelity=true",)), (0.5, ())):
        assert kvbench(*own, f"budget={budget}", *more)[0] == 0
    found = load_runs(tmp_path / "r")
    assert sorted((run.value["budget"], "fidelity" in run.value) for run in found) == [
        (0.3, True), (0.5, False), (1.0, True),
    ]  # fmt: skip
    assert curves_command.main(["--results", str(tmp_path / "r")]) == 0 and "knorm" in capsys.readouterr().out


def test_an_answer_is_encoded_as_it_follows_the_prompt(tmp_path, monkeypatch):
    """A SentencePiece tokenizer begins every text with a blank, which does not follow a prompt."""
    monkeypatch.setattr(local_models, "MODELS", tmp_path / "models")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tokenizer="llama")
    tokenizer = Checkpoint("tiny", str(find_converted(path))).tokenizer()
    reader = object.__new__(responder.Responder)
    reader.tokenizer, reader.run = tokenizer, SimpleNamespace(task_settings={"name": "mine"})
    reader.task = SimpleNamespace(reference=lambda sample: "abc")
    for prefix, question in (("the word is", ""), ("", "and the word")):
        sample = SimpleNamespace(uid="0", answer_prefix=prefix, chat=False, question=question)
        found = reader._right_answer(sample, SimpleNamespace(unknown=0))
        assert tokenizer.convert_ids_to_tokens(found) == ["▁a", "b", "c"]
    alone = tokenizer.encode(" abc", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(alone) == ["▁", "▁a", "b", "c"]


def test_what_has_no_right_answer_is_not_compared(kvbench, tmp_path):
    own = (*CONVERSATION, "method=snapkv", "budget=0.5", "fidelity=true")
    for answers, turns in (("golden", {True}), ("own", {True, False})):
        code, _, err = kvbench(*own, f"task.answers={answers}", f"results={tmp_path / answers}")
        assert code == 0, err
        for _, records in read_runs(tmp_path / answers).values():
            assert {bool(record["fidelity"]) for record in records} == turns
            assert all(bool(record["fidelity"]) or record["turn"] > 0 for record in records)


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (("fidelity=yes please",), "fidelity=yes please: choose one of true, false"),
        (("fidelity=true", "task=math500"), "fidelity=true: task=math500 has no reference answers"),
        (("fidelity=true", "task=efficiency"), "fidelity=true: task=efficiency has no reference answers"),
    ],
)
def test_what_cannot_be_compared_is_one_line(kvbench, own, line):
    code, out, err = kvbench(*own)
    assert (code, out) == (2, "") and err.startswith(f"kvbench: {line}") and err.count("\n") == 1


TASKS = {
    "ruler": {"seed": 0, "length": 1024, "samples": 1, "cache": None},
    "niah": {"seed": 0, "lengths": [1024], "depths": [50], "trials": 1},
    "phonebook": {"seed": 0, "asked": 2},
    "ledger": {"seed": 0},
    "longbench": {},
}
OVERLAP = ("gov_report", "multi_news", "qmsum", "samsum")  # scored by overlap, which a right answer may not reach


@pytest.mark.parametrize("task", TASKS)
def test_tasks_give_the_text_of_a_right_answer(task):
    """Their own score says that it is right."""
    own = build("task", load_settings("task", task, {"limit": 1} | TASKS[task]))
    tokenizer = Checkpoint("reference", str(REFERENCE)).tokenizer()
    samples = [sample for sample in own.samples(tokenizer, 0, 16384) if not sample.subtask.startswith(OVERLAP)]
    assert samples
    for sample in samples:
        assert own.score(sample, own.reference(sample)).score == 100, sample.uid


@pytest.mark.full
def test_frames_have_a_column_each(kvbench, tmp_path):
    assert kvbench(*SETTINGS, "limit=1", "method=knorm", "fidelity=true", f"results={tmp_path / 'r'}")[0] == 0
    found = package.load(str(tmp_path / "r")).records(["fidelity.nll", "fidelity.kl", "fidelity.tokens"])
    assert len(found) == 4 and found.notna().all().all()
    assert json.loads(found.to_json())
