"""The code in docs/analysis.md that recomputes a published interval gives the line of `dev measured --lines`."""

import random

from kvbench.analysis.result_lines import read_lines
from kvbench.store.published_file import write_published
from kvbench.store.published_runs import publish
from kvbench.store.runs import load_runs
from tests.docs.pages import read_blocks
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.repository import ROOT

PATH = "results/measured/nvidia-h200/confirmation.parquet"


def test_an_interval_is_recomputed_with_pandas(tmp_path, monkeypatch):
    [block] = [block for block in read_blocks(ROOT / "docs" / "analysis.md") if PATH in block.text]
    for question in ("visible", "hidden"):
        write_run(tmp_path, make_records(1.0, 100, count=30), method={"name": "full"}, question=question)
        for name in ("snapkv", "knorm"):
            draw = random.Random(name + question)
            records = make_records(0.2, 60, draw.randrange(99), count=30)
            write_run(tmp_path, records, method={"name": name}, budget=0.2, question=question)
    path = tmp_path / PATH
    path.parent.mkdir(parents=True)
    write_published([publish(run) for run in load_runs(tmp_path)], {}, path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block.text, block.name, "exec"), names)
    [line] = [line for line in read_lines(path) if (line["method"], line["question"]) == ("snapkv", "hidden")]
    change = names["change"]
    assert (change.difference, change.low, change.high) == (line["difference"], line["low"], line["high"])
    assert line["low"] < line["high"] and abs(names["mean"] - line["difference"]) < 1e-9
