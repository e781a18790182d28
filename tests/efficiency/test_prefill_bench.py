"""What a cut costs: the report, its limits, and that no method holds queries × keys."""

import csv
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.cache.policy import CachePolicy
from kvbench.cli import bench_methods, calibrate
from kvbench.config.catalogue import list_choices, methods_available
from kvbench.efficiency import prefill_bench
from kvbench.efficiency.prefill_bench import PrefillCost, Setup, find_limit, format_costs, list_setups, measure_costs
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.validation import SettingError
from tests.support.method_files import build_policy
from tests.support.repository import ROOT
from tests.support.tiny_models import ids, tiny


def test_set_ups_are_every_method_alone_and_one_with_everything():
    found = list_setups(methods_available(), "snapkv")
    assert [own.method for own in found if str(own) == own.method] == [m for m in methods_available() if m != "full"]
    crossed = {(own.allocator, own.codec) for own in found if own.method == "snapkv"}
    assert crossed == {(own, "raw") for own in list_choices("allocator")} | {
        ("uniform", own) for own in list_choices("codec")
    }
    assert list_setups(["full", "knorm"], None) == [Setup("knorm")]


def test_limits_follow_what_a_method_needs():
    plain, votes = build_policy("knorm", "uniform", "llama")[0], build_policy("h2o", "uniform", "llama")[0]

    @dataclass(frozen=True)
    class Rereading(type(votes)):
        needs_extra_reads = True

    assert (find_limit(plain), find_limit(votes), find_limit(Rereading(**vars(votes)))) == (1.3, 2.0, None)


def test_the_ratio_is_the_median_over_rounds_and_marked_above_its_limit():
    cost = PrefillCost(Setup("knorm"), 1.3, seconds=(2.0, 9.0, 2.8), full=(2.0, 3.0, 2.0))
    assert cost.quartiles == pytest.approx((1.2, 1.4, 2.2))
    assert cost.over and cost.verdict == "OVER"
    assert replace(cost, limit=1.5).verdict == "ok" and replace(cost, limit=None).verdict == "no limit"
    assert "1.40  1.20-2.20           1.3  OVER" in format_costs([cost])
    assert "1.40  1.20-2.20   1.19    1.3  OVER" in format_costs([replace(cost, floor=1.189)])


def test_each_set_up_is_timed_between_two_full_caches(monkeypatch):
    ran = []

    def seconds(model, choice, budget, ids, own):
        ran.append(choice.method.name)
        return float(len(ran))

    monkeypatch.setattr(prefill_bench, "time_prefill", seconds)
    monkeypatch.setattr(prefill_bench, "prefill_ratio", lambda model, tokens, method, codec: float(tokens))
    costs = measure_costs(None, ids(9), Budget(0.5), 2, list_setups(["knorm", "qfilters", "random"], None), {})
    assert ran == ["full", "knorm", "random"] + 2 * ["full", "knorm", "full", "random", "full"]
    assert [cost.setup.method for cost in costs] == ["knorm", "qfilters", "random"]
    assert costs[0].floor == 9 and costs[1].floor is None
    assert costs[0].seconds == (5, 10) and costs[0].full == (5, 10) and costs[2].seconds == (7, 12)
    assert costs[1].verdict.startswith("not run: method.path=null")


def test_the_command_prints_and_writes_every_set_up(tmp_path, capsys):
    out = tmp_path / "new" / "prefill.csv"
    command = ["--tokens=60", "--rounds=1", "--out", str(out), "--methods", "knorm", "h2o", "tova", "qfilters"]
    assert bench_methods.main([*command, "--cross", "tova", "h2o.preset=kvpress"]) == 0
    printed = capsys.readouterr().out
    with out.open() as file:
        lines = list(csv.DictReader(file))
    named = [tuple(line[key] for key in ("method", "allocator", "codec")) for line in lines]
    plain = [(name, "uniform", "raw") for name in ("knorm", "h2o", "tova", "qfilters")]
    crossed = [("tova", name, "raw") for name in list_choices("allocator") if name != "uniform"]
    assert named == [*plain, *crossed, *(("tova", "uniform", name) for name in list_choices("codec") if name != "raw")]
    refused = [line for line in lines if line["not_run"]]
    assert {line["method"] for line in refused} == {"qfilters", "tova"}  # no file; no competition, no packing
    for line in lines:
        assert f"{line['method']} " in printed and line["not_run"] in printed
        assert line["not_run"] or float(line["ratio"]) == pytest.approx(float(line["ms"]) / float(line["full_ms"]))
        assert line["tokens"] == "60" and line["torch"] == torch.__version__
        assert line["not_run"] or bool(line["floor"]) == (line["codec"] not in ("delta", "palu"))
        assert line["command"].startswith("kvbench dev bench-methods --tokens=60 --rounds=1")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--methods", "nothing"],
        ["--cross", "nothing"],
        ["--tokens", "0"],
        ["--tokens", "20000"],
        ["--rounds", "0"],
        ["--budget", "1"],
        ["--model", "/nowhere"],
        ["knorm.preset"],
        ["preset=paper"],
        ["nothing.path=x"],
        ["--also", "nothing"],
        ["--also", "kvzip.nothing"],
        ["--also", "kvzip."],
        ["--also", "random.paper"],
        ["--also", "full+nothing"],
        ["--also", "full+"],
        ["--budget", "["],
        ["--out", "/"],
        ["--out", f"{__file__}/x.csv"],
    ],
)
def test_a_setting_that_cannot_be_used_is_said_in_one_line(wrong, tmp_path, capsys):
    assert bench_methods.main(["--out", str(tmp_path / "x.csv"), *wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench: ") and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_set_names_methods_and_codecs_that_have_no_name_in_common():
    assert not set(methods_available()) & set(list_choices("codec"))
    settings = prefill_bench.parse_settings(["h2o.preset=kvpress", "kivi.preset=bits4"])
    choice = Setup("h2o", codec="kivi").choice(settings)
    assert (choice.method.norm, choice.codec.bits) == ("count", 4)
    with pytest.raises(SettingError, match="^method or codec=ada: choose one that "):
        prefill_bench.parse_settings(["ada.preset=kvpress"])


def test_also_adds_another_preset_and_a_codec():
    also = prefill_bench.parse_also(["kvzip.plus", "deltakv+delta", "h2o.kvpress+kivi"])
    assert list(map(str, also)) == ["kvzip plus", "deltakv delta", "h2o kvpress kivi"]
    assert list_setups(["knorm"], None, also) == [Setup("knorm"), *also]
    assert not Setup("kvzip").choice({}).method.norms
    choice = also[0].choice({"kvzip": {"preset": "uniform", "chunk": 50}})
    assert choice.method.norms and choice.method.chunk == 50


def test_codecs_run_with_their_files(tmp_path, capsys):
    palu, out = tmp_path / "palu.safetensors", tmp_path / "prefill.csv"
    made = ["palu", "--model=reference", "--untrained", "--device=cpu", f"--out={palu}"]
    assert calibrate.main(made) == 0
    command = ["--tokens=100", "--rounds=1", f"--out={out}", "--methods", "kvzip", "--also", "kvzip.plus"]
    command += ["--also", "snapkv+palu", "--also", "deltakv+delta", f"palu.path={palu}"]
    delta = ROOT / "kvbench/models/embedded_v2_deltakv.safetensors"
    command += [f"{part}.preset=reference" for part in ("delta", "deltakv")]
    assert bench_methods.main([*command, f"delta.path={delta}"]) == 0
    assert "kvzip plus  " in capsys.readouterr().out
    with out.open() as file:
        lines = list(csv.DictReader(file))
    named = [tuple(line[key] for key in ("method", "preset", "codec")) for line in lines]
    assert named == [("kvzip", "", "raw"), ("kvzip", "plus", "raw"), ("snapkv", "", "palu"), ("deltakv", "", "delta")]
    assert not any(line["not_run"] for line in lines)


def test_what_is_no_yaml_is_text():
    assert prefill_bench.parse_settings(["snapkv.window=[", "snapkv.kernel=7"]) == {
        "snapkv": {"window": "[", "kernel": 7}
    }


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        held = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in several if is_tensor(tensor)]
        self.elements = max(self.elements, *held, 0)
        return result


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


CASES = [(method, "uniform") for method in methods_available() if method != "full"]
CASES += [("snapkv", allocator) for allocator in list_choices("allocator") if allocator != "uniform"]


@pytest.mark.parametrize("method, allocator", CASES)
def test_nothing_holds_queries_times_keys(method, allocator, monkeypatch):
    """No tensor has as many elements as one of the four query heads has logits."""
    monkeypatch.setattr("kvbench.methods.attention_matching.LOGITS", 1 << 19)  # 2^21 are more than this prompt has
    tokens, choice = 1152, CachePolicy(*build_policy(method, allocator, "wide"))
    context = GenerationContext(tiny("wide"), choice, Budget(0.1), None, (0,))
    with Largest() as largest:
        context.prefill(ids(tokens))
    assert 0 < largest.elements < tokens * tokens
