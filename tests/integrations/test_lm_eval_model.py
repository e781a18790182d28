"""KVBenchLM: log-probabilities against the plain model, what is read over the cut cache, lm-eval's evaluation."""

import json

import datasets
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

import kvbench
from kvbench.engine.generation import GenerationContext
from kvbench.integrations.lm_eval_model import KVBenchLM
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.validation import NumericalError, SettingError
from tests.support.selection import only_in_full

CONTEXT = "The grass is green. VAR ABCDE = 12345. The sky is blue. VAR FGHIJ = VAR ABCDE. " * 3
ASKED = CONTEXT + "Question: Find all variables."
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def full():
    return KVBenchLM("reference")


@pytest.fixture(autouse=True)
def no_traces(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def cut(full: KVBenchLM, **settings) -> KVBenchLM:
    return KVBenchLM(full.model, full.tokenizer, **settings)


def asks(kind: str, *arguments: tuple, **doc) -> list[Instance]:
    return [Instance(kind, doc, own, index, ("facts", index, 1)) for index, own in enumerate(arguments)]


def plain(model, ids: list[int], count: int) -> tuple[float, bool]:
    """What the model itself says of the last `count` tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -count - 1 : -1]
    last = torch.tensor(ids[-count:])
    return float(logits.log_softmax(-1).gather(-1, last[:, None]).sum()), bool((logits.argmax(-1) == last).all())


@pytest.mark.parametrize(
    "settings", [only_in_full({}), only_in_full({"block_size": 16}), {"block_size": 16, "question": "hidden"}]
)
def test_the_full_cache_gives_the_models_own_log_probabilities(full, settings):
    encode = full.tokenizer.encode
    greedy = full.generate_until(asks("generate_until", (ASKED, {"until": [], "max_gen_toks": 4})), True)[0]
    pairs = [(ASKED, " green."), (ASKED, " 12345 ABCDE"), (ASKED, greedy), (ASKED + " ", "sky"), (CONTEXT, ".")]
    found = cut(full, **settings).loglikelihood(asks("loglikelihood", *pairs, context=CONTEXT), True)
    for (context, continuation), own in zip(pairs, found, strict=True):
        whole = encode(context + continuation)
        value, likeliest = plain(full.model, whole, len(whole) - len(encode(context.rstrip())))
        assert own[0] == pytest.approx(value, abs=1e-4) and own[1] == likeliest
    assert found[2][1] and not found[1][1]


def test_without_a_context_the_begin_token_stands_in_front(full):
    ids = full.tokenizer.encode("The sky is", add_special_tokens=False)
    [(found, _)] = full.loglikelihood(asks("loglikelihood", ("", "The sky is")), True)
    assert found == pytest.approx(plain(full.model, [full.tokenizer.bos_token_id, *ids], len(ids))[0], abs=1e-4)


@pytest.mark.cover
@pytest.mark.parametrize("length", [4096, 9])
@pytest.mark.parametrize("block_size", [None, only_in_full(1), 5])
def test_rolling_is_the_sum_over_lm_evals_windows(full, length, block_size):
    text = ASKED[:40]
    ids, begin = full.tokenizer.encode(text, add_special_tokens=False), full.tokenizer.bos_token_id
    windows = list(get_rolling_token_windows(ids, begin, length, 1))
    assert sum(len(target) for _, target in windows) == len(ids) and (len(windows) > 1) == (length < 100)
    wanted = sum(plain(full.model, [*context, target[-1]], len(target))[0] for context, target in windows)
    lm = cut(full, max_length=length, block_size=block_size)
    assert lm.loglikelihood_rolling(asks("loglikelihood_rolling", (text,)), True) == [pytest.approx(wanted, abs=1e-3)]


def test_likelihoods_of_logits_that_are_not_finite_are_refused(full, monkeypatch):
    extend = GenerationContext.extend
    monkeypatch.setattr(GenerationContext, "extend", lambda *given: extend(*given) * torch.inf)
    with pytest.raises(NumericalError, match="^model: its logits are not finite in float32; "):
        full.loglikelihood(asks("loglikelihood", (ASKED, " green.")), True)


def test_rolling_reads_every_block_over_the_rows_held_before_it(full):
    text = ASKED[:45]
    ids = [full.tokenizer.bos_token_id, *full.tokenizer.encode(text, add_special_tokens=False)]
    own = dict(method="knorm", budget=6, block_size=8)
    found = cut(full, **own).loglikelihood_rolling(asks("loglikelihood_rolling", (text,)), True)[0]
    wanted, read = 0.0, ids[:-1]
    for start in range(0, len(read), 8):  # as many blocks before it, then the block over what is held of them
        block, target = read[start : start + 8], torch.tensor(ids[start + 1 : start + 9])
        if start:
            logits = kvbench.prefill(full.model, torch.tensor([read[:start]]), **own).extend(torch.tensor([block]))[0]
        else:
            with torch.no_grad():
                logits = full.model(torch.tensor([block])).logits[0]
        wanted += float(logits.log_softmax(-1).gather(-1, target[:, None]).sum())
    assert found == pytest.approx(wanted, abs=1e-3)
    [whole] = cut(full).loglikelihood_rolling(asks("loglikelihood_rolling", (text,)), True)
    assert abs(found - whole) > 0.1
    with pytest.raises(SettingError, match="^block_size=None: in one block a text is read before anything is cut"):
        cut(full, method="knorm", budget=6).loglikelihood_rolling(asks("loglikelihood_rolling", (text,)), True)


@pytest.mark.parametrize("question", ["visible", "hidden"])
def test_a_continuation_is_read_over_the_cut_cache_from_its_first_token_on(full, question):
    own = dict(method="snapkv", budget=0.2)
    lm, encode = cut(full, question=question, **own), full.tokenizer.encode
    ids, target = encode(ASKED), encode(" green", add_special_tokens=False)[:1]
    pairs = [(ASKED, full.tokenizer.decode(target)), (ASKED, " sky")]
    [(found, _), _] = lm.loglikelihood(asks("loglikelihood", *pairs, context=CONTEXT.rstrip()), True)
    split = len(ids) - 1 if question == "visible" else len(encode(CONTEXT.rstrip()))
    held = kvbench.prefill(full.model, torch.tensor([ids[:split]]), **own)
    logits = held.extend(torch.tensor([ids[split:]]))[0, -1]
    assert found == pytest.approx(float(logits.log_softmax(-1)[target[0]]), abs=1e-4)
    assert abs(found - plain(full.model, [*ids, *target], 1)[0]) > 0.01
    [record] = lm.records  # both continuations over what was held once
    assert record["resident_bytes"] / record["full_bytes"] == pytest.approx(int(0.2 * split) / split)


def test_what_is_generated_is_what_a_run_generates(full):
    prompt, kwargs = "needle " * 30 + "The grass is green.", {"until": ["\n"], "max_gen_toks": 6}
    for question in ("visible", "hidden"):
        lm = cut(full, method="snapkv", budget=0.3, question=question)
        [found] = lm.generate_until(asks("generate_until", (prompt, kwargs), context="needle " * 30), True)
        ids = full.tokenizer(prompt)["input_ids"]
        split = len(ids) if question == "visible" else len(full.tokenizer(("needle " * 30).rstrip())["input_ids"])
        held = kvbench.prefill(full.model, torch.tensor([ids[:split]]), method="snapkv", budget=0.3)
        if question == "hidden":
            held.extend(torch.tensor([ids[split:]]))
        tokens = held.generate(6)[0].tolist()
        assert found == full.tokenizer.decode(tokens, skip_special_tokens=True).split("\n")[0]
        assert lm.records[0]["rows_held"] == int(0.3 * split) + len(ids) - split


def test_repeats_are_sampled_each_with_its_seed(full):
    kwargs = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "max_gen_toks": 4, "until": []}
    [request] = asks("generate_until", (ASKED, kwargs))
    first = full.generate_until([request] * 3, True)
    assert len(set(first)) == 3 and full.generate_until([request] * 3, True) == first
    assert cut(full, seed=1).generate_until([request] * 3, True) != first


def test_what_is_too_long_is_refused_or_loses_its_front(full):
    request = asks("generate_until", (ASKED, {"until": [], "max_gen_toks": 4}))
    with pytest.raises(
        SettingError, match=r"^max_length=40: facts/0/0 needs \d+ tokens with its answer; truncate=True"
    ):
        cut(full, max_length=40).generate_until(request, True)
    lm = cut(full, max_length=40, truncate=True)
    [found] = lm.generate_until(request, True)
    ids = full.tokenizer.encode(ASKED)[-36:]
    tokens = kvbench.prefill(full.model, torch.tensor([ids])).generate(4)[0].tolist()
    assert found == full.tokenizer.decode(tokens, skip_special_tokens=True)
    [(value, _)] = lm.loglikelihood(asks("loglikelihood", (ASKED, " green.")), True)
    whole = full.tokenizer.encode(ASKED + " green.")
    assert value == pytest.approx(
        plain(full.model, whole[-41:], len(whole) - len(full.tokenizer.encode(ASKED)))[0], abs=1e-4
    )


def test_chat_templates_bring_their_own_begin_token(full):
    tokenizer = Checkpoint("reference", str(REFERENCE)).tokenizer()
    tokenizer.chat_template = CHAT
    lm = KVBenchLM(full.model, tokenizer)
    history = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "It is"}]
    begin = tokenizer.bos_token
    assert lm.apply_chat_template(history[:1]) == f"{begin}[user]Which?\n[assistant]"
    continued = lm.apply_chat_template(history, add_generation_prompt=False)
    assert continued == f"{begin}[user]Which?\n[assistant]It is"
    assert (
        lm.tok_encode(continued).count(tokenizer.bos_token_id) == 1 == lm.tok_encode("x").count(tokenizer.bos_token_id)
    )
    assert lm.chat_template(True) == CHAT and "/" not in lm.tokenizer_name
    lm.generate_until(asks("generate_until", (continued, {"until": [], "max_gen_toks": 1})), True)
    assert lm.records[0]["rows_seen"] == len(lm.tok_encode(continued))


YAML = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}} Question: {{{{question}}}}"
doc_to_choice: choices
doc_to_target: gold
"""


@pytest.mark.parametrize("question", [only_in_full("visible"), "hidden"])
def test_lm_eval_evaluates_choices_and_answers(full, tmp_path, monkeypatch, question):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it starts other programs
    rows = [
        {"context": CONTEXT, "question": f"{i}?", "choices": ["green.", "12345", "blue and more"], "gold": i % 3}
        for i in range(3)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choice.yaml").write_text(YAML.format(folder=tmp_path))
    folders = [str(tmp_path), str(kvbench.__path__[-1]) + "/tasks/lm_eval/miniature"]
    asked = {"full": ["choice", "miniature_niah"], "knorm": ["miniature_niah"]}
    if question == "hidden":
        del asked["knorm"]  # in make test
    found = {}
    for method, tasks in asked.items():
        lm = cut(full, method=method, budget=0.2, question=question)
        results = simple_evaluate(
            model=lm, tasks=tasks, limit=1, bootstrap_iters=0, log_samples=True,
            task_manager=TaskManager(include_path=folders, include_defaults=False),
        )  # fmt: skip
        found[method] = results["results"]["miniature_niah"]["found,none"]
        assert results["config"]["kvbench"]["method"]["name"] == method
        if method == "full":
            for sample in results["samples"]["choice"]:
                text = sample["arguments"][0][0]
                values = []
                for choice in rows[0]["choices"]:
                    ids = full.tokenizer.encode(f"{text} {choice}")
                    values.append(plain(full.model, ids, len(ids) - len(full.tokenizer.encode(text)))[0])
                assert sample["acc"] == float(values.index(max(values)) == sample["doc"]["gold"])
    assert found["full"] == 1.0 > found.get("knorm", 0.0)


BAD = {
    "no such method": (dict(method="none"), "method=none: choose one that kvbench run --help lists"),
    "budget": (dict(method="knorm", budget=0), "budget=0: a fraction in (0, 1]"),
    "question": (dict(question="asked"), "question=asked: choose one of visible, hidden"),
    "block size": (dict(block_size=0), "block_size=0: a whole number"),
    "allocator": (dict(method="centroidkv", budget=0.5, allocator="ada"), "allocator=ada: centroidkv has no scores"),
    "max_length": (dict(max_length=0), "max_length=0: a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_line(full, case):
    settings, line = BAD[case]
    with pytest.raises(SettingError) as raised:
        cut(full, **settings)
    assert str(raised.value).startswith(line)


def test_what_cannot_be_followed_is_refused(full, tmp_path):
    with pytest.raises(SettingError, match="^tokenizer=None"):
        KVBenchLM(full.model)
    with pytest.raises(SettingError, match="^model.path=/nowhere: no such folder"):
        KVBenchLM("/nowhere")
    with pytest.raises(SettingError, match="^use_cache: it knows answers by the prompt alone"):
        simple_evaluate(model=full, tasks=["x"], use_cache=str(tmp_path / "cache"))
    with pytest.raises(SettingError, match="^facts: generation setting=num_beams: choose one of until"):
        full.generate_until(asks("generate_until", (ASKED, {"num_beams": 2})), True)
    for doc in ({}, {"context": 3}, {"context": "elsewhere"}):
        with pytest.raises(SettingError, match="^question=hidden: facts/0/0 has no field context that stands in its"):
            cut(full, question="hidden").generate_until(asks("generate_until", (ASKED, {}), **doc), True)
    with pytest.raises(SettingError, match="has no tokens"):
        full.loglikelihood(asks("loglikelihood", (ASKED, "")), True)
