"""RULER: draws and fits are stable, prompts are upstream's to the byte, and scores are upstream's."""

import ast
import itertools
import json
import random
import re
import string
import sys
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, SimpleNamespace

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy.special import zeta
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.config import catalogue
from kvbench.interfaces.task import Graded, Sample
from kvbench.models.chat_template import count_template_tokens
from kvbench.runs.prompt import encode
from kvbench.tasks.common import synthetic_prose
from kvbench.tasks.common.sample_cache import hash_tokenizer
from kvbench.tasks.ruler.fit import TRIES, fit_units, step_down
from kvbench.tasks.ruler.niah import DEPTHS, NiahFamily
from kvbench.tasks.ruler.sentences import load_punkt
from kvbench.tasks.ruler.task import (
    FAMILIES,
    FITS,
    SUBTASKS,
    Ruler,
    count_least_units,
    draw_sample,
    load_texts,
    render_sample,
)
from kvbench.tasks.ruler.templates import load_wordings
from kvbench.tasks.ruler.texts import RulerTexts
from kvbench.tasks.ruler.variable_tracking import draw_chain, fit_example
from kvbench.validation import SettingError
from tests.support.repository import ROOT
from tests.support.selection import choose_quick, only_in_full

LIMITS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
NIAH = [family for family in FAMILIES if family.name.startswith("niah")]


def generated() -> RulerTexts:
    """The texts of a task without paths, which it has in a cache."""
    return load_texts(None, None)


def bpe(vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = generated().words
    text = (" ".join(words[i : i + 500]) for i in range(0, 30_000, 500))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    """It encodes a text once: tasks and tests count the tokens of the same prompts."""
    own = bpe(2500)
    encode = cache(own.encode)
    own.encode = lambda text, **given: list(encode(text, **given))
    return own


def ruler(**given) -> Ruler:
    return Ruler(**{"samples": 2, "cache": None, "length": 2048} | given)


def tokens(tokenizer, sample: Sample) -> int:
    return len(tokenizer.encode(sample.context + sample.question + sample.answer_prefix, add_special_tokens=False))


def family_of(name: str):
    return FAMILIES[SUBTASKS.index(name)]


# Identity: a sample depends on (seed, subtask, length, index) and nothing else.


def test_a_sample_depends_neither_on_the_list_nor_the_order_nor_the_limit(tokenizer):
    every = {sample.uid: sample for sample in ruler().samples(tokenizer, 10, 4096)}
    assert list(every) == [f"{name}/2048/{i}" for name in SUBTASKS for i in range(2)]
    few = ["ruler_fwe", "niah_multikey_3", "ruler_qa_hotpot"]
    some = list(ruler(subtasks=few, samples=9, limit=1).samples(tokenizer, 10, 4096))
    assert [sample.subtask for sample in some] == few
    assert all(every[sample.uid] == sample for sample in some)
    assert len({sample.context for sample in every.values()}) == len(every)


@pytest.mark.parametrize("other", [{"seed": 1}, {"length": 2049}])
def test_seed_and_length_make_other_samples(tokenizer, other):
    chosen = {"subtasks": ["niah_single_2", "ruler_vt", "ruler_cwe", "ruler_qa_squad"], "samples": 1}
    pairs = zip(
        ruler(**chosen).samples(tokenizer, 0, 4096), ruler(**chosen | other).samples(tokenizer, 0, 4096), strict=True
    )
    assert all(a.context != b.context for a, b in pairs)


def test_the_config_makes_the_task(tokenizer):
    config = OmegaConf.load(ROOT / "conf/task/ruler.yaml")
    task = instantiate(OmegaConf.merge(config, {"seed": 3, "limit": 1, "cache": None, "subtasks": ["ruler_fwe"]}))
    assert task.check() is None and task.length == 2048 and task.per_subtask == 5
    same = ruler(seed=3, subtasks="ruler_fwe", samples=1)
    assert list(task.samples(tokenizer, 0, 4096)) == list(same.samples(tokenizer, 0, 4096))


# Fitting


@given(st.sampled_from(SUBTASKS), st.integers(1100, 4600), st.integers(0, 60))
def test_a_prompt_fits_and_one_more_unit_would_not(tokenizer, name, length, template_tokens):
    task = ruler(subtasks=name, length=length, samples=1)
    try:
        [sample] = task.samples(tokenizer, template_tokens, 4096)
    except SettingError as error:
        assert name in ("ruler_cwe", "ruler_qa_hotpot"), "the others fit in 1100 tokens"
        assert length < int(str(error).split("at least ")[1].split()[0])
        return
    room = length - template_tokens - sample.max_new_tokens
    assert tokens(tokenizer, sample) <= room

    def drawn(units):
        example = fit_example(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
        rng = random.Random(f"0/{name}/{length}/0")
        draws = draw_sample(name, units, rng, generated(), length, index=0, example=example)
        return render_sample(name, draws, generated())

    units = sample.meta["units"]
    assert drawn(units).prompt == sample.context + sample.question + sample.answer_prefix
    more = drawn(units + family_of(name).step(length)).prompt
    assert len(tokenizer.encode(more, add_special_tokens=False)) > room


@given(st.lists(st.integers(1, 9), min_size=1, max_size=80), st.integers(0, 400), st.integers(0, 80))
def test_fit_finds_the_edge_in_few_guesses(steps, room, most):
    costs = list(itertools.accumulate(steps, initial=20)) + [10_000] * 200
    asked = []

    def cost(count):
        asked.append(count)
        return costs[count]

    found = fit_units(cost, most, room)
    affordable = [i for i in range(most + 1) if costs[i] <= room]
    assert found == (affordable[-1] if affordable else None)
    assert len(asked) <= 20


def halve(low: int, high: int, fits) -> int | None:
    """The last number that fits in a search by halves."""
    if low > high:
        return None
    middle = (low + high) // 2
    return (halve(middle + 1, high, fits) or middle) if fits(middle) else halve(low, middle - 1, fits)


def upstreams(name: str, length: int, count, template: int, samples: int) -> list[tuple[int, str]]:
    """Units and prompts as NVIDIA/RULER's scripts choose them, loop by loop; the draws are kvbench's."""
    new = next(n for kind, n in LIMITS.items() if kind in name)
    search = random.Random(f"0/{name}/{length}/fit")
    found, fixed = [], {}

    def prompt(units, rng, index=0):
        draws = draw_sample(name, units, rng, generated(), length, index=index, **fixed)
        return render_sample(name, draws, generated()).prompt

    if name == "ruler_fwe":  # freq_words_extraction.py: grow until the text is long enough, then one step back
        room, units = length - new - template, (length - new) // 6
        step = (length - new) // 32
        while count(prompt(units, random.Random(f"0/{name}/{length}/fit"))) < room:
            units += step
        for index in range(samples):
            used = units - step
            while count(text := prompt(used, random.Random(f"0/{name}/{length}/{index}"))) > room:
                used -= step
            found.append((used, text))
        return found

    shown, step = 0, 10
    opening = load_wordings().vt.template[:20]
    if "niah" in name:  # niah.py
        step = 5 if length < 4096 else 25
        step = 500 if family_of(name).haystack == "essay" else step
    if name == "ruler_vt":  # variable_tracking.py: first an example of 500 tokens

        def chained(units):
            drawn = draw_chain(3, units, search)
            whole = render_sample(name, {"example": drawn, **drawn}, generated()).prompt
            return whole[whole.rindex(opening) :], whole[: whole.rindex(opening)].removesuffix("\n")

        most = max(int(500 / (count(chained(5)[0]) / 5) * 3), 10)
        units = halve(5, most, lambda middle: count(chained(middle)[0]) <= 500)
        while count((example := chained(units))[0]) > 500:
            units -= 5 if units > 5 else 0
        fixed, shown, step = {"example": units}, count(example[1]), 5 if length < 4096 else 10

    def tokens_of(units):
        text = prompt(units, search)
        return template + count(text[text.rindex(opening) :] if name == "ruler_vt" else text)

    if name == "ruler_cwe":  # common_words_extraction.py: the estimate is made with 4096 words
        most = int(length // (tokens_of(4096) / 4096)) * 2
    else:
        most = int(length / (tokens_of(step) / step) * 3)
    units = halve(step, max(most, 2 * step), lambda middle: tokens_of(middle) + shown + new <= length) or step
    for index in range(samples):
        rng, used = random.Random(f"0/{name}/{length}/{index}"), units
        while count(text := prompt(used, rng, index)) + template + new > length:
            used -= step if used > step else 0
        found.append((used, text))
    return found


@pytest.mark.cover
@pytest.mark.parametrize("length", [2048, 4500])
@pytest.mark.parametrize("name", SUBTASKS)
def test_upstreams_fit_is_what_its_scripts_do(tokenizer, name, length):
    def count(text):
        return len(tokenizer.encode(text, add_special_tokens=False))

    made = list(ruler(subtasks=name, length=length, samples=2, fit="upstream").samples(tokenizer, 9, 10**6))
    found = [(s.meta["units"], s.context + s.question + s.answer_prefix) for s in made]
    assert found == upstreams(name, length, count, 9, 2)
    assert all(count(text) + 9 + sample.max_new_tokens <= length for (_, text), sample in zip(found, made, strict=True))


@pytest.mark.parametrize(("fit", "least", "most"), [only_in_full("fill", 0.87, 1.0), ("upstream", 0.59, 0.75)])
def test_upstreams_fit_leaves_the_room_that_was_measured(tokenizer, fit, least, most):
    """Between 0.59 and 1 of 2048 tokens in NVIDIA/RULER's own prompts, and essays lose 500 words at once."""
    samples = ruler(fit=fit).samples(tokenizer, 0, 4096)
    shares = [(tokens(tokenizer, sample) + sample.max_new_tokens) / 2048 for sample in samples]
    assert least <= min(shares) < most and 0.98 < max(shares) <= 1


def test_the_fit_is_part_of_a_run_and_of_a_cached_sample(tmp_path, tokenizer):
    own = {"seed": 0, "limit": None, "cache": None}
    default, *hashed = (
        catalogue.task_identity(catalogue.load_settings("task", "ruler", own | more))
        for more in ({}, *({"fit": kind} for kind in FITS))
    )
    assert default == hashed[0] != hashed[1]
    kinds = [ruler(subtasks="niah_multiquery", samples=2, cache=str(tmp_path), fit=kind) for kind in FITS]
    fill, upstream = [list(task.samples(tokenizer, 0, 4096)) for task in kinds]
    assert fill != upstream and len(list(tmp_path.iterdir())) == 2
    assert list(kinds[1].samples(tokenizer, 0, 4096)) == upstream


def test_upstreams_steps_end_where_its_own_would_not(tmp_path, tokenizer):
    assert list(step_down(23, 10, 1)) == [23, 13] + [3] * (1 + TRIES)
    assert list(step_down(9, 10, 1)) == [9] * (1 + TRIES)
    assert list(step_down(17, 10, 10)) == [17] + [10] * (1 + TRIES), "hotpot's ten documents stay"
    task = ruler(subtasks="ruler_cwe", length=2048, fit="upstream", samples=1)
    with pytest.raises(SettingError, match=r"^task.length=700: at least \d+ for ruler_cwe .* task.fit=upstream draws"):
        list(replace(task, samples=1, length=700).samples(tokenizer, 0, 4096))
    [sample] = task.samples(tokenizer, 0, 4096)
    assert len(set(sample.answers)) == 10


def test_upstreams_fit_stops_at_the_words_that_there_are(tokenizer):
    few = ruler(subtasks="ruler_cwe", length=2048, fit="upstream", samples=1)
    family = family_of("ruler_cwe")
    pool = replace(generated(), pool=generated().pool[:4100])
    _, fitted = few._upstream(family, pool, lambda text: len(text.split()) // 32, 1900)
    units, draws = fitted(0)
    assert units == 4100 and len(set(draws["words"])) == 4100


CHAT = (
    "{{ '<s>' }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("kind", FITS)
def test_cwes_example_is_a_turn_of_its_own_under_a_chat_template(kind):
    """As upstream's scripts write it: the model's template around the task's, and around the example's too."""
    plain, chat = bpe(2500), bpe(2500)
    chat.chat_template = CHAT
    [sample] = ruler(subtasks="ruler_cwe", samples=1, fit=kind).samples(chat, count_template_tokens(chat), 4096)
    bare = sample.context + sample.question + sample.answer_prefix
    assert plain.decode(encode(plain, sample).ids) == bare
    prompt = encode(chat, sample)
    assert 1800 < len(prompt.ids) + sample.max_new_tokens <= 2048

    opening, asked = "Below is a numbered list", sample.answer_prefix
    example, main = (opening + text for text in bare.split(opening)[1:])
    assert asked in example and main.endswith(asked)
    question, solution = example.split(asked)
    expected = "".join(
        f"<s><user>{text}<end><assistant>{asked}{answer}"
        for text, answer in ((question, solution), (main.removesuffix(asked), ""))
    )
    assert chat.decode(prompt.ids) == expected and solution.endswith("\n") and solution.startswith(" 1. ")
    assert expected.startswith(chat.decode(prompt.context)) and chat.decode(prompt.rest).endswith("<assistant>" + asked)
    assert chat.decode(prompt.ids[: prompt.prefix]) == "<s><user>"

    found = [match.span() for word in sample.answers for match in re.finditer(rf"\b{word}\b", sample.context)]
    assert len(found) >= 60 and list(prompt.ends) == sorted(prompt.ends) and prompt.ends[-1] <= len(sample.context)
    for first, last in found:
        own = prompt.ids[bisect_right(prompt.ends, first) : bisect_left(prompt.ends, last) + 1]
        assert chat.decode(own).strip(" .") == sample.context[first:last]
    assert encode(chat, replace(sample, chat=False)) == encode(plain, sample)


def test_only_cwe_has_a_turn_before_its_own(tokenizer):
    for sample in ruler(samples=1).samples(tokenizer, 0, 4096):
        assert bool(sample.solved) == (sample.subtask == "ruler_cwe")


def test_fwe_keeps_the_sizes_of_upstream(tokenizer):
    for length in (2048, 4096):
        [sample] = ruler(subtasks="ruler_fwe", length=length, samples=1).samples(tokenizer, 0, 4096)
        assert (sample.meta["units"] - (length - 50) // 6) % ((length - 50) // 32) == 0


def test_the_example_of_vt_has_500_tokens(tokenizer):
    [sample] = ruler(subtasks="ruler_vt", samples=1).samples(tokenizer, 0, 4096)
    example = sample.context[: sample.context.rindex("Memorize")]
    unanswered = example[: example.rindex("they are: ") + len("they are: ")]
    assert 470 <= len(tokenizer.encode(unanswered, add_special_tokens=False)) <= 505  # its names were drawn anew


@pytest.mark.parametrize("length", [4095, 4096])
def test_cwe_repeats_words_more_from_4096_on(length):
    draws = draw_sample("ruler_cwe", 25, random.Random(0), generated(), length)
    example, main = Counter(draws["example"]["words"]), Counter(draws["words"])
    expected = (
        (Counter({3: 10, 1: 10}), Counter({6: 10, 1: 15}))
        if length < 4096
        else (Counter({10: 10, 3: 30}), Counter({30: 10, 3: 15}))
    )
    assert (Counter(example.values()), Counter(main.values())) == expected
    assert set(draws["common"]) == {word for word, n in main.items() if n > 3}


def test_fwe_counts_fall_as_the_square_of_the_rank():
    draws = draw_sample("ruler_fwe", 1000, random.Random(0), generated(), 4096)
    counts = Counter(draws["words"])
    assert [counts[word] for word in ("...", *draws["top"])] == [int(1000 / k**2 / zeta(2)) for k in (1, 2, 3, 4)]
    assert max(n for word, n in counts.items() if word not in ("...", *draws["top"])) < counts[draws["top"][2]]
    assert len(draws["words"]) == sum(int(1000 / k**2 / zeta(2)) for k in range(1, 4096 // 50 + 1))


# The prompts: what lm-eval's functions, run from their source, make of the same draws.


class Recorded(random.Random):
    """Stands for the module `random` in a function of lm-eval."""

    Random = random.Random


def ported(file: str, *names: str, **given) -> dict:
    """Functions of lm-eval's RULER (a port of upstream's), run from source: importing the modules downloads."""
    space = {"RANDOM_SEED": 42, "SEED": 42, **given}
    exec(compiled(file, names), space)
    return space


@cache
def compiled(file: str, names: tuple[str, ...]) -> CodeType:
    path = Path(find_spec("lm_eval").submodule_search_locations[0], "tasks", "ruler", file)
    wanted = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if getattr(node, "name", "") in names or isinstance(node, ast.Assign) and node.targets[0].id in names
    ]
    return compile("from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted)), file, "exec")


@pytest.mark.parametrize("seed", choose_quick(range(12), 0, 1, 4))
@pytest.mark.parametrize(
    "family", [*NIAH, NiahFamily("many", "noise", keys=3, values=2, asked=2)], ids=lambda f: f.name
)
def test_niah_is_upstreams_to_the_byte(family, seed):
    units, essay = 6 + 37 * seed, family.haystack == "essay"
    ends = set(generated().ends)

    def sentences(text):
        words = text.split(" ")
        cuts = [0, *(i for i in range(1, len(words)) if i in ends), len(words)]
        return [" ".join(words[a:b]) for a, b in itertools.pairwise(cuts)]

    space = ported(
        "prepare_niah.py",
        "generate_random_number",
        "generate_random_word",
        "generate_random_uuid",
        "generate_random",
        "generate_input_output",
        uuid=uuid,
        DEPTHS=list(DEPTHS),
        cached_sent_tokenize=sentences,
        WORDS=[f"wry-{noun}" for noun in generated().nouns],
    )

    def generator():
        space["random"] = Recorded(seed)
        return space["random"]

    rng = generator()  # the same draws, one by one
    keys, values = [], []
    for _ in range(family.keys):
        keys.append(space["generate_random"](family.key))
        values.append([space["generate_random"](family.value) for _ in range(family.values)])
    order = list(range(family.keys * family.values))
    random.Random(42).shuffle(order)
    others = [
        [space["generate_random"](family.key), space["generate_random"](family.value)]
        for _ in range(units if family.haystack == "needle" else 0)
    ]
    places = sorted(rng.sample(DEPTHS if essay else range(units), len(order)))
    asked = rng.sample(range(family.keys), family.asked)
    draws = {
        "units": units,
        "keys": keys,
        "values": values,
        "order": order,
        "places": places,
        "asked": asked,
        "others": others,
    }

    generator()
    haystack = {"essay": list(generated().words), "noise": load_wordings().noise, "needle": load_wordings().needle}[
        family.haystack
    ]
    text, answers, query = space["generate_input_output"](
        units,
        haystack,
        type_haystack="repeat" if family.haystack == "noise" else family.haystack,
        num_needle_k=family.keys,
        type_needle_k=family.key,
        num_needle_v=family.values,
        type_needle_v=family.value,
        num_needle_q=family.asked,
        template=load_wordings().niah.template,
    )
    rendered = family.render(draws, generated())
    assert rendered.context + rendered.question == text
    assert rendered.answers == tuple(answers)
    kind, verb = (family.value[:-1], "is") if len(answers) == 1 else (family.value, "are")
    assert rendered.answer_prefix == f" The special magic {kind} for {query} mentioned in the provided text {verb}"


@pytest.mark.parametrize("units", [60, 400, 3000])
def test_fwe_is_upstreams_to_the_byte(units):
    space = ported(
        "fwe_utils.py",
        "CONFIG",
        "TEMPLATE",
        "generate_input_output",
        random=Recorded(units),
        np=np,
        zeta=zeta,
        string=string,
    )
    short = type("Tokens", (), {"input_ids": ()})
    text, answers, _ = space["generate_input_output"](10**6, lambda _: short, num_words=units, vocab_size=81)
    words = text[text.index("words. ") + len("words. ") : text.index("\nQuestion")].split(" ")
    rendered = render_sample("ruler_fwe", {"words": words, "top": answers}, generated())
    assert rendered.prompt == text and rendered.answers == tuple(answers)
    ours = draw_sample("ruler_fwe", units, random.Random(0), generated(), 4096)["words"]
    assert sorted(Counter(ours).values()) == sorted(Counter(words).values())


@pytest.mark.parametrize("length", [2048, 4096])
def test_cwe_is_upstreams_to_the_byte(length):
    space = ported(
        "cwe_utils.py",
        "CONFIG",
        "TEMPLATE",
        "get_example",
        "generate_input_output",
        RNG=random.Random(42),
        random=Recorded(length),
        WORDS=list(generated().pool),
    )
    example, text, answers = space["generate_input_output"](30, length)
    # Upstream puts the example before the list and a space before its answer, which lm-eval does not.
    solved, solution = example.split("in the list are:")
    expected = f"{solved}in the list are: {solution}\n{text}"

    def listed(part):
        body = part[part.index("\n1. ") + 4 : part.index("\nQuestion")]
        return [piece.rsplit(" ", 1)[0] for piece in (body + " 0").split(". ")]

    shown = [piece.rsplit(" ", 1)[0] for piece in (solution[3:] + " 0").split(". ")]
    draws = {"example": {"words": listed(example), "common": shown}, "words": listed(text), "common": answers}
    rendered = render_sample("ruler_cwe", draws, generated())
    assert rendered.prompt == expected and rendered.answers == tuple(answers)
    assert rendered.answer_prefix == " Answer: The top 10 words that appear most often in the list are:"


@pytest.mark.parametrize("units", [3, 14, 90])
@pytest.mark.parametrize("name", ["ruler_qa_squad", "ruler_qa_hotpot"])
def test_qa_is_upstreams_to_the_byte(name, units):
    chosen = generated().squad if name == "ruler_qa_squad" else generated().hotpot
    space = ported("qa_utils.py", "CONFIG", "TEMPLATE", "DOCUMENT_PROMPT", "generate_input_output", random=Recorded(7))
    rows = [
        {"query": q.query, "outputs": list(q.answers), "context": list(q.documents), "more_context": list(q.related)}
        for q in chosen.questions
    ]
    units = max(units, len(chosen.questions[5].documents))
    text, answers = space["generate_input_output"](5, units, rows, list(chosen.documents))
    order = sorted((text.index(f"\n{d}"), i) for i, d in enumerate(chosen.documents) if f":\n{d}\n\n" in text)
    rendered = render_sample(name, {"question": 5, "documents": [i for _, i in order]}, generated())
    assert rendered.context + rendered.question == text and rendered.answer_prefix == " Answer:"
    assert rendered.answers == tuple(answers) and len(order) == units
    assert rendered.context.startswith("Answer the question") and "\n\nDocument 1:\n" in rendered.context


def test_vt_is_upstreams_to_the_byte():
    """Built as upstream's generate_input_output and randomize_icl would, by hand."""
    shown = {"units": 6, "names": ["ABC", "DEF", "GHI", "JKL", "MNO"], "value": "54321", "places": [0, 1, 2, 3, 5]}
    draws = {
        "example": shown,
        "units": 7,
        "names": ["AAAAA", "BBBBB", "CCCCC", "DDDDD", "EEEEE"],
        "value": "12345",
        "places": [1, 2, 3, 5, 6],
    }
    noise = load_wordings().noise
    before, after = load_wordings().vt.template.split("{context}")
    prefix = load_wordings().vt.prefix
    example = (
        before + f"VAR ABC = 54321\n{noise}\nVAR DEF = VAR ABC \n{noise}\nVAR GHI = VAR DEF \n{noise}\n"
        f"VAR JKL = VAR GHI \n{noise}\n{noise}\nVAR MNO = VAR JKL \n{noise}"
        + (after + prefix).format(query="54321", num_v=5)
        + " ABC DEF GHI JKL MNO\n"
        + "\n"
    )
    main = (
        before + f"{noise}\nVAR AAAAA = 12345\n{noise}\nVAR BBBBB = VAR AAAAA \n{noise}\nVAR CCCCC = VAR BBBBB \n"
        f"{noise}\n{noise}\nVAR DDDDD = VAR CCCCC \n{noise}\nVAR EEEEE = VAR DDDDD \n{noise}"
    )
    rendered = render_sample("ruler_vt", draws, generated())
    assert rendered.context == example + main
    assert rendered.question + rendered.answer_prefix == (after + prefix).format(query="12345", num_v=5)
    assert rendered.answer_prefix.endswith("5 variables are assigned the value 12345, they are: ")
    assert rendered.answers == ("AAAAA", "BBBBB", "CCCCC", "DDDDD", "EEEEE")


def test_names_of_a_chain_differ_and_are_not_the_keyword():
    class Scripted(random.Random):
        names = ["VAR", "ABC", "ABC", "DEF", "VAR", "GHI", "JKL", "MNO"]

        def choices(self, population, k):
            return list(self.names.pop(0)) if k == 3 else super().choices(population, k=k)

    draws = draw_sample("ruler_vt", 9, Scripted(0), generated(), 2048)
    assert draws["example"]["names"] == ["ABC", "DEF", "GHI", "JKL", "MNO"]


def test_prompt_strings_are_the_official_ones():
    """The hash of upstream's strings at c3f5e3b: another lm-eval may change them, and scores with them."""
    assert load_wordings().fingerprint() == "c3042cd916fe8430811bb8182761a8836cd13fc229da8700a4485a10f321892d"
    assert DEPTHS == tuple(np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int))


# Scores


@pytest.mark.parametrize("name", SUBTASKS)
def test_answers_stand_in_the_context_and_score_100(tokenizer, name):
    task = ruler(subtasks=name)
    for sample in task.samples(tokenizer, 0, 4096):
        assert all(answer in sample.context for answer in sample.answers)
        assert sample.context.count(sample.question) == (1 if name == "ruler_cwe" else 0), "cwe's example asks the same"
        assert task.score(sample, " " + ", ".join(sample.answers)).score == 100.0
        assert task.score(sample, "####").score == 0.0
        assert sample.max_new_tokens == next(n for kind, n in LIMITS.items() if kind in name)
        assert sample.group == sample.uid and sample.chat


@pytest.mark.parametrize(
    "name, answers, output, score, extracted",
    [
        ("niah_single_1", ["1234567"], " 1234567.", 100.0, "1234567."),
        ("niah_multivalue", ["11", "22", "33", "44"], "22, 44 and 55", 50.0, "22, 44 and 55"),
        ("ruler_vt", ["ABCDE", "FGHIJ"], "abcde", 50.0, "abcde"),
        ("ruler_cwe", ["One", "two", "three"], "1. one\t2. TWO\x07\n", 200 / 3, "1. one\n2. TWO"),
        ("ruler_qa_squad", ["Denver Broncos", "Broncos", "The Broncos"], "Broncos", 100.0, "Broncos"),
        ("ruler_qa_hotpot", ["yes"], "\x00\nno", 0.0, "no"),
        ("ruler_fwe", ["abcdef"], "abc\ndef", 0.0, "abc\ndef"),
        ("ruler_fwe", ["abcdef"], "", 0.0, ""),
    ],
)
def test_scores_are_upstreams(name, answers, output, score, extracted):
    sample = Sample("x", name, "", "", "", tuple(answers), 1)
    assert ruler().score(sample, output) == Graded(pytest.approx(score), extracted)


# The texts


def test_prose_is_varied_and_without_needles():
    sentences = " ".join(synthetic_prose.write_words()).rstrip(".").split(". ")
    assert len(synthetic_prose.write_words()) > 100_000 and len(set(sentences)) == len(sentences)
    assert all(5 <= len(sentence.split()) <= 25 and sentence[0].isupper() for sentence in sentences)
    runs = Counter(
        tuple(synthetic_prose.write_words()[i : i + 14]) for i in range(len(synthetic_prose.write_words()) - 13)
    )
    assert max(runs.values()) == 1
    assert not any(c.isdigit() for c in "".join(synthetic_prose.write_words()))
    assert list(itertools.accumulate(len(s.split()) for s in sentences)) == generated().ends


@pytest.mark.parametrize("name", ["squad", "hotpot"])
def test_an_invented_answer_stands_in_one_document_alone(name):
    chosen = getattr(generated(), name)
    assert len(chosen.questions) >= 2000 and len({q.query for q in chosen.questions}) == len(chosen.questions)
    assert len({q.documents for q in chosen.questions[:10]}) > 8, "neighbours are about different things"
    everything = "\n".join(chosen.documents).lower()
    for question in chosen.questions:
        for answer in question.answers:
            [own] = [d for d in question.documents if answer in chosen.documents[d]]
            assert everything.count(answer.lower()) == chosen.documents[own].lower().count(answer.lower())


def test_an_invented_hotpot_question_needs_two_documents():
    for question in generated().hotpot.questions[:200]:
        work = question.query.rstrip("?").split(" of ")[-1].split()[0]
        documents = [generated().hotpot.documents[d] for d in question.documents]
        [first] = [d for d in documents if work in d]
        [second] = [d for d in documents if question.answers[0] in d]
        assert len(documents) == 10 and first != second
        assert second.split("\n")[0] in first, "the first document names whom the second is about"


def official(folder: Path) -> Path:
    """A few questions in the official formats."""
    paragraphs = [
        {
            "context": f"Paragraph {i}.",
            "qas": [
                {
                    "question": f"Q{i}?",
                    "is_impossible": False,
                    "answers": [{"text": f"{i}"}, {"text": f"Paragraph {i}"}],
                },
                {"question": f"Never {i}?", "is_impossible": True, "answers": []},
            ],
        }
        for i in range(6)
    ]
    squad = {"data": [{"paragraphs": paragraphs[:4]}, {"paragraphs": paragraphs[4:]}]}
    pages = [[f"Title {i}", ["One. ", f"Two {i}."]] for i in range(6)]
    hotpot = [{"question": f"H{i}?", "answer": "Two", "context": pages[i : i + 3]} for i in range(3)]
    (folder / "dev-v2.0.json").write_text(json.dumps(squad))
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot))
    return folder


def test_official_questions_are_read_as_upstream_does(tmp_path, tokenizer):
    texts = load_texts(None, str(official(tmp_path)))
    assert texts.qa.startswith("file:") and texts.haystack == "generated"
    assert [q.query for q in texts.squad.questions] == [f"Q{i}?" for i in range(6)]
    assert texts.squad.questions[1].answers == ("1", "Paragraph 1")
    assert texts.squad.questions[1].documents == (1,) and texts.squad.questions[1].related == (0, 2, 3)
    assert texts.hotpot.documents[0] == "Title 0\nOne. Two 0." and texts.hotpot.questions[2].documents == (2, 3, 4)
    for units, chosen in ((3, {0, 1, 2, 3}), (5, {0, 1, 2, 3, 4, 5})):
        drawn = draw_sample("ruler_qa_squad", units, random.Random(0), texts, 2048, index=1)["documents"]
        assert len(set(drawn)) == units and 1 in drawn and set(drawn) <= chosen
    assert {0, 1, 2, 3} <= set(draw_sample("ruler_qa_squad", 5, random.Random(0), texts, 2048, index=1)["documents"])
    shuffled = [draw_sample("ruler_qa_squad", 3, random.Random(i), texts, 2048, index=1)["documents"] for i in range(9)]
    assert len({documents.index(1) for documents in shuffled}) == 3
    every = draw_sample("ruler_qa_squad", 15, random.Random(0), texts, 2048, index=7)
    assert every["question"] == 1 and Counter(every["documents"]) == Counter([0, 1, 2, 3, 4, 5] * 2 + [0, 1, 2])
    [sample] = ruler(subtasks="ruler_qa_squad", qa_path=str(tmp_path), samples=1).samples(tokenizer, 0, 4096)
    assert sample.meta["qa"] == texts.qa and "Q0?" in sample.question


def test_word_lists_are_the_pinned_ones():
    texts = generated()
    assert (len(texts.nouns), len(texts.adjectives), len(texts.pool)) == (6782, 912, 8166)
    assert (texts.nouns[0], texts.nouns[4], "nasty" in texts.adjectives, "run" in texts.pool) == (
        "ATM",
        "aardvark",
        True,
        True,
    )


def test_sentences_end_where_a_reader_says():
    text = 'He met Dr. J. Smith. "Why?" he asked! (It rained.) At 3.5 m. deep, e.g. here. End'
    texts = replace(generated(), words=tuple(text.split()))
    ended = [" ".join(texts.words[a:b]) for a, b in itertools.pairwise([0, *texts.ends])]
    assert ended == ["He met Dr. J. Smith.", '"Why?"', "he asked!", "(It rained.)", "At 3.5 m. deep, e.g. here.", "End"]
    words, ends = texts.essay(2 * len(texts.words) + 3)
    assert words == texts.words * 2 + texts.words[:3]
    assert ends[: 2 * len(texts.ends)] == texts.ends + [end + len(texts.words) for end in texts.ends]


@pytest.fixture
def punkts(monkeypatch, tmp_path):
    """Punkt's data, which is not installed for tests: a function that makes either kind of it, and texts load anew."""
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk_data")])
    monkeypatch.setitem(sys.modules, "punkt", None)
    lists = {"abbrev_types": {"fig"}, "collocations": {("##number##", "deep")}, "sent_starters": {"then"}}
    lists["ortho_context"] = {"nobody": 46}

    def make(kind: str, **own) -> None:
        load_punkt.cache_clear()
        monkeypatch.setattr("kvbench.tasks.ruler.task.load_texts", cache(load_texts.__wrapped__))
        if kind == "package":
            given = SimpleNamespace(**lists | own)
            monkeypatch.setitem(sys.modules, "punkt", SimpleNamespace(load_model=lambda _: given, __spec__=given))
        elif kind == "nltk":
            (folder := tmp_path / "nltk_data/tokenizers/punkt_tab/english").mkdir(parents=True)
            (folder / "abbrev_types.txt").write_text("fig")
            (folder / "collocations.tab").write_text("##number##\tdeep")
            (folder / "sent_starters.txt").write_text("then")
            (folder / "ortho_context.tab").write_text("nobody\t46")

    make("none")
    yield make
    load_punkt.cache_clear()


ESSAY = "See Fig. two first.[1] It rained (a lot). They left. " * 40


@pytest.mark.parametrize("kind", ["package", "nltk"])
def test_punkt_ends_the_sentences_where_its_data_is_there(punkts, tmp_path, tokenizer, kind):
    (tmp_path / "essay.txt").write_text(ESSAY)
    paths = {"haystack_path": str(tmp_path / "essay.txt"), "qa_path": str(official(tmp_path))}
    task = ruler(subtasks=["niah_multikey_1", "niah_single_1", "ruler_vt"], cache=str(tmp_path / "cache"), **paths)
    regex, before = list(task.samples(tokenizer, 0, 4096)), task.fingerprint()
    assert task._texts().sentences == "regex"
    punkts(kind)
    texts = task._texts()
    said = ["See Fig. two first.", "[1] It rained (a lot).", "They left."]
    pieces, ends = texts.essay(20)
    assert [" ".join(pieces[a:b]) for a, b in itertools.pairwise([0, *ends])][:6] == said * 2
    assert texts.words[3] == "first.[1]" and pieces[3:5] == ("first.", "[1]") and len(pieces) == 20 + 2
    assert texts.essay(10 * 40 + 4)[0] == pieces[:11] * 40 + pieces[:5], "it begins again"

    made = list(task.samples(tokenizer, 0, 4096))
    assert [s.meta.get("sentences") for s in regex] == ["regex"] * 2 + [None] * 4
    assert [s.meta.get("sentences") for s in made] == ["punkt"] * 2 + [None] * 4
    assert task.fingerprint() != before and made[2:] == regex[2:]
    for sample in made[:2]:  # upstream's: sentences and needles, joined by blanks
        needles = re.findall(r"One of the special magic numbers for \S+ is: \d+\.", sample.context)
        text = " ".join((ESSAY * 9).split()[: sample.meta["units"]])
        sentences = re.sub(r"(first\.|lot\)\.|left\.) ?(?=.)", r"\1|", text).split("|")
        cuts = [int(len(sentences) * (depth / 100)) for depth in sample.meta["depths"]]
        parts = [
            part
            for first, last, needle in zip([0, *cuts], [*cuts, len(sentences)], [*needles, None], strict=True)
            for part in (" ".join(sentences[first:last]), needle)
            if part is not None
        ]
        assert sample.context.endswith("\n" + " ".join(parts))


def test_other_data_of_punkt_is_another_run_and_generated_prose_needs_none(punkts, tmp_path):
    (tmp_path / "essay.txt").write_text(ESSAY)
    prose = ruler(qa_path=str(official(tmp_path)))
    given = replace(prose, samples=2, haystack_path=str(tmp_path / "essay.txt"))
    names, prose_hash = {given.fingerprint()}, prose.fingerprint()
    for own in ({}, {"abbrev_types": {"fig", "lot"}}, {"ortho_context": {"nobody": 2}}):
        punkts("package", **own)
        names.add(given.fingerprint())
        assert prose.fingerprint() == prose_hash and prose._texts().sentences == "regex"
    assert len(names) == 4


@pytest.mark.parametrize("broken", ["abbrev_types.txt", "package"])
def test_data_of_punkt_that_cannot_be_read_is_said_in_one_line(punkts, tmp_path, broken):
    (tmp_path / "essay.txt").write_text(ESSAY)
    punkts("nltk" if broken != "package" else "package", abbrev_types=None)
    if broken != "package":
        (tmp_path / "nltk_data/tokenizers/punkt_tab/english" / broken).unlink()
    with pytest.raises(SettingError, match=r"^task.haystack_path: Punkt's data in .* cannot be read \(.*; mend or rem"):
        ruler(haystack_path=str(tmp_path / "essay.txt"), qa_path=str(official(tmp_path))).check()


def test_no_other_needle_has_a_key_that_is_asked():
    few = replace(generated(), adjectives=("wry",), nouns=("ox", "elk", "hen"))
    for seed in range(20):
        draws = draw_sample("niah_multikey_2", 9, random.Random(seed), few, 2048)
        assert draws["keys"][0] not in [key for key, _ in draws["others"]]
    many = NiahFamily("many", "noise", keys=3).draw(9, random.Random(0), few, 2048)
    assert sorted(many["keys"]) == ["wry-elk", "wry-hen", "wry-ox"]


@pytest.mark.parametrize("name", ["essay.txt", "PaulGrahamEssays.json"])
def test_a_given_haystack_is_used_and_repeated(tmp_path, tokenizer, name):
    text = "It was late.  Nobody came!\n" + " ".join(f"Line {w} of the essay by Mr. Smith." for w in "abcdefgh")
    path = tmp_path / name
    path.write_text(json.dumps({"text": text}) if name.endswith("json") else text, "utf-8-sig")  # with a mark
    prose = ruler(subtasks="niah_single_2", qa_path=str(official(tmp_path)), samples=1)
    task = replace(prose, haystack_path=str(path), samples=1)
    task.check()
    [sample] = task.samples(tokenizer, 0, 4096)
    needle = load_wordings().needle.format(type_needle_v="numbers", key="", value="").split(" for ")[0]
    before, _, after = sample.context.split("\n", 1)[1].partition(f"{needle} for ")
    after = after[after.index(f"{sample.answers[0]}.") + len(sample.answers[0]) + 1 :]
    words = (before + after).split()
    once = text.split()
    assert words == (once * 99)[: len(words)] and len(words) > 3 * len(once) and sample.meta["units"] == len(words)
    assert sample.meta["haystack"].startswith("file:") and len(sample.meta["depths"]) == 1
    assert task.fingerprint() != prose.fingerprint()


def test_the_hub_gives_the_same_as_the_files(tmp_path, monkeypatch):
    official(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: {"text": ["One essay.", "Another."]})
    monkeypatch.setattr("datasets.DownloadManager.download", lambda self, url: str(tmp_path / Path(url).name))
    monkeypatch.setattr("kvbench.network.is_reachable", lambda url: True)
    texts, files = load_texts.__wrapped__("hub", "hub"), load_texts(None, str(tmp_path))
    assert texts.words == ("One", "essay.", "Another.") and texts.haystack.startswith("hub:")
    assert (texts.squad, texts.hotpot) == (files.squad, files.hotpot)
    assert texts.qa == files.qa.replace("file:", "hub:")


@pytest.mark.parametrize("given", [("hub", None), (None, "hub")])
def test_a_hub_out_of_reach_is_a_wrong_setting(monkeypatch, given):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("datasets.DownloadManager.download", refuse)
    with pytest.raises(SettingError, match=r"^task\.(haystack|qa)_path=hub: \S+ is out of reach \(ConnectionError\); "):
        load_texts(*given)


# The cache


class Counted:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer):
        self.backend_tokenizer, self.tokenizer, self.asked = tokenizer.backend_tokenizer, tokenizer, 0

    def encode(self, text, add_special_tokens=True):
        self.asked += 1
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_the_cache_is_reused_extended_and_mended(tmp_path, tokenizer, capsys):
    task = ruler(subtasks=["niah_multikey_1", "ruler_qa_squad"], samples=3, cache=str(tmp_path / "samples"))
    counted = Counted(tokenizer)
    made = list(task.samples(counted, 5, 4096))
    assert made == list(replace(task, samples=3, cache=None).samples(tokenizer, 5, 4096))
    files = sorted((tmp_path / "samples").iterdir())
    assert len(files) == 2 and all(file.suffix == ".jsonl" for file in files)

    counted.asked = 0
    assert list(task.samples(counted, 5, 4096)) == made and counted.asked == 0
    more = list(replace(task, samples=5).samples(counted, 5, 4096))
    assert [*more[:3], *more[5:8]] == made and 0 < counted.asked and sorted((tmp_path / "samples").iterdir()) == files

    whole = [file.read_text() for file in files]
    assert capsys.readouterr().err == ""
    edited, old = whole[0].replace(" the ", " his ", 1), whole[0].partition("\n")[2]
    for damaged in (whole[0][: len(whole[0]) // 2], "", "no json\n" + whole[0], "{}\n", edited, old, whole[1]):
        files[0].write_text(damaged)
        assert list(replace(task, samples=5).samples(counted, 5, 4096)) == more
        assert files[0].read_text() == whole[0]
        said = f"kvbench: {files[0]}: has another checksum than its content; its samples are made anew\n"
        assert capsys.readouterr().err == (said if damaged != whole[1] else "")  # another subtask's samples


def test_a_reader_that_stops_early_leaves_what_it_got(tmp_path, tokenizer):
    task = ruler(subtasks="niah_single_1", samples=50, cache=str(tmp_path))
    samples = task.samples(tokenizer, 0, 4096)
    first = [next(samples), next(samples)]
    samples.close()
    [file] = tmp_path.iterdir()
    assert [json.loads(line)["uid"] for line in file.read_text().splitlines()[1:]] == [sample.uid for sample in first]


def test_the_cache_knows_what_made_its_samples(tmp_path, tokenizer):
    kinds = [{}, {"seed": 1}, {"length": 2000}, {"subtasks": "niah_single_3"}]
    for kind in kinds:
        list(
            ruler(**{"subtasks": "niah_single_1", "samples": 1, "cache": str(tmp_path)} | kind).samples(
                tokenizer, 0, 4096
            )
        )
    task = ruler(subtasks="niah_single_1", samples=1, cache=str(tmp_path))
    list(task.samples(tokenizer, 7, 4096))
    list(task.samples(bpe(1000), 0, 4096))
    assert len(list(tmp_path.iterdir())) == len(kinds) + 2
    tokenizer.backend_tokenizer.enable_truncation(10**6)  # as a call may; it changes no count
    list(task.samples(tokenizer, 7, 4096))
    tokenizer.backend_tokenizer.no_truncation()
    assert len(list(tmp_path.iterdir())) == len(kinds) + 2


def test_a_tokenizer_without_a_backend_is_known_by_its_vocabulary():
    vocabularies = {"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1}
    slow = [type("Slow", (), {"get_vocab": lambda self, known=known: known})() for known in vocabularies]
    first, same, other = map(hash_tokenizer, slow)
    assert first == same != other


# Settings


@pytest.mark.parametrize(
    "given, message",
    [
        ({"subtasks": "niah"}, "task.subtasks=niah: choose one of all, niah_single_1, "),
        ({"subtasks": ["ruler_vt", "cwe"]}, "task.subtasks=cwe: choose one of niah_single_1, "),
        ({"subtasks": ["ruler_vt", "all"]}, "task.subtasks=all: choose one of niah_single_1, "),
        ({"subtasks": None}, "task.subtasks=null: choose one of all, "),
        ({"subtasks": ["ruler_vt", "ruler_vt"]}, "task.subtasks=['ruler_vt', 'ruler_vt']: all, one subtask, or a list"),
        ({"subtasks": []}, "task.subtasks=[]: all, one subtask, or a list of different ones"),
        ({"samples": 0}, "task.samples=0: a whole number of at least 1"),
        ({"samples": 2.5}, "task.samples=2.5: a whole number of at least 1"),
        ({"limit": 0}, "limit=0: a whole number of at least 1"),
        ({"fit": "lm_eval"}, "task.fit=lm_eval: choose one of fill, upstream"),
        ({"fit": None}, "task.fit=null: choose one of fill, upstream"),
        ({"length": "4k"}, "task.length=4k: a whole number of at least 1"),
        (
            {"haystack_path": "{}/absent.txt"},
            "task.haystack_path={}/absent.txt: a readable file, but absent.txt is not (",
        ),
        ({"haystack_path": "{}"}, "task.haystack_path={}: a readable file, but "),
        ({"haystack_path": "{}/empty.txt"}, "task.haystack_path={}/empty.txt: the file is empty"),
        ({"haystack_path": "{}/latin.txt"}, "task.haystack_path={}/latin.txt: UTF-8 text, or JSON with the key text ("),
        ({"haystack_path": "{}/list.json"}, "task.haystack_path={}/list.json: UTF-8 text, or JSON with the key text ("),
        ({"qa_path": "{}/absent"}, "task.qa_path={}/absent: a folder with dev-v2.0.json or squad.json"),
        ({"qa_path": "{}/half"}, "task.qa_path={}/half: a folder with hotpot_dev_distractor_v1.json or hotpotqa.json"),
        ({"qa_path": "{}/broken"}, "task.qa_path={}/broken: squad.json is not the official JSON ("),
        ({"qa_path": "{}/wrong"}, "task.qa_path={}/wrong: hotpotqa.json is not the official JSON (KeyError("),
        ({"qa_path": "{}/none"}, "task.qa_path={}/none: dev-v2.0.json has no questions"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(tmp_path, given, message):
    for folder in ("half", "broken", "wrong", "none"):
        official_folder = tmp_path / folder
        official_folder.mkdir()
        official(official_folder)
    (tmp_path / "half/hotpot_dev_distractor_v1.json").unlink()
    (tmp_path / "broken/dev-v2.0.json").rename(tmp_path / "broken/squad.json")
    (tmp_path / "broken/squad.json").write_text('{"data": [')
    (tmp_path / "wrong/hotpot_dev_distractor_v1.json").unlink()
    (tmp_path / "wrong/hotpotqa.json").write_text('[{"question": "Q?"}]')
    (tmp_path / "none/dev-v2.0.json").write_text('{"data": []}')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "list.json").write_text("[]")
    given = {key: value.format(tmp_path) if key.endswith("path") else value for key, value in given.items()}
    with pytest.raises(SettingError) as error:
        ruler(**given).check()
    assert str(error.value).startswith(message.replace("{}", str(tmp_path))) and "\n" not in str(error.value)


def test_a_length_that_only_the_tokenizer_shows_too_small_names_what_is_needed(tokenizer):
    task = ruler(subtasks="ruler_vt", length=560)
    task.check()
    said = r"^task.length=560: at least \d+ for ruler_vt with this tokenizer$"
    with pytest.raises(SettingError, match=said) as error:
        list(task.samples(tokenizer, 20, 4096))
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert len(list(replace(task, samples=1, length=needed + 20).samples(tokenizer, 20, 4096))) == 1


def test_all_subtasks_that_do_not_fit_are_named_at_once_with_those_that_do(tokenizer):
    """Before the first sample, also where a later sample is the one that does not fit."""
    with pytest.raises(SettingError) as error:
        next(ruler(length=512, samples=2).samples(tokenizer, 1, 4096))
    line, _, fit = str(error.value).partition(" with this tokenizer; what fits: task.subtasks=")
    short = dict(own.split(" for ")[::-1] for own in line.removeprefix("task.length=512: at least ").split(", "))
    assert list(short) == ["ruler_vt", "ruler_cwe", "ruler_qa_hotpot"]
    assert fit.strip("[]").split(",") == [name for name in SUBTASKS if name not in short]
    some = ruler(length=max(map(int, short.values())), subtasks=list(short), samples=2)
    assert len(list(some.samples(tokenizer, 1, 4096))) == 6
    first = ruler(length=100, subtasks="niah_multikey_3", samples=1)
    with pytest.raises(SettingError) as error:
        next(first.samples(tokenizer, 1, 4096))
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert next(replace(first, samples=1, length=least).samples(tokenizer, 1, 4096))
    with pytest.raises(SettingError, match=rf"^task.length={least}: at least \d+ for niah_multikey_3 with this tok"):
        next(replace(first, samples=40, length=least).samples(tokenizer, 1, 4096))


def test_good_settings_pass():
    for length in (2048, 4096, 131072):
        assert ruler(length=length).check() is None


@pytest.mark.parametrize("name", SUBTASKS)
def test_the_fewest_units_can_be_drawn(name):
    for index in range(3):
        units = count_least_units(name, generated(), 2048, index)
        draws = draw_sample(name, units, random.Random(index), generated(), 2048, index=index)
        assert render_sample(name, json.loads(json.dumps(draws)), generated()).answers, "draws are plain JSON"
