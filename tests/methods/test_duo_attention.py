"""duo_attention: who streams, by brute force over whole heads; what streaming heads hold; files that are refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cli import calibrate
from kvbench.config.catalogue import build, load_settings
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.validation import SettingError
from tests.support.dense_engine import Head, HeadView
from tests.support.method_files import make_tiny_method_args
from tests.support.oracles import assert_engines_agree
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, tiny

CLOSE = dict(rtol=3e-4, atol=3e-4)


def write(folder: Path, alpha: list[list[float]], sinks: int = 3, recent: int = 6) -> str:
    folder.mkdir(exist_ok=True)
    np.savetxt(folder / "full_attention_heads.tsv", np.array(alpha), delimiter="\t")
    (folder / "config.json").write_text(json.dumps({"sink_size": sinks, "recent_size": recent}))
    return str(folder)


def gates(path: str) -> np.ndarray:
    return np.loadtxt(Path(path) / "full_attention_heads.tsv", delimiter="\t", ndmin=2)


def streaming_heads(alpha: np.ndarray, count: int) -> set[tuple[int, int]]:
    """The `count` smallest; of equal ones the later first."""
    heads = [(layer, head) for layer, head in np.ndindex(*alpha.shape) if not math.isnan(alpha[layer, head])]
    return set(sorted(heads, key=lambda place: (alpha[place], -place[0], -place[1]))[:count])


def fewest(heads: int, tokens: int, window: int, budget: int) -> int:
    """The least number of streaming heads that keeps all within the budget; all, if none does."""
    for count in range(heads + 1):
        if (heads - count) * tokens + count * min(window, tokens) <= heads * budget:
            return count
    return heads


def stream(alpha: np.ndarray, count, sinks: int, recent: int, quota: int = 10**9, prompt: int = 60):
    """What every head keeps. `count(tokens)` heads stream, as the prompt's last cut has it; where `sinks + recent` are
    more than `quota`, both are fewer.
    """
    known = {}
    first, last = sinks, recent
    if quota < sinks + recent:
        first = quota * sinks // (sinks + recent)
        last = quota - first

    def cut(glances: list[HeadView]) -> list[Head]:
        if glances[0].tokens <= prompt:
            known[glances[0].layer] = count(glances[0].tokens)
        chosen = streaming_heads(alpha, known[glances[0].layer])
        return [keep(glance.rows) if (glance.layer, glance.head) in chosen else glance.rows for glance in glances]

    def keep(rows: Head) -> Head:
        count = len(rows.places)
        return rows if count <= first + last else rows.take((rows.places < first) | (np.arange(count) >= count - last))

    return cut


def agree(name: str, cut, quota: int, block: int | None, decoding: bool = True, **args):
    """Both engines hold the same rows after the prompt and after seven more tokens."""
    settings = args | {"decoding": decoding}
    return assert_engines_agree(
        name, cut, "duo_attention", quota, block, seed=6, dense_cuts=decoding, parts=(1, 5, 1), **settings
    )


@pytest.mark.cover
@pytest.mark.parametrize("quota", [2, 5, 9, 10, 17, 30, 59])
@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
@pytest.mark.parametrize("name", choose_quick(["llama", "qwen3", "gemma3"], "llama"))
def test_as_many_heads_stream_as_the_budget_needs(name, block, quota):
    args = make_tiny_method_args("duo_attention", name)
    alpha = gates(args["path"])
    heads = int((~np.isnan(alpha)).sum())
    prompt = 30 if block == 1 else 60  # of `assert_engines_agree`
    cut = stream(alpha, lambda tokens: fewest(heads, tokens, 9, quota), 3, 6, quota, prompt)
    agree(name, cut, quota, block, **args)
    held = kvbench.prefill(tiny(name), ids(prompt), "duo_attention", quota, block, method_args=args)
    layers = [layer for layer in range(len(alpha)) if layer not in held.sliding_layers]
    total = sum(len(held.places(layer, head)) for layer in layers for head in range(alpha.shape[1]))
    allowed = heads * min(quota, prompt)
    assert total <= allowed
    assert total > allowed - (prompt - 9) or total == allowed  # less than one head's difference below it


@pytest.mark.cover
@pytest.mark.parametrize("count", ["quantile", "round"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("quota", [2, 40])
def test_a_sparsity_of_its_own(quota, block, sparsity, count):
    """Whatever the budget; official: heads below the quantile of all gates."""
    args = make_tiny_method_args("duo_attention", "llama")
    alpha = gates(args["path"])
    number = (alpha < np.quantile(alpha, sparsity)).sum() if count == "quantile" else round(6 * sparsity)
    number = 6 if sparsity == 1 else number
    cut = stream(alpha, lambda tokens: number, 3, 6)
    args |= {"sparsity": sparsity, "count": count}
    agree("llama", cut, quota, block, **args)
    args |= {"sinks": 1, "recent": 11}
    agree("llama", stream(alpha, lambda tokens: number, 1, 11), 20, block, decoding=False, **args)


def test_quantile_and_round_differ():
    """Of six heads 0.3 are two either way, 0.6 are three below the quantile and four by rounding."""

    def streaming(sparsity: float, count: str) -> int:
        args = make_tiny_method_args("duo_attention", "llama") | {"sparsity": sparsity, "count": count}
        return build("method", load_settings("method", "duo_attention", args)).streaming(2, 60)[0]

    assert [streaming(share, "quantile") for share in (0.3, 0.6)] == [2, 3]
    assert [streaming(share, "round") for share in (0.3, 0.6)] == [2, 4]


def test_full_heads_append_and_streaming_heads_slide():
    args = make_tiny_method_args("duo_attention", "llama") | {"preset": "paper"}
    held = kvbench.prefill(tiny("llama"), ids(60), "duo_attention", 0.5, method_args=args)
    held.extend(ids(5, seed=1))
    found = sorted(len(held.places(layer, head)) for layer in range(3) for head in range(2))
    assert found == [9, 9, 9, 65, 65, 65]
    plain = kvbench.prefill(tiny("llama"), ids(60), "duo_attention", 0.5, method_args=args | {"preset": "kvpress"})
    plain.extend(ids(5, seed=1))
    found = sorted(len(plain.places(layer, head)) for layer in range(3) for head in range(2))
    assert found == [14, 14, 14, 65, 65, 65]


def test_a_head_that_streams_never_stops_to():
    """A fraction of what was seen grows with the prompt: less need to stream later, and nothing to refill from."""
    args = make_tiny_method_args("duo_attention", "llama")
    held = kvbench.prefill(tiny("llama"), ids(60), "duo_attention", 0.5, 10, method_args=args, budget_of="seen")
    heads = [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]
    assert all(rows == list(range(60)) or rows == [0, 1, 2, *range(54, 60)] or len(rows) <= 9 for rows in heads)


def test_equal_gates_are_decided_the_same_way_every_time(tmp_path):
    path = write(tmp_path / "ties", [[0.5, 0.5], [1.0, 0.5], [0.5, 0.0]])
    args = {"path": path, "sparsity": 0.5, "count": "round"}
    held = kvbench.prefill(tiny("llama"), ids(60), "duo_attention", 0.5, method_args=args)
    found = {(layer, head) for layer in range(3) for head in range(2) if len(held.places(layer, head)) < 60}
    assert found == {(2, 1), (2, 0), (1, 1)}  # the smallest, then of equal ones the later layers
    clipped = write(tmp_path / "clipped", [[0.5, 7.0], [1.0, 0.5], [-3.0, 0.0]])  # official: clipped to [0, 1]
    assert build("method", load_settings("method", "duo_attention", {"path": clipped})).pattern.alpha == [
        [0.5, 1.0], [1.0, 0.5], [0.0, 0.0],
    ]  # fmt: skip


def refused(path: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason) as error:
        kvbench.prefill(tiny("llama"), ids(20), "duo_attention", 0.5, method_args={"path": path})
    assert str(error.value).startswith("method.path") and "\n" not in str(error.value)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"^method\.path=null: give a folder"):
        kvbench.prefill(tiny("llama"), ids(20), "duo_attention", 0.5)
    refused(str(tmp_path / "missing"), "no readable pattern")
    refused(str(tmp_path), "no readable pattern")
    refused(write(tmp_path / "heads", [[1.0] * 3] * 3), r"\(3, 3\), the model \(3, 2\)")
    refused(write(tmp_path / "layers", [[1.0] * 2] * 2), r"\(2, 2\), the model \(3, 2\)")
    refused(write(tmp_path / "nan", [[1.0, 1.0], [math.nan] * 2, [1.0, 1.0]]), "have no α")
    refused(write(tmp_path / "some", [[1.0, math.nan]] * 3), "must be a table")
    refused(write(tmp_path / "recent", [[1.0, 0.0]] * 3, recent=0), "recent_size=0")
    ragged = Path(write(tmp_path / "ragged", [[1.0, 0.0]] * 3))
    (ragged / "full_attention_heads.tsv").write_text("1.0\t0.0\n1.0\n0.0\t0.0\n")
    refused(str(ragged), "must be a table")
    (ragged / "full_attention_heads.tsv").write_text("1.0\tmany\n")
    refused(str(ragged), "no readable pattern")
    (ragged / "full_attention_heads.tsv").write_text("")
    refused(str(ragged), "must be a table")
    (ragged / "config.json").write_text("{}")
    refused(str(ragged), "no readable pattern")


@pytest.mark.parametrize("setting", [{"sparsity": 1.5}, {"count": "some"}, {"sinks": -1}, {"recent": 0}], ids=str)
def test_settings_that_are_refused(setting):
    args = make_tiny_method_args("duo_attention", "llama") | setting
    with pytest.raises(SettingError, match=f"^method.{next(iter(setting))}="):
        build("method", load_settings("method", "duo_attention", args))


def test_a_size_while_decoding_is_refused():
    """Heads stay at what the prompt made them: it would change nothing."""
    with pytest.raises(SettingError, match="^method setting=decode_size: choose one of"):
        kvbench.prefill(tiny("llama"), ids(20), "duo_attention", 5, method_args={"decode_size": 9})


def test_other_allocators_are_refused():
    args = make_tiny_method_args("duo_attention", "llama")
    with pytest.raises(SettingError, match="^allocator=ada: duo_attention"):
        kvbench.prefill(tiny("llama"), ids(20), "duo_attention", 0.5, allocator="ada", method_args=args)


def test_a_pattern_made_from_kvzips_head_scores(tmp_path, capsys, monkeypatch):
    """Where none was trained: written as published, its origin in config.json, and taken by the method."""
    monkeypatch.setattr(calibrate, "ESSAYS", 1)
    out = tmp_path / "pattern"
    command = ["duo_attention", "--model", "reference", "--out", str(out), "--device", "cpu"]
    assert calibrate.main([*command, "--length", "96", "--sinks", "2", "--recent", "9"]) == 0
    assert "pattern (6, 2) from 1 texts of 96 tokens" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (2, 9) and config["source"].startswith("KVzip head scores")
    alpha = gates(str(out))
    assert alpha.shape == (6, 2) and (alpha > 0).all() and (alpha <= 1).all() and len(np.unique(alpha)) > 6
    model = Checkpoint("reference", find_model("reference")).weights(torch.float32, "cpu")
    held = kvbench.prefill(model, ids(90), "duo_attention", 0.5, method_args={"path": str(out)})
    full = {(i, h) for i in range(6) for h in range(2) if len(held.places(i, h)) == 90}
    gate = np.sort(alpha.ravel())[::-1]
    other = str(tmp_path / "other")
    assert calibrate.main([*command, "--length", "96", "--seed", "1", "--out", other]) == 0
    assert (gates(other) != alpha).any()  # the seed draws the text
    assert full == {(i, h) for i in range(6) for h in range(2) if alpha[i, h] >= gate[len(full) - 1]} and len(full) == 5
    assert calibrate.main(command) == 2
    assert "there is a file; delete it or give another name" in capsys.readouterr().err
    inside, command = ("config.json", "config.json/pattern"), [*command, "--out", str(tmp_path / "new")]
    for wrong in (
        ["--length", "1"],
        ["--recent", "0"],
        ["--sequences", "0"],
        *(["--out", str(out / own)] for own in inside),
    ):
        assert calibrate.main([*command, *wrong]) == 2
        assert capsys.readouterr().err.startswith(f"kvbench: {wrong[0]}={wrong[1]}")
