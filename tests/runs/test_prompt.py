"""The ids of prompts and conversations, for tokenizers and chat templates of several shapes."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvbench.config.compose import compose_config
from kvbench.integrations.lm_eval_model import KVBenchLM
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import count_template_tokens
from kvbench.runs.checks import check_settings
from kvbench.runs.prompt import encode, encode_all
from kvbench.runs.resources import Resources
from kvbench.runs.spec import RunSpec
from kvbench.training.query_filters import split_text
from kvbench.validation import SettingError
from tests.support.conversations import ASKED, CONTEXT, make_turns

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
TRIM = CHATML.replace("m.content", "m.content | trim")
WORDS = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"none": None, "chatml": CHATML, "trim": TRIM, "llama-2": LLAMA_2, "words": WORDS}
SHAPES = {  # normalizer, pre-tokenizer and decoder
    "bytes": lambda: (None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "prepend": lambda: (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, decoders.Metaspace(),
    ),
    "always": lambda: (
        None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False), decoders.Metaspace()
    ),
    "first": lambda: (None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
}  # fmt: skip
SPECIAL = {"": "$A", "begin": "<s> $A", "both": "<s> $A </s>"}  # what the post-processor makes of a text


@cache
def train(shape: str) -> Tokenizer:
    """A tokenizer of the words of the conversations. Llama-2, Mistral and Phi-3 have the shapes with `▁`."""
    made = Tokenizer(BPE())
    normalizer, pre_tokenizer, made.decoder = SHAPES[shape]()
    made.pre_tokenizer = pre_tokenizer if shape == "bytes" else pre_tokenizers.Metaspace()  # words, as in SentencePiece
    words = ["user", "system", "assistant", "[INST]", "[/INST]", "\n\n"]
    texts = [CONTEXT, *ASKED, *(f"{one} {other}" for one in words for other in words), "a monk. in spring for bread"]
    letters = sorted({*"".join(texts), *"▁@", *(pre_tokenizers.ByteLevel.alphabet() if shape == "bytes" else ())})
    made.train_from_iterator(texts, BpeTrainer(vocab_size=450, initial_alphabet=letters, show_progress=False))
    made.add_special_tokens(MARKS)
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence([])
    return made


def make_tokenizer(shape: str, special: str = "", template: str = "none") -> PreTrainedTokenizerFast:
    own = Tokenizer.from_str(train(shape).to_str())
    ids = [(mark, own.token_to_id(mark)) for mark in ("<s>", "</s>")]
    own.post_processor = processors.TemplateProcessing(single=SPECIAL[special], special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATES[template]
    return made


def read_whole(tokenizer, messages: list[str]) -> list[int]:
    """The ids that the tokenizer gives for a conversation whose last message is the user's, without an end."""
    if tokenizer.chat_template:
        roles = ["user", "assistant"] * len(messages)
        said = [{"role": role, "content": own} for role, own in zip(roles, messages, strict=False)]
        text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode("".join(messages))
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids


def read_texts(tokenizer, ids) -> str:
    """Every token's text. Decoding them together would drop a first space."""
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))


@pytest.mark.cover
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ids_of_a_turn_are_those_of_the_whole_conversation(shape, special, template):
    """Where the whole has a token over the beginning of an answer, what was read stays and the prompt says so."""
    tokenizer, messages, held = make_tokenizer(shape, special, template), [], ()
    samples = make_turns(("a monk.", " in spring\n", "for bread"))
    for sample, prompt in encode_all(tokenizer, samples).values():
        messages.append(sample.question if messages else CONTEXT + sample.question)
        whole = read_whole(tokenizer, messages)
        assert prompt.ids[: len(held)] == held and prompt.ids == held + (prompt.rest if held else prompt.ids)
        assert tokenizer.eos_token_id not in prompt.ids[-1:]
        assert (list(prompt.ids) == whole) == (prompt.retokenized == 0)
        if prompt.retokenized:
            assert template == "words" and read_texts(tokenizer, prompt.ids) == read_texts(tokenizer, whole)
            assert prompt.retokenized <= 3 * len(prompt.earlier)
        held = prompt.ids
        messages.append(sample.said)


@pytest.mark.cover
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_an_answer_of_the_models_own_come_the_ids_that_follow_any_other(shape, template):
    tokenizer = make_tokenizer(shape, "both", template)
    given, own = (
        [prompt for _, prompt in encode_all(tokenizer, make_turns(said)).values()]
        for said in (("monk", "mill", "x"), (None, "mill", "x"))
    )
    follows = given[1].rest[-len(own[1].rest) :]
    assert own[1].rest == follows and tokenizer.decode(given[1].rest[: -len(follows)]).strip() == "monk"
    assert own[2].rest == given[2].rest and (own[2].retokenized == 0 or template == "words")


@pytest.mark.parametrize("template", ["trim", "llama-2"])
def test_what_a_template_strips_from_a_message_is_no_part_of_the_context(template):
    tokenizer = make_tokenizer("prepend", "begin", template)
    sample = Sample("s", "s", "\n " + CONTEXT, " Who? \n", "", (), 1)
    prompt = encode(tokenizer, sample)
    assert list(prompt.ids) == read_whole(tokenizer, [sample.context + sample.question])
    for token in range(prompt.prefix, len(prompt.context)):
        begin, end = prompt.ends[token - 1] if token > prompt.prefix else 2, prompt.ends[token]
        piece = tokenizer.convert_ids_to_tokens(prompt.context[token]).replace("▁", " ")
        assert sample.context[begin:end].strip() == piece.strip()


def make_run(tokenizer, embeddings: int = 1000, samples=(), system=None, thinking=None) -> SimpleNamespace:
    """What loading needs of a run."""
    checkpoint = SimpleNamespace(
        name="mine", path="/mine", longest=lambda: 1000, tokenizer=lambda: tokenizer,
        config=lambda: LlamaConfig(vocab_size=embeddings),
    )  # fmt: skip
    task = SimpleNamespace(samples=lambda *_: samples)
    return SimpleNamespace(checkpoint=checkpoint, task=task, system=system, thinking=thinking, task_settings={})


def test_an_end_that_the_tokenizer_appends_stands_in_no_prompt_and_is_said_once(capsys):
    bench = Resources(make_run(make_tokenizer("prepend", "both")))
    tokenizer = bench.tokenizer
    assert bench.tokenizer is tokenizer
    line = "kvbench: model=mine: its tokenizer appends </s> to every text; prompts are read without it\n"
    assert capsys.readouterr().err == line
    begin, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    assert count_template_tokens(tokenizer) == 1
    lm = KVBenchLM.__new__(KVBenchLM)
    lm.tokenizer = tokenizer
    for ids in (encode(tokenizer, Sample("s", "s", CONTEXT, ASKED[0], "", (), 1)).ids, lm.tok_encode("the mill")):
        assert ids[0] == begin and end not in ids
    [sequence] = split_text(tokenizer, CONTEXT, 1, 8)
    assert sequence[0] == begin and end not in sequence


@pytest.mark.parametrize(
    ("listed", "eos", "template", "line"),
    [
        (["</s>", "<|im_end|>"], "</s>", "chatml", ""),
        (["</s>"], "</s>", "words", ""),
        (
            ["<s>"], "</s>", "chatml",
            "answers end at any of these tokens, which differ: generation_config <s>, tokenizer </s>, "
            "chat template <|im_end|>",
        ),
        (
            [], "</s>", "none",
            "answers end at any of these tokens, which differ: generation_config none, tokenizer </s>, "
            "chat template none",
        ),
        ([], None, "none", "it has no token that ends an answer; an answer has max_new_tokens tokens"),
    ],
)  # fmt: skip
def test_an_answer_ends_at_the_ends_of_all_and_where_they_differ_is_said_once(capsys, listed, eos, template, line):
    tokenizer = make_tokenizer("first", template=template)
    tokenizer.eos_token = eos
    ids = tokenizer.convert_tokens_to_ids(listed)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=ids or None), config=LlamaConfig(eos_token_id=None)
    )
    bench = Resources(make_run(tokenizer), {"model": model})
    expected = {*listed, *([eos] if eos else ()), *(["<|im_end|>"] if template == "chatml" else ())}
    assert bench.ends == bench.ends == {*tokenizer.convert_tokens_to_ids(sorted(expected))}
    assert capsys.readouterr().err == (f"kvbench: model=mine: {line}\n" if line else "")


def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings_is_refused():
    """Embeddings without tokens and special tokens that no prompt contains do no harm."""
    tokenizer = make_tokenizer("bytes", "begin")
    special = len(tokenizer) - len(MARKS)
    line = (
        f"model.path=/mine: its tokenizer gives ids up to {len(tokenizer) - 1}, but the model has embeddings for 0 to "
    )
    with pytest.raises(SettingError, match=f"^{line}{special - 2}; the model needs its own tokenizer$"):
        _ = Resources(make_run(tokenizer, special - 1)).tokenizer
    samples = [Sample("s", "s", CONTEXT, ASKED[0], "", ("a",), 1, chat=False)]
    for embeddings in (len(tokenizer) - 1, len(tokenizer), len(tokenizer) + 64):
        assert list(Resources(make_run(tokenizer, embeddings, samples)).prompts) == ["s"]
    tokenizer.chat_template = CHATML
    more = [replace(samples[0], uid="t", chat=True)]
    with pytest.raises(SettingError, match=r"^task: t contains <\|im_end\|>, for which the model has no embedding$"):
        _ = Resources(make_run(tokenizer, len(tokenizer) - 1, more)).prompts


def test_a_template_without_an_end_is_refused_after_some_seconds(monkeypatch):
    monkeypatch.setattr("kvbench.models.chat_template.TEMPLATE_SECONDS", 0.05)
    tokenizer = make_tokenizer("bytes")
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = f"{3 * loop}{{{{ i }}}}{3 * '{% endfor %}'}"
    with pytest.raises(SettingError, match=r"^model: its chat template takes longer than 0.05 s$"):
        count_template_tokens(tokenizer)


NO_ROLE = "{% if messages[0].role == 'system' %}{{ raise_exception('no such role') }}{% endif %}" + TRIM
SYSTEM = 'Say "it\'s {{ odd }} %}".\n\tNothing else ✓.'


@pytest.mark.parametrize(
    ("template", "shown", "line"),
    [
        (CHATML, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n\n Who?<|im_end|>\n", ""),
        (
            NO_ROLE, f"<|im_start|>user\n{SYSTEM}\n\n\n Who?<|im_end|>\n",
            "kvbench: model=mine: its chat template has no system role; "
            "task.system stands in front of the first message\n",
        ),
    ],
)  # fmt: skip
def test_a_system_prompt_stands_in_front(capsys, template, shown, line):
    own = make_tokenizer("bytes")
    own.chat_template = template
    [sample] = samples = [Sample("s", "s", "\n ", "Who?", "", ("a",), 1)]
    bench = Resources(make_run(own, samples=samples, system=SYSTEM))
    text = bench.tokenizer.decode(bench.prompts["s"][1].ids)
    assert text == f"{shown}<|im_start|>assistant\n" and own.chat_template == template
    assert capsys.readouterr().err == line
    with pytest.raises(
        SettingError, match=r"^task.system: no sample of this task is read with the chat template; null$"
    ):
        _ = Resources(make_run(own, samples=[replace(sample, chat=False)], system=SYSTEM)).prompts


THINKS = CHATML.replace(
    "assistant\n{%", "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{%"
)


@pytest.mark.parametrize(("thinking", "opens"), [("on", ""), ("off", "<think>\n\n</think>\n\n"), (None, "")])
def test_a_template_is_told_whether_to_think(thinking, opens):
    """Templates leave out an earlier answer's thought. What was read stays, and the record says so."""
    own = make_tokenizer("bytes")
    own.chat_template = THINKS
    prompts = Resources(make_run(own, samples=make_turns(), thinking=thinking)).prompts.values()
    texts = [own.decode(prompt.ids) for _, prompt in prompts]
    assert [text.count("<think>") for text in texts] == ([1, 2, 3] if opens else [0, 0, 0])
    assert all(text.endswith(f"<|im_start|>assistant\n{opens}") for text in texts)
    thought = len(own.encode(opens))
    assert [prompt.retokenized for _, prompt in prompts] == [0, thought, 2 * thought]


@pytest.mark.parametrize(
    ("template", "asked", "line"),
    [
        (None, {"thinking": "on"}, "model.thinking=on: the model has no chat template; null"),
        (None, {"system": "Be brief."}, "task.system=Be brief.: the model has no chat template; null"),
        (
            CHATML,
            {"thinking": "off"},
            "model.thinking=off: the model's chat template does not know enable_thinking; null",
        ),
    ],
)
def test_what_a_template_cannot_do_is_refused(template, asked, line):
    own = make_tokenizer("bytes")
    own.chat_template = template
    with pytest.raises(SettingError) as caught:
        _ = Resources(make_run(own, **asked)).tokenizer
    assert str(caught.value) == line


def test_only_a_run_that_uses_them_is_named_by_its_system_prompt_and_thinking(monkeypatch):
    monkeypatch.setattr("kvbench.runs.spec.source_hash", lambda modules: "")

    def describe(*settings: str) -> tuple[dict, dict]:
        config = compose_config(["device=cpu", "task=ledger", *settings])
        value = RunSpec.describe(config, check_settings(config)).value
        return value["model"], value["task"]

    model, task = describe()
    assert model.keys() == {"name", "identity"} and "system" not in task
    assert describe("model.thinking=off", "task.system=brief") == (
        model | {"thinking": "off"},
        task | {"system": "brief"},
    )
