"""Every exhibit of conf/papers/exhibits/ has a chart or a table, whose numbers committed studies have."""

import pytest

from kvbench.papers.exhibit_pages import fill_exhibits
from kvbench.papers.exhibits import load_exhibits
from kvbench.papers.table_spec import list_papers
from kvbench.report.study_charts import KINDS, draw_exhibit
from kvbench.store.study_lines import find_studies
from kvbench.studies.catalogue import load_studies
from tests.support.repository import ROOT

STUDIES, EXHIBITS = load_studies(), load_exhibits()
COMMITTED = {(line.study, line.quantity) for found in find_studies(ROOT / "results") for line in found.lines}
COMPUTED = {study for study, _ in COMMITTED}


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_has_what_it_needs(name):
    spec = EXHIBITS[name]
    assert name.startswith(tuple(f"{paper}_" for paper in list_papers()))
    known = {"title", "study", "lines", "claims", "proof", "notes"}
    if "rows" in spec:
        known |= {"rows", "columns", "line", "published", "file", "scale", "digits"}
    else:
        known |= {"chart", "axes", "names"}
        assert spec["chart"] in KINDS and spec.get("axes", {}).keys() <= {"x", "y", "value", "log"}
    assert {"title", "study"} <= spec.keys() <= known and spec["study"] in STUDIES
    shown = spec.get("lines", {}).get("quantity", [])
    for quantity in [*([shown] if isinstance(shown, str) else shown), *spec.get("claims", {})]:
        there = (spec["study"], quantity) in COMMITTED or spec["study"] not in COMPUTED
        assert there, f"{spec['study']} gave no {quantity}"
    named = {shown} if isinstance(shown, str) else set(shown)
    assert spec.get("proof", {}).keys() <= spec.get("claims", {}).keys() | named


@pytest.mark.full
def test_every_figure_of_the_committed_studies_can_be_drawn():
    pages = [page for found in fill_exhibits(ROOT / "results", EXHIBITS).values() for page in found]
    assert pages and all(draw_exhibit(page.spec, page.lines, 500).chart(150) for page in pages if page.table is None)
