"""A method that decides itself how many rows stay: its laws, and what runs, records, curves and tables say of it."""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import kvbench as package
from kvbench.analysis.budget_series import CurveOptions, build_series
from kvbench.analysis.run_labels import format_budget, group_series
from kvbench.analysis.score_matrix import build_blocks
from kvbench.cache.policy import choose_cache
from kvbench.cli import check_method, curves, results, run
from kvbench.config import compose
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import CompressedCache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.settings import setting
from kvbench.report.panels import gather_results
from kvbench.runs import method_checks
from kvbench.runs.joint_samples import find_batch_size
from kvbench.store.runs import NAMED_GROUPS, StoredRun, check_value, load_runs
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused
from tests.support.selection import choose_quick
from tests.support.threshold import Threshold, write_settings
from tests.support.tiny_models import distinct, ids, tiny

CHECKPOINT = dict(layers=2)
BLOCKS = choose_quick([None, 1, 7], None, 7)
NOTHING_GOES, MIDDLE, ALL_GO = -1e9, -9.9, -1e-9
TOKENS = 40


def threshold(own: float, recent: int = 3, **more: object) -> Threshold:
    return Threshold(name="threshold", threshold=own, recent=recent, budget_setting="threshold", **more)


def read(
    own: float, block: int | None = None, model: str = "llama", recent: int = 3, **more: object
) -> CompressedCache:
    prompts = torch.cat([distinct(TOKENS, seed=seed) for seed in (1, 2)])
    return package.prefill(tiny(model), prompts, threshold(own, recent, **more), None, block)


def layers(held: CompressedCache) -> list:
    return [layer for context in held.contexts for layer in context.own_layers]


def check_laws(held: CompressedCache, own: float, recent: int = 3) -> None:
    """Exactly the rows stay that the definition lets stay, and tokens are conserved."""
    for layer in layers(held):
        view, seen = layer.rows.view(), layer.rows.seen
        for head in range(layer.rows.shape[1]):
            count = int(layer.rows.counts()[0, head])
            places, scores = view.places[0, head][-count:], -view.keys[0, head][-count:].norm(dim=-1)
            stays = (scores > own) | (places >= seen - recent)
            assert stays.all() or count == 1
            gone = 0 if layer.tally.evicted is None else int(layer.tally.evicted[0, head])
            assert int(layer.rows.head_masses(0, head).sum()) + gone == seen and gone + count == seen
            assert set(range(seen - recent, seen)) <= set(places.tolist())


@pytest.mark.cover
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_heads_and_samples_keep_the_rows_above_the_threshold(block, model):
    scores = [layer.rows.view().keys.norm(dim=-1).flatten() for layer in layers(read(NOTHING_GOES, None, model))]
    own = -torch.cat(scores).median().item()
    held = read(own, block, model)
    check_laws(held, own)
    counts = {int(count) for layer in layers(held) for count in layer.rows.counts().flatten()}
    assert len(counts) > 2 and 3 < min(counts) < max(counts) < TOKENS
    assert held.resident_bytes == sum(
        int(layer.rows.counts().sum()) * 2 * layer.rows.view().keys.shape[-1] * 4 for layer in layers(held)
    ) + sum(context.sliding_bytes() for context in held.contexts)


def test_in_one_block_these_are_the_full_caches_keys_above_the_threshold():
    """The oracle: of the first layer, whose keys no eviction changes, and of all layers in one block."""
    full, held = package.prefill(tiny("llama"), distinct(TOKENS, seed=1), "full"), read(MIDDLE)
    for layer, own in enumerate(full.contexts[0].own_layers):
        for head, keys in enumerate(own.rows.view().keys[0]):
            stays = (-keys.norm(dim=-1) > MIDDLE) | (torch.arange(TOKENS) >= TOKENS - 3)
            assert held.places(layer, head).tolist() == stays.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_threshold_below_all_scores_is_the_full_cache(block):
    held, more = read(NOTHING_GOES, block, decoding=True), ids(5, seed=3).expand(2, -1)
    full = package.prefill(tiny("llama"), torch.cat([distinct(TOKENS, seed=seed) for seed in (1, 2)]), "full")
    assert all((layer.rows.counts() == TOKENS).all() for layer in layers(held))
    torch.testing.assert_close(held.extend(more), full.extend(more), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_head_keeps_one_row_if_no_score_exceeds_the_threshold(block):
    held = read(ALL_GO, block, recent=0)
    for layer in layers(held):
        assert (layer.rows.counts() == 1).all()
    if block is None:
        keys = read(NOTHING_GOES).contexts[0].own_layers[0].rows.view().keys[0, 0]
        assert held.places(0, 0).tolist() == [int(keys.norm(dim=-1).argmin())]


@pytest.mark.parametrize("block", BLOCKS)
def test_while_decoding_rows_are_appended_or_cut(block):
    for decoding in (False, True):
        held = read(MIDDLE, block, decoding=decoding)
        before = [layer.rows.counts().clone() for layer in layers(held)]
        for context in held.contexts:
            tokens = list(context.generate(9, Sampling(), frozenset()))
            assert len(tokens) == 9
        if decoding:
            check_laws(held, MIDDLE)
            assert any((layer.rows.counts() < own + 8).any() for layer, own in zip(layers(held), before, strict=True))
        else:
            for layer, own in zip(layers(held), before, strict=True):
                assert (layer.rows.counts() == own + 8).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_samples_of_a_batch_keep_what_they_keep_alone(block):
    policy = choose_cache(threshold(MIDDLE), build("allocator", load_settings("allocator", "uniform")), RAW)
    prompts = torch.cat([distinct(TOKENS, seed=seed) for seed in (1, 2)])
    context = GenerationContext(tiny("llama"), policy, Budget(None), block, (0, 0))
    context.prefill(prompts)
    alone = read(MIDDLE, block)
    for layer, own in enumerate(context.own_layers):
        assert own.rows.counts()[0].tolist() != own.rows.counts()[1].tolist()
        for sample in range(2):
            for head in range(2):
                assert torch.equal(own.rows.head_places(sample, head), alone.places(layer, head, sample))


RAW = build("codec", load_settings("codec", "raw"))


def test_a_budget_is_refused_if_the_method_decides_and_needed_if_not():
    prompt = distinct(TOKENS, seed=1)
    for budget in (30, 1.0):
        with pytest.raises(SettingError, match=f"^budget={budget}: threshold decides by method.threshold how many"):
            package.prefill(tiny("llama"), prompt, threshold(MIDDLE), budget)
    with pytest.raises(SettingError, match="^budget=null: snapkv does not decide how many rows stay"):
        package.prefill(tiny("llama"), prompt, "snapkv", None)


def test_the_rows_that_stay_can_be_rounded():
    held = package.prefill(tiny("wide"), distinct(TOKENS, seed=1), threshold(MIDDLE), None, codec="kivi")
    raw = package.prefill(tiny("wide"), distinct(TOKENS, seed=1), threshold(MIDDLE), None)
    assert held.resident_bytes <= raw.resident_bytes
    assert [layer.rows.counts().tolist() for layer in layers(held)] == [
        layer.rows.counts().tolist() for layer in layers(raw)
    ]


@pytest.mark.parametrize(
    "own, line",
    [
        (lambda: Threshold(name="t", threshold=0.0, recent=0, budget_setting="tau"),
         "method.budget_setting=tau: choose one of threshold, recent"),
        (lambda: choose_cache(threshold(MIDDLE), build("allocator", load_settings("allocator", "ada")), RAW),
         "allocator=ada: threshold shares rows out itself; use allocator=uniform"),
        (lambda: Eager(name="t", threshold=0.0, recent=0, budget_setting="threshold"),
         "method.budget_setting=threshold: t must not keep every row, be captured or need extra reads; use null"),
        (lambda: Reading(name="t", threshold=0.0, recent=0, budget_setting="threshold"),
         "method.budget_setting=threshold: t must not keep every row"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused(own, line):
    with pytest.raises(SettingError, match=f"^{line}"):
        own()


class Eager(Threshold):
    captured = Captured()


class Reading(Threshold):
    def read(self, request, rows, state):
        return None


class Few(Threshold):
    """Counts without a look at what is protected."""

    def count_rows(self, scores):
        return scores.new_zeros(scores.shape[:2], dtype=torch.int64)


@pytest.mark.parametrize("block", [None, 1, 7])
def test_protected_rows_stay_whatever_is_counted(block):
    policy = Few(name="few", threshold=0.0, recent=5, budget_setting="threshold")
    held = package.prefill(tiny("llama"), distinct(TOKENS, seed=1), policy, None, block)
    assert all(held.places(layer, head).tolist() == [*range(TOKENS - 5, TOKENS)] for layer in (0, 1) for head in (0, 1))


@pytest.mark.parametrize("block", BLOCKS)
def test_protected_rows_stay_if_they_are_all_that_a_head_holds(block):
    held = package.prefill(tiny("llama"), distinct(9, seed=1), threshold(ALL_GO, recent=9), None, block)
    assert all(held.places(layer, head).tolist() == [*range(9)] for layer in (0, 1) for head in (0, 1))


@dataclass(frozen=True)
class Counting(Method):
    """Scores nothing."""

    most: int = setting()

    def count_rows(self, scores):
        return torch.full(scores.shape[:2], self.most)


def test_a_method_that_only_counts_rows_evicts():
    policy = Counting(name="counting", most=9, budget_setting="most")
    held = package.prefill(tiny("llama"), distinct(TOKENS, seed=1), policy, None)
    assert policy.cuts and all((layer.rows.counts() == 9).all() for layer in layers(held))


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    """A folder for --config-dir with the method's file."""
    monkeypatch.setattr(compose, "_added", [])
    write_settings(tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize(
    "settings, line",
    [
        (["method=threshold"], "budget=0.05: threshold decides by method.threshold how many rows stay; use null"),
        (
            ["method=snapkv", "budget=null"],
            "budget=null: snapkv does not decide how many rows stay; a fraction in (0, 1]",
        ),
        (
            ["method=threshold", "budget=null", "task=efficiency"],
            "method=threshold: task=efficiency reads random tokens",
        ),
        (["method=threshold", "budget=null", "allocator=ada"], "allocator=ada: threshold shares rows out itself"),
        (
            ["method=criticalkv", "method.base=threshold"],
            "method.base=threshold: it decides itself how many rows stay; choose another method",
        ),
    ],
)
def test_a_run_has_a_budget_or_a_method_that_decides(kvbench, own_folder, tmp_path, settings, line):
    (tmp_path / "empty").mkdir()
    found = kvbench(f"--config-dir={own_folder}", *settings, f"results={tmp_path}/empty")
    assert_refused(found, line, tmp_path / "empty")


def test_the_checks_of_a_method_apply(own_folder, checkpoint, monkeypatch, capsys):
    for name, few in (("TOKENS", 40), ("BUDGETS", (0.5, 9)), ("BLOCKS", (None, 15))):
        monkeypatch.setattr(method_checks, name, few)
    assert check_method.main(["threshold", "--config-dir", str(own_folder), "--model", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert out.count("whatever the budget") == 2 and "the total stays within the budget" in out


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory) -> Path:
    """Results of two thresholds and of a given budget, from the command line."""
    folder = tmp_path_factory.mktemp("measured")
    own = (
        f"--config-dir={folder}/own",
        "model=hf",
        f"model.path={checkpoint}",
        "device=cpu",
        f"results={folder}/results",
    )
    task = ("task=phonebook", "task.sizes=[4]", "limit=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_added", [])
        write_settings(folder / "own")
        assert run.main(["-m", *own, *task, "method=threshold", "method.threshold=-1.0,-0.8", "budget=null"]) == 0
        assert run.main([*own, *task, "method=snapkv", "budget=0.5"]) == 0
    return folder / "results"


@pytest.fixture(scope="module")
def runs(measured) -> dict[str, StoredRun]:
    return {run.budget_name: run for run in load_runs(measured)}


@pytest.fixture(scope="module")
def shares(runs) -> dict[str, float]:
    """The mean share of bytes, of each threshold."""
    own = {name: run.records.values() for name, run in runs.items() if name.startswith("threshold")}
    return {
        name: fmean(record["resident_bytes"] / record["full_bytes"] for record in own[name]) for name in sorted(own)
    }


def test_a_record_has_the_bytes_of_its_sample_and_no_budget(runs, shares):
    assert len(runs) == 4 and list(shares) == ["threshold=-0.8", "threshold=-1.0"]
    assert 0 < shares["threshold=-0.8"] < shares["threshold=-1.0"] < 1
    for name, share in shares.items():
        records = runs[name].records.values()
        assert all(record["budget"] is None and record["quota"] is None for record in records)
        assert len({record["resident_bytes"] for record in records}) > 1
        assert format_budget(runs[name]) == f"{100 * share:.1f}\u202f% ({name})"


def test_a_curve_and_a_matrix_show_what_was_measured(runs, shares):
    every = list(runs.values())
    [(_, _, series)] = [found for found in group_series(every) if found[0].startswith("threshold")]
    *points, full = build_series(series, every, CurveOptions()).points
    assert [point.budget for point in points] == list(shares) and full.share == 1
    assert [point.share for point in points] == pytest.approx(list(shares.values()))

    [block], refused = build_blocks(every, every)
    assert not refused and block.budgets == ("50\u202f%", *(format_budget(runs[name]) for name in shares))
    row = next(cells for label, cells in block.rows.items() if label.startswith("threshold"))
    assert [cell.held for cell in row.values()] == pytest.approx(list(shares.values()))


def test_commands_print_what_was_measured(measured, shares, capsys):
    assert curves.main(["--results", str(measured), "method=threshold"]) == 0
    out = capsys.readouterr().out
    for name, share in shares.items():
        assert re.search(rf"^{re.escape(name)} +{100 * share:.1f}% ", out, re.M)
    assert out.count("threshold · uniform · raw") == 1
    assert results.main(["--results", str(measured), "--sort", "0.5"]) == 0
    assert f"{100 * shares['threshold=-0.8']:.1f}\u202f%" in capsys.readouterr().out
    assert results.main(["--results", str(measured), "--format", "csv"]) == 0
    assert ",threshold=-0.8," in capsys.readouterr().out
    assert "threshold=-0.8" in json.dumps(gather_results(measured, datetime.now(UTC)).page)


def test_samples_are_read_alone_so_that_each_has_its_own_bytes():
    """Also those of the runs that share their prefill."""
    given, decided = (SimpleNamespace(device="cuda", max_batch=3, budget=Budget(own)) for own in (0.5, None))
    assert [find_batch_size(runs) for runs in ([given], [decided], [given, decided])] == [3, 1, 1]


@pytest.mark.parametrize("method", [{"name": "m"}, {"name": "m", "budget_setting": "threshold"}])
def test_a_stored_run_without_a_budget_names_the_setting_that_decides(method):
    value = {group: {"name": "x"} for group in NAMED_GROUPS} | {"method": method, "budget": None, "question": "visible"}
    with pytest.raises(ValueError, match="^run.yaml lacks a setting"):
        check_value(value)
    check_value(value | {"method": {"name": "m", "budget_setting": "threshold", "threshold": -1.0}})
