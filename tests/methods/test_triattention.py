"""TriAttention and its calibration against their formulas, from keys and queries before rotation, in float64."""

import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvbench
from kvbench.cli import calibrate
from kvbench.config.catalogue import build, load_settings
from kvbench.methods import triattention
from kvbench.methods.triattention import mean_rotation, normalise, pair_sizes, weigh_keys
from kvbench.models.transformers_port import make_rotations
from kvbench.training.query_statistics import compute_query_statistics
from kvbench.validation import SettingError
from tests.replay.adapter import make_model
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import make_tiny_method_args
from tests.support.oracle_scores import assert_scores_are_an_oracles
from tests.support.oracle_shares import share_interpolated
from tests.support.oracles import assert_engines_agree, assert_same_rows, keep_by_score, protect_newest
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny
from tests.support.unrotated_heads import find_frequencies, read_unrotated

MODELS = ("llama", "llama3", "yarn", "qwen3", "phi3", "gemma3", "mistral")


def path_of(model: str) -> str:
    return make_tiny_method_args("triattention", model)["path"]


class Oracle:
    """The score of a KV head's rows, in loops over rows and query heads."""

    def __init__(self, model: str, horizon: int = 65536, pinned: int = 0, ideal: bool = False) -> None:
        """`pinned`: tokens of a prompt that stays. `ideal`: angles that are not rounded as the model rounds them."""
        own = load_file(path_of(model))
        self.frequencies = find_frequencies(model)
        self.mean = self.frequencies.split(own["q_mean"].double().numpy())  # (layers, query heads, d/2)
        self.size = own["q_abs_mean"].double().numpy()
        self.horizon, self.pinned, self.ideal = horizon, pinned, ideal

    def weigh(self, layer: int, head: int, keys: np.ndarray, places: np.ndarray, end: int) -> np.ndarray:
        """a of one query head, (n,), of keys before rotation, (n, d)."""
        own, mean, size = self.frequencies, self.mean[layer, head], self.size[layer, head]
        distances, found = [], []
        while not distances or 2 * distances[-1] <= self.horizon:
            distances.append(2 * distances[-1] if distances else 1)
        ahead = np.array([own.angles(end + distance) for distance in distances])
        for key, place in zip(own.split(keys), places.tolist(), strict=True):
            if self.ideal:
                phase = own.omega.astype(np.float64) * (end - place + np.array(distances)[:, None])
            else:
                phase = ahead - own.angles(place)
            logits = (own.factor**2 * (mean * key.conj() * np.exp(1j * phase)).real).sum(1)
            more = (own.factor**2 * (size - abs(mean)) * abs(key)).sum()
            found.append(logits.mean() + more)
        return np.array(found)

    def unrotate(self, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Keys (n, d) without their rotation."""
        own = self.frequencies
        plain = [
            key * np.exp(-1j * own.angles(place)) / own.factor
            for key, place in zip(own.split(keys), places.tolist(), strict=True)
        ]
        half, rest = own.rotated // 2, slice(own.rotated // 2, None)
        parts = [[key[:half].real, key[:half].imag, key[rest].real, key[rest].imag] for key in plain]
        return np.array([np.concatenate(part) for part in parts]).reshape(keys.shape)

    def score(self, glance: HeadView) -> np.ndarray:
        """s of the rows of one KV head, (n,)."""
        places, group = glance.rows.places, len(glance.queries)
        keys, best = self.unrotate(glance.rows.keys, places), []
        counted = places >= self.pinned
        for member in range(group):
            own = self.weigh(glance.layer, glance.head * group + member, keys, places, glance.tokens)
            some = own[counted]
            best.append((own - some.mean()) / max(some.std(), 1e-6))
        return np.max(best, 0)

    def keeps(self, quota: int, *more, interval: int = 1, prompt: int = 60) -> Callable[[list[HeadView]], list[Head]]:
        cut, since = keep_by_score(self.score, quota, *more), {}

        def wait_and_cut(glances: list[HeadView]) -> list[Head]:
            layer, new = glances[0].layer, glances[0].queries.shape[1]
            if glances[0].tokens > prompt:
                since[layer] = since.get(layer, 0) + new
                if since[layer] < interval:
                    return [glance.rows for glance in glances]
                since[layer] = 0
            return cut(glances)

        return wait_and_cut


# The score.


@pytest.mark.parametrize("block", [None, 11])
@pytest.mark.parametrize("model", choose_quick(MODELS, "llama"))
def test_scores_are_those_of_the_equation(model, block, monkeypatch):
    """In float64, of every row, at every cut. The model's cos and sin are float32, whatever its weights are."""
    assert_scores_are_an_oracles(
        monkeypatch, "triattention", {"path": path_of(model)}, Oracle(model), model, block, atol=2e-7
    )


@pytest.mark.cover
@pytest.mark.parametrize("horizon, close", [(1, 1e-6), (64, 1e-6), (65536, 1e-4)])
@pytest.mark.parametrize("model", MODELS)
def test_scores_follow_from_keys_that_were_never_rotated(model, horizon, close, monkeypatch):
    """The keys are those of the model's projections, and ω·(t+δ) is exact. The model rounds its angles to float32: at
    65536 radians by 0.004, of which the mean over 17 distances leaves less.
    """
    found: list[tuple] = []
    weigh = weigh_keys
    monkeypatch.setattr(triattention, "weigh_keys", lambda *a: found.append(weigh(*a)) or found[-1])
    args = {"path": path_of(model), "horizon": horizon}
    held = kvbench.prefill(make_double(model), distinct(60), "triattention", 13, method_args=args)
    oracle, unrotated = Oracle(model, horizon, ideal=True), read_unrotated(model, distinct(60))
    layers = [layer for layer in unrotated if layer not in held.sliding_layers]
    assert len(found) == len(layers)
    for layer, own in zip(layers, found, strict=True):
        keys, group = unrotated[layer][1], own.shape[2]
        for head in range(own.shape[1] * group):
            expected = oracle.weigh(layer, head, keys[head // group], np.arange(60), 60)
            np.testing.assert_allclose(
                own[0].flatten(0, 1)[head].numpy(), expected, atol=close * np.abs(expected).max()
            )


@pytest.mark.parametrize("model", ["llama", "yarn", "phi3", "llama3"])
def test_the_score_of_a_fixed_query_is_its_mean_logit(model):
    """A query that is always the same: E|q| = |E q|, and the score is what it would see, as the model rotates it."""
    rotation = make_rotations(make_double(model))[0].again
    draw = torch.Generator().manual_seed(0)
    query, keys = torch.randn(4, 32, generator=draw).double(), torch.randn(2, 50, 32, generator=draw).double()
    like = SimpleNamespace(rotation=rotation, tokens=torch.tensor(50))
    cos, sin, factor = mean_rotation(like, 65536, keys)
    found = weigh_keys(keys[None], query, pair_sizes(query, cos.shape[2]), cos, sin, factor)
    logits = []
    for distance in [2**power for power in range(17)]:
        [one, other] = (part.double()[0, 0] for part in rotation(torch.tensor([[50 + distance]])))
        r, half = len(one), len(one) // 2
        turned = query.clone()
        turned[:, :half] = query[:, :half] * one[:half] - query[:, half:r] * other[:half]
        turned[:, half:r] = query[:, half:r] * one[half:] + query[:, :half] * other[half:]
        logits.append(turned.unflatten(0, (2, -1)) @ keys.mT)
    torch.testing.assert_close(found[0], torch.stack(logits).mean(0), rtol=1e-9, atol=1e-9)


def test_what_the_mean_loses_counts_by_the_size_of_keys():
    """Queries that cancel out: the score is Σ_f c_f E|q_f| |κ_f|, at any distance."""
    draw = torch.Generator().manual_seed(0)
    keys, size = torch.randn(1, 2, 9, 8, generator=draw).double(), torch.rand(4, 4, generator=draw).double()
    cos, sin, factor = torch.ones(1, 1, 4).double(), torch.zeros(1, 1, 4).double(), torch.full((2,), 3.0)
    found = weigh_keys(keys, torch.zeros(4, 8).double(), size, cos, sin, factor)
    pairs = [(0, 2), (1, 3), (4, 6), (5, 7)]  # of 4 rotated dimensions, and of 4 others
    for head, row in np.ndindex(4, 9):
        key = keys[0, head // 2, row]
        expected = sum(
            size[head, f] * (3 if f < 2 else 1) * (key[i] ** 2 + key[j] ** 2) ** 0.5 for f, (i, j) in enumerate(pairs)
        )
        torch.testing.assert_close(found[0, head // 2, head % 2, row], expected)


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_rows_are_scored_in_pieces(chunk, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    keys, mean, size = (torch.randn(*shape, generator=draw).double() for shape in ((2, 2, 30, 8), (6, 8), (6, 4)))
    cos, sin, factor = torch.rand(2, 1, 8).double(), torch.rand(2, 1, 8).double(), torch.ones(4).double()
    whole = weigh_keys(keys, mean, size, cos, sin, factor)
    monkeypatch.setattr(triattention, "CHUNK", chunk)
    torch.testing.assert_close(weigh_keys(keys, mean, size, cos, sin, factor), whole)


def test_scores_are_normalised_over_the_rows_that_count():
    scores = torch.randn(1, 2, 3, 10, generator=torch.Generator().manual_seed(0)).double()
    counted = torch.arange(10) >= torch.tensor([0, 4])[None, :, None]
    found = normalise(scores, counted)
    for head, member in np.ndindex(2, 3):
        own = found[0, head, member][counted[0, head]]
        assert abs(own.mean()) < 1e-12 and abs(own.std(correction=0) - 1) < 1e-12
        scaled = scores[0, head, member] - scores[0, head, member, 0]
        torch.testing.assert_close(
            (found[0, head, member] - found[0, head, member, 0]) / found[0, head, member].std(),
            scaled / scores[0, head, member].std(),
        )
    assert torch.isfinite(normalise(scores, torch.zeros(1, 2, 10, dtype=torch.bool))).all()
    assert (normalise(torch.ones(1, 1, 1, 5), torch.ones(1, 1, 5, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("model", ["dynamic", "longrope"])
@pytest.mark.parametrize("method", ["triattention", "criticalkv"])
def test_frequencies_that_follow_the_length_are_refused(model, method):
    args = {"path": path_of("yarn")}  # of the same shape
    args = args if method == "triattention" else {"base": "triattention", "base_args": args}
    with pytest.raises(SettingError, match=f"^method={method}: .*beyond 64 tokens, and {method} .*needs fixed rotary "):
        kvbench.prefill(make_model(model), ids(20), method, 0.5, method_args=args)


# The rows that stay.


@pytest.mark.cover
@pytest.mark.parametrize("recent", [0, 5])
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("model", choose_quick(MODELS, "llama"))
def test_triattention(model, block, recent):
    cut = Oracle(model).keeps(13, protect_newest(recent), prompt=30 if block == 1 else 60)
    args = dict(path=path_of(model), recent=recent, decode_interval=1)
    assert_engines_agree(model, cut, "triattention", 13, block, dense_cuts=True, **args)


@pytest.mark.parametrize("block", [None, 9])
def test_heads_share_rows(block):
    """Heads then hold different numbers of rows."""
    cut = Oracle("llama").keeps(13, protect_newest(0), share_interpolated(0.2))
    ada = ("ada", {"mode": "interpolate", "alpha": 0.2})
    args = dict(path=path_of("llama"), decode_interval=1)
    assert_engines_agree("llama", cut, "triattention", 13, block, allocator=ada, dense_cuts=True, **args)


def test_it_appends_where_it_does_not_cut_while_decoding():
    held = assert_engines_agree(
        "qwen3", Oracle("qwen3").keeps(13), "triattention", 13, 9, path=path_of("qwen3"), decoding=False
    )
    assert len(held.places(0, 0)) == 13 + 7 and held.bytes.state == 0


@pytest.mark.parametrize("interval", [1, 6])
def test_it_cuts_every_few_tokens_of_an_answer(interval):
    prompt, more = distinct(73).split([60, 13], dim=1)
    dense = DenseEngine("qwen3", Oracle("qwen3").keeps(17, interval=interval), cuts_decoding=True)
    dense.prefill(prompt, None)
    args = {"path": path_of("qwen3"), "decode_interval": interval}
    held = kvbench.prefill(tiny("qwen3"), prompt, "triattention", 17, method_args=args)
    lengths = []
    for token in more.split(1, dim=1):
        held.extend(token), dense.extend(token)
        assert_same_rows(held, dense)
        lengths.append(len(held.places(0, 0)))
    assert lengths == [17 + step % interval for step in range(1, 14)]


def test_a_pinned_prompt_stays_and_does_not_enter_the_mean():
    """The answer competes for what the prompt leaves of the budget; heads may keep other rows of it."""
    prompt, more = distinct(41).split([20, 21], dim=1)

    def protect(glance: HeadView, quota: int) -> np.ndarray:
        return glance.rows.places < 20

    cut = Oracle("llama", pinned=20).keeps(26, protect, prompt=20)
    dense = DenseEngine("llama", cut, cuts_decoding=True)
    dense.prefill(prompt, None)
    args = {"path": path_of("llama"), "preset": "paper", "decode_interval": 1}
    held = kvbench.prefill(tiny("llama"), prompt, "triattention", 26, method_args=args)
    for token in more.split(1, dim=1):
        held.extend(token), dense.extend(token)
        assert_same_rows(held, dense)
    kept = {tuple(held.places(layer, head).tolist()) for layer, head in np.ndindex(3, 2)}
    assert {own[:20] for own in kept} == {tuple(range(20))} and {len(own) for own in kept} == {26} and len(kept) > 1


def test_of_a_pinned_prompt_that_exceeds_the_budget_the_first_rows_stay():
    """As in the source, but for one row that is free."""
    args = {"path": path_of("llama"), "preset": "paper"}
    held = kvbench.prefill(tiny("llama"), ids(60), "triattention", 13, method_args=args)
    for layer, head in np.ndindex(3, 2):
        assert held.places(layer, head).tolist()[:12] == [*range(12)] and len(held.places(layer, head)) == 13


def test_settings_count():
    def places(**args) -> list:
        args["path"] = path_of("llama")
        held = kvbench.prefill(tiny("llama"), ids(90), "triattention", 20, method_args=args)
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    found = [places(**args) for args in ({}, {"horizon": 1}, {"recent": 9}, {"pin_prompt": True})]
    assert len({str(own) for own in found}) == len(found)


def test_presets_are_the_sources_own():
    names = ("pin_prompt", "recent", "horizon", "decoding", "decode_interval")
    found = {
        preset: [load_settings("method", "triattention", {"preset": preset})[name] for name in names]
        for preset in ("budget", "paper", "vllm")
    }
    same = [65536, True, 128]
    assert found == {"budget": [False, 0, *same], "paper": [True, 0, *same], "vllm": [False, 128, *same]}


# The statistics.


@pytest.mark.parametrize("model", MODELS)
def test_calibration(model):
    """Against queries of the model's projections, behind its norm if it has one, over two texts."""
    texts = [distinct(61, seed=8), distinct(30, seed=9)]
    found = compute_query_statistics(tiny(model), [own[0] for own in texts])
    frequencies = find_frequencies(model)
    sliding = kvbench.prefill(tiny(model), ids(5)).sliding_layers
    read = [read_unrotated(model, own) for own in texts]
    for layer in read[0]:
        if layer in sliding:
            assert not any(own[layer].any() for own in found.values())
            continue
        queries = np.concatenate([own[layer][0] for own in read], 1)
        for head, own in enumerate(queries):
            sizes = [np.mean([abs(query[f]) for query in frequencies.split(own)]) for f in range(16)]
            np.testing.assert_allclose(found["q_mean"][layer, head], sum(own) / len(own), atol=2e-5)
            np.testing.assert_allclose(found["q_abs_mean"][layer, head], sizes, atol=2e-5)


def test_the_command(tmp_path, capsys):
    """On the embedded model: the file serves it, equal commands write equal files, and wrong options are one line."""
    out, text = tmp_path / "made" / "statistics", tmp_path / "text.txt"
    text.write_text("The old man gave the letter to nobody. " * 60)
    few = ["--sequences", "2", "--length", "16", "--device", "cpu"]
    command = ["triattention", "--model", "reference", "--out", str(out), *few]
    assert calibrate.main(command) == 0
    assert "q_mean (6, 4, 64), q_abs_mean (6, 4, 32) from 2 sequences of 16 tokens" in capsys.readouterr().out
    for name, more, same in (("again", [], True), ("seed", ["--seed", "1"], False)):
        assert calibrate.main([*command, *more, "--out", str(tmp_path / name)]) == 0
        assert ((tmp_path / name).read_bytes() == out.read_bytes()) == same
    assert calibrate.main(command) == 2
    assert "there is a file; delete it or give another name" in capsys.readouterr().err
    out.unlink()
    assert calibrate.main([*command, "--text", str(text)]) == 0
    command += ["--out", str(tmp_path / "new")]
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert about["source"] == "text text.txt" and about["sequences"] == "2 of 16 tokens" and len(about["model"]) == 16
    assert [own.name for own in out.parent.iterdir()] == ["statistics"]
    for wrong, line in (
        (["--sequences", "900", "--text", str(text)], "--sequences=900: text too short: "),
        (["--sequences", "0"], "--sequences=0: a whole number of at least 1"),
        (["--length", "1"], "--length=1: a whole number of at least 2"),
        (["--text", str(tmp_path / "none")], "--text="),
        (["--model", "/none"], "--model=/none"),
        (["--out", str(tmp_path)], f"--out={tmp_path}: no file can be there"),
    ):
        assert calibrate.main([*command, *wrong]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert line in said
    assert about["model"] == build_for_other(out, tmp_path, capsys)


def build_for_other(out: Path, folder: Path, capsys) -> str:
    """A run with the file of another model of equal shapes ends with one line before weights load. Its identity."""
    from kvbench.cli.command import run_command
    from kvbench.cli.run import main

    other = folder / "other"
    save_file(load_file(out), str(other), {"model": "0123456789abcdef"})
    settings = ["model=reference", "task=ruler", "task.length=512", "task.samples=1", "task.subtasks=[niah_single_1]"]
    settings += ["device=cpu", f"results={folder / 'results'}", "method=triattention", f"method.path={other}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", *settings, "budget=0.5"])
        patch.setattr("kvbench.models.loading.load_weights", lambda *a: pytest.fail("weights were loaded"))
        assert run_command(main) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if "method.path" in line]
    assert f"method.path={other}: the file was made for the model 0123456789abcdef, this one is " in said
    return said.rpartition(" ")[2]


def test_a_killed_calibration_leaves_no_file(checkpoint, tmp_path):
    """A copy of this process is killed while it writes."""
    out = tmp_path / "statistics"
    command = ["triattention", "--model", str(checkpoint), "--out", str(out), "--sequences", "1", "--length", "8"]

    def begin_and_die(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:99])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def calibrate_and_die() -> None:
        Path.write_bytes = begin_and_die
        calibrate.main([*command, "--device", "cpu"])

    copy = get_context("fork").Process(target=calibrate_and_die)
    copy.start()
    copy.join()
    [begun] = tmp_path.iterdir()
    assert copy.exitcode == -signal.SIGKILL and begun != out and begun.stat().st_size == 99


# Files.


def refused(path: object, reason: str, model: str = "llama") -> None:
    with pytest.raises(SettingError, match=rf"^method\.path={path}: .*{reason}") as error:
        kvbench.prefill(tiny(model), ids(20), "triattention", 0.5, method_args={"path": path})
    assert "\n" not in str(error.value)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"^method\.path=null: .*kvbench calibrate triattention"):
        kvbench.prefill(tiny("llama"), ids(20), "triattention", 0.5)
    refused(5, "a path")
    refused(str(tmp_path / "missing"), "cannot read the statistics")
    refused(str(tmp_path), "cannot read the statistics")
    good, cut = Path(path_of("llama")), tmp_path / "cut"
    for size in (0, 5, 200, good.stat().st_size - 1):
        cut.write_bytes(good.read_bytes()[:size])
        refused(str(cut), "cannot read the statistics")
    mean, size = torch.zeros(3, 6, 32), torch.zeros(3, 6, 16)
    for number, (tensors, reason) in enumerate(
        [
            ({"q_mean": mean}, "cannot read the statistics"),
            ({"q_mean": mean[0], "q_abs_mean": size}, "q_mean must be a finite tensor"),
            ({"q_mean": mean, "q_abs_mean": size * torch.nan}, "q_abs_mean must be a finite tensor"),
            ({"q_mean": mean.long(), "q_abs_mean": size}, "q_mean must be a finite tensor"),
            ({"q_mean": mean, "q_abs_mean": size - 1}, "from 0 on"),
            ({"q_mean": mean, "q_abs_mean": torch.zeros(3, 6, 32)}, "d/2"),
            ({"q_mean": mean[:2], "q_abs_mean": size[:2]}, r"\(2, 6, 32\), the model \(3, 6, 32\)"),
            ({"q_mean": mean[:, :5], "q_abs_mean": size[:, :5]}, r"\(3, 5, 32\), the model \(3, 6, 32\)"),
            ({"q_mean": mean[:, :4], "q_abs_mean": size[:, :4]}, r"\(3, 4, 32\), the model \(3, 6, 32\)"),
            ({"q_mean": mean[..., :30], "q_abs_mean": size[..., :15]}, r"\(3, 6, 30\), the model \(3, 6, 32\)"),
        ]
    ):
        path = tmp_path / str(number)
        save_file({name: own.contiguous() for name, own in tensors.items()}, str(path))
        refused(str(path), reason)


def write_as_authors(path: Path, mean: torch.Tensor, size: torch.Tensor, **more: object) -> Path:
    """A file in the layout of the authors' scripts/calibrate.py, with made-up numbers."""
    half, (layers, heads) = mean.shape[2] // 2, mean.shape[:2]
    parts = {"q_mean_real": mean[..., :half], "q_mean_imag": mean[..., half:], "q_abs_mean": size}
    stats = {
        f"layer{layer:02d}_head{head:02d}": {name: own[layer, head].clone() for name, own in parts.items()}
        for layer, head in np.ndindex(layers, heads)
    }
    places = [[layer, head] for layer, head in np.ndindex(layers, heads)]
    about = {"num_traces": 1, "head_dim": 2 * half, "dtype": "bfloat16", "rope_style": "half", "rope_type": "default"}
    torch.save({"metadata": about | {"sampled_heads": places}, "stats": stats} | more, path)
    return path


def test_files_of_the_authors_are_read(tmp_path):
    own = load_file(path_of("llama"))
    path = write_as_authors(tmp_path / "stats.pt", own["q_mean"], own["q_abs_mean"])
    found = [
        kvbench.prefill(tiny("llama"), ids(90), "triattention", 20, method_args={"path": str(each)})
        for each in (path, path_of("llama"))
    ]
    one, other = ([held.places(layer, head).tolist() for layer, head in np.ndindex(3, 2)] for held in found)
    assert one == other
    method = build("method", load_settings("method", "triattention", {"path": str(path)}))
    method.file.check_identity(lambda: pytest.fail("needs no identity"))
    assert method.file.nbytes == 3 * 6 * (32 + 16) * 4


class Harmful:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return print, ("harm",)


def test_pickled_files_that_are_refused(tmp_path, capsys):
    """They are opened with weights_only=True, so nothing in them runs."""
    mean, size = torch.rand(3, 6, 32), torch.rand(3, 6, 16)
    path = tmp_path / "stats.pt"
    good = write_as_authors(path, mean, size).read_bytes()
    stats = torch.load(io.BytesIO(good), weights_only=True)["stats"]
    fewer = {key: own for key, own in stats.items() if key != "layer01_head03"}
    short = stats | {"layer01_head03": {name: own[:5] for name, own in stats["layer00_head00"].items()}}
    for more, reason in (
        ({"harm": Harmful()}, "cannot read the statistics"),
        ({"stats": {}}, "no dictionary of query heads"),
        ({"stats": stats | {"layer1": 0}}, "layer1 is no layer and query head"),
        ({"stats": fewer}, "layer 1, query head 3 lacks"),
        ({"stats": short}, "layer 1, query head 3 lacks"),
        ({"stats": stats | {"layer02_head05": 3}}, "lacks q_mean_real, q_mean_imag, q_abs_mean"),
        ({"metadata": {"rope_style": "interleaved"}}, "rope_style is interleaved"),
    ):
        refused(str(write_as_authors(path, mean, size, **more)), reason)
    refused(str(write_as_authors(path, mean, size * torch.nan)), "q_abs_mean must be a finite tensor")
    refused(str(write_as_authors(path, mean[:2], size)), r"\(2, 6, 32\), the model \(3, 6, 32\)")
    for content in (good[:-100], pickle.dumps(Harmful()), pickle.dumps([1, 2])):
        path.write_bytes(content)
        refused(str(path), "cannot read the statistics")
    assert capsys.readouterr().out == ""
