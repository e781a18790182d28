"""Make synthetic rows in SCBench's published format, for trying the tasks. They are not the benchmark.

kv, vt, qa_eng, choice_eng and the needles ask what the embedded model was trained on: RULER's needles, variable chains
and questions about synthetic documents. It cannot answer the other tasks; they only run.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from kvbench.tasks.common import synthetic_prose
from kvbench.tasks.ruler.niah import NiahFamily
from kvbench.tasks.ruler.questions import Question
from kvbench.tasks.ruler.templates import load_wordings
from kvbench.tasks.ruler.texts import load_texts
from kvbench.tasks.ruler.variable_tracking import HOPS, draw_chain

ROWS, TURNS = 5, 3


def make_rows(name: str, count: int = ROWS) -> list[dict[str, Any]]:
    """Make the rows of a task. Each row has its own seed, so that more rows begin with those of fewer."""
    return [
        {"id": index, **MAKERS[name](random.Random(f"kvbench miniature/{name}/{index}"), TURNS + (index == 1))}
        for index in range(count)
    ]


def _row(context: str | list[int], turns: list[tuple[Any, ...]]) -> dict[str, Any]:
    names = ("input", "answer", "task")
    return {"context": context, "multi_turns": [dict(zip(names, turn, strict=False)) for turn in turns]}


def _needles(rng: random.Random, count: int) -> dict[str, str]:
    """Draw needles: key -> number."""
    texts = load_texts()
    drawn = NiahFamily("needle", "needle", keys=count).draw(count, rng, texts, 0)
    return dict(zip(drawn["keys"], (values[0] for values in drawn["values"]), strict=True))


def _statement(key: str, value: str) -> str:
    return load_wordings().needle.format(type_needle_v="numbers", key=key, value=value)


def _ask(key: str) -> str:
    form, slots = load_wordings().niah.singular(), {"type_needle_v": "number", "query": key}
    return form.render("", (), **slots).question.lstrip() + form.prefix.format(**slots)


def _kv(rng: random.Random, turns: int, pairs: int = 16) -> dict[str, Any]:
    values = _needles(rng, pairs)
    context = json.dumps({key: _statement(key, value) for key, value in values.items()}, indent=0)
    return _row(context, [(_ask(key), values[key]) for key in rng.sample(list(values), turns)])


def _prefix_suffix(rng: random.Random, turns: int, count: int = 16) -> dict[str, Any]:
    lines = [f"{rng.getrandbits(96):024x}" for _ in range(count)]
    asked = [
        (f"Which line begins with {line[:6]} and ends in {line[-6:]}? Line:", line) for line in rng.sample(lines, turns)
    ]
    return _row("\n".join(lines), asked)


def _vt(rng: random.Random, turns: int, noise: int = 4) -> dict[str, Any]:
    chains = [draw_chain(5, HOPS + 1, rng) for _ in range(turns)]
    lines = [load_wordings().noise] * noise
    for chain in chains:
        lines += [f"VAR {chain['names'][0]} = {chain['value']}"]
        lines += [f"VAR {new} = VAR {old} " for old, new in zip(chain["names"], chain["names"][1:], strict=False)]
        lines += [load_wordings().noise] * noise
    form, asked = load_wordings().vt, []
    for chain in chains:
        slots = {"query": chain["value"], "num_v": len(chain["names"])}
        asked.append((form.render("", (), **slots).question.lstrip() + form.prefix.format(**slots), chain["names"]))
    return _row(form.render("\n".join(lines), (), query=chains[0]["value"], num_v=HOPS + 1).context, asked)


def _documents(rng: random.Random, turns: int) -> tuple[str, list[Question]]:
    """Return the documents of an article, and questions about them."""
    squad = load_texts().squad
    first = rng.choice(squad.questions)
    numbers = sorted({*first.documents, *first.related})
    about = [question for question in squad.questions if question.documents[0] in numbers]
    text = "\n\n".join(f"Document {i}:\n{squad.documents[number]}" for i, number in enumerate(numbers, 1))
    return text, rng.sample(about, turns)


def _qa_eng(rng: random.Random, turns: int) -> dict[str, Any]:
    text, questions = _documents(rng, turns)
    return _row(text, [(question.query, question.answers[0]) for question in questions])


def _choice_eng(rng: random.Random, turns: int) -> dict[str, Any]:
    return add_options(rng, _qa_eng(rng, turns))


def add_options(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """Turn questions into multiple choice: add three names beside each answer."""
    for turn in row["multi_turns"]:
        turn["options"] = rng.sample([turn["answer"], *(synthetic_prose.draw_short_name(rng) for _ in range(3))], 4)
    return row


def _qa_chn(rng: random.Random, turns: int) -> dict[str, Any]:
    people = ["".join(pair) for pair in rng.sample([(a, b) for a in "赵钱孙李周吴" for b in "安平和顺"], turns + 4)]
    places = ["".join(pair) for pair in rng.sample([(a, b) for a in "东南西北" for b in "山河桥村"], turns + 4)]
    text = "".join(f"{person}住在{place}。" for person, place in zip(people, places, strict=True))
    return _row(text, [(f"{people[i]}住在哪里？", places[i]) for i in rng.sample(range(turns + 4), turns)])


def _many_shot(rng: random.Random, turns: int, shots: int = 20) -> dict[str, Any]:
    def shot() -> tuple[str, str]:
        one, other = rng.sample(range(10, 100), 2)
        return f"Which is larger?\n(A) {one}\n(B) {other}\nAnswer:", "AB"[other > one]

    return _row("\n\n".join(" ".join(shot()) for _ in range(shots)), [shot() for _ in range(turns)])


def _summary(rng: random.Random, turns: int) -> dict[str, Any]:
    parts = [synthetic_prose.write_essay(rng, 8) for _ in range(turns)]
    papers = "\n\n".join(f"Paper {i}:\n{' '.join(part)}" for i, part in enumerate(parts, 1))
    return _row(papers, [(f"Summarise paper {i} in one sentence.", part[0]) for i, part in enumerate(parts, 1)])


def _mf(rng: random.Random, turns: int) -> dict[str, Any]:
    numbers = [rng.randint(0, 999) for _ in range(60)]
    facts = [("largest", max(numbers)), ("smallest", min(numbers)), ("first", numbers[0]), ("last", numbers[-1])]
    asked = [(f"The {which} number of the list is", value) for which, value in rng.sample(facts, turns)]
    return _row(numbers, asked)


def _summary_with_needles(rng: random.Random, turns: int) -> dict[str, Any]:
    parts, pairs = [synthetic_prose.write_essay(rng, 8) for _ in range(turns)], _needles(rng, turns)
    asked: list[tuple[Any, ...]] = []
    for number, (part, (key, value)) in enumerate(zip(parts, pairs.items(), strict=True), 1):
        asked += [(f"Summarise essay {number} in one sentence.", part[0], "scbench_summary")]
        asked += [(_ask(key), value, "scbench_passkey")]
        part.insert(rng.randrange(1, len(part)), _statement(key, value))
    return _row("\n\n".join(map(" ".join, parts)), asked)


MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "scbench_kv": _kv,
    "scbench_prefix_suffix": _prefix_suffix,
    "scbench_vt": _vt,
    "scbench_qa_eng": _qa_eng,
    "scbench_qa_chn": _qa_chn,
    "scbench_choice_eng": _choice_eng,
    "scbench_many_shot": _many_shot,
    "scbench_summary": _summary,
    "scbench_mf": _mf,
    "scbench_summary_with_needles": _summary_with_needles,
}
