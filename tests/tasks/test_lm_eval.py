"""task=lm_eval: lm-eval's prompts and scores in kvbench's samples, what is refused, and whole runs on the miniature."""

import json
import pickle
import random
from pathlib import Path

import datasets
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from kvbench.tasks.lm_eval.loader import PACKAGE, REFUSED, find_tasks, load_task, seed_generators
from kvbench.tasks.lm_eval.task import LmEval
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.selection import only_in_full

ROWS = [
    {"context": f"Row {i % 3} is {i % 3 * 7}.", "question": f"What is row {i}?", "answer": str(i)} for i in range(6)
]
SHOTS = [{"context": f"Shot {i}.", "question": "Which?", "answer": f"#{i}"} for i in range(9)]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl, train: {folder}/train.jsonl}}}}
test_split: test
fewshot_split: train
output_type: generate_until
description: "Facts.\\n\\n"
doc_to_text: "{{{{context}}}} {{{{question}}}}"
doc_to_target: answer
gen_prefix: "Answer:"
num_fewshot: 2
generation_kwargs: {{until: ["\\n", ""], max_gen_toks: 7, do_sample: false}}
filter_list:
  - {{name: strict, filter: [{{function: take_first}}]}}
  - {{name: number, filter: [{{function: regex, regex_pattern: "([0-9]+)"}}, {{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


class Parrot(LM):
    """Answers with what was written for each document."""

    def __init__(self, outputs: list[str]) -> None:
        super().__init__()
        self.outputs, self.prompts = outputs, []

    def generate_until(self, requests):
        self.prompts += [request.args[0] for request in requests]
        return self.outputs[: len(requests)]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.fixture(autouse=True)
def no_traces(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


@pytest.fixture
def own(tmp_path):
    """Writes a folder of tasks of a user's; `change` is put into the YAML."""

    def write(*changes: tuple[str, str], rows: list | str = ROWS, names=("facts",), at: str = "own") -> Path:
        folder = tmp_path / at
        folder.mkdir()
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "test.jsonl").write_text(text)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHOTS))
        for name in names:
            config = YAML.format(name=name, folder=folder)
            for before, after in changes:
                assert before in config
                config = config.replace(before, after)
            (folder / f"{name}.yaml").write_text(config)
        return folder

    return write


def samples(task: LmEval) -> list:
    return list(task.samples(None, 0, 4096))


@pytest.mark.parametrize("shots", [None, only_in_full(0)])
def test_prompts_and_scores_are_lm_evals(own, shots):
    outputs = ["0", "it is 1", " 2", "4", "", "5."]
    folder, parrot = own(), Parrot(outputs)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        model=parrot, tasks=["facts"], task_manager=manager, num_fewshot=shots, bootstrap_iters=0, log_samples=True
    )
    task = LmEval(tasks="facts", include_path=str(folder), num_fewshot=shots)
    task.check()
    made = samples(task)
    assert [own.context + own.question + own.answer_prefix for own in made] == parrot.prompts
    assert len(set(parrot.prompts)) == 6 and ("Shot" in parrot.prompts[0]) == (shots is None)
    logged = {(own["doc_id"], own["filter"]): 100 * own["exact_match"] for own in results["samples"]["facts"]}
    for index, (sample, output) in enumerate(zip(made, outputs, strict=True)):
        graded = task.score(sample, output)
        assert graded.score == logged[index, "strict"] and graded.also == {
            "exact_match,number": logged[index, "number"]
        }
    assert {own.max_new_tokens for own in made} == {7} and {own.until for own in made} == {("\n",)}
    assert made[0].meta["data"] == "local" and made[0].answers == ("0",)


def test_the_context_is_split_off_and_shared(own):
    made = samples(LmEval(tasks="facts", include_path=str(own()), question="hidden"))
    assert all(sample.context.endswith(row["context"]) for sample, row in zip(made, ROWS, strict=True))
    assert [sample.question for sample in made] == [f" {row['question']} " for row in ROWS]
    assert made[0].context.count("Shot") == 2  # the examples are read before the cut
    zero = samples(LmEval(tasks="facts", include_path=str(own(at="zero")), num_fewshot=0))
    assert zero[0].group == zero[3].group != zero[1].group


def test_with_a_chat_template_the_texts_are_lm_evals_messages(own):
    folder, seen = own(), []
    task = load_task("facts", folder / "facts.yaml", folder, {}, 0)
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(1234)
    for document in task.eval_docs:
        task.fewshot_context(
            document, 2, apply_chat_template=True, gen_prefix="Answer:", chat_template=lambda m, **_: seen.append(m)
        )
    made = samples(LmEval(tasks="facts", include_path=str(folder), apply_chat_template=True))
    for sample, (system, user, assistant) in zip(made, seen, strict=True):
        assert sample.chat and sample.context + sample.question == system["content"] + user["content"]
        assert sample.answer_prefix == assistant["content"] == "Answer:"
    assert not made[0].question.endswith(" ")


def test_samples_depend_on_the_task_and_the_seed_alone(own):
    folder = own(names=("facts", "more"))

    def made(*names: str, **changes) -> dict:
        random.seed(random.random())
        return {sample.uid: sample for sample in samples(LmEval(tasks=names, include_path=str(folder), **changes))}

    alone = made("facts")
    state = random.getstate()
    assert list(alone) == [f"facts/{index}" for index in range(6)]
    both = made("more", "facts")
    assert {uid: both[uid] for uid in alone} == alone
    assert list(made("facts", limit=2).items()) == list(alone.items())[:2]
    assert made("facts", seed=1) != alone
    random.setstate(state)
    with seed_generators(3):
        random.random()
    assert random.getstate() == state


def test_a_run_is_known_by_documents_prompts_and_files(own):
    def known(*changes, **more) -> str:
        folder = own(*changes, at=f"at{len(seen)}", **more)
        seen.append(folder)
        return LmEval(tasks="facts", include_path=str(folder)).fingerprint()

    seen: list[Path] = []
    first = known()
    assert len(first) == 16
    text = (seen[0] / "facts.yaml").read_text()
    assert LmEval(tasks="facts", include_path=str(seen[0])).fingerprint() == first
    assert known(rows=[*ROWS[:-1], ROWS[-1] | {"answer": "6"}]) != first
    assert known(("Facts.", "Fact.")) != first
    (seen[0] / "facts.yaml").write_text(text.replace('regex_pattern: "([0-9]+)', 'regex_pattern: "([0-8]+)'))
    assert LmEval(tasks="facts", include_path=str(seen[0])).fingerprint() != first


REFUSALS = {
    "metric: bleu, aggregation: bleu": "no metric is a mean over documents where more is better (bleu)",
    "more is better": "no metric is a mean over documents where more is better (exact_match)",
    "repeats": "it asks for 3 answers a document, one is graded",
    "sampling": "temperature=0.0: task.tasks=facts samples at temperature=0.7 top_p=1",
    "beams": "task.tasks=facts: generation setting=num_beams: choose one of until, max_gen_toks",
    "choice": "its output type is multiple_choice, samples are generated; lm-eval runs it with KVBenchLM",
    "code": "it runs the code that a model writes",
    "column": "task.tasks=facts: lm-eval cannot load it (UndefinedError: 'passage' is undefined)",
    "function": "task.tasks=facts: lm-eval cannot load it (ModuleNotFoundError: No module named 'nowhere'",
}
CHANGES = {
    "metric: bleu, aggregation: bleu": ("metric: exact_match, aggregation: mean", "metric: bleu, aggregation: bleu"),
    "more is better": ("higher_is_better: true", "higher_is_better: false"),
    "repeats": ("num_fewshot: 2", "num_fewshot: 2\nrepeats: 3"),
    "sampling": ("do_sample: false", "do_sample: true, temperature: 0.7"),
    "beams": ("do_sample: false", "num_beams: 2"),
    "choice": ("generate_until", "multiple_choice\ndoc_to_choice: ['a', 'b']"),
    "code": ("num_fewshot: 2", "num_fewshot: 2\nunsafe_code: true"),
    "column": ("{{context}}", "{{passage}}"),
    "function": ("num_fewshot: 2", "num_fewshot: 2\nprocess_results: !function nowhere.grade"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_task_that_cannot_be_samples_is_refused_with_the_reason(own, case):
    changes = [CHANGES[case]]
    if case == "choice":
        changes += [('generation_kwargs: {until: ["\\n", ""], max_gen_toks: 7, do_sample: false}\n', "")]
        changes += [("metric: exact_match", "metric: acc"), ("doc_to_target: answer", "doc_to_target: 0")]
        changes += [("num_fewshot: 2", "num_fewshot: 0")]
    with pytest.raises(SettingError) as raised:
        LmEval(tasks="facts", include_path=str(own(*changes))).check()
    assert REFUSALS[case] in str(raised.value) and "\n" not in str(raised.value)


def test_what_a_task_samples_at_can_be_asked_for_or_switched_off(own):
    folder = str(own(CHANGES["sampling"]))
    LmEval(tasks="facts", include_path=folder, temperature=0.7).check()
    made = samples(LmEval(tasks="facts", include_path=folder, gen_kwargs={"do_sample": False, "max_new_tokens": 9}))
    assert made[0].max_new_tokens == 7  # lm-eval's own name of it comes first
    made = samples(LmEval(tasks="facts", include_path=folder, gen_kwargs={"do_sample": False, "max_gen_toks": 9}))
    assert made[0].max_new_tokens == 9


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('{"context": "a"}\n{"context": \n', "task.tasks=facts: test.jsonl line 2 is not JSON ("),
        ("", "task.tasks=facts: no rows"),
        ("[1]\n", "task.tasks=facts: test.jsonl line 1 is not an object with columns"),
        (
            [ROWS[0], ROWS[1] | {"question": ["b"]}],
            "task.tasks=facts: test.jsonl line 2: question is list, expected str",
        ),
        ([ROWS[0], {"context": "a", "answer": "b"}], "task.tasks=facts: test.jsonl line 2 has no column question"),
        ([{"context": "a", "answer": "b"}], "task.tasks=facts: lm-eval cannot load it (CastError: Couldn't cast"),
    ],
)
def test_broken_data_is_refused_with_the_line(own, rows, line):
    task = LmEval(tasks="facts", include_path=str(own(rows=rows)))
    with pytest.raises(SettingError) as raised:
        task.check()
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


@pytest.mark.parametrize("folder", REFUSED)
def test_tasks_of_lm_eval_that_are_no_use_here_say_why(folder):
    path = next(path for path in sorted((PACKAGE / folder).rglob("*.yaml")) if "\ntask:" in f"\n{path.read_text()}")
    with pytest.raises(SettingError, match="^task.tasks=some: ") as raised:
        load_task("some", path, PACKAGE, {}, 0)
    assert REFUSED[folder] in str(raised.value)


def test_names_are_found_without_lm_evals_index(monkeypatch):
    names = ["gsm8k", "ifeval", "infinitebench_passkey", "niah_single_1", "miniature_vt"]
    found = find_tasks(names, None)
    assert list(found) == names and all(path.read_text().count(f"task: {name}") for name, (path, _) in found.items())
    monkeypatch.setattr("kvbench.tasks.lm_eval.loader.PACKAGE", PACKAGE / "infinitebench")
    for name, line in {
        "infinitebench": "a group of lm-eval; name the tasks",
        "nothing": "no such task in lm-eval",
    }.items():
        with pytest.raises(SettingError, match=f"^task.tasks={name}: {line}"):
            find_tasks([name], None)


BAD = {
    "task.tasks=[]": "task.tasks=[]: a name of lm-eval's, or a list",
    "task.tasks=3": "task.tasks=3: a name of lm-eval's, or a list",
    "task.tasks=hellaswag": "task.tasks=hellaswag: its output type is multiple_choice, samples are generated",
    "task.tasks=[miniature_vt,miniature_vt]": "task.tasks=['miniature_vt', 'miniature_vt']: a name of lm-eval's",
    "task.include_path=/nowhere": "task.include_path=/nowhere: no such folder",
    "task.num_fewshot=-1": "task.num_fewshot=-1: a whole number of at least 0",
    "task.best=0": "task.best=0: the metric's largest value",
    "task.metric=acc": "task.tasks=miniature_niah: task.metric=acc: choose one of found",
    "task.gen_kwargs=greedy": "task.gen_kwargs=greedy: settings such as {name: value}",
    "task.gen_kwargs={max_gen_toks: 0}": "task.tasks=miniature_niah: max_gen_toks=0: a whole number of at least 1",
    "task.context=passage": "question=hidden: miniature_niah has no column passage that stands in its prompts",
    "task.apply_chat_template=1.5": "task.apply_chat_template=1.5: choose one of true, false",
    "limit=0": "limit=0: a whole number",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    given = ["task=lm_eval", "question=hidden", "device=cpu", setting]
    assert_refused(run_cli(given, monkeypatch, capsys), BAD[setting], tmp_path)


def test_a_metric_beyond_its_best_is_no_score(own):
    task = LmEval(tasks="miniature_niah", limit=1, best=0.5)
    [sample] = samples(task)
    assert task.score(sample, "nothing").score == 0
    with pytest.raises(SettingError, match=r"^task.best=0.5: miniature_niah gives found 1.0, not from 0 to that"):
        task.score(sample, sample.answers[0])


def test_only_settings_travel_to_other_processes():
    task = LmEval(tasks="miniature_vt", limit=2)
    assert len(samples(task)) == 2
    assert samples(pickle.loads(pickle.dumps(task))) == samples(task)


BOTH = ("miniature_niah", "miniature_vt")


@pytest.mark.parametrize(
    "question, tasks, methods",
    [
        ("hidden", BOTH[:1], ("snapkv",)),
        only_in_full("hidden", BOTH, ("random", "snapkv")),
        only_in_full("visible", BOTH, ("random", "snapkv")),
    ],
)
def test_the_miniature_runs_from_the_command_line(tmp_path, monkeypatch, capsys, question, tasks, methods):
    monkeypatch.chdir(tmp_path)
    for method in methods:
        given = ["task=lm_eval", f"task.tasks=[{','.join(tasks)}]", f"method={method}", "budget=0.2"]
        given += [f"question={question}", "limit=1", "device=cpu"]
        code, out, err = run_cli(given, monkeypatch, capsys)
        assert code == 0 and all(task in out for task in tasks), err
    scores = {True: [], False: []}
    for file in Path("results/runs").rglob("records*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            full = record["budget"] == 1.0
            scores[full].append(record["score"])
            assert record["meta"] | {"data": "miniature", "metric": "found"} == record["meta"]
            assert record["tokens_context"] < record["tokens_in"] and record["error"] is None
            cut = record["tokens_in"] if question == "visible" else record["tokens_context"]
            rows = cut if full else int(0.2 * cut)
            assert record["rows_held"] == rows + record["tokens_in"] - cut
    assert scores[True] == [100.0] * len(tasks)
    assert len(scores[False]) == len(tasks) * len(methods) and sum(scores[False]) < 100 * len(scores[False])
