"""The papers' efficiency tables: published and measured side by side, and what fills an empty cell."""

import csv
import json
import re

import pytest
import yaml

from kvbench.cli import papers
from kvbench.config.catalogue import load_settings
from kvbench.config.compose import compose_config, expand_cells
from kvbench.efficiency.measure import collect_settings, simplify_run
from kvbench.efficiency.plan import EVERY, PLAN
from kvbench.papers.build import build_table, write_tables
from kvbench.papers.table_spec import TABLES, expand_each, load_specs, read_published, read_tables
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import COLUMNS, LAST_QUANTITY, append_lines, read_lines
from tests.support.delta_files import make_zero, write_compressors
from tests.support.selection import only_in_full

SPECS = read_tables(TABLES)
WANTED = {
    "dropkv_table02", "dropkv_table09", "dropkv_table10", "dropkv_table17", "dropkv_table18", "dropkv_figure02_left",
    "centroidkv_table06", "centroidkv_table07", "centroidkv_figure06", "expected_attention_table03",
    "expected_attention_figure05a", "keydiff_figure07", "keydiff_figure17", "keydiff_table19", "deltakv_table04",
    "deltakv_figure07", "dropkv_figure02_right", "deltakv_figure05_speed",
}  # fmt: skip


def lines(cell: str, quantities: dict[str, float | str], **more: object) -> list[dict]:
    """A cell's lines: a number is measured, a text is a status."""
    base = {"gpu": "nvidia-test", "measure": "latency", "model": "megabeam_mistral_7b", "method": "full", "preset": ""}
    base |= {"allocator": "uniform", "codec": "raw", "budget": 1.0, "budget_of": "prompt", "baseline": "dynamic"}
    base |= {"length": 32768, "batch": 1, "date": "2026-01-02T03:04:05", "cell": cell, "status": "ok", **more}
    own = [
        base | ({"status": v} if isinstance(v, str) else {"value": v}) | {"quantity": k} for k, v in quantities.items()
    ]
    return [*own, base | {"quantity": LAST_QUANTITY, "value": 1}]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "efficiency" / "nvidia-test.csv"
    append_lines(path, lines("a", {"ttft_ms": 9000.0, "e2e_500_ms": 29999.0}))
    append_lines(path, lines("b", {"ttft_ms": 1500.0, "e2e_500_ms": 29000.0}))  # newer
    append_lines(path, lines("c", {"ttft_ms": 1400.0}))  # newer still, with another number of tokens
    append_lines(path, lines("d", {"latency": "out_of_memory"}, batch=12))
    append_lines(path, lines("e", {"ttft_ms": 6000.0, "answer": "out_of_memory"}, batch=4))
    append_lines(
        path, lines("f", {"ttft_ms": 1.0}, method="dropkv", budget=0.05, baseline="none", changed='{"window": 4}')
    )
    (tmp_path / "efficiency" / "prefill-1.csv").write_text("method,ms\nsnapkv,3\n")
    return tmp_path


def rows_of(markdown: str) -> dict[str, list[str]]:
    found = [[own.strip() for own in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in found}


def test_published_and_measured_stand_side_by_side(results):
    written = write_tables(results, SPECS)
    folder = results / "papers" / "nvidia-test"
    assert {path.parent for path in written if path.stem != "keydiff_table19"} == {folder}  # which needs a CPU
    rows = rows_of((folder / "dropkv_table02.md").read_text())
    assert rows["full cache, transformers"][:2] == ["19.08", "29.00"]  # seconds, of the newest that has them
    assert rows["full cache, transformers"][4:6] == ["54.72", "OOM"] and rows["full cache, transformers"][-1] == "OOM"
    assert rows["full cache, transformers"][6] == "OOM"  # as published
    assert rows["DropKV"][0] == "16.21" and re.fullmatch(r"\[\d+\]", rows["DropKV"][1])
    rows = rows_of((folder / "dropkv_table10.md").read_text())
    assert rows["full cache, transformers"][:2] == ["3.69", "1.40"] and rows["full cache, transformers"][5] == "6.00"
    assert rows["DropKV"][1].startswith("[")  # a changed setting is no measurement of the method
    text = (folder / "dropkv_table02.md").read_text()
    assert "one A100-80GB" in text and "Measured: nvidia-test" in text and "2026-01-02" in text
    assert "No two cells share a prefill." in text
    latex = (folder / "dropkv_table02.tex").read_text()
    assert "full cache, transformers & 19.08 & 29.00" in latex and latex.count("\\begin{tabular}") == 1
    body = [line for line in latex.splitlines() if not line.startswith("%")]
    assert not re.search(r"(?<!\\)[%#_]", "\n".join(body)) and latex.count(r"\\") == 2 + 6


def test_a_ratio_is_of_two_measurements(results):
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "baseline": "none", "measure": "latency"}
    append_lines(path, lines("g", {"tpot_ms": 9.0, "tpot_floor_ms": 4.5}, mean=9.9, p99=12.0, intervals=4, **own))
    write_tables(results, SPECS)
    rows = rows_of((results / "papers" / "nvidia-test" / "decoding_floor.md").read_text())
    assert rows["kvbench, full cache, 32k"] == ["9.00", "9.90", "12.00", "4.50", "2.00", "2.20"]


def test_beside_a_prefill_s_ratio_stands_its_floor(results):
    """An older floor, which did not count the score, is divided by nothing."""
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "baseline": "none", "measure": "latency"}
    append_lines(path, lines("g", {"ttft_ms": 1000.0, "ttft_floor_ms": 900.0}, **own))
    h2o = {"ttft_ms": 1240.0, "ttft_floor_ms": 1080.0, "ttft_full_floor_ms": 900.0}
    append_lines(path, lines("h", h2o, **own | {"method": "h2o", "budget": 0.05}))
    ada = own | {"method": "snapkv", "budget": 0.05, "allocator": "ada"}
    append_lines(path, lines("i", {"ttft_ms": 1050.0}, **ada))
    write_tables(results, {"prefill_full": SPECS["prefill_full"]})
    text = (results / "papers" / "nvidia-test" / "prefill_full.md").read_text()
    rows = rows_of(text)
    assert rows["H2O 5 %"][:3] == ["1.240", "1.240", "1.200"] and rows["full cache, kvbench"][:3] == [
        "1.000",
        "1.000",
        "–",
    ]
    assert rows["SnapKV 5 %, AdaKV"][:2] == ["1.050", "1.050"]
    assert text.count("A ratio is missing (–)") == 1


@pytest.mark.parametrize("cell", ["i", "g"])
def test_a_ratio_is_of_measurements_that_were_made_together(results, cell):
    """Also if the same cell was measured again."""
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "baseline": "none", "measure": "latency"}
    append_lines(path, lines("g", {"ttft_ms": 1000.0}, **own))
    append_lines(path, lines("h", {"ttft_ms": 1100.0}, **own | {"method": "knorm", "budget": 0.05}))
    append_lines(path, lines(cell, {"ttft_ms": 800.0}, **own | {"date": "2026-02-03T04:05:06"}))
    write_tables(results, SPECS)
    rows = rows_of((results / "papers" / "nvidia-test" / "prefill_full.md").read_text())
    assert rows["full cache, kvbench"][:2] == ["0.800", "1.000"] and rows["L2 norm 5 %"][:2] == ["1.100", "1.100"]


def test_a_failed_measurement_is_explained_and_divides_nothing(results):
    """Two full caches of transformers: the one beside kvbench's failed, so that the ratio is of the one that ran."""
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "measure": "throughput", "fill": "replicated", "batch": ""}
    why = {"note": "RuntimeError: no plan"}
    append_lines(path, lines("g", {"throughput": "failed"}, **own, **why))
    append_lines(path, lines("h", {"decode_tokens_s": 800.0}, **own | {"baseline": "none"}))
    reason = (
        "nothing to compare with: failed: full dynamic with copies of 32768 tokens on nvidia-test: RuntimeError: no"
    )

    def show() -> tuple[dict[str, list[str]], str]:
        write_tables(results, {"throughput": SPECS["throughput"]})
        text = (results / "papers" / "nvidia-test" / "throughput.md").read_text()
        return rows_of(text), text

    rows, text = show()
    assert rows["full cache, transformers"][4:6] == ["failed", "–"] and f"* full cache, kvbench: {reason}" in text
    assert rows["full cache, kvbench"][4:6] == ["800", "–"]
    append_lines(path, lines("i", {"decode_tokens_s": 200.0}, **own | {"date": "2026-03-02T03:04:05"}))
    rows, text = show()
    assert rows["full cache, kvbench"][4:6] == ["800", "4.0"] and "RuntimeError" not in text
    write_tables(results, SPECS)
    text = (results / "papers" / "nvidia-test" / "dropkv_table02.md").read_text()
    assert "* full cache, transformers: OOM: full dynamic with 12 x 32768 tokens on nvidia-test: memory ran out" in text


def test_the_mean_stands_beside_the_median(results):
    """Work that returns every 64 tokens is in the mean alone."""
    shown = {}
    for intervals in ("", 3, 4):  # not noted, as in older measurements, too few, and enough
        spread = {"value": 4.32, "mean": 14.8, "p99": 680.0, "intervals": intervals, "quantity": "tpot_ms"}
        base = lines(f"g{intervals}", {"tpot_ms": 0.0}, model="llama31_8b", measure="decoding", baseline="none")
        append_lines(results / "efficiency" / "nvidia-test.csv", [base[0] | spread, base[1]])
        write_tables(results, {"decoding_methods": SPECS["decoding_methods"]})
        text = (results / "papers" / "nvidia-test" / "decoding_methods.md").read_text()
        assert rows_of(text)[""][:3] == ["32k ms", "32k mean ms", "32k p99 ms"]
        shown[intervals] = rows_of(text)["full cache"][:3], text.count("* A mean or 99th percentile is missing")
    few = (["4.32", "–", "–"], 1)
    assert shown == {"": few, 3: few, 4: (["4.32", "14.80", "680.00"], 0)}


def test_a_rate_of_the_median_step_is_said_to_be_one(results):
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "measure": "throughput", "fill": "replicated", "batch": "", "repeats": 3}
    for count, noted in ((55, True), ("", False)):
        append_lines(path, lines(f"g{count}", {"decode_tokens_s": 800.0}, **own, count=count))
        write_tables(results, {"throughput": SPECS["throughput"]})
        text = (results / "papers" / "nvidia-test" / "throughput.md").read_text()
        assert "| 800 |" in text and ("median over steps" in text) == noted


def test_a_ratio_beside_what_did_not_fit_is_a_dash(results):
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "measure": "decoding", "baseline": "none", "batch": 16, "codec": "kivi"}
    shortage = {"note": "4.00 GiB wanted, 1.06 GiB free of 79.19 GiB"}
    ran, failed = (
        lines("g", {"tpot_ms": 5.0, "tpot_floor_ms": 4.0}, **own),
        lines("g", {"batched_tpot_ms": "out_of_memory"}),
    )
    append_lines(path, [*ran[:2], failed[0] | own | shortage, ran[2]])
    write_tables(results, {"decoding_methods": SPECS["decoding_methods"]})
    text = (results / "papers" / "nvidia-test" / "decoding_methods.md").read_text()
    cells = dict(zip(rows_of(text)[""], rows_of(text)["full cache, KIVI 2 bits"], strict=True))
    assert cells["32k mean ms"] == "–"  # the prompt alone did fit
    assert cells["32k ms"] == "5.00" and cells["32k over floor"] == "1.25"
    assert cells["32k batch ms"] == "OOM" and cells["32k batch over floor"] == cells["32k batch mean over floor"] == "–"
    assert "OOM: full kivi with 16 x 32768 tokens on nvidia-test: 4.00 GiB wanted, 1.06 GiB free of 79.19 GiB" in text


def test_a_change_is_of_seconds_and_of_their_share(results):
    path = results / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "length": 131072, "baseline": "none"}
    append_lines(path, lines("g", {"ttft_ms": 8000.0}, **own))
    append_lines(path, lines("h", {"ttft_ms": 10000.0}, **own | {"method": "expected_attention", "budget": 0.5}))
    write_tables(results, {"expected_attention_table03": SPECS["expected_attention_table03"]})
    rows = rows_of((results / "papers" / "nvidia-test" / "expected_attention_table03.md").read_text())
    assert rows["Expected Attention"][:2] == ["15.52", "10.00"]
    assert rows["Expected Attention − full cache, s"][:2] == ["0.27", "2.00"]
    assert rows["Expected Attention − full cache, %"][:2] == ["1.74", "25.00"]
    assert rows["full cache, ± standard deviation"][:4] == ["0.02", "–", "0.00", "–"]


def test_all_tables_are_there_and_what_is_empty_says_what_fills_it(results):
    assert set(SPECS) >= WANTED
    write_tables(results, SPECS)
    for name, spec in SPECS.items():
        if spec.get("device") == "cpu":
            continue
        text = (results / "papers" / "nvidia-test" / f"{name}.md").read_text()
        asked = set(re.findall(r"\[(\d+)\]", "\n".join(line for line in text.splitlines() if line[:1] == "|")))
        filled = dict(re.findall(r"^\* \[(\d+)\] (`python run\.py.*`)$", text, re.M))
        assert asked == set(filled) and asked, name
        line = re.findall(r"`python run\.py(?: -m)? ([^`]*)`", text)[0]
        first, *_ = expand_cells(line.split())
        assert compose_config(first).model.like == line.split("model.like=")[1].split()[0]


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if "file" in spec])
def test_every_published_selection_finds_values(name, tmp_path):
    spec = SPECS[name]
    printed = read_published(tmp_path, spec["file"])
    made = build_table(spec, (), printed)
    for label, found in made.rows:
        row = next(own for own in spec["rows"] if own["label"] == label)
        wanted = row.get("published", {}) is not None
        assert any(cell.published for cell in found) == wanted, label
    known = {key for part in (spec, *spec["rows"], *spec["columns"]) for key in (part.get("published") or {})}
    assert known <= set(printed[0])


def list_planned(plan: str, spec: dict) -> list[dict]:
    """The settings of the measurements of a list that a table may show, as their CSV would hold them."""
    wanted = {f"model.like={spec['measured']['model']}", f"task.measure={spec['measured']['measure']}"}
    lines = [line.split() for line in yaml.safe_load(PLAN.read_text())[plan]]
    cells = [cell for line in lines if wanted <= {*line} and "codec=palu" not in line for cell in expand_cells(line)]
    methods = {f"method={row['measured']['method']}" for row in spec["rows"] if row["measured"]}
    runs = [RunSpec.from_config(compose_config([*EVERY, "device=cpu", *cell])) for cell in cells if methods & {*cell}]
    return [collect_settings(simplify_run(run)) for run in runs]


@pytest.mark.parametrize(
    "name, plan, width, layers",
    [("deltakv_table04", "full", 1024, 28), only_in_full("decoding_deltakv", "decoding", 2048, 32)],
)
def test_the_plan_fills_deltakvs_tables(tmp_path, monkeypatch, name, plan, width, layers):
    """At all lengths at which the paper has a value of the row's method, if it is a table of the paper."""
    spec = SPECS[name]
    folder, model = tmp_path / "results" / "files", spec["measured"]["model"]
    folder.mkdir(parents=True)
    for kind in ("", "full_"):
        write_compressors(folder / f"deltakv_{kind}{model}.safetensors", [make_zero(width, 8) for _ in range(layers)])
    monkeypatch.chdir(tmp_path)
    planned, printed = list_planned(plan, spec), read_published(tmp_path, spec.get("file"))
    parts = [part for column in spec["columns"] for part in (column["measured"], column.get("over", {}))]
    quantities = {part["quantity"] for part in parts if "quantity" in part}
    empty = dict.fromkeys(COLUMNS, "") | {"value": 1.0, "date": "2026-01-02"}
    measured = [empty | settings | {"quantity": quantity} for settings in planned for quantity in quantities]
    for row, (_, cells) in zip(spec["rows"], build_table(spec, measured, printed).rows, strict=True):
        for column, cell in zip(spec["columns"], cells, strict=True):
            length, method = str(column["measured"]["length"]), row["measured"] and row["measured"]["method"]
            if not printed or any((own["method"], own["context_length"]) == (method, length) for own in printed):
                assert cell.filling is None, (row["label"], column["label"])


def test_deltakv_is_measured_at_the_setting_of_its_scores():
    scores = load_specs("deltakv")["deltakv_table01"]
    run = next(own["run"] for own in expand_each(scores["rows"]) if own["label"] == "Qwen2.5-7B-Instruct-1M, DeltaKV")
    codec = load_settings("codec", "delta", {"preset": run["codec.preset"]})
    for row in SPECS["deltakv_table04"]["rows"]:
        if row["measured"] and row["measured"]["method"] == "deltakv":
            cost, changed = row["measured"], json.loads(row["measured"]["changed"])
            assert (cost["preset"], cost["budget"]) == (run["method.preset"], run["budget"])
            assert (changed["codec.full_layers"], changed["codec.depth"]) == (codec["full_layers"], codec["depth"])


@pytest.mark.parametrize("name", SPECS)
def test_every_measured_selection_names_columns(name):
    spec = SPECS[name]
    for part in (spec, *spec["rows"], *spec["columns"]):
        assert not {"run", "of"} & set(part)  # no cost is a record's, whose prompt others may have shared
        for key in ("measured", "minus", "over"):
            own = part.get(key) or {}
            assert set(own) - {"column"} <= set(COLUMNS) and own.get("column", "mean") in ("mean", "p99", "value")


def test_without_measurements_a_table_has_published_values_and_commands(tmp_path, capsys):
    assert papers.main(["--results", str(tmp_path), "dropkv", "2"]) == 0
    out = capsys.readouterr().out
    assert rows_of(out)["DropKV"][0] == "16.21" and "`python run.py -m task=efficiency" in out
    assert {path.name for path in (tmp_path / "papers").iterdir()} == {
        f"dropkv_table02.{own}" for own in ("md", "csv", "tex")
    }
    assert papers.main(["--results", str(tmp_path), "dropkv", "2", "--beside"]) == 0
    assert (
        capsys.readouterr().out
        == f"no measurements of these tables in {tmp_path}/efficiency: `make efficiency` makes them\n"
    )


def test_a_table_stands_in_its_csv(results):
    with (results / "efficiency" / "nvidia-test.csv").open() as file:
        assert {row["quantity"] for row in csv.DictReader(file)} >= {"ttft_ms", LAST_QUANTITY}


@pytest.mark.parametrize("which", [only_in_full([]), ["dropkv", "2"]], ids=["all", "one"])
def test_only_on_request_what_lies_beside_measurements_is_written(results, capsys, which):
    """`papers write` writes into papers/, `papers write --beside` beside the measurements."""

    def files() -> dict[str, tuple[bytes, int]]:
        found = (path for path in (results / "efficiency").rglob("*") if path.is_file())
        return {str(path.relative_to(results)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    stale = results / "efficiency" / "nvidia-test" / "dropkv_table02.md"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("of another day")
    before = files()
    assert papers.main(["--results", str(results), *which]) == 0
    assert files() == before
    made = results / "papers" / "nvidia-test" / stale.name
    assert made.is_file() and stale.read_text() == "of another day"
    unmeasured = "nvidia-test/dropkv_table17.md"  # it has commands alone
    assert (results / "papers" / unmeasured).exists() or which
    for path in sorted((results / "papers").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert papers.main(["--beside", "--results", str(results), *which]) == 0
    assert stale.read_text().startswith("#") and list((results / "papers").iterdir()) == []
    assert set(files()) > set(before) or which
    assert not (results / "efficiency" / unmeasured).exists()


def test_a_gain_is_a_difference_over_the_faster_one(tmp_path):
    path = tmp_path / "efficiency" / "nvidia-test.csv"
    own = {"model": "llama31_8b", "method": "dropkv", "budget": 0.05, "baseline": "none", "length": 4096, "batch": 51}
    append_lines(path, lines("a", {"ttft_ms": 2120.0}, **own, implementation="reference"))
    append_lines(path, lines("b", {"ttft_ms": 2000.0}, **own, implementation="triton"))
    made = build_table(SPECS["dropkv_figure02_right"], read_lines(path), ())
    assert made.rows[0][1][0].measured == "6.00"
    assert made.rows[0][1][1].filling["task.implementation"] == "reference"
