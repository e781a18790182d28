"""KVzap against loops in float64: scores of hidden states, rows kept within a budget and by a threshold, and files."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvbench
from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import CompressedCache
from kvbench.engine.context import decodes_in_graph
from kvbench.methods.kvzap import KVzap, peek_surrogates, read_surrogates
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import build_policy, make_tiny_method_args
from tests.support.normed_states import record_normed_states
from tests.support.oracles import CLOSE, assert_same_rows, find_top, fit_protected
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny

WINDOW = 9


def write_linear(model: str, path: Path) -> str:
    """The names of the authors' linear surrogates."""
    config = tiny(model).config
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for layer in range(config.num_hidden_layers):
        heads = config.num_key_value_heads
        weights[f"layers.{layer}.weight"] = torch.randn(heads, config.hidden_size, generator=generator) / 7
        weights[f"layers.{layer}.bias"] = torch.randn(heads, generator=generator) - 4
    save_file(weights, str(path), {"format": "pt"})
    return str(path)


def apply_surrogate(weights: dict[str, np.ndarray], layer: int, hidden: np.ndarray) -> list[float]:
    """The scores of one token for each KV head."""

    def multiply(name: str, x: list[float]) -> list[float]:
        rows, bias = weights[f"layers.{layer}.{name}weight"], weights[f"layers.{layer}.{name}bias"]
        return [sum(w * a for w, a in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]

    if f"layers.{layer}.weight" in weights:
        return multiply("", list(hidden))
    inner = [0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in multiply("0.", list(hidden))]
    return multiply("2.", inner)


class Scores:
    """The score of every row by layer, head and place."""

    def __init__(self, path: str, hidden: dict[int, np.ndarray]) -> None:
        self.weights = {name: own.double().numpy() for name, own in load_file(path).items()}
        self.hidden, self.found = hidden, dict[tuple[int, int, int], float]()

    def read(self, glance: HeadView) -> np.ndarray:
        """The scores of the rows that the head holds; those of the block are computed."""
        new = glance.queries.shape[1]
        for state, place in zip(self.hidden[glance.layer], glance.rows.places[-new:], strict=True):
            key = glance.layer, glance.head, int(place)
            if key not in self.found:
                self.found[key] = apply_surrogate(self.weights, glance.layer, state)[glance.head]
        return np.array([self.found[glance.layer, glance.head, int(place)] for place in glance.rows.places])


def keep_best(scores: Scores, quota: int, recent: int) -> Callable[[list[HeadView]], list[Head]]:
    def keep(glance: HeadView) -> Head:
        own = scores.read(glance)
        safe = fit_protected(glance.rows.places >= glance.tokens - recent, quota)
        return glance.rows.take(find_top(np.where(safe, np.inf, own), quota))

    return lambda glances: [keep(glance) for glance in glances]


def keep_above(scores: Scores, threshold: float) -> Callable[[list[HeadView]], list[Head]]:
    def keep(glance: HeadView) -> Head:
        own, rows = scores.read(glance), glance.rows
        stays = [
            place >= glance.tokens - WINDOW or score >= threshold for place, score in zip(rows.places, own, strict=True)
        ]
        return rows.take(np.array(stays))

    return lambda glances: [keep(glance) for glance in glances]


@pytest.fixture(params=["linear", "mlp"])
def kind(request) -> str:
    return request.param


def find_file(kind: str, model: str, tmp_path: Path) -> str:
    if kind == "linear":
        return write_linear(model, tmp_path / "linear")
    return make_tiny_method_args("kvzap", model)["path"]


def compare(model, dense, method, budget, block, args, parts) -> CompressedCache:
    """Both engines read a prompt and further tokens, and hold the same rows."""
    tokens = 30 if block == 1 else 60
    prompt, more = distinct(tokens + sum(parts)).split([tokens, sum(parts)], dim=1)
    expected = dense.prefill(prompt, block)
    held = kvbench.prefill(tiny(model), prompt, method, budget, block, method_args=args)
    torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
    assert_same_rows(held, dense)
    for part in more.split(parts, dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        assert_same_rows(held, dense)
    return held


@pytest.mark.cover
@pytest.mark.parametrize("recent, decoding", [(0, False), (0, True), (6, True), (64, True)])
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "phi3", "gemma3", "mistral", "yarn"], "llama"))
def test_rows_kept_within_a_budget(model, block, recent, decoding, kind, tmp_path):
    path = find_file(kind, model, tmp_path)
    with record_normed_states(make_double(model)) as hidden:
        scores = Scores(path, hidden)
        dense = DenseEngine(model, keep_best(scores, 17, recent), cuts_decoding=decoding)
        args = {"path": path, "recent": recent, "decoding": decoding}
        compare(model, dense, "kvzap", 17, block, args, (1, 5, 1))


@pytest.mark.cover
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3"], "llama"))
def test_rows_kept_by_the_threshold(model, block, decoding, kind, tmp_path):
    """The preset of dms_threshold: -4, whatever the file. How many rows stay is an outcome."""
    path = find_file(kind, model, tmp_path)
    args = {"preset": "kvzap", "base_args": {"path": path}, "window": WINDOW, "decoding": decoding}
    with record_normed_states(make_double(model)) as hidden:
        scores = Scores(path, hidden)
        dense = DenseEngine(model, keep_above(scores, -4.0), cuts_decoding=decoding)
        held = compare(model, dense, "dms_threshold", None, block, args, (1, 1, 14, 1, 8))
    counts = [len(rows.places) for layer in set(dense.held) - set(held.sliding_layers) for rows in dense.held[layer]]
    assert WINDOW <= min(counts) < max(counts)


@pytest.mark.parametrize("block", [None, 11])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3"], "llama"))
def test_scores_are_those_of_the_equation(model, block, kind, tmp_path, monkeypatch):
    """In float64, of every row, at every cut, and also while decoding."""
    path, found = find_file(kind, model, tmp_path), []
    score = KVzap.score
    monkeypatch.setattr(
        KVzap,
        "score",
        lambda self, seen, rows, state: found.append((seen.layer, rows)) or score(self, seen, rows, state),
    )
    args = {"path": path, "decoding": True}
    with record_normed_states(make_double(model)) as hidden:
        scores = Scores(path, hidden)
        dense = DenseEngine(model, keep_best(scores, 17, 0), cuts_decoding=True)
        dense.prefill(distinct(60), block)
        dense.extend(ids(3, seed=4))
    held = kvbench.prefill(make_double(model), distinct(60), "kvzap", 17, block, method_args=args)
    held.extend(ids(3, seed=4))
    compared, worst = 0, 0.0
    for layer, rows in found:
        for head, row in zip(*np.nonzero(rows.present[0].numpy()), strict=True):
            expected = scores.found[layer, head, int(rows.places[0, head, row])]
            worst = max(worst, abs(float(rows.columns["kvzap"][0, head, row]) - expected))
            compared += 1
    assert compared > 200 and worst < 1e-12


def test_a_batch_gives_what_its_samples_give_alone():
    args = make_tiny_method_args("kvzap", "llama")
    both = torch.cat([distinct(40, 1), distinct(40, 2)])
    batch = kvbench.prefill(tiny("llama"), both, "kvzap", 12, 9, "ada", method_args=args)
    for sample in range(2):
        alone = kvbench.prefill(tiny("llama"), both[sample : sample + 1], "kvzap", 12, 9, "ada", method_args=args)
        for layer, head in np.ndindex(3, 2):
            assert torch.equal(batch.places(layer, head, sample), alone.places(layer, head))


def test_what_it_costs_is_said():
    method, *others = build_policy("kvzap", "uniform", "llama")
    file = load_file(method.path)
    assert method.file.nbytes == sum(own.nbytes for own in file.values())
    composite = build(
        "method", load_settings("method", "dms_threshold", {"preset": "kvzap", "base_args": {"path": method.path}})
    )
    assert composite.file.nbytes == method.file.nbytes and composite.wants == ("normed_hidden",)
    assert decodes_in_graph(CachePolicy(method, *others))  # it needs hidden states of the prompt alone


# Files.


@pytest.mark.parametrize("inner", [None, 512])
def test_files_in_the_authors_layout(tmp_path, inner):
    """A folder as `save_pretrained` of the source writes it: names, bfloat16, config.json, a format in the metadata.
    Widths of HF nvidia/KVzap-…-Qwen3-8B, and two layers of its 36.
    """
    layers, hidden, heads = 2, 4096, 8
    shapes = {"weight": (heads, hidden), "bias": (heads,)}
    if inner:
        shapes = {"0.weight": (inner, hidden), "0.bias": (inner,), "2.weight": (heads, inner), "2.bias": (heads,)}
    weights = {
        f"layers.{layer}.{name}": torch.full(shape, 0.01 * (layer + 1), dtype=torch.bfloat16)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    save_file(weights, str(tmp_path / "model.safetensors"), {"format": "pt"})
    (tmp_path / "config.json").write_text(
        '{"model_type": "kvzap", "input_dim": 4096, "output_dim": 8, "hidden_dim": %s, "n_modules": 2}'
        % (inner or "null")
    )
    described = peek_surrogates(tmp_path)
    assert described.kind == ("mlp_gelu" if inner else "linear") and described.fits == (layers, hidden, heads)
    assert described.identity is None and described.nbytes == sum(own.nbytes for own in weights.values())
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
    for own, scale in zip(read_surrogates(tmp_path).values(), (0.01, 0.02), strict=True):
        c = float(torch.tensor(scale).bfloat16())
        inside = c * (x.double().sum(1) + 1)
        expected = c * (inner * torch.nn.functional.gelu(inside) + 1) if inner else inside
        found = own.to("cpu", torch.float64).apply(x.double())
        torch.testing.assert_close(found, expected[:, None].expand(-1, heads))
    method = build("method", load_settings("method", "kvzap", {"path": str(tmp_path)}))
    method.check(replace(read_layout(tiny("llama")), layers=layers, heads=heads, hidden=hidden))
    method.file.check_identity(lambda: pytest.fail("needs no identity"))


def refuse(path: object, reason: str) -> None:
    with pytest.raises(SettingError, match=rf"^method\.path={path}: .*{reason}") as error:
        kvbench.prefill(tiny("llama"), ids(20), "kvzap", 0.5, method_args={"path": path})
    assert "\n" not in str(error.value)


def test_files_that_are_refused(tmp_path):
    good = Path(make_tiny_method_args("kvzap", "llama")["path"]).read_bytes()
    weights = load_file(make_tiny_method_args("kvzap", "llama")["path"])
    with pytest.raises(SettingError, match=r"^method\.path=null: .*kvbench calibrate kvzap"):
        kvbench.prefill(tiny("llama"), ids(20), "kvzap", 0.5)
    refuse(5, "a path")
    refuse(tmp_path / "missing", "cannot read the surrogates")
    refuse(tmp_path, "cannot read the surrogates")  # a folder without model.safetensors
    for name, content in {"text": b"nothing", "truncated": good[:-9], "header": good[:40]}.items():
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, "cannot read the surrogates")
    torch.save(weights, tmp_path / "pickled")
    refuse(tmp_path / "pickled", "pickled weights are not read")

    def without(*names: str) -> dict[str, torch.Tensor]:
        return {name: own for name, own in weights.items() if not name.startswith(names)}

    def linears(heads: int, hidden: int, value: float = 0.0) -> dict[str, torch.Tensor]:
        return {f"layers.{layer}.weight": torch.full((heads, hidden), value) for layer in range(3)}

    for number, (tensors, reason) in enumerate(
        [
            ({}, "the file holds no surrogates"),
            (without("layers.1."), "the surrogate of layer 1 is missing"),
            (without("layers.0.2.weight"), "the surrogate of layer 1 has other shapes than that of layer 0"),
            ({**weights, "q_filters": torch.zeros(3)}, "q_filters is no weight of a surrogate"),
            ({f"module_list.{name}": own for name, own in weights.items()}, "is no weight of a surrogate"),
            ({name: own.long() for name, own in weights.items()}, "has dtype I64, allowed are"),
            ({**without("layers.2."), "layers.2.weight": torch.zeros(2, 48)}, "layer 2 has other shapes"),
            ({"layers.0.0.weight": torch.zeros(4, 48)}, "layer 0 must have the matrices of one of"),
            ({"layers.0.0.weight": torch.zeros(4, 48), "layers.0.2.weight": torch.zeros(2, 5)}, "do not fit together"),
            (without("layers.2."), r"\(2, 48, 2\), the model \(3, 48, 2\)"),
            (linears(2, 50), r"\(3, 50, 2\), the model \(3, 48, 2\)"),
            (linears(3, 48), r"\(3, 48, 3\), the model \(3, 48, 2\)"),
            (linears(2, 48, math.nan), "is not finite"),
        ]
    ):  # fmt: skip
        path = tmp_path / str(number)
        save_file({name: own.contiguous() for name, own in tensors.items()}, str(path))
        refuse(path, reason)


def test_a_file_of_another_model_of_the_same_shape_is_refused_before_weights_load(tmp_path, monkeypatch, capsys):
    path, folder = tmp_path / "file", tmp_path / "results"
    folder.mkdir()
    save_file({f"layers.{layer}.weight": torch.zeros(2, 320) for layer in range(6)}, str(path), {"model": "another"})
    monkeypatch.setattr("kvbench.models.loading.load_weights", lambda *_: pytest.fail("weights are loaded"))
    for chosen in (
        ["method=kvzap", f"method.path={path}", "budget=0.5"],
        ["method=dms_threshold", "method.preset=kvzap", f"method.base_args.path={path}", "budget=null"],
    ):
        found = run_cli([*chosen, f"results={folder}", "task.subtasks=niah_single_1"], monkeypatch, capsys)
        line = f"method.path={path}: the file was made for the model another, this one is "
        assert_refused(found, line, folder)


def test_it_is_no_base_of_criticalkv():
    args = {"base": "kvzap", "base_args": make_tiny_method_args("kvzap", "llama")}
    with pytest.raises(SettingError, match="^method.base=kvzap: values would count twice"):
        kvbench.prefill(tiny("llama"), ids(20), "criticalkv", 5, method_args=args)
