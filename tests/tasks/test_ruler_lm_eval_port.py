"""task=ruler_lmeval: lm-eval's own documents and scores, independent of each other's company, and what is refused."""

import json
from pathlib import Path

import datasets
import pytest
from lm_eval.tasks import TaskManager

from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.tasks.lm_eval.loader import PACKAGE, seed_generators, silence_output
from kvbench.tasks.ruler.lm_eval_port import OFFLINE, RulerLmEval, find_context
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.lm_eval_words import use_few_words
from tests.support.selection import only_in_full

LENGTH = 1024


@pytest.fixture(scope="module", autouse=True)
def few_words():
    with use_few_words():
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return Checkpoint("reference", str(REFERENCE)).tokenizer()


def made(tokenizer, *names: str, samples: int = 2, **more) -> dict:
    task = RulerLmEval(samples, subtasks=names or "offline", **{"length": LENGTH, **more})
    return {sample.uid: sample for sample in task.samples(tokenizer, 1, 4096)}


@pytest.fixture(scope="module")
def offline(tokenizer):
    return made(tokenizer)


@pytest.mark.parametrize("name, file", [("ruler_vt", "vt"), only_in_full("niah_multikey_2", "niah_multikey_2")])
def test_documents_are_those_of_lm_eval_for_a_subtask_that_runs_alone(name, file, offline, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # no download when its modules are imported
    manager = TaskManager(include_defaults=False, metadata={"tokenizer": str(REFERENCE), "max_seq_lengths": [LENGTH]})
    with seed_generators(0), silence_output():
        [task] = manager.load([str(PACKAGE / "ruler" / f"{file}.yaml")])["tasks"].values()
        for index in range(2):
            document = task.eval_docs[index]
            wanted = task.fewshot_context(document, 0, gen_prefix=task.doc_to_prefix(document))
            own = offline[f"{name}/{LENGTH}/{index}"]
            assert own.context + own.question + own.answer_prefix == wanted
            assert list(own.answers) == document["outputs"]


def test_samples_depend_on_their_subtask_alone(tokenizer, offline):
    assert list(offline) == [f"{name}/{LENGTH}/{index}" for name in OFFLINE for index in range(2)]
    for name in ("ruler_cwe", "niah_multikey_3"):  # cwe's generator goes on from call to call in lm-eval
        assert made(tokenizer, name, samples=3, limit=1) == {f"{name}/{LENGTH}/0": offline[f"{name}/{LENGTH}/0"]}
        assert made(tokenizer, name, samples=1, seed=1)[f"{name}/{LENGTH}/0"] != offline[f"{name}/{LENGTH}/0"]


def test_the_question_is_apart_from_the_context(offline):
    for uid, sample in offline.items():
        assert sample.context and sample.question.startswith("\n") and sample.question.rstrip().count("\n") == 1
        assert len(sample.question) < 300 and ("What" in sample.question or "Find" in sample.question), uid
        assert sample.meta["note"].startswith("RULER in lm-eval's port") and sample.max_new_tokens in (30, 50, 120, 128)
    assert find_context("a\nQuestion: b\n\nQuestion: c\nd") == "a\nQuestion: b\n"


def test_scores_are_lm_evals_with_its_share_of_answers_in_qa(tokenizer, offline, monkeypatch):
    task = RulerLmEval(1, subtasks=["ruler_fwe"], length=LENGTH)
    [sample] = task.samples(tokenizer, 1, 4096)
    assert task.score(sample, "\x00".join(sample.answers).upper()).score == 100
    assert task.score(sample, sample.answers[1]).score == pytest.approx(100 / 3)
    monkeypatch.setattr("requests.get", lambda *_, **__: Reply())
    monkeypatch.setattr("kvbench.network.is_reachable", lambda url: True)
    task = RulerLmEval(2, subtasks="ruler_qa_squad", length=LENGTH)
    task.check()
    first, second = task.samples(tokenizer, 1, 4096)
    assert first.question.endswith("Question: Who is 0? ") and "Person 0 is Ann0" in first.context
    assert len(first.answers) == 3 and task.score(first, "Ann0").score == pytest.approx(100 / 3)  # official: 100
    assert first.uid != second.uid


class Reply:
    """SQuAD's file with twelve paragraphs of one question each."""

    def raise_for_status(self) -> None:
        pass

    def json(self) -> dict:
        def paragraph(index: int) -> dict:
            names = [{"text": f"Ann{index}"}, {"text": "of the sea"}, {"text": "Lady"}]
            asked = {"question": f"Who is {index}?", "is_impossible": False, "answers": names}
            return {"context": f"Person {index} is Ann{index}, Lady of the sea.", "qas": [asked]}

        return {"data": [{"paragraphs": [paragraph(index)]} for index in range(12)]}


def test_needles_among_essays_need_the_network(tokenizer, monkeypatch):
    task = RulerLmEval(1, subtasks="niah_single_2", length=4000)
    line = "task.subtasks=niah_single_2: baber/paul_graham_essays and nltk's punkt_tab is out of reach; without"
    with pytest.raises(SettingError, match=f"^{line} a network: niah_single_1, niah_multikey_2"):
        task.check()
    from lm_eval.tasks.ruler.prepare_niah import get_haystack

    essays = {"text": [f"Sentence {index} says little." for index in range(400)]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: essays)
    monkeypatch.setattr("nltk.data.find", lambda name: name)
    monkeypatch.setattr("lm_eval.tasks.ruler.prepare_niah.sent_tokenize", lambda text: text.split(". "))
    try:
        known = task.fingerprint()
        [sample] = task.samples(tokenizer, 1, 4096)
        assert "Sentence 3 says little" in sample.context and sample.answers[0] in sample.context
        essays["text"].pop()
        get_haystack.cache_clear()
        assert task.fingerprint() != known
    finally:
        get_haystack.cache_clear()


@pytest.mark.parametrize("name", ["ruler_vt", "ruler_cwe", "ruler_fwe", "niah_single_1"])
def test_a_length_at_which_lm_eval_would_not_end_is_refused(tokenizer, name):
    with pytest.raises(SettingError, match=rf"^task\.(length=130: at least \d+ for {name}|subtasks={name}: lm-eval)"):
        made(tokenizer, name, length=130)


def test_all_subtasks_that_do_not_fit_are_named_at_once_with_those_that_do(tokenizer):
    said = (
        r"^task.length=400: at least \d+ for ruler_vt, \d+ for ruler_cwe with this tokenizer; what fits: task.subtasks="
    )
    with pytest.raises(SettingError, match=said) as error:
        made(tokenizer, length=400)
    fit = str(error.value).partition("[")[2].strip("]").split(",")
    assert fit == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_fwe"]
    assert len(made(tokenizer, *fit, length=400, samples=1)) == 4


BAD = {
    "task.subtasks=niah": "task.subtasks=niah: choose one of offline, all, niah_single_1",
    "task.subtasks=[ruler_vt,ruler_vt]": "task.subtasks=['ruler_vt', 'ruler_vt']: offline, all",
    "task.samples=0": "task.samples=0: a whole number",
    "task.length=20000": "task.length=20000: reference takes at most 16384",
    "task.length=short": "task.length=short: a whole number",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    assert_refused(run_cli(["task=ruler_lmeval", "device=cpu", setting], monkeypatch, capsys), BAD[setting], tmp_path)


@pytest.mark.full
def test_it_runs_from_the_command_line_and_says_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = ["task=ruler_lmeval", "task.subtasks=niah_multikey_2", "task.length=600", "limit=1", "question=hidden"]
    code, out, err = run_cli([*own, "method=snapkv", "budget=0.3", "device=cpu"], monkeypatch, capsys)
    assert code == 0 and "RULER in lm-eval's port, which differs from the official one" in " ".join(out.split()), err
    records = [json.loads(line) for file in Path("results").rglob("records*") for line in file.read_text().splitlines()]
    assert [record["score"] for record in records if record["budget"] == 1.0] == [100.0]
    assert len(records) == 2 and all(record["error"] is None for record in records)
