"""SCBench: prompts to the byte, metrics, data and its errors, averages, and whole runs on the miniature."""

import json
from dataclasses import replace

import pandas
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.cli.data import examine
from kvbench.config.catalogue import task_identity
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode_all
from kvbench.tasks.scbench import metrics
from kvbench.tasks.scbench.miniature import make_rows
from kvbench.tasks.scbench.prompts import NAMES, hash_prompts, load_forms
from kvbench.tasks.scbench.rows import DATASET, REVISION
from kvbench.tasks.scbench.task import SCBench
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.recorded_runs import read_runs
from tests.support.selection import only_in_full


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


@pytest.fixture(scope="module")
def chatting():
    """Every byte a token; a chat template."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


ROWS = {
    "scbench_kv": [{"input": "Key: k\nValue:", "answer": "v1"}, {"input": "Key: l\nValue:", "answer": "v2"}],
    "scbench_qa_eng": [{"input": "Who?", "answer": "Ann"}, {"input": "When?", "answer": "1900"}],
    "scbench_qa_chn": [{"input": "谁？", "answer": "安"}, {"input": "何时？", "answer": "春天"}],
    "scbench_choice_eng": [
        {"input": "Who?", "answer": "Ann", "options": ["Bo", "Ann", "Cy", "Di"]},
        {"input": "Whom?", "answer": "Di", "options": ["Bo", "Ann", "Cy", "Di"]},
    ],
    "scbench_mf": [
        {"input": "The largest number is", "answer": 9},
        {"input": "The smallest number is", "answer": 1},
    ],
    "scbench_vt": [{"input": "Which are 5?", "answer": ["A", "B"]}, {"input": "Which are 6?", "answer": ["C"]}],
    "scbench_summary": [{"input": "Sum up. This paper", "answer": "is."}, {"input": "Sum up.", "answer": "was."}],
}
BOOK = "\n\nQuestion: {}\nA. Bo\nB. Ann\nC. Cy\nD. Di\n\nThe {} correct answer is"
KV = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
QA = "Read the book and answer the question. Be very concise in your answer.\n\n"
# name: (what stands before the context, first turn, second turn with the answer before it, with a template, shared)
EXPECTED = {
    "scbench_kv": (KV, "\n\nKey: k\nValue:", "v1\n\nKey: l\nValue:", "Key: l\nValue:", "Key: k\nValue:"),
    "scbench_qa_eng": (
        QA, "\n\nQuestion: Who?\nAnswer:", "Ann\n\nQuestion: When?\nAnswer:", "Question: When?\nAnswer:",
        "Question: Who?\nAnswer:",
    ),
    "scbench_qa_chn": (
        "阅读以下书籍然后回答问题。\n\n", "\n\n问题：谁？\n答案：", "安\n\n问题：何时？\n答案：",
        "问题：何时？\n答案：", "问题：谁？\n答案：",
    ),
    "scbench_choice_eng": (
        "Read the book and answer the question.\n\n", BOOK.format("Who?", "the"),
        "Ann" + BOOK.format("Whom?", "letter of the"), BOOK.format("Whom?", "the")[2:], BOOK.format("Who?", "the")[2:],
    ),
    "scbench_mf": (
        "What is the largest number?\n\n", "\n\nThe largest number is",
        "9\n\nWhat is the smallest number?\n\nThe smallest number is",
        "What is the smallest number?\n\nThe smallest number is",
        "What is the largest number?\n\nThe largest number is",
    ),
    "scbench_vt": ("", "\n\nWhich are 5?", "['A', 'B']\n\nWhich are 6?", "Which are 6?", "Which are 5?"),
    "scbench_summary": ("", "\n\nSum up. This paper", "is.\n\nSum up.", "Sum up.", "Sum up. This paper"),
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """A folder of one-row files in the published format."""
    for name, turns in ROWS.items():
        context = [3, 9, 1] if name == "scbench_mf" else "The {context}."
        row = {"id": 0, "context": context, "multi_turns": turns}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    return tmp_path


def task(path="miniature", names="all", **more) -> SCBench:
    made = SCBench(path=str(path), subtasks=names, **more)
    made.check()
    return made


@pytest.mark.parametrize("name", ROWS)
def test_prompts_are_upstreams_to_the_byte(written, tokenizer, chatting, name):
    before, first, second, in_chat, shared = EXPECTED[name]
    context = before + ("[3, 9, 1]" if name == "scbench_mf" else "The {context}.")
    one, two = task(written, name).samples(tokenizer, 1, 4096)
    assert (one.context, one.question, two.question) == (context, first, second.removeprefix(one.said))
    assert (
        two.said is not None and one.conversation == two.conversation and one.answer_prefix == two.answer_prefix == ""
    )
    pieces = encode_all(tokenizer, [one, two])[two.uid][1]
    assert list(pieces.ids) == tokenizer.encode(context + first) + tokenizer.encode(second, add_special_tokens=False)

    one, two = task(written, name).samples(chatting, 20, 4096)
    whole = f"<user>{context + first}</><assistant>{one.said}</><user>{in_chat}</><assistant>"
    whole += "This paper" if name == "scbench_summary" else ""
    assert chatting.decode(encode_all(chatting, [one, two])[two.uid][1].ids) == whole

    one, two = task(written, name, mode="shared_context").samples(tokenizer, 1, 4096)
    context = "The largest number is\n\n[3, 9, 1]" if name == "scbench_mf" else context
    assert (one.context, one.question, one.said, one.conversation) == (context, shared, None, "")
    assert two.context == context and one.group == two.group and two.question.startswith(in_chat[:4])


def test_own_answers_are_followed_by_the_end_token_where_there_is_no_template(written, tokenizer):
    for name in ("scbench_qa_eng", "scbench_choice_eng"):
        one, two = task(written, name, answers="own").samples(tokenizer, 1, 4096)
        assert one.said is None and two.question == "<eos>" + EXPECTED[name][3]
        ids = encode_all(tokenizer, [one, two])[two.uid][1].rest
        assert ids[0] == tokenizer.eos_token_id


def test_prompt_strings_are_those_of_the_installed_package():
    """Changes when lm-eval's files, a prompt of ours or a token limit do."""
    assert hash_prompts() == "9ed942f25f73534d"
    assert [form.name for form in load_forms()] == list(NAMES) and len(NAMES) == 10
    limits = [[own.new_tokens for own in form.metrics.values()] for form in load_forms()]
    assert limits == [[150], [150], [30], [40], [40], [40], [10], [200], [5], [800, 15]]


# Metrics. Golden values were worked out by hand from the definitions in upstream's compute_scores.py.

GOLDEN = [
    (metrics.contains_label, "the value is 5f-2.", ("5f-2",), 100),
    (metrics.contains_label, "5F-2", ("5f-2",), 0),
    (metrics.share_found, "a, c", ("A", "B", "C"), 67),
    (metrics.share_found, "b", ("A", "B", "C"), 33),
    (metrics.contains_any, " by ann smith", ("Ann",), 100),
    (metrics.contains_any, "An n", ("Ann",), 0),
    (metrics.contains_any_character, "(b)", ("B",), 100),
    (metrics.contains_any_character, "(a)", ("B",), 0),
    (metrics.contains_any_character, "x)", ("(A)",), 100),  # a character of the label is enough
    (metrics.chinese_f1, "安平。", ("安平",), 200 / 3),  # one character of two
    (metrics.chinese_f1, "安", ("安",), 100),
    (metrics.chinese_f1, "在 北 山", ("南村",), 0),
    (metrics.choice_score, "B. Ann", ("Ann", "B"), 100),
    (metrics.choice_score, "C", ("Ann", "B"), 0),
    (metrics.choice_score, "", ("Ann", "B"), 0),
    (metrics.choice_score, "Ann", ("Ann", "B"), 0),  # its first letter is an A
    (metrics.choice_score, "Zoe", ("Zoe", "B"), 100),
    (metrics.choice_score, "the answer is: B", ("Ann", "B"), 100),
    (metrics.choice_score, "the answer is Zoe", ("Zoe", "B"), 100),
    (metrics.choice_score, "the answer is", ("Zoe", "B"), 0),
    (metrics.choice_score, "the option is\n\nB", ("Ann", "B"), 100),
    (metrics.choice_score, "I take B, not C", ("Ann", "B"), 100),
    (metrics.choice_score, "no idea", ("Ann", "B"), 0),
    (metrics.first_number, "It is 42.9, not 7", ("42",), 100),
    (metrics.first_number, "42.9", ("42.9",), 100),
    (metrics.first_number, "-3", ("3",), 100),
    (metrics.first_number, "none", ("3",), 0),
    (metrics.first_digits, "It is 0042.", ("0042",), 100),
    (metrics.first_digits, "7 or 42", ("42",), 0),
    (metrics.rouge, "the cat sat", ("the cat sat",), 100),
    (metrics.rouge, "", ("the cat",), 0),
    (metrics.rouge, "the cat\nthe dog", ("the dog\nthe cat",), 100),  # sentences are lines, in any order
    (metrics.rouge, "the cat the dog", ("the dog the cat",), 50),  # one line: 2 of 4 in order
]


@pytest.mark.parametrize(("metric", "output", "answers", "points"), GOLDEN)
def test_golden_values(metric, output, answers, points):
    assert metric(output, answers).score == pytest.approx(points, abs=1e-9)


def test_what_the_odd_metrics_mean_stands_beside_them():
    assert metrics.contains_any_character("x)", ("(A)",)).also == {"contained": 0.0}
    assert metrics.chinese_f1("安平。", ("安平",)).also == {"f1": 100.0}
    assert metrics.chinese_f1("", ("安平",)).also == {"f1": 0.0}
    assert metrics.choice_score("the option is Bo", ("Bo", "C")).answer == "Bo"


def test_rouge_is_what_evaluate_computes():
    """`evaluate`'s rouge metric is rouge-score's scorer without stemming, with all types asked for at once."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=False)
    texts = [turn["answer"] for row in make_rows("scbench_summary") for turn in row["multi_turns"]]
    for one, other in zip(texts, texts[1:], strict=False):
        assert metrics.rouge(one, (other,)).score == 100 * scorer.score(other, one)["rougeLsum"].fmeasure


# Data


def test_the_miniature_is_made_alike_and_read_by_the_same_reader(tmp_path, tokenizer):
    made = task()
    assert made.inventory() == dict.fromkeys(NAMES, 5)
    assert made.fingerprint() == task().fingerprint() == task(mode="shared_context").fingerprint()
    samples = list(made.samples(tokenizer, 1, 4096))
    assert {sample.meta["data"] for sample in samples} == {"miniature"}
    assert len({sample.uid for sample in samples}) == len(samples)
    assert all(made.score(sample, sample.answers[-1]).score > 0 for sample in samples)
    for name in NAMES:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(name)))
        (tmp_path / name).mkdir()
        pandas.DataFrame(make_rows(name)).to_parquet(tmp_path / name / "test-00000-of-00001.parquet")
    local = list(task(tmp_path).samples(tokenizer, 1, 4096))
    assert [replace(sample, meta={}) for sample in local] == [replace(sample, meta={}) for sample in samples]
    assert task(tmp_path).fingerprint() == task(tmp_path).fingerprint() != made.fingerprint()
    for name in NAMES:
        (tmp_path / f"{name}.jsonl").unlink()
    assert list(task(tmp_path).samples(tokenizer, 1, 4096)) == local
    assert "scbench_kv                         5 rows" in examine("scbench", str(tmp_path))


def test_the_miniature_has_as_many_contexts_as_asked(tokenizer):
    made = task(names=["scbench_kv", "scbench_vt"], rows=7, max_turns=3)
    assert made.inventory() == {"scbench_kv": 7, "scbench_vt": 7} and made.fingerprint() != task().fingerprint()
    assert list(made.count_samples().values()) == [7] * 6
    samples = list(made.samples(tokenizer, 1, 4096))
    assert len({sample.context for sample in samples}) == 14 and len(samples) == 42
    fewer = list(task(names="scbench_kv", max_turns=3).samples(tokenizer, 1, 4096))
    assert samples[: len(fewer)] == fewer


def test_runs_without_a_number_of_contexts_keep_their_names():
    settings = {"name": "scbench", "max_turns": 3}
    assert task_identity(settings | {"rows": None}) == settings
    assert task_identity(settings | {"rows": 5}) == settings | {"rows": 5}


def test_samples_depend_neither_on_the_list_nor_the_order_nor_the_limit(tokenizer):
    every = {sample.uid: sample for sample in task().samples(tokenizer, 1, 4096)}
    some = list(task(names=["scbench_mf", "scbench_kv"], limit=2).samples(tokenizer, 1, 4096))
    assert [sample.uid for sample in some][:4] == [f"scbench_kv/0/turn{i}" for i in (1, 2, 3)] + ["scbench_kv/1/turn1"]
    assert all(every[sample.uid] == sample for sample in some) and len(some) == 14
    short = list(task(names="scbench_kv", max_turns=2).samples(tokenizer, 1, 4096))
    assert len(short) == 10 and all(every[sample.uid] == sample for sample in short)


def test_the_hub_is_asked_for_each_config_at_a_pinned_revision(monkeypatch, tokenizer):
    asked = []

    def load_dataset(name, config, split, revision):
        asked.append((name, config, split, revision))
        return make_rows(config)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    [*samples] = task("hub", ["scbench_kv", "scbench_mf"]).samples(tokenizer, 1, 4096)
    assert asked == [(DATASET, name, "test", REVISION) for name in ("scbench_kv", "scbench_mf")]
    assert samples[0].meta["data"] == "hub" and len(REVISION) == 40

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(SettingError, match=r"^task.path=hub: microsoft/SCBench/scbench_kv is out of reach \(Conn"):
        task("hub", "scbench_kv")


def test_an_answer_in_a_list_of_its_own_is_the_answer(written):
    """Except in vt, whose answers are lists."""
    names = [name for name in ROWS if name != "scbench_vt"]
    first = task(written, names)
    for name in names:
        row = json.loads((written / f"{name}.jsonl").read_text(encoding="utf-8"))
        row["multi_turns"] = [{**turn, "answer": [turn["answer"]]} for turn in row["multi_turns"]]
        (written / f"{name}.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert task(written, names).fingerprint() == first.fingerprint()


TURN = '{"input": "a", "answer": "b"}'
BAD = {
    "scbench_kv": {
        '{"context": "a"}': "scbench_kv.jsonl line 1 has no column multi_turns",
        '{"context": 5, "multi_turns": []}': "scbench_kv.jsonl line 1: context is int, expected str",
        '{"context": "a", "multi_turns": []}': "scbench_kv.jsonl line 1: multi_turns is empty",
        '{"context": "a", "multi_turns": [3]}': "scbench_kv.jsonl line 1: turn 1 of multi_turns is int, expected an",
        '{"context": "a", "multi_turns": [{"input": "a"}]}': "scbench_kv.jsonl line 1: turn 1 of multi_turns has no co",
        '{"context": "a", "multi_turns": [{"input": "a", "answer": 4}]}': "scbench_kv.jsonl line 1: turn 1 of multi_t",
        '{"context": "a", "multi_turns": [{"input": "a", "answer": ["b", "c"]}]}': "scbench_kv.jsonl line 1: turn 1 of",
        '{"context": "a", "multi_turns": [{"input": "a", "answer": ""}]}': "scbench_kv.jsonl line 1: turn 1 of multi_t",
        "": "no rows of scbench_kv",
        f'{{"context": "a", "multi_turns": [{TURN}]}}\n{{"con': "scbench_kv.jsonl line 2 is not JSON (",
        f'{{"id": 7, "context": "a", "multi_turns": [{TURN}]}}\n{{"id": 7, "context": "a", "multi_turns": [{TURN}]}}': (
            "scbench_kv.jsonl line 2: id 7 with this context is that of scbench_kv.jsonl line 1"
        ),
    },
    "scbench_choice_eng": {
        f'{{"context": "a", "multi_turns": [{TURN}]}}': "scbench_choice_eng.jsonl line 1: turn 1 of multi_turns has no",
        '{"context": "a", "multi_turns": [{"input": "a", "answer": "b", "options": ["a", "c", "d", "e"]}]}': (
            "scbench_choice_eng.jsonl line 1: turn 1 of multi_turns: options are not four with the answer among them"
        ),
    },
    "scbench_mf": {
        '{"context": "1", "multi_turns": []}': "scbench_mf.jsonl line 1: context is str, expected list",
        '{"context": ["1"], "multi_turns": [{"input": "The x is", "answer": 1}]}': "scbench_mf.jsonl line 1: context",
        '{"context": [1], "multi_turns": [{"input": "largest?", "answer": 1}]}': "scbench_mf.jsonl line 1: turn 1",
    },
    "scbench_summary_with_needles": {
        '{"context": "a", "multi_turns": [{"input": "a", "answer": "b", "task": "c"}]}': (
            "scbench_summary_with_needles.jsonl line 1: turn 1 of multi_turns: task is 'c', expected scbench_summary or"
        )
    },
}


@pytest.mark.parametrize(("name", "text", "line"), [(n, t, m) for n, own in BAD.items() for t, m in own.items()])
def test_bad_data_is_said_in_one_line(tmp_path, name, text, line):
    (tmp_path / f"{name}.jsonl").write_text(text)
    for path in (tmp_path, tmp_path / f"{name}.jsonl"):
        with pytest.raises(SettingError) as error:
            task(path, name)
        assert str(error.value).startswith("task.path: " + line) and "\n" not in str(error.value)


WRONG = {
    "task.path=/nowhere": "task.path=/nowhere: no such file or folder",
    "task.subtasks=scbench_repoqa": "task.subtasks=scbench_repoqa: its metric parses the code that the model wrote",
    "task.subtasks=[scbench_kv,scbench_repoqa_and_kv]": "task.subtasks=scbench_repoqa_and_kv: its metric parses",
    "task.subtasks=kv": "task.subtasks=kv: choose one of all, scbench_kv",
    "task.subtasks=[scbench_kv,scbench_kv]": "task.subtasks=['scbench_kv', 'scbench_kv']: all, one subtask, or a list",
    "task.mode=scdq": "task.mode=scdq: choose one of multi_turn, shared_context",
    "task.answers=none": "task.answers=none: choose one of golden, own",
    "task.max_turns=0": "task.max_turns=0: a whole number of at least 1",
    "task.rows=0": "task.rows=0: a whole number of at least 1",
    "task.length=0": "task.length=0: a whole number of at least 1",
    "task.length=100": "task.length=100: scbench_kv/0/turn1 needs ",
    "task.length=20000": "task.length=20000: reference takes at most 16384 tokens",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_said_in_one_line(setting, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused(run_cli(["task=scbench", "device=cpu", setting], monkeypatch, capsys), WRONG[setting], tmp_path)


def test_answers_before_a_query_and_one_file_for_all_are_refused(tmp_path):
    with pytest.raises(SettingError, match="^task.answers=own: shared_context has no answers before"):
        task(mode="shared_context", answers="own")
    with pytest.raises(SettingError, match="task.rows=9: the miniature makes so many; null with task.path=hub"):
        task("hub", rows=9).check()
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(make_rows("scbench_kv")[0]))
    with pytest.raises(SettingError, match=f"^task.path={file}: one file is one subtask's"):
        task(file)
    assert task(file, "scbench_kv").inventory() == {"scbench_kv": 1}


@pytest.mark.cover
@pytest.mark.parametrize("settings", [{}, {"answers": "own"}, {"mode": "shared_context"}])
@pytest.mark.parametrize("name", ["scbench_kv", "scbench_qa_chn"])
def test_a_long_context_loses_its_middle_and_all_turns_fit(tmp_path, tokenizer, chatting, settings, name):
    """Of Chinese each byte or so is a token, so that a cut may fall into a character."""
    text = "".join(f"{i}号" for i in range(4000))
    turns = make_rows(name)[1]["multi_turns"]
    (tmp_path / f"{name}.jsonl").write_text(json.dumps({"context": text, "multi_turns": turns}))
    for own, template in ((tokenizer, 1), (chatting, 21)):
        for most in (1800, 1801, 1802, 1803) if name == "scbench_qa_chn" and own is chatting else (1800,):
            for sample, prompt in encode_all(
                own, task(tmp_path, name, length=most, **settings).samples(own, template, 10**6)
            ).values():
                need = len(prompt.ids) + prompt.unknown + sample.max_new_tokens
                assert need <= most
                whole = next(form for form in load_forms() if form.name == name).wording.before + text
                head = next(i for i, (a, b) in enumerate(zip(sample.context, whole, strict=False)) if a != b)
                assert head > 100 and whole.endswith(sample.context[head:]) and "\ufffd" not in sample.context


def test_averages_weigh_turn_indices_alike():
    made = task(max_turns=None)
    means = made.averages
    assert means["scbench_kv"] == {
        f"scbench_kv/turn{i}": 0.25 for i in (1, 2, 3, 4)
    }  # one row of five has a fourth turn
    both = means["scbench_summary_with_needles"]
    assert list(both)[:3] == [
        f"scbench_summary_with_needles/{name}" for name in ("summary/turn1", "needle/turn2", "summary/turn3")
    ]
    assert all(weights and sum(weights.values()) == pytest.approx(1) for weights in means.values())
    four = means["DeltaKV's four"]
    assert four["scbench_kv/turn4"] == pytest.approx(1 / 16) and len({name.split("/")[0] for name in four}) == 4
    assert means["DeltaKV's four, by samples"]["scbench_kv/turn4"] == pytest.approx(1 / 4 / 16)  # of 5 + 5 + 5 + 1
    assert len({name.split("/")[0] for name in means["mean of tasks"]}) == 10
    assert "DeltaKV's four" not in task(names=["scbench_kv", "scbench_vt"]).averages
    assert list(means)[:2] == ["mean of tasks", "DeltaKV's four"]  # curves draw the first
    shared = task(mode="shared_context").averages
    assert shared["mean of tasks"]["scbench_kv"] == pytest.approx(1 / 10) and "scbench_kv" not in shared


@pytest.mark.full
@pytest.mark.parametrize(
    "name, mode, question, method",
    [
        ("scbench_many_shot", "multi_turn", "hidden", "keydiff"),
        only_in_full("scbench_many_shot", "shared_context", "hidden", "keydiff"),
        only_in_full("scbench_kv", "multi_turn", "visible", "snapkv"),
    ],
)
def test_whole_runs_on_the_miniature(tmp_path, monkeypatch, capsys, name, mode, question, method):
    """The embedded model answers with the full cache."""
    monkeypatch.chdir(tmp_path)
    own = ["task=scbench", f"task.subtasks={name}", f"task.mode={mode}", "task.max_turns=2", "limit=1", "device=cpu"]
    own += [f"method={method}", "budget=0.1", f"question={question}"]
    code, out, _ = run_cli(own, monkeypatch, capsys)
    assert code == 0 and name in out
    found = read_runs(tmp_path / "results")
    full, other = (sorted(found[name][1], key=lambda one: one["index"]) for name in ("full", method))
    assert [one["uid"] for one in full] == [f"{name}/0/turn{turn}" for turn in (1, 2)]
    assert [one["turn"] for one in full] == ([0, 1] if mode == "multi_turn" else [0, 0])
    assert [one["score"] for one in full] == [100.0] * 2
    assert all(one["meta"]["data"] == "miniature" and one["error"] is None for one in (*full, *other))
    assert other[0]["resident_bytes"] < 0.3 * other[0]["full_bytes"]
