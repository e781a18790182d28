"""task=efficiency: lines with all settings, out of memory as a result, no cell twice, wrong settings in one line."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from kvbench.cli import efficiency
from kvbench.config.catalogue import list_choices, load_settings, methods_available
from kvbench.config.compose import compose_config, expand_cells
from kvbench.efficiency import measure, measured_task, plan
from kvbench.efficiency.caches import (
    KVBenchCache,
    TransformersDynamic,
    TransformersStatic,
    drop_warmed,
    spread_tokens,
)
from kvbench.efficiency.latency import compute_tpot_floors
from kvbench.efficiency.measured_task import count_split, find_interval, find_period, list_ends
from kvbench.efficiency.roofline import Machine, WeightSizes, decode_ms, load_machines, load_needs, prefill_ms
from kvbench.efficiency.scoring_time import prepare_score
from kvbench.efficiency.throughput import find_largest_batch
from kvbench.engine.generation import GenerationContext
from kvbench.engine.timing import describe_shortage, spread, try_in_memory
from kvbench.interfaces.codec import Packing
from kvbench.methods.codecs.kivi import Kivi
from kvbench.models.loading import make_random_model
from kvbench.models.random_weights import RandomCheckpoint, list_shapes
from kvbench.runs.executor import Executor
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import (
    COLUMNS,
    COLUMNS_OF_MEDIANS,
    INTERVALS,
    LAST_QUANTITY,
    append_lines,
    find_whole_cells,
    read_lines,
)
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.delta_files import build_delta
from tests.support.hybrids import make_hybrid

QUICK = ("task.length=60", "task.new_tokens=[3,6]", "task.repeats=2", "budget=0.25")
PARAMETERS = {  # billions, as the models' pages say
    "llama31_8b": 8.03, "r1_llama_8b": 8.03, "llama32_3b": 3.21, "mistral_7b_v02": 7.24, "megabeam_mistral_7b": 7.24,
    "qwen25_7b": 7.62, "qwen25_7b_1m": 7.62, "qwen25_3b": 3.09, "qwen25_32b": 32.76, "r1_qwen_1_5b": 1.78,
    "r1_qwen_7b": 7.62, "openmath_nemotron_14b": 14.77, "qwen3_8b": 8.19, "gemma3_12b": 11.77,
    "gemma2_9b": 9.24, "smollm3_3b": 3.08, "glm4_9b": 9.40, "mixtral_8x7b": 46.70, "phi4": 14.66, "exaone4_32b": 32.00,
    "seed_oss_36b": 36.15, "olmoe_1b_7b": 6.92, "ernie45_0_3b": 0.36, "granite33_8b": 8.17, "glm45_air": 106.85,
    "olmo3_7b": 7.30, "qwen3_30b_a3b": 30.53, "gpt_oss_20b": 20.91, "qwen3_next_80b_a3b": 79.67,
    "llama4_scout": 107.77,  # without the vision tower
}  # fmt: skip


@pytest.fixture
def kvbench(tmp_path, monkeypatch, capsys):
    """Runs the command line in this process; gives exit code, output, errors. Results lie in tmp_path/results."""
    monkeypatch.chdir(tmp_path)

    def call(*own: str) -> tuple[int, str, str]:
        base = ["task=efficiency", "model=random", "model.like=tiny", "device=cpu"]
        sweep = [setting for setting in own if setting == "-m"]  # in front of all settings
        return run_cli([*sweep, *base, *own[len(sweep) :]], monkeypatch, capsys)

    return call


def by_quantity(path: Path, **where: object) -> dict[str, dict[str, str]]:
    return {row["quantity"]: row for row in read_lines(path) if all(row[k] == str(v) for k, v in where.items())}


def test_a_sweep_gives_lines_and_measures_no_cell_twice(kvbench, monkeypatch):
    path = Path("results/efficiency/cpu.csv")
    assert kvbench("-m", "method=full,snapkv", *QUICK)[0] == 0
    before = path.read_bytes()
    for method, budget, share in (("full", 1.0, 1), ("snapkv", 0.25, 0.25)):
        found = by_quantity(path, method=method, budget=budget)
        times = {"ttft_ms", "tpot_ms", "tpot_mean_ms", "decode_tokens_s", "e2e_3_ms", "e2e_6_ms", "answer_3_ms"}
        assert times <= set(found) and list(found)[-1] == LAST_QUANTITY
        assert float(found["resident_bytes"]["value"]) == share * 60 * 2 * 2 * 2 * 32 * 4  # layers, heads, k and v
        assert found["ttft_ms"]["count"] == "2" and float(found["ttft_ms"]["least"]) <= float(found["ttft_ms"]["value"])
        assert float(found["e2e_3_ms"]["value"]) < float(found["e2e_6_ms"]["value"])
        for column in ("gpu", "model", "weights", "length", "batch", "device", "dtype", "torch", "sources", "date"):
            assert found["ttft_ms"][column]
    monkeypatch.setattr(
        "kvbench.models.random_weights.RandomCheckpoint.weights", lambda *_: pytest.fail("weights were loaded")
    )
    code, out, _ = kvbench("method=snapkv", *QUICK[:3], "budget=2.5e-1")
    assert code == 0 and "measured already" in out and path.read_bytes() == before


def test_a_measurement_is_alone(kvbench, monkeypatch):
    """Processes that other cells of a sweep left end before it, and `workers` starts none."""
    order = []
    monkeypatch.setattr(Executor, "close", lambda executor, at_once=False: order.append("end"))
    monkeypatch.setattr(measure, "measure_once", lambda run, results: order.append("measure") or (results, []))
    assert kvbench("method=snapkv", "workers=2", *QUICK)[0] == 0 and order[:2] == ["end", "measure"]


@pytest.mark.parametrize("name, found", [("nvidia-h200", 4.27e12), ("nvidia-other", None)])
def test_floors_are_those_of_the_machine(kvbench, monkeypatch, name, found):
    for module in (measured_task, measure):
        monkeypatch.setattr(module, "machine_name", lambda device: name)
    usual = ("task.measure=decoding", "task.length=60", "task.new_tokens=3")
    code, out, _ = kvbench(*usual)
    floor = by_quantity(Path(f"results/efficiency/{name}.csv")).get("tpot_floor_ms")
    assert code == 0 and (floor is None) == (found is None) == ("no floors: they need task.bandwidth" in out)
    if floor is not None:
        assert 0 < float(floor["value"]) < 1
    assert kvbench(*usual, f"task.bandwidth={(found or 4.27e12) / 1e3}", "task.flops=1e20")[0] == 0
    slower = by_quantity(Path(f"results/efficiency/{name}.csv"))["tpot_floor_ms"]
    assert floor is None or float(slower["value"]) == pytest.approx(1e3 * float(floor["value"]), rel=1e-3)
    assert "no floors" not in kvbench("task.measure=throughput", "task.most_batch=1", *usual[1:])[1]  # it never has any
    monkeypatch.setitem(load_machines(), name, {"bandwidth": 1e12, "flops": 1e14})
    code, out, _ = kvbench(*usual)
    assert code == 0 and "tpot_floor_ms" in out  # other speeds are another cell


def test_baselines_and_throughput(kvbench):
    assert kvbench("method=snapkv", "task.baseline=dynamic", *QUICK)[0] == 0
    assert kvbench("method=snapkv", "task.measure=throughput", "task.most_batch=3", *QUICK)[0] == 0
    path = Path("results/efficiency/cpu.csv")
    dynamic = by_quantity(path, baseline="dynamic")
    assert dynamic["ttft_ms"]["method"] == "full" and dynamic["ttft_ms"]["budget"] == "1.0"
    several = by_quantity(path, measure="throughput")
    assert several["largest_batch"]["value"] == "3" and several["decode_tokens_s"]["status"] == "ok"
    assert float(several["resident_bytes"]["value"]) >= 3 * 15 * 2 * 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    "setting, replicates",
    [("method=snapkv", True), ("codec=kivi", True), ("codec=kivi", False), ("task.baseline=dynamic", True)],
)
def test_tokens_of_one_prompt_and_of_a_batch_are_timed_after_one_prefill(kvbench, monkeypatch, setting, replicates):
    prompts = []
    monkeypatch.setattr(Kivi, "packing", Packing(replicates=replicates))
    monkeypatch.setattr(KVBenchCache, "read", note_calls(prompts, KVBenchCache.read))
    assert kvbench(setting, "task.measure=decoding", "task.batch=3", *QUICK)[0] == 0
    found = by_quantity(Path("results/efficiency/cpu.csv"), measure="decoding")
    assert found["batched_prompts"]["value"] == "3" and list(found)[-1] == LAST_QUANTITY
    for quantity in ("tpot_ms", "tokens_s", "resident_bytes"):
        assert float(found[quantity]["value"]) > 0 and float(found[f"batched_{quantity}"]["value"]) > 0
    assert float(found["batched_resident_bytes"]["value"]) >= 3 * float(found["resident_bytes"]["value"])
    batch = [] if replicates else [(3, 60)]  # read, because the codec cannot copy its rows
    assert prompts == ([] if setting == "task.baseline=dynamic" else [(1, 60), *batch])


def note_calls(shapes, read):
    def noting(self, ids):
        shapes.append(tuple(ids.shape))
        read(self, ids)

    return noting


CUDA_SHORTAGE = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.06 GiB is free."
    " Process 7 has 78.11 GiB memory in use.\nOf the allocated memory 70 GiB is allocated by PyTorch"
)


def test_no_memory_is_a_result_that_says_what_did_not_fit(kvbench, monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError(CUDA_SHORTAGE)

    monkeypatch.setattr(GenerationContext, "prefill", exhausted)
    assert kvbench("-m", "method=snapkv", "task.measure=latency,throughput", *QUICK)[0] == 0
    rows = read_lines(Path("results/efficiency/cpu.csv"))
    assert [(row["quantity"], row["status"]) for row in rows if row["quantity"] != LAST_QUANTITY] == [
        ("latency", "out_of_memory"), ("throughput", "out_of_memory"),
    ]  # fmt: skip
    assert {row["note"] for row in rows if row["status"] != "ok"} == {"4.00 GiB wanted, 1.06 GiB free of 79.19 GiB"}


def test_weights_that_do_not_fit_are_a_lack_of_memory_too(tmp_path):
    run = compose_run("method=knorm")
    measure.append_failure(run, tmp_path, torch.OutOfMemoryError(CUDA_SHORTAGE))
    row, _ = read_lines(tmp_path / "efficiency" / "cpu.csv")
    assert row["status"] == "out_of_memory" and row["note"].startswith("4.00 GiB wanted")


def test_other_errors_are_no_lack_of_memory():
    def fail(message: str):
        raise RuntimeError(message)

    assert try_in_memory(lambda: 3, "cpu") == (3, "")
    found = try_in_memory(lambda: fail("CUBLAS_STATUS_ALLOC_FAILED when calling\nmore"), "cpu")
    assert found == (None, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling")
    with pytest.raises(RuntimeError, match="shape"):
        try_in_memory(lambda: fail("shape"), "cpu")
    assert describe_shortage(torch.OutOfMemoryError()) == "OutOfMemoryError"


def compose_run(*settings: str) -> RunSpec:
    own = ["task=efficiency", "model=random", "model.like=tiny", "device=cpu", "budget=0.5"]
    return RunSpec.from_config(compose_config([*own, *settings]))


@pytest.mark.parametrize("period", [16, 64])
def test_a_token_that_is_slow_now_and_then_is_in_the_mean_and_the_last_percentile(period):
    """As with a merge every 64 tokens, of which the median knows nothing."""
    steps = [105.0 if number % period == 0 else 5.0 for number in range(512)]
    found = spread_tokens([steps, steps], 128)
    assert found["median"] == 5 and found["mean"] == pytest.approx(5 + 100 / period) and found["p99"] == 105
    assert found["intervals"] == 4 and spread_tokens([steps, steps[1:]], 128)["intervals"] == 3


@pytest.mark.parametrize(
    "settings, period",
    [
        (["method=snapkv"], 1), (["method=keydiff"], 1), (["method=keydiff", "method.decode_interval=256"], 256),
        (["method=keydiff", "method.decode_interval=256", "method.decoding=false"], 1),
        (["method=centroidkv"], 64), (["method=rkv"], 128), (["method=full", "codec=kivi"], 128),
        (["method=snapkv", "codec=kivi", "codec.residual=256", "codec.group=64"], 256),
    ],
)  # fmt: skip
def test_an_answer_covers_intervals_of_what_a_method_or_codec_does_now_and_then(settings, period):
    run = compose_run(*settings, "task.measure=decoding")
    (count,) = list_ends(run)
    timed = drop_warmed([1.0] * (count - 1))
    assert find_period(run) == period and len(timed) == max(512, INTERVALS * period)
    assert spread_tokens([timed], find_interval(run))["intervals"] == INTERVALS
    assert list_ends(compose_run(*settings, "task.new_tokens=[9,3]")) == (3, 9)
    split = count_split(compose_run(*settings, "task.measure=regions"))
    assert max(16, period) <= split - 17 < period + 16  # a whole period behind the tokens that are left out


def test_a_cache_of_transformers_does_nothing_now_and_then():
    run = compose_run("method=rkv", "method.decode_interval=512", "task.measure=decoding", "task.baseline=dynamic")
    assert find_period(run) == 1 and list_ends(run) == (521,)


def test_deltas_period_is_that_of_its_blocks_or_of_its_base():
    assert build_delta("llama", "drawn").packing.interval == build_delta("llama", "drawn").recent
    base = Kivi("kivi", bits=4, group=8, residual=1024)
    assert replace(build_delta("llama", "drawn"), base=base).packing.interval == 1024


def is_scored(name: str) -> bool:
    """Whether a method cuts to a budget, without a file. Random tokens say nothing of how many rows others keep."""
    own = load_settings("method", name)
    return name != "full" and own.get("budget_setting") is None and own.get("path", "") is not None


@pytest.mark.parametrize("name", list(filter(is_scored, methods_available())))
def test_every_method_is_scored_or_says_why_not(name):
    own = ["task=efficiency", "model=random", "model.like=tiny", "device=cpu", "budget=0.5", "task.length=70"]
    run = RunSpec.from_config(compose_config([*own, f"method={name}", "task.measure=scoring"]))
    method = run.choice().method
    if method.attends_subset or method.needs_extra_reads:
        with pytest.raises(SettingError, match=f"{name} scores nothing"):
            prepare_score(run)
    else:
        found = prepare_score(run).call()
        rows = found.shape[2] if method.scores else int(found[-1].sum(-1).max())  # tokens, of a cut
        assert rows == 70


def test_needs_are_those_of_methods_and_codecs():
    assert set(load_needs()) <= {*methods_available(), *list_choices("codec")}


def test_a_score_is_timed(kvbench):
    assert kvbench("method=dropkv", "task.measure=scoring", "task.repeats=1", "task.implementation=reference")[0] == 0
    found = by_quantity(Path("results/efficiency/cpu.csv"))
    assert found["scoring_ms"]["count"] == "10" and found["scoring_ms"]["implementation"] == "reference"
    both, once = 4096 * 2 * 32 * 4 * 2, 4096 * 2 * 4  # keys and values of two heads; a number a row
    assert int(found["scoring_bytes"]["value"]) == 2 * both + once


BAD = {
    "model.like=foo": "model.like=foo: choose one of ernie45_0_3b",
    "model.like=null": "model.like=null: choose one of",
    "task.length=5000": "task.length=5000: tiny takes at most 4096",
    "task.length=0": "task.length=0: a whole number",
    "task.batch=0": "task.batch=0: a whole number",
    "task.baseline=foo": "task.baseline=foo: choose one of none, dynamic, static_compiled",
    "task.baseline=static_compiled": "task.baseline=static_compiled: needs a GPU",
    "task.measure=foo": "task.measure=foo: choose one of latency",
    "task.measure=regions task.new_tokens=32": "task.new_tokens=32: task.measure=regions splits the time",
    "task.measure=regions task.baseline=dynamic": "task.baseline=dynamic: task.measure=regions splits kvbench's own",
    "task.new_tokens=1": "task.new_tokens=1: a whole number of at least 2",
    "task.new_tokens=[]": "task.new_tokens=None: a whole number",
    "task.answers=9": "task.answers=9: at most task.repeats",
    "task.rows=9": "task.rows=9: of task.baseline=static_compiled",
    "task.implementation=triton": "task.implementation=triton: of task.measure=scoring, or of latency with",
    "task.implementation=reference task.answers=0 method=full": "task.implementation=reference: needs",
    "task.implementation=reference task.answers=0 block_size=16": "task.implementation=reference: times a prompt",
    "task.bandwidth=0": "task.bandwidth=0: a number above 0, or null",
    "task.fill=foo": "task.fill=foo: choose one of",
    "task=ruler": "model=random: task=ruler needs text",
    "method=foo": "method=foo: choose one that kvbench run --help lists",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line_and_leaves_nothing(kvbench, tmp_path, monkeypatch, setting):
    monkeypatch.setattr(
        "kvbench.models.random_weights.RandomCheckpoint.weights", lambda *_: pytest.fail("weights were loaded")
    )
    assert_refused(kvbench(*setting.split()), BAD[setting], tmp_path)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_models_parameters(name):
    model = make_random_model(RandomCheckpoint.like(name, 0).config(), torch.bfloat16, "meta", 0)
    assert sum(own.numel() for own in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.006)
    assert set(PARAMETERS) | {"tiny"} == set(list_shapes())


def test_random_weights_are_the_seed_s_and_leave_the_global_state(monkeypatch):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, same, other = (RandomCheckpoint.like("tiny", seed).weights(torch.float32, "cpu") for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert RandomCheckpoint.like("tiny", 0).identity() != RandomCheckpoint.like("tiny", 1).identity()


CUT_INSIDE = "knorm method.decoding=true method.decode_interval=24"  # a cut after 24 of 40 tokens that are read


@pytest.mark.parametrize("method, grown", [("full", 40), ("knorm", 0), (CUT_INSIDE, 16)])
def test_a_floor_is_the_mean_over_an_answer_whose_rows_grow(method, grown):
    row, run = 2 * 2 * 2 * 32 * 4, compose_run(*f"method={method} task.length=60 task.new_tokens=41".split())
    model, machine = run.checkpoint.weights(torch.float32, "cpu"), Machine(1e9, 1e30)
    own = KVBenchCache(model, run, 41)
    own.read(torch.arange(3, 63)[None])
    before = own.bytes().rows
    own.answer(41)
    assert own.bytes().rows == before and own.bytes_after() == before + grown * row  # the answer is forgotten
    floor, _ = compute_tpot_floors(run, machine, model, own, 1, before)
    assert floor == pytest.approx((WeightSizes.of(model).read + before + grown // 2 * row) / 1e6)


def test_floors_of_the_8b_shape():
    """Issue 4: 4.5 ms a token with the full cache at 32k, 3.6 ms at 5 %; 3.74 ms for all weights."""
    model = make_random_model(RandomCheckpoint.like("llama31_8b", 0).config(), torch.bfloat16, "meta", 0)
    machine, weights, row = Machine(4.27e12, 600e12), WeightSizes.of(model), 128 << 10
    assert weights.total / 4.27e9 == pytest.approx(3.76, abs=0.03)
    assert decode_ms(machine, weights, 32768 * row, 1)[0] == pytest.approx(4.5, abs=0.05)
    assert decode_ms(machine, weights, 1638 * row, 1)[0] == pytest.approx(3.6, abs=0.05)
    whole = prefill_ms(machine, model, 131072, 1, None, None)
    blocks = prefill_ms(machine, model, 131072, 1, 128, 8192)
    assert blocks == pytest.approx(3800, rel=0.06) and whole > 1.7 * blocks


def test_a_codec_that_cannot_copy_rows_is_refused(kvbench, monkeypatch):
    monkeypatch.setattr(Kivi, "packing", Packing())
    code, _, err = kvbench("method=snapkv", "codec=kivi", "task.measure=throughput", "task.most_batch=2", *QUICK)
    assert code == 2 and "task.fill=replicated: codec=kivi packs rows that it cannot copy" in err


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["tiny", "lfm2", "qwen3_next"])
def test_transformers_own_caches_answer_alike(batch, name):
    model = RandomCheckpoint.like("tiny", 0).weights(torch.float32, "cpu") if name == "tiny" else make_hybrid(name)
    ids = torch.arange(3, 43).repeat(batch, 1)
    one = TransformersDynamic(model)
    one.read(ids[:1])
    one.replicate(batch)
    answers = [torch.cat([one.token.clone() for _ in one.tokens(6)], 1)]
    for own in (TransformersDynamic(model), TransformersStatic(model, 40, 6, compiled=False)):
        for _ in range(2):  # read again: nothing of the first prompt is left
            own.read(ids)
            answers.append(torch.cat([own.token.clone() for _ in own.tokens(6)], 1))
    assert answers[0].shape == (batch, 6) and all(torch.equal(answers[0], own) for own in answers)
    assert (one.bytes().recurrent > 0) == (name != "tiny") and one.bytes_per_token() == one.bytes().total


@pytest.mark.parametrize("limit", [1, 2, 7, 49, 130, 1000])
@pytest.mark.parametrize("first", [2, 8, 100, 2000])
def test_bisection_finds_the_largest_batch(limit, first):
    tried = []
    found = find_largest_batch(lambda batch: tried.append(batch) or batch <= limit, first, None)
    assert limit * 0.98 - 1 < found <= limit and len(tried) < 40
    assert find_largest_batch(lambda batch: batch <= limit, first, 5) == min(limit, 5)


def test_a_batch_that_fails_late_is_made_smaller(kvbench, monkeypatch):
    answer = KVBenchCache.answer

    def late(own, count, most=None):
        if most is None and len(own.context.seeds) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answer(own, count, most)

    monkeypatch.setattr(KVBenchCache, "answer", late)
    assert kvbench("method=snapkv", "task.measure=throughput", "task.most_batch=4", *QUICK)[0] == 0
    assert by_quantity(Path("results/efficiency/cpu.csv"))["largest_batch"]["value"] == "2"


def test_spread():
    found = spread([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found["median"], found["mean"], found["least"], found["most"], found["count"]) == (3, 22, 1, 100, 5)


def test_appending_never_touches_what_is_there(tmp_path):
    path = tmp_path / "new" / "gpu.csv"
    append_lines(
        path,
        [
            {"quantity": "a", "note": 'a "quoted", text\nof two lines', "cell": "1"},
            {"quantity": LAST_QUANTITY, "cell": "1"},
        ],
    )
    with path.open("a") as file:
        file.write('gpu,latency,"torn')  # a killed writer
    before = path.read_bytes()
    append_lines(path, [{"quantity": "b", "cell": "2"}])
    assert path.read_bytes().startswith(before)
    assert [row["quantity"] for row in read_lines(path)] == ["a", LAST_QUANTITY, "b"] and find_whole_cells(path) == {
        "1"
    }
    assert read_lines(path)[0]["note"] == 'a "quoted", text of two lines'
    with path.open() as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    other = tmp_path / "other.csv"
    lines = [",".join(row[column] for column in COLUMNS_OF_MEDIANS) for row in ({**dict.fromkeys(COLUMNS, "old")},)]
    other.write_text("\n".join([",".join(COLUMNS_OF_MEDIANS), *lines, "torn"]))
    assert find_whole_cells(other) == set() and read_lines(other)[0]["p99"] == ""
    append_lines(other, [{"quantity": "new", "p99": 3.0}])  # a file without the columns gets them
    assert [(row["quantity"], row["mean"], row["p99"]) for row in read_lines(other)] == [
        ("old", "old", ""),
        ("new", "", "3.0"),
    ]
    other.write_text("method,ms\n")
    with pytest.raises(SettingError, match="has other columns"):
        append_lines(other, [{}])
    assert other.read_text() == "method,ms\n"


def test_a_list_goes_on_after_refusals_and_failures(tmp_path, monkeypatch, capsys):
    own = tmp_path / "plan.yaml"
    short = "model.like=tiny device=cpu task.length=50 task.new_tokens=3 task.repeats=1"
    own.write_text(
        f"few:\n- {short} method=full task.measure=scoring,latency\n- {short} method=knorm,sink budget=0.5\n"
    )
    generate = KVBenchCache.generate

    def failing(self, count):
        if self.choice.method.name == "knorm":
            raise RuntimeError("a kernel is wrong")
        return generate(self, count)

    monkeypatch.setattr(KVBenchCache, "generate", failing)
    arguments = ["few", "--plan", str(own), "--results", str(tmp_path / "results")]
    assert efficiency.main(arguments) == 0
    out = capsys.readouterr().out
    assert "refused: task.measure=scoring: full" in out and "[4/4]" in out
    rows = read_lines(tmp_path / "results" / "efficiency" / "cpu.csv")
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row["method"] for row in failed] == ["knorm"] and failed[0]["note"] == "RuntimeError: a kernel is wrong"
    assert efficiency.main(arguments) == 0 and capsys.readouterr().out.count("measured already") == 3
    assert efficiency.main([*arguments, "--minutes", "0"]) == 1
    assert efficiency.main(["many", "--plan", str(own)]) == 2


def test_the_plan_s_lines_are_settings_that_exist():
    lists = yaml.safe_load(plan.PLAN.read_text())
    assert set(lists) == {
        "quick",
        "bars",
        "decoding",
        "regions",
        "families",
        "codes",
        "prefill_gain",
        "delta_sizes",
        "full",
        "cpu",
    }
    for lines in lists.values():
        for line in lines:
            first, *_ = expand_cells(line.split())
            config = compose_config([*plan.EVERY, *first])
            assert config.model.like in list_shapes() and config.task.name == "efficiency"
