"""kvbench keeps the rows that kvpress keeps, and the same tokens follow (`make parity`)."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
import transformers

from kvbench.models import local_models, tuned_models
from kvbench.models.checkpoint import find_model
from kvbench.validation import SettingError
from tests.parity import comparison
from tests.parity.comparison import (
    ANSWER,
    BUDGETS,
    DEFINITIONS,
    INTERVAL,
    PACKAGES,
    REAL_MODELS,
    TOKENS,
    Case,
    Found,
    compare,
)
from tests.support.repository import ROOT

LENGTHS = {"llama": (301, 700, 2048, 4000), "mistral": (303, 1500), "qwen2": (305, 1024), "qwen3": (511, 3001)}
SUBJECTS = (*LENGTHS, *REAL_MODELS)
MOST_ROUNDED = 0.03  # share of a model's cases in which rounding may exchange a row
TABLE = ROOT / "results" / "parity" / "kvpress.md"
HEAD = """# Agreement with kvpress

`make parity` wrote this page. It runs kvpress {kvpress} with transformers {theirs}, and kvbench with
transformers {ours}, in float32 on the CPU, one thread each. Both read a prompt at once, cut the cache and decode
{tokens} tokens greedily. smollm2 and smollm2_long read English chats. The other models are small, with random weights,
and read random tokens. The test makes the filters and head patterns that two definitions need.

A budget is the share of rows kept, of DuoAttention the share of heads that are not cut; the `compression_ratio` of
kvpress is 1 - budget. There are two exceptions, in which kvpress gets a ratio that keeps as many rows as kvbench. At
{adjusted}, kvpress would keep one row less, because Python rounds 1 - 0.8.
KVzip rounds the rows that it drops of all heads together, kvbench the rows that a head keeps. On smollm2 and
smollm2_long, KVzip, which reads a prompt again, reads at most 1024 tokens, and 4000 tokens are read at the smallest
budget only.

"Cuts the answer": the prompt stays whole, {answer} tokens follow, and every {interval} tokens a cut leaves as many
rows as the budget is of the prompt. Compared are the rows left in the end.

"""
FOOT = """
Left out: kvpress's RandomPress, because the two programs draw different numbers; DMSPress, KVzapPress, KVgradPress and
KVzip+, whose methods are compared with oracles of their own (tests/methods); and presses that kvbench has no method
for. `CriticalKVPress` and `CriticalAdaKVPress` do not run on Qwen2, whose configuration has no `head_dim`.
"""


def find_missing(name: str, packages: Path) -> str | None:
    """What a comparison on a model lacks, and the command that brings it."""
    if not packages.is_dir():
        return "kvpress is not installed: run make parity"
    if name in REAL_MODELS:
        try:
            find_model(name)
        except SettingError as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def comparisons() -> list[comparison.Comparison]:
    """All comparisons of this file, for the table."""
    return []


@pytest.mark.parity
@pytest.mark.parametrize("name", SUBJECTS)
def test_rows_and_tokens_are_those_of_kvpress(name, comparisons, tmp_path):
    if missing := find_missing(name, PACKAGES):
        pytest.skip(missing)
    if name in REAL_MODELS:
        folder, prompts = Path(find_model(name)), comparison.english_prompts
    else:
        folder, prompts = tmp_path / "model", comparison.random_prompts(LENGTHS[name])
        comparison.save_tiny(name, folder)
    subject = comparison.load_subject(name, folder, prompts)
    cases = subject.cases()
    with comparison.start_kvpress(subject, cases, tmp_path) as process:
        try:
            ours = comparison.run_kvbench(subject, cases)
            theirs = comparison.read_kvpress(process, tmp_path, cases)
        finally:
            process.kill()
    found = [compare(name, case, subject.prompts[case.tokens], ours[case.name], theirs[case.name]) for case in cases]
    comparisons.extend(found)
    assert not [f"{own.case.name}: {own.share:.4f}, tokens {own.same_tokens}" for own in found if not own.explained]
    assert sum(own.reason == comparison.ROUNDING for own in found) <= MOST_ROUNDED * len(found)


@pytest.mark.parity
def test_the_table_is_written(comparisons, capsys):
    if {own.subject for own in comparisons} != set(SUBJECTS):
        pytest.skip("not all models were compared")
    table = comparison.write_table(comparisons)
    with capsys.disabled():
        print(f"\n{table}")
    adjusted = sorted({(own.case.tokens, own.case.budget) for own in comparisons if not own.case.agrees})
    theirs = {own.metadata["name"]: own.version for own in importlib.metadata.distributions(path=[str(PACKAGES)])}
    facts = {"kvpress": theirs["kvpress"], "theirs": theirs["transformers"], "ours": transformers.__version__}
    facts |= {
        "tokens": TOKENS,
        "answer": ANSWER,
        "interval": INTERVAL,
        "adjusted": ", ".join(f"{tokens} tokens × {budget}" for tokens, budget in adjusted),
    }
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(HEAD.format(**facts) + table + FOOT)


def definition(name: str) -> comparison.Definition:
    return next(own for own in DEFINITIONS if own.name == name)


def kept(rows: list[int], tokens: int = 300) -> torch.Tensor:
    """(2 layers, 2 heads, n): every head keeps these rows."""
    found = torch.zeros(2, 2, tokens, dtype=torch.bool)
    found[..., rows] = True
    return found


def test_one_row_or_token_that_differs_is_found():
    case, ids = Case(definition("KeyDiff"), 300, 0.2), list(range(300))
    answer = list(range(TOKENS))
    same = Found(kept([*range(60)]), answer)
    moved = kept([*range(60)])
    moved[1, 0, 59], moved[1, 0, 60] = False, True
    found = compare("llama", case, ids, same, same)
    assert (found.share, found.reason, found.explained) == (1.0, "", True)
    assert not compare("llama", case, ids, same, Found(same.kept, [*answer[:-1], 0])).explained
    found = compare("llama", case, ids, same, Found(moved, answer))
    assert found.share == pytest.approx(59 / 60) and found.reason == comparison.ROUNDING
    assert "| 98.3 % | 1 of 1 |" in comparison.write_table([found])
    assert not compare("llama", case, ids, same, Found(moved, [*answer[:-1], 0])).explained
    moved[0, 0, 59], moved[0, 0, 60] = False, True  # in another head, too
    assert not compare("llama", case, ids, same, Found(moved, answer)).explained


WIDE = definition("PyramidKV, window 8")


def test_a_reason_explains_no_more_than_it_says():
    ids = [*range(299), 5]  # the last token is the sixth, again
    first, last = kept([0, 5]), kept([0, 5])
    first[0, 0, 5], first[0, 0, 299] = False, True
    last[1, 0, 5], last[1, 0, 299] = False, True
    knorm = Case(definition("Knorm"), 300, 0.01)
    ours = Found(kept([0, 5]), [])
    assert compare("llama", knorm, ids, ours, Found(first, [])).explained
    assert not compare("llama", knorm, ids, ours, Found(last, [])).explained  # keys of later layers differ
    assert not compare("llama", knorm, [*range(300)], ours, Found(first, [])).explained

    snapkv = definition("SnapKV")
    newest, oldest = (Found(kept([*rows]), []) for rows in (range(240, 300), range(236, 296)))
    assert compare("llama", Case(snapkv, 300, 0.2), ids, newest, oldest).reason == comparison.WINDOW
    other, fewer = Found(kept([5, *range(241, 300)]), []), Found(kept([*range(236, 295)]), [])
    assert compare("llama", Case(snapkv, 300, 0.2), ids, other, oldest).explained  # one row by its score
    for ours, theirs in ((newest, other), (newest, fewer), (Found(kept([4, 5, *range(242, 300)]), []), oldest)):
        assert not compare("llama", Case(snapkv, 300, 0.2), ids, ours, theirs).explained
    critical = Case(definition("CriticalKV over SnapKV"), 300, 0.4)  # 120 rows, of which kvpress first takes 60
    ours = Found(kept([*range(56), *range(236, 300)]), [])
    for rows, explained in (
        ([*range(60), *range(236, 296)], True),
        ([*range(61), *range(236, 295)], False),
        ([*range(1, 61), *range(236, 296)], False),
    ):
        assert compare("llama", critical, ids, ours, Found(kept(rows), [])).explained is explained
    newest, oldest = (Found(kept([*rows]), []) for rows in (range(150, 300), range(149, 299)))
    assert not compare("llama", Case(snapkv, 300, 0.5), ids, newest, oldest).explained

    ours = Found(kept([*range(150, 300)]), [])
    for case in (Case(WIDE, 300, 0.4991), Case(WIDE, 300, 0.15)):  # 149.73 rows; 45 in every layer
        fraction = case.budget == 0.4991
        for rows, explained in ((range(150, 299), fraction), (range(150, 298), False), (range(149, 298), False)):
            theirs = Found(kept([*rows]), [])
            assert compare("llama", case, ids, ours, theirs).explained is explained

    sink, answer = Case(definition("StreamingLLM, cuts the answer"), 300, 0.5), list(range(ANSWER))
    for place, explained in ((2 * INTERVAL, False), (2 * INTERVAL + 1, True)):
        other = Found(oldest.kept, [*answer[:place], *reversed(answer[place:])])
        assert compare("llama", sink, ids, Found(newest.kept, answer), other).explained is explained


def test_the_number_of_rows_is_what_kvbench_keeps():
    """int(1000 * (1 - 0.8)) is 199."""
    own = definition("KeyDiff")
    for tokens in range(300, 4001, 100):
        for budget in BUDGETS:
            case = Case(own, tokens, budget)
            assert int(tokens * (1 - case.ratio)) == case.quota
    assert not Case(own, 1000, 0.2).agrees and Case(own, 301, 0.2).agrees


def test_what_is_missing_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(local_models, "MODELS", tmp_path)
    monkeypatch.setattr(tuned_models, "__file__", str(tmp_path / "tuned_models.py"))
    assert find_missing("llama", tmp_path / "none") == "kvpress is not installed: run make parity"
    assert find_missing("smollm2", tmp_path) == (
        "model=smollm2: it is not here yet; `make model` downloads it (93 MB) and converts it"
    )
    assert "smollm2_long.safetensors: no such file of low-rank factors" in str(find_missing("smollm2_long", tmp_path))
    assert find_missing("llama", tmp_path) is None
