"""Submissions are scored alone: what one holds changes no number of another one."""

import random
from dataclasses import replace

import pytest

from kvbench.analysis.score_matrix import FULL, build_blocks, list_cells
from kvbench.analysis.submissions import Agreement, build_tables, score_submission
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records

COUNT = 6  # samples of each of three subtasks


@pytest.fixture
def submit(tmp_path):
    """Return a function that scores a full cache and a method at two budgets, as a bundle holds them."""
    made = []

    def make(full=None, method="snapkv", change=lambda records: records, **settings):
        folder = tmp_path / f"{len(made)}"
        made.append(folder)
        write_run(folder, full or make_records(1.0, 100, count=COUNT), method={"name": "full"}, **settings)
        for budget in (0.1, 0.2):
            records = make_records(budget, 60, count=COUNT)
            own = change(records) if budget == 0.1 else records
            write_run(folder, own, method={"name": method}, budget=budget, **settings)
        return score_submission(folder / "own.zip", None, folder)  # the bundle itself gives no number

    return make


def collect_numbers(tables, submission):
    """Everything that a reader sees of the rows of a submission but the marks."""
    rows = [row for table in tables for row in table.rows if row.submission is submission]
    return {
        (row.label, row.cell.run.hash): (
            replace(row.cell, run=None, alike="", best=False, tied=False),
            row.run.lacking,
            row.run.failed,
            row.panel.block.full.score,
        )
        for row in rows
    }


def spoil(records, share, **changed):
    """Records with other fields in a share of the samples."""
    return {
        uid: own | changed if place < share * len(records) else own for place, (uid, own) in enumerate(records.items())
    }


def list_rows(submissions):
    return {(row.label, row.run.value["budget"]): row for table in build_tables(submissions) for row in table.rows}


def make_attack(submit, draw):
    """A submission that would like to bend others: a twin, failures, other samples, a second full cache."""
    full = make_records(1.0, 100, count=COUNT)
    share = draw.random() * 0.9
    failure = {"error": "out_of_memory", "score": None}
    attack = draw.choice(["twin", "failing twin", "failing full cache", "spoiled full cache", "fewer", "more", "other"])
    if attack == "twin":
        return submit(change=lambda own: spoil(own, 1, score=0.0), fidelity=True)
    if attack == "failing twin":
        return submit(change=lambda own: spoil(own, share / 3, **failure))
    if attack == "failing full cache":
        return submit(spoil(full, share / 3, **failure), method="mine")
    if attack == "spoiled full cache":
        return submit(spoil(full, share, score=0.0), method="mine")
    if attack == "fewer":
        return submit(change=lambda own: dict([*own.items()][len(own) // 4 :]))
    if attack == "more":
        more = make_records(1.0, 100, count=COUNT + 2)
        return submit(more, method="mine")
    return submit(spoil(full, 1, prompt_hash="x"), change=lambda own: spoil(own, 1, prompt_hash="x"))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 80), marks=pytest.mark.full)])
def test_no_bundle_changes_a_number_of_another_ones_rows(submit, seeds):
    honest = submit()
    alone = collect_numbers(build_tables([honest]), honest)
    assert len(alone) == 3
    attacks = []
    for seed in seeds:
        try:
            attacks.append(make_attack(submit, random.Random(seed)))
        except SettingError:
            continue  # such a bundle never gets onto a board
        for others in ([attacks[-1]], attacks):
            assert collect_numbers(build_tables([*others, honest]), honest) == alone
    assert len(attacks) >= len(seeds) // 2


def test_numbers_are_those_of_the_matrix(submit, tmp_path):
    own = list_rows([submit()])
    runs = load_runs(tmp_path / "0")
    for _, label, cell in list_cells(build_blocks(runs, runs)[0]):
        found = own[label, cell.run.value["budget"]].cell
        assert replace(found, run=cell.run) == cell


def test_a_failed_and_a_lacking_sample_score_0_in_their_own_row_alone(submit):
    whole = list_rows([submit()])
    [right, *_] = [uid for uid, own in make_records(0.1, 60, count=COUNT).items() if own["score"] == 100]
    failed = list_rows([submit(change=lambda own: own | {right: own[right] | {"score": None, "error": "oom"}})])
    lacking = list_rows([submit(change=lambda own: {uid: own[uid] for uid in own if uid != right})])
    zero = list_rows([submit(change=lambda own: own | {right: own[right] | {"score": 0.0}})])
    for found, counts in ((failed, (1, 0)), (lacking, (0, 1))):
        row = found["snapkv", 0.1]
        assert (row.run.failed, row.run.lacking) == counts
        for name in ("score", "difference"):
            assert getattr(row.cell, name) == getattr(zero["snapkv", 0.1].cell, name)
            for other in (("snapkv", 0.2), (FULL, 1.0)):
                assert getattr(found[other].cell, name) == getattr(whole[other].cell, name)
        assert row.cell.score.value < whole["snapkv", 0.1].cell.score.value
        [table] = build_tables([submit(), row.submission, submit(fidelity=True)])
        marks = {
            (own.submission is row.submission, own.cell.tied) for own in table.rows if own.run.value["budget"] == 0.1
        }
        assert marks == {(True, False), (False, True)}  # the row is not compared with others
        [table] = build_tables([row.submission])
        assert not any(own.cell.best or own.cell.alike for own in table.rows)  # nothing is left to compare


def test_without_a_whole_full_cache_there_is_no_difference(submit):
    full = make_records(1.0, 100, count=COUNT)
    for own in (spoil(full, 0.1, score=None, error="out_of_memory"), dict([*full.items()][1:])):
        rows = list_rows([submit(own)])
        assert [row.cell.difference for row in rows.values()] == [None] * 3
        assert rows[FULL, 1.0].cell.score.value < 100 * len(full)
        assert rows["snapkv", 0.2].run.whole and rows["snapkv", 0.2].cell.score.samples == len(full)


def test_samples_that_settings_name_are_counted(submit):
    names = [*dict.fromkeys(own["subtask"] for own in make_records(1.0, 100).values())]
    task = {"name": "ruler", "length": 2048, "samples": 9, "limit": COUNT + 1, "subtasks": names}
    rows, plain = list_rows([submit(task=task)]), list_rows([submit()])
    for key, row in rows.items():
        assert (row.run.lacking, row.cell.score.samples) == (3, 3 * (COUNT + 1))
        assert row.cell.score.value == pytest.approx(plain[key].cell.score.value * COUNT / (COUNT + 1))
        assert row.cell.difference is None  # the full cache lacks them too
    with pytest.raises(SettingError, match=f"has {3 * COUNT} of the 3000 samples that its settings name"):
        submit(task=task | {"samples": 1000, "limit": None})


def test_full_caches_that_differ_are_marked(submit):
    full = make_records(1.0, 100, count=COUNT)
    one, other, spoiled = submit(), submit(spoil(full, 1 / 18, score=0.0)), submit(spoil(full, 0.9, score=0.0))
    [table] = build_tables([one, one, other, spoiled])
    found = [row.agreement for row in table.rows if row.label == FULL]  # by score
    assert found == [Agreement(3, 2, 1), Agreement(3, 2, 1), Agreement(3, 3, 1), Agreement(3, 3, 3)]


def test_two_submissions_of_one_run_are_two_rows(submit):
    one, twin = submit(), submit(change=lambda own: spoil(own, 1, score=0.0), fidelity=True)
    [table] = build_tables([one, twin])
    rows = [
        (row.submission is one, row.cell.score.value > 0, row.cell.best)
        for row in table.rows
        if row.run.value["budget"] == 0.1
    ]
    assert rows == [(True, True, True), (False, False, False)]


def test_only_rows_with_the_same_samples_share_a_table(submit):
    one, other = submit(), submit(make_records(1.0, 100, count=COUNT - 1), method="other")  # whose methods have all
    assert len(build_tables([one, other])) == 1
    titles = [table.title for table in build_tables([one, submit(make_records(1.0, 100, count=COUNT + 1))])]
    assert len({*titles}) == 2 and all(" · samples " in own for own in titles)
