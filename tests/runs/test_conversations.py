"""Conversations, stop texts and draws: what the runner reads and records, against doing it by hand."""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaForCausalLM

import kvbench
from kvbench.config.compose import compose_config
from kvbench.engine.joint_decoding import run_alone
from kvbench.interfaces.task import Graded, Sample
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode_all
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, derive_seed
from kvbench.runs.runner import execute_run
from kvbench.runs.spec import RunSpec
from kvbench.runs.survival import measure_survival
from kvbench.validation import SettingError
from tests.support.conversations import ASKED, CONTEXT, SAID, make_turns
from tests.support.recorded_runs import TIMES
from tests.support.selection import only_in_full

CHECKPOINT = dict(stops=False)  # answers are compared with those of transformers' own generate, which has no stop
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "<bos>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
THINKS = CHATML.replace("assistant\n", "assistant\n<think>\n")
MARKS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]


@dataclass(frozen=True)
class Talk:
    """A task of given samples; the score is whether an answer stands in the output."""

    given: tuple[Sample, ...]
    length: int | None = None
    settings: dict = field(default_factory=dict)

    def check(self) -> None: ...

    def fingerprint(self) -> str:
        return str(hash(repr(self.given)))

    def samples(self, tokenizer, template_tokens, longest):
        return iter(self.given)

    def score(self, sample, output):
        return Graded(100.0 * any(answer in output for answer in sample.answers), output)


@pytest.fixture(scope="module")
def base(checkpoint):
    """A random model and the embedded model's tokenizer with the marks of chat templates."""
    torch.manual_seed(1)
    tokenizer, model = AutoTokenizer.from_pretrained(REFERENCE), LlamaForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return checkpoint, tokenizer, model, {}


@pytest.fixture
def reader(base, monkeypatch):
    """Makes readers of given samples."""

    def make(samples, *settings, template=None) -> Responder:
        checkpoint, tokenizer, model, composed = base
        if settings not in composed:
            where = ["model=hf", f"model.path={checkpoint}", "device=cpu", "task.subtasks=niah_single_1"]
            composed[settings] = RunSpec.from_config(compose_config([*where, *settings]))
        run = replace(composed[settings], task=Talk(tuple(samples)))
        monkeypatch.setattr(tokenizer, "chat_template", template)
        made = Responder(run, Resources(run, {"model": model, "tokenizer": tokenizer}))
        made.stop = frozenset()  # a random model ends its answers anywhere
        return made

    return make


def records(reader: Responder, samples) -> list[dict]:
    bench = Resources(reader.run, {"model": reader.model, "tokenizer": reader.tokenizer})
    return reader.answer([bench.prompts[sample.uid] for sample in samples])


def greedy(model, ids, tokens: int) -> list[int]:
    given = torch.tensor([ids])
    mask = torch.ones_like(given)  # else it is guessed from the padding token, which a random model says too
    out = model.generate(given, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=2)
    return out[0, len(ids) :].tolist()


@pytest.mark.cover
@pytest.mark.parametrize("template", [None, HEADERS])
@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize("said", [SAID, (None,) * 3, ("a monk.", None, "x")])
def test_with_the_full_cache_every_turn_is_transformers_own(reader, template, question, said):
    """Each output is the greedy continuation of all that was said before, read at once."""
    samples = make_turns(said)
    own = reader(samples, f"question={question}", "method=full", template=template)
    found, prompts = records(own, samples), encode_all(own.tokenizer, samples)
    ids: list[int] = []
    for sample, record in zip(samples, found, strict=True):
        prompt = prompts[sample.uid][1]
        ids += [*(prompt.context if not ids else ()), *prompt.rest]
        answer = greedy(own.model, ids, 7)
        assert record["output"] == own.tokenizer.decode(answer, skip_special_tokens=True)
        assert (record["stop"], record["tokens_out"], record["turn"]) == ("length", 7, len(prompt.earlier))
        ids += answer if sample.said is None else []
        assert record["rows_seen"] == len(ids) - (7 if sample.said is None else 0)


@pytest.mark.cover
@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize("said", [SAID, (None,) * 3])
@pytest.mark.parametrize("method", ["snapkv", only_in_full("keydiff"), only_in_full("tova"), "graph"])
def test_with_a_method_every_turn_is_what_the_same_steps_give(reader, monkeypatch, method, question, said):
    """Prefill, extend, generate; what is not to stay, in a branch. `graph`: the step of a CUDA graph, without one."""
    if method == "graph":
        monkeypatch.setattr("kvbench.engine.context.can_capture", lambda model: True)
    samples, tokens, name = make_turns(said, tokens=12), 12, "keydiff" if method == "graph" else method
    own = reader(samples, f"question={question}", f"method={name}", "budget=0.5")
    found, prompts = records(own, samples), [prompt for _, prompt in encode_all(own.tokenizer, samples).values()]
    assert {record["decoding"] for record in found} == {"graph" if method == "graph" else "modules"}
    monkeypatch.undo()
    first = prompts[0].context + (prompts[0].rest if question == "visible" else ())
    more = {"seed": derive_seed(own.run.seed, "talk"), "tokenizer": own.tokenizer, "prefix": prompts[0].prefix}
    held = kvbench.prefill(own.model, torch.tensor([first]), name, 0.5, **more)
    for turn, (prompt, record) in enumerate(zip(prompts, found, strict=True)):
        if turn or question == "hidden":
            held.extend(torch.tensor([prompt.rest]))
        assert record["rows_held"] == held.contexts[0].own_layers[0].rows.mean_rows < record["rows_seen"]
        [context] = held.contexts
        assert [record["survived"]] == measure_survival(
            [layer.rows for layer in context.own_layers], record["rows_seen"]
        )
        assert record["asked"] == ASKED[turn]
        with nullcontext() if said[turn] is None else held.branch():
            answer = held.generate(tokens, stop=frozenset())
        assert record["output"] == own.tokenizer.decode(answer[0], skip_special_tokens=True)


def test_an_own_answer_that_ended_is_followed_by_the_templates_end(reader, monkeypatch):
    samples = make_turns((None,) * 3)
    own = reader(samples, "method=full", template=CHATML)
    prompts = [prompt for _, prompt in encode_all(own.tokenizer, samples).values()]
    answer = greedy(own.model, prompts[0].ids, 7)
    end = answer[4]
    assert end not in answer[:4]
    own.stop = frozenset([end])
    found = records(own, samples)
    assert (found[0]["stop"], found[0]["tokens_out"]) == ("eos", 5)
    assert own.tokenizer.decode(prompts[1].rest).startswith("<|im_end|>\n<|im_start|>user\n")
    ids = [*prompts[0].ids, *answer[:4], *prompts[1].rest]
    again = greedy(own.model, ids, 7)
    upto = again[: again.index(end) + 1] if end in again else again
    assert found[1]["output"] == own.tokenizer.decode(upto, skip_special_tokens=True)
    assert found[1]["rows_seen"] == len(ids)


def test_ids_differ_from_the_whole_conversations_only_where_an_answer_begins(reader):
    """GPT-2's pattern parts two line breaks before a letter, which it does not know of when the prompt ends there."""
    samples = make_turns(("a monk.", "in spring", "for bread"))
    own = reader(samples, "method=full", template=HEADERS)
    tokenizer = own.tokenizer
    (_, first), (_, second), _ = encode_all(tokenizer, samples).values()
    messages = [("user", CONTEXT + ASKED[0]), ("assistant", SAID[0]), ("user", ASKED[1])]
    messages = [{"role": role, "content": content} for role, content in messages]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(second.ids) == tokenizer.decode(whole) and list(second.ids) != whole
    border, both = len(first.ids), tokenizer.encode("\n\n", add_special_tokens=False)
    assert list(second.ids[: border - len(both)]) == whole[: border - len(both)]
    assert list(second.ids[border:]) == whole[-len(second.ids[border:]) :]
    assert [record.get("retokenized") for record in records(own, samples)] == [None, len(both), 2 * len(both)]


def test_a_template_that_shows_turns_otherwise_than_they_were_read_is_refused(reader):
    with pytest.raises(SettingError, match="^model: its chat template must show the turns of a conversation as"):
        encode_all(reader(make_turns(), template=THINKS).tokenizer, make_turns())


def test_turns_of_a_conversation_that_was_cut_off_are_made_again_and_are_the_same(reader, tmp_path):
    samples = (*make_turns((None,) * 3, tokens=4), *make_turns((None, "x", None), "other", tokens=4))
    own = reader(samples, "method=tova", "budget=0.5", "temperature=1.0")
    bench = Resources(own.run, {"model": own.model, "tokenizer": own.tokenizer})

    def plain(found):
        return {uid: {k: v for k, v in own.items() if k not in TIMES} for uid, own in found.items()}

    whole = execute_run(own.run, tmp_path / "whole", bench)
    assert [record["turn"] for record in whole.values()] == [0, 1, 2, 0, 1, 2]
    assert [record["conversation"] for record in whole.values()] == ["talk"] * 3 + ["other"] * 3
    [folder] = (tmp_path / "whole" / "runs").iterdir()
    [written] = folder.glob("records*.jsonl")
    for kept in (1, 5):
        shutil.copytree(folder, tmp_path / f"{kept}" / "runs" / folder.name)
        cut = tmp_path / f"{kept}" / "runs" / folder.name
        (cut / "done").unlink()
        (cut / written.name).write_text("".join(written.read_text().splitlines(keepends=True)[:kept]))
        assert plain(execute_run(own.run, tmp_path / f"{kept}", bench)) == plain(whole)


def test_own_answers_count_against_the_window(reader, tmp_path):
    length = len(encode_all(reader(make_turns()).tokenizer, make_turns((None,) * 3))["talk/2"][1].ids)
    fits = (4096 - length) // 3
    for tokens, good in ((fits, True), (fits + 1, False)):
        samples = make_turns((None,) * 3, tokens=tokens)
        own = reader(samples, "method=full")
        bench = Resources(own.run, {"model": own.model, "tokenizer": own.tokenizer})
        prompt = bench.prompts["talk/2"][1]
        assert (prompt.unknown, len(prompt.ids)) == (2 * tokens, length)
        assert (length + 3 * tokens <= 4096) == good
        if not good:
            with pytest.raises(
                SettingError, match=rf"^task: talk/2 needs {length + 3 * tokens} tokens, the model takes"
            ):
                execute_run(own.run, tmp_path, bench)
            assert not (tmp_path / "runs").exists()


# Stop texts, ends and draws


def scripted(reader: Responder, rows: list[list[int]], **more) -> tuple[list[dict], int]:
    """What is recorded of samples whose tokens are given, and how many tokens were asked for."""
    sample = Sample("s", "s", "", "", "", ("x",), max(map(len, rows)), **more)
    asked, stop = [0], reader.stop | set(more.get("ends", ()))

    class ScriptedAnswer:
        """In place of `kvbench.engine.generation.Answer`."""

        def __init__(self, context, most, sampling, stops, seeds, min_new_tokens, keeps_rows):
            assert stops == stop and len(seeds) == len(rows) and not keeps_rows
            self.steps, self.ended = list(zip(*rows, strict=True)), [False] * len(rows)
            self.step()

        def step(self):
            own = self.steps[asked[0]]
            asked[0] += 1
            self.token = torch.tensor(own)
            self.ended = [one or token in stop for one, token in zip(self.ended, own, strict=True)]
            self.is_over = all(self.ended) or asked[0] == len(self.steps)

        def end(self):
            self.is_over = True

        def close(self):
            assert self.is_over

    with patch("kvbench.runs.responder.Answer", ScriptedAnswer):
        tokens = run_alone(reader._tokens(None, [sample] * len(rows)))
    stamps = [float(i) for i in range(tokens.shape[1])]
    return [reader._output(sample, row, stamps) for row in tokens], asked[0]


@pytest.fixture(scope="module")
def plain_reader():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    own = Responder.__new__(Responder)
    own.tokenizer, own.stop = tokenizer, frozenset([tokenizer.eos_token_id])
    own.run = SimpleNamespace(seed=0, sampling=None, thinking=None)
    return own


PIECES = st.lists(st.sampled_from(["ab", "b\n", "\n", "。", "中文", "é", " the", "ENDE", "EN", "DE", "x"]), max_size=9)


@given(st.lists(PIECES, min_size=1, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_output_stands_before_the_first_stop_text(plain_reader, texts, ends):
    """Whatever tokens a stop text is spread over, alone or in a batch: text, tokens and reason are the definition's."""
    tokenizer, until, [eos] = plain_reader.tokenizer, ("ENDE", "。", "\n\n"), plain_reader.stop
    rows = []
    for pieces, end in zip(texts, ends, strict=False):
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        rows.append(ids + [eos] * end)
    longest = max(map(len, rows)) + 1
    tail = tokenizer.encode("x", add_special_tokens=False)
    rows = [row + tail * (longest - len(row)) for row in rows]
    found, asked = scripted(plain_reader, rows, until=until)
    lengths = []
    for row, record in zip(rows, found, strict=True):
        kept = row[: row.index(eos) + 1] if eos in row else row
        texts_of = [tokenizer.decode(kept[: i + 1], skip_special_tokens=True) for i in range(len(kept))]
        first = next((i for i, text in enumerate(texts_of) if any(end in text for end in until)), None)
        reason = "until" if first is not None else "eos" if eos in row else "length"
        stop = len(kept) if first is None else first + 1
        text = texts_of[stop - 1]
        cut = min((text.find(end) for end in until if end in text), default=len(text))
        assert (record["output"], record["stop"], record["tokens_out"]) == (text[:cut], reason, stop)
        assert record["decode_ms"] == 1000.0 * (stop - 1)
        lengths.append(stop)
    assert asked == max(lengths)  # no token more than the last of them needs


def test_an_end_token_of_the_sample_ends_it_and_stays_in_the_text(plain_reader):
    ids = plain_reader.tokenizer.encode("one\ntwo", add_special_tokens=False)
    line = plain_reader.tokenizer.encode("\n", add_special_tokens=False)
    [record], asked = scripted(plain_reader, [ids], ends=tuple(line))
    assert (record["output"], record["stop"], record["tokens_out"]) == ("one\n", "eos", ids.index(line[0]) + 1)
    assert asked == record["tokens_out"]


@pytest.mark.parametrize("kind", ["text", "token", "special token"])
def test_what_follows_a_thought_is_scored_and_both_are_counted(kind):
    """A thought may contain what ends an answer."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    if kind != "text":
        tokenizer.add_tokens([AddedToken("</think>", special=kind == "special token")])
    thought, answer = (tokenizer.encode(own, add_special_tokens=False) for own in ("one\ntwo</think>", "\n\nthree\nx"))
    own = Responder.__new__(Responder)
    own.tokenizer, own.stop, own.task = tokenizer, frozenset([tokenizer.eos_token_id]), Talk(())
    own.run = SimpleNamespace(thinking="on", task_settings={})
    sample = Sample("s", "s", "", "", "", ("three",), 99, until=("\n",))
    ids = torch.tensor([*thought, *answer])
    found = own._output(sample, ids, [0.0] * len(ids))
    assert (found["output"], found["stop"]) == ("one\ntwo</think>\n\nthree", "until")
    lengths = found["thought_tokens"], found["answer_tokens"], found["tokens_out"]
    assert lengths == (len(thought), len(answer) - 1, len(ids) - 1)
    assert own._grade(sample, found["output"]).answer == "\n\nthree"
    own.task = SimpleNamespace(reads_thoughts=True, score=own.task.score)
    assert own._grade(sample, found["output"]).answer == found["output"]
    own.run.thinking = None
    found = own._output(sample, ids, [0.0] * len(ids))
    assert found["output"] == "one" and "thought_tokens" not in found


def test_a_real_answer_stops_at_text_end_token_and_not_with_its_first(reader):
    def one(**more):
        sample = Sample("one", "one", CONTEXT, ASKED[0], "", ("x",), 12, **more)
        own = reader([sample], "method=full")
        [record] = records(own, [sample])
        return own, record

    own, free = one()
    ids = greedy(own.model, encode_all(own.tokenizer, [Sample("o", "o", CONTEXT, ASKED[0], "", (), 1)])["o"][1].ids, 12)
    assert free["output"] == own.tokenizer.decode(ids) and free["stop"] == "length"
    text = own.tokenizer.decode(ids[:6])
    _, record = one(until=(text[-3:],))
    assert record["stop"] == "until" and record["tokens_out"] <= 6
    assert record["output"] == free["output"][: free["output"].find(text[-3:])]
    end = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    _, record = one(ends=(ids[end],))
    assert (record["stop"], record["tokens_out"]) == ("eos", end + 1)
    _, record = one(ends=(ids[0],))
    assert (record["stop"], record["tokens_out"]) == ("eos", 1)
    _, record = one(ends=(ids[0],), min_new_tokens=1)
    assert record["tokens_out"] > 1 and not record["output"].startswith(own.tokenizer.decode(ids[:1]))


def test_draws_are_a_samples_own(reader):
    """Repeats of one prompt share its context and differ; neither order nor company changes what one draws."""
    samples = [Sample(f"s/{i}", "s", CONTEXT, ASKED[0], "", ("x",), 10, "s") for i in range(4)]
    settings = ("method=snapkv", "budget=0.5", "temperature=1.0")
    own = reader(samples, *settings)
    alone = {sample.uid: records(own, [sample])[0]["output"] for sample in samples}
    assert len(set(alone.values())) == 4
    other = reader(samples[::-1], *settings)
    assert {sample.uid: records(other, [sample])[0]["output"] for sample in samples[::-1]} == alone
    together = records(own, samples)
    assert {record["uid"]: record["output"] for record in together} == alone
    changed = reader(samples, *settings, "seed=1")
    assert records(changed, samples[:1])[0]["output"] != alone["s/0"]
